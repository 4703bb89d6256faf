"""Unsloth: its YAML, and the arguments of its models and of PEFT's adapters."""

from portlab_port.dialects.table import Dialect, Key, all_to, negated, same, tensorboard
from portlab_port.dialects.trl import HF_DEFAULTS, SEVEN, SFT, TRAINER, TRAINER_PREFIXES

FAST_MODEL = {
    "model_name": Key("model"),
    "max_seq_length": Key("max_length"),
    **same("dtype load_in_4bit load_in_8bit load_in_16bit device_map token trust_remote_code revision "
            "attn_implementation use_exact_model_name fast_inference gpu_memory_utilization max_memory rope_scaling "
            "cache_dir low_cpu_mem_usage use_cache"),
    "torch_dtype": Key("dtype"),
    "pretrained_model_name_or_path": Key("model"),
    "full_finetuning": Key("use_lora", negated),
    **all_to("other_quantization", "load_in_fp8"),
    **all_to("gradient_checkpointing", "use_gradient_checkpointing"),
    **all_to("fast_inference", "max_lora_rank float8_kv_cache disable_log_stats unsloth_vllm_standby"),
}  # fmt: skip
LORA_CONFIG = {
    **same("r lora_alpha lora_dropout target_modules use_rslora use_dora modules_to_save bias init_lora_weights "
            "rank_pattern alpha_pattern layers_to_transform layers_pattern exclude_modules target_parameters "
            "trainable_token_indices task_type fan_in_fan_out inference_mode peft_type ensure_weight_tying "
            "runtime_config base_model_name_or_path megatron_config megatron_core random_state "
            "autocast_adapter_dtype finetune_vision_layers finetune_language_layers finetune_attention_modules "
            "finetune_mlp_modules"),
    "revision": Key("base_model_name_or_path"),
    "max_seq_length": Key("max_length"),
    **all_to("gradient_checkpointing", "use_gradient_checkpointing"),
    **all_to("init_lora_weights", "loftq_config"),
    **all_to("lora_variant", "eva_config corda_config lora_ga_config velora_config alora_invocation_tokens use_qalora "
              "qalora_group_size monteclora_config layer_replication lora_bias use_bdlora arrow_config kasa_config"),
}  # fmt: skip

UNSLOTH_DEFAULTS = {
    **HF_DEFAULTS, "optim": "adamw_8bit", "weight_decay": 0.01, "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2, "warmup_steps": 0.1, "seed": 3407, "max_length": 2048,
    "gradient_checkpointing": "unsloth", "load_in_4bit": True,
}  # fmt: skip
UNSLOTH_LORA = {"r": 16, "lora_alpha": 16.0, "lora_dropout": 0.0, "target_modules": SEVEN}
UNSLOTH = Dialect(
    style="unsloth",
    keys={
        **TRAINER, **SFT, **FAST_MODEL, **LORA_CONFIG,
        "model_name_or_path": Key("model"), "base_model": Key("model"), "lora_r": Key("r"), "lora_rank": Key("r"),
        "dataset": Key("dataset"), "dataset_name": Key("dataset"), "dataset_split": Key("dataset_split"),
        "chat_template": Key("chat_template"),
        "num_epochs": Key("num_train_epochs"), "batch_size": Key("per_device_train_batch_size"),
        "random_seed": Key("seed"), "train_on_completions": Key("completion_only_loss"),
        "train_on_responses_only": Key("completion_only_loss"),
        "lr_scheduler": Key("lr_scheduler_type"), "optimizer": Key("optim"),
        "vision_all_linear": Key("finetune_vision_layers"), "use_loftq": Key("init_lora_weights"),
        **all_to("tracker_project", "enable_wandb"), "enable_tensorboard": Key("report_to", tensorboard),
        "tensorboard_dir": Key("logging_other"), "log_frequency": Key("logging_steps"),
        **all_to("generation", "temperature top_p top_k min_p max_new_tokens repetition_penalty"),
        **all_to("push_to_hub", "save_method save_gguf save_model save_path quantization push_model hub_path"),
        "revision": Key("revision"), "use_lora": Key("use_lora"),
    },
    prefixes=TRAINER_PREFIXES,
    defaults={**UNSLOTH_DEFAULTS, "use_lora": True},
    defaults_of="Unsloth",
    lora_defaults=UNSLOTH_LORA,
    lora_defaults_of="Unsloth",
    marks=frozenset({"use_gradient_checkpointing", "max_seq_length", "train_on_completions", "random_seed",
                     "finetune_vision_layers"}),
)  # fmt: skip
