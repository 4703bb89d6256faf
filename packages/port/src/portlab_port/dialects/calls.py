"""Scripts and launchers: what may stand in which call. `TrainingArguments` and `SFTConfig` are read alike."""

from portlab_port.dialects.table import Key, all_to, same
from portlab_port.dialects.trl import PREFERENCE, SFT, TRAINER

BITS_AND_BYTES = {
    **same("load_in_8bit load_in_4bit llm_int8_threshold llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload "
            "llm_int8_has_fp16_weight bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant "
            "bnb_4bit_quant_storage"),
}  # fmt: skip
TRAINER_CONFIG = {**TRAINER, **SFT, **PREFERENCE}
AUTO_MODEL = {
    "pretrained_model_name_or_path": Key("model"),
    **same(
        "dtype attn_implementation device_map low_cpu_mem_usage trust_remote_code revision token max_memory "
        "use_cache cache_dir load_in_4bit load_in_8bit"
    ),
    "torch_dtype": Key("dtype"),
    **all_to("attn_implementation", "use_flash_attention_2"),
    **all_to("model_loading", "local_files_only use_safetensors variant subfolder config"),
    **all_to("token", "use_auth_token"),
    **all_to("rope_scaling", "rope_scaling"),
}
TRAINER_CALL = {
    **SFT,
    **same("model neftune_noise_alpha dataset_num_proc formatting_func"),
    **all_to("generation", "compute_metrics preprocess_logits_for_metrics"),
}
LAUNCHERS = {
    **all_to("devices", "num_processes nproc_per_node nproc-per-node num_gpus"),
    **all_to("launcher", "num_machines machine_rank main_process_ip main_process_port main_process_port "
              "rdzv_backend rdzv_endpoint rdzv_id master_addr master_port node_rank standalone multi_gpu "
              "num_cpu_threads_per_process dynamo_backend same_network rdzv_conf module max_restarts hostfile include "
              "use_deepspeed use_fsdp gpu_ids debug m"),
    "config_file": Key("config_file"),
    "deepspeed_config_file": Key("deepspeed"),
    "gradient_accumulation_steps": Key("gradient_accumulation_steps"),
}  # fmt: skip
