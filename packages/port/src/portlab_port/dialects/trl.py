"""TRL: transformers' trainer, SFT's own keys, and those of its command line; alignment-handbook's on top."""

from typing import Any

from portlab_port.dialects.table import Dialect, Key, all_to, same


def _by_length(value: Any) -> bool:
    return value == "group_by_length"


TRAINER = {
    **same(
        "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type "
        "lr_scheduler_kwargs warmup_steps warmup_ratio seed data_seed optim optim_args optim_target_modules "
        "neftune_noise_alpha label_smoothing_factor per_device_train_batch_size num_train_epochs "
        "gradient_accumulation_steps max_steps group_by_length bf16 fp16 gradient_checkpointing "
        "gradient_checkpointing_kwargs length_column_name torch_compile torch_compile_backend torch_compile_mode "
        "torch_empty_cache_steps dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_prefetch_factor dataloader_persistent_workers remove_unused_columns use_liger_kernel "
        "liger_kernel_config fsdp fsdp_config deepspeed accelerator_config local_rank tf32 full_determinism "
        "average_tokens_across_devices auto_find_batch_size logging_steps eval_strategy eval_steps save_strategy "
        "save_steps save_total_limit load_best_model_at_end report_to metric_for_best_model output_dir run_name "
        "per_device_eval_batch_size log_level disable_tqdm overwrite_output_dir skip_memory_metrics debug push_to_hub "
        "resume_from_checkpoint use_cache"
    ),
    **all_to("eval_strategy", "evaluation_strategy"),
    **all_to("gradient_checkpointing", "activation_checkpointing"),
    **all_to("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    **all_to("per_device_train_batch_size", "per_gpu_train_batch_size"),
    **all_to("per_device_eval_batch_size", "per_gpu_eval_batch_size"),
    **all_to("fsdp_config", "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap parallelism_config"),
    **all_to("dataloader_other", "dataloader_multiprocessing_context dataloader_in_order"),
    **all_to("eval_other", "do_train do_eval do_predict prediction_loss_only "
              "bf16_full_eval fp16_full_eval greater_is_better include_for_metrics "
              "batch_eval_metrics label_names include_inputs_for_metrics"),
    **all_to("save_other", "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint"),
    **all_to("logging_other", "log_on_each_node include_num_input_tokens_seen include_tokens_per_second"),
    **all_to("tracker_project", "project"),
    **all_to("launcher", "use_cpu no_cuda use_mps_device"),
    **all_to("fused_kernels", "jit_mode_eval use_ipex fp16_backend half_precision_backend fp16_opt_level"),
    "train_sampling_strategy": Key("group_by_length", _by_length),
}  # fmt: skip
TRAINER_PREFIXES = {
    "hub_": "push_to_hub", "ddp_": "ddp", "wandb_": "tracker_project", "trackio_": "tracker_project",
    "log_": "logging_other", "logging_": "logging_other", "eval_": "eval_other", "save_": "save_other",
}  # fmt: skip
SFT = {
    **same(
        "max_length packing packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss "
        "assistant_only_loss dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token loss_type "
        "activation_offloading model_init_kwargs trust_remote_code router_aux_loss_coef shuffle_dataset"
    ),
    **all_to("max_length", "max_seq_length"),
    **all_to("chat_template", "chat_template_path"),
    **all_to("packing_strategy", "truncation_mode"),
    **all_to("dataset_kwargs", "dataset_batch_size num_of_sequences chars_per_token"),
}
_MODEL = {
    **same("dtype attn_implementation use_dora use_rslora load_in_8bit load_in_4bit bnb_4bit_quant_type "
            "bnb_4bit_quant_storage bnb_4bit_compute_dtype bnb_4bit_use_double_quant trust_remote_code"),
    "model_name_or_path": Key("model"),
    "model_revision": Key("revision"),
    "torch_dtype": Key("dtype"),
    "use_peft": Key("use_lora"),
    "lora_r": Key("r"),
    **same("lora_alpha lora_dropout"),
    "lora_target_modules": Key("target_modules"),
    "lora_target_parameters": Key("target_parameters"),
    "lora_modules_to_save": Key("modules_to_save"),
    "lora_task_type": Key("task_type"),
    "use_bnb_nested_quant": Key("bnb_4bit_use_double_quant"),
    "use_flash_attention_2": Key("attn_implementation"),
}  # fmt: skip
_DATASET_ARGUMENTS = {
    "dataset_name": Key("dataset"),
    "dataset_config": Key("dataset_config"),
    "dataset_train_split": Key("dataset_split"),
    "dataset_test_split": Key("eval_dataset"),
    "dataset_streaming": Key("dataset_streaming"),
    "streaming": Key("dataset_streaming"),
    "ignore_bias_buffers": Key("ddp"),
    "datasets": Key("dataset_mixture"),
    "test_split_size": Key("val_set_size"),
}
# alignment-handbook's own, on top of TRL's.
_HANDBOOK = {
    "dataset_mixer": Key("dataset"),
    "dataset_mixture": Key("dataset"),
    "dataset_splits": Key("dataset_split"),
    "dataset_configs": Key("dataset_config"),
    "chat_template": Key("chat_template"),
    "preprocessing_num_workers": Key("dataset_num_proc"),
    "tokenizer_name_or_path": Key("tokenizer"),
    "text_column": Key("dataset_text_field"),
    "auto_insert_empty_system_msg": Key("dataset_kwargs"),
    "hub_model_id": Key("push_to_hub"),
}
PREFERENCE = all_to("other_loss", "beta max_prompt_length loss_weights num_generations reward_funcs rl kl_coef")

HF_OPTIMISER = {
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0,
    "optim": "adamw_torch", "gradient_accumulation_steps": 1,
}  # fmt: skip
HF_DEFAULTS = {
    **HF_OPTIMISER, "learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0.0, "seed": 42,
    "per_device_train_batch_size": 8, "num_train_epochs": 3.0,
}  # fmt: skip
SFT_DEFAULTS = {**HF_DEFAULTS, "learning_rate": 2e-5, "max_length": 1024, "gradient_checkpointing": True}
PEFT_DEFAULTS = {"r": 8, "lora_alpha": 8.0, "lora_dropout": 0.0, "target_modules": ("q_proj", "v_proj")}
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

TRL = Dialect(
    style="trl",
    keys={**TRAINER, **SFT, **_MODEL, **_DATASET_ARGUMENTS, **_HANDBOOK, **PREFERENCE},
    prefixes=TRAINER_PREFIXES,
    defaults=SFT_DEFAULTS,
    defaults_of="TRL",
    lora_defaults={**PEFT_DEFAULTS, "r": 16, "lora_alpha": 32.0, "lora_dropout": 0.05},
    lora_defaults_of="TRL",
    marks=frozenset({"dataset_name", "use_peft", "dataset_train_split", "dataset_mixer", "dataset_mixture",
                     "lora_target_modules", "model_revision", "assistant_only_loss"}),
)  # fmt: skip
