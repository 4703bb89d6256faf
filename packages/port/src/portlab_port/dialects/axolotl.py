"""Axolotl."""

from typing import Any

from portlab_port.dialects.table import Dialect, Key, Said, all_linear, all_to, peft_method, same, tensorboard
from portlab_port.dialects.trl import HF_OPTIMISER, TRAINER, TRAINER_PREFIXES


def _plugins(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    kernels = all("liger" in str(name).lower() or "cut_cross_entropy" in str(name) for name in names)
    return value if kernels else Said("other_loss", value)


AXOLOTL = Dialect(
    style="axolotl",
    keys={
        **TRAINER,
        "base_model": Key("model"),
        "base_model_config": Key("tokenizer"),
        "revision_of_model": Key("revision"),
        "base_model_ignore_patterns": Key("model_loading"),
        **same("model_type tokenizer_type processor_type load_in_8bit load_in_4bit chat_template eot_tokens "
                "special_tokens unfrozen_parameters trust_remote_code neftune_noise_alpha device_map rope_scaling"),
        "adapter": Key("use_lora", peft_method),
        "lora_r": Key("r"),
        **same("lora_alpha lora_dropout lora_on_cpu"),
        "lora_target_modules": Key("target_modules"),
        "lora_target_linear": Key("target_modules", all_linear),
        "lora_target_parameters": Key("target_parameters"),
        "lora_modules_to_save": Key("modules_to_save"),
        "lora_fan_in_fan_out": Key("fan_in_fan_out"),
        "lora_model_dir": Key("start_from"),
        "peft_use_dora": Key("use_dora"),
        "peft_use_rslora": Key("use_rslora"),
        "peft_layers_to_transform": Key("layers_to_transform"),
        "peft_layers_pattern": Key("layers_pattern"),
        "peft_init_lora_weights": Key("init_lora_weights"),
        "peft_trainable_token_indices": Key("trainable_token_indices"),
        "peft_ensure_weight_tying": Key("ensure_weight_tying"),
        "peft_autocast_adapter_dtype": Key("autocast_adapter_dtype"),
        **all_to("lora_variant", "peft peft_layer_replication relora relora_steps"),
        **all_to("loraplus", "loraplus_lr_ratio"),
        **all_to("other_quantization", "gptq quantization qat"),
        **all_to("fused_kernels", "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
                  "unsloth_lora_mlp liger_rope liger_rms_norm liger_glu_activation liger_layer_norm "
                  "liger_fused_linear_cross_entropy liger_cross_entropy cut_cross_entropy flash_attn_cross_entropy "
                  "flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv chunked_cross_entropy"),
        "plugins": Key("fused_kernels", _plugins),
        "noisy_embedding_alpha": Key("neftune_noise_alpha"),
        "chat_template_jinja": Key("chat_template"),
        "default_system_message": Key("dataset_kwargs"),
        "auto_resume_from_checkpoints": Key("resume_from_checkpoint"),
        "resize_token_embeddings_to_32x": Key("added_tokens"),
        **all_to("use_fast_tokenizer", "tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files"),
        "tokenizer_config": Key("tokenizer"),
        "gpu_memory_limit": Key("gpu_memory_utilization"),
        "bnb_config_kwargs": Key("bnb_4bit_quant_storage"),
        "sequence_len": Key("max_length"),
        "excess_length_strategy": Key("long_rows"),
        "sample_packing": Key("packing"),
        "eval_sample_packing": Key("eval_packing"),
        "pad_to_sequence_len": Key("pad_to_sequence_len"),
        **all_to("sample_packing_tuning", "sample_packing_group_size sample_packing_bin_size "
                  "sample_packing_sequentially sample_packing_eff_est total_num_tokens multipack_real_batches"),
        "batch_flattening": Key("batch_flattening"),
        "micro_batch_size": Key("per_device_train_batch_size"),
        "batch_size": Key("auto_find_batch_size"),
        "eval_batch_size": Key("per_device_eval_batch_size"),
        "num_epochs": Key("num_train_epochs"),
        "optimizer": Key("optim"),
        "lr_scheduler": Key("lr_scheduler_type"),
        "cosine_min_lr_ratio": Key("cosine_min_lr_ratio"),
        **all_to("embedding_learning_rate", "embedding_lr embedding_lr_scale lr_groups"),
        **all_to("optim_args", "cosine_constant_lr_ratio lr_quadratic_warmup adam_epsilon2 adam_beta3 "
                  "torchdistx_path lr_div_factor"),
        "train_on_inputs": Key("train_on_inputs"),
        "datasets": Key("dataset"),
        "test_datasets": Key("eval_dataset"),
        "val_set_size": Key("val_set_size"),
        **all_to("dataset_cache", "dataset_prepared_path dataset_keep_in_memory dataset_shard_num dataset_shard_idx"),
        "skip_prepare_dataset": Key("skip_prepare_dataset"),
        "shuffle_merged_datasets": Key("shuffle_merged_datasets"),
        "dataset_processes": Key("dataset_num_proc"),
        "evals_per_epoch": Key("evals_per_epoch"),
        "saves_per_epoch": Key("saves_per_epoch"),
        "early_stopping_patience": Key("early_stopping_patience"),
        "wandb_log_model": Key("tracker_project"),
        "use_tensorboard": Key("report_to", tensorboard),
        **all_to("tracker_project", "use_mlflow use_comet use_wandb"),
        **same("flash_attention sdp_attention xformers_attention eager_attention attn_implementation"),
        **all_to("flash_attention", "s2_attention flex_attention sage_attention"),
        **all_to("tensor_parallel_size", "tensor_parallel_size"),
        **all_to("context_parallel_size", "sequence_parallel_degree context_parallel_size"),
        **all_to("fsdp", "dp_shard_size dp_replicate_size ring_attn_func fsdp_version fsdp_final_state_dict_type"),
        "rl": Key("other_loss"),
        "rl_beta": Key("other_loss"),
        "tokens": Key("added_tokens"),
        "added_tokens_overrides": Key("added_tokens"),
        "strict": Key("debug"),
        "gc_steps": Key("torch_empty_cache_steps"),
        "profiler_steps": Key("profiling"),
        "low_cpu_mem_usage": Key("low_cpu_mem_usage"),
    },
    prefixes={**TRAINER_PREFIXES, "mlflow_": "tracker_project", "comet_": "tracker_project"},
    defaults={
        **HF_OPTIMISER, "lr_scheduler_type": "cosine", "seed": 42, "per_device_train_batch_size": 1,
        "num_train_epochs": 1.0, "max_length": 512, "long_rows": "drop", "gradient_checkpointing": False,
        "train_on_inputs": False,
    },
    defaults_of="Axolotl",
    lora_defaults={"lora_dropout": 0.0, "target_modules": ("q_proj", "v_proj")},
    lora_defaults_of="Axolotl",
    marks=frozenset({"base_model", "micro_batch_size", "sequence_len", "adapter", "num_epochs", "lora_target_linear",
                     "sample_packing", "val_set_size"}),
)  # fmt: skip
