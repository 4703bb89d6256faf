"""One table per dialect: key -> neutral name, and the defaults of what a dialect's files leave out.

Keys are those of TRL 1.16, transformers 5.23, PEFT 0.21, and of the older releases that recipes still hold; Axolotl
0.19, LLaMA-Factory 0.9, Unsloth 2026.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from portlab_port.settings import Style


@dataclass(frozen=True)
class Said:
    """What a conversion gives where the value decides which setting it is."""

    name: str
    value: Any


@dataclass(frozen=True)
class Key:
    """Where a key goes: a neutral name, and a conversion of its value if the dialect has another meaning."""

    name: str
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Dialect:
    """A dialect.

    Attributes:
        style: its name on the command line.
        keys: key -> neutral name.
        prefixes: start of a key -> neutral name, for families of keys that are all treated alike.
        defaults: neutral name -> value, where a file says nothing; a function is given the rank.
        defaults_of: whose defaults they are, for the report.
        lora_defaults: the same for adapters, where the recipe trains them.
        marks: keys that this dialect has and others have not.
    """

    style: Style
    keys: Mapping[str, Key]
    prefixes: Mapping[str, str]
    defaults: Mapping[str, Any]
    defaults_of: str
    lora_defaults: Mapping[str, Any] = field(default_factory=dict)
    lora_defaults_of: str = ""
    marks: frozenset[str] = frozenset()

    def find(self, key: str) -> Key | None:
        """The entry of a key, None if the dialect has no such key."""
        if key in self.keys:
            return self.keys[key]
        return next((Key(name) for prefix, name in self.prefixes.items() if key.startswith(prefix)), None)


def _same(names: str) -> dict[str, Key]:
    return {name: Key(name) for name in names.split()}


def _all_to(name: str, keys: str) -> dict[str, Key]:
    return {key: Key(name) for key in keys.split()}


def _negated(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


def _by_length(value: Any) -> bool:
    return value == "group_by_length"


def _peft_method(value: Any) -> Any:
    if value in ("lora", "qlora"):
        return True
    return False if value == "full" else Said("other_peft", value)


def _bits(value: Any) -> Any:
    return Said("load_in_8bit", True) if str(value) == "8" else str(value) == "4" or Said("other_quantization", value)


def _twice(rank: Any) -> Any:
    return 2.0 * rank if isinstance(rank, int) else rank


def _all_linear(value: Any) -> Any:
    return "all-linear" if value is True else None


def _plugins(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    kernels = all("liger" in str(name).lower() or "cut_cross_entropy" in str(name) for name in names)
    return value if kernels else Said("other_loss", value)


def _tensorboard(value: Any) -> Any:
    return "tensorboard" if value is True else None


_TRAINER = {
    **_same(
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
    **_all_to("eval_strategy", "evaluation_strategy"),
    **_all_to("gradient_checkpointing", "activation_checkpointing"),
    **_all_to("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    **_all_to("per_device_train_batch_size", "per_gpu_train_batch_size"),
    **_all_to("per_device_eval_batch_size", "per_gpu_eval_batch_size"),
    **_all_to("fsdp_config", "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap parallelism_config"),
    **_all_to("dataloader_other", "dataloader_multiprocessing_context dataloader_in_order"),
    **_all_to("eval_other", "do_train do_eval do_predict prediction_loss_only "
              "bf16_full_eval fp16_full_eval greater_is_better include_for_metrics "
              "batch_eval_metrics label_names include_inputs_for_metrics"),
    **_all_to("save_other", "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint"),
    **_all_to("logging_other", "log_on_each_node include_num_input_tokens_seen include_tokens_per_second"),
    **_all_to("tracker_project", "project"),
    **_all_to("launcher", "use_cpu no_cuda use_mps_device"),
    **_all_to("fused_kernels", "jit_mode_eval use_ipex fp16_backend half_precision_backend fp16_opt_level"),
    "train_sampling_strategy": Key("group_by_length", _by_length),
}  # fmt: skip
_TRAINER_PREFIXES = {
    "hub_": "push_to_hub", "ddp_": "ddp", "wandb_": "tracker_project", "trackio_": "tracker_project",
    "log_": "logging_other", "logging_": "logging_other", "eval_": "eval_other", "save_": "save_other",
}  # fmt: skip
_SFT = {
    **_same(
        "max_length packing packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss "
        "assistant_only_loss dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token loss_type "
        "activation_offloading model_init_kwargs trust_remote_code router_aux_loss_coef shuffle_dataset"
    ),
    **_all_to("max_length", "max_seq_length"),
    **_all_to("chat_template", "chat_template_path"),
    **_all_to("packing_strategy", "truncation_mode"),
    **_all_to("dataset_kwargs", "dataset_batch_size num_of_sequences chars_per_token"),
}
_MODEL = {
    **_same("dtype attn_implementation use_dora use_rslora load_in_8bit load_in_4bit bnb_4bit_quant_type "
            "bnb_4bit_quant_storage bnb_4bit_compute_dtype bnb_4bit_use_double_quant trust_remote_code"),
    "model_name_or_path": Key("model"),
    "model_revision": Key("revision"),
    "torch_dtype": Key("dtype"),
    "use_peft": Key("use_lora"),
    "lora_r": Key("r"),
    **_same("lora_alpha lora_dropout"),
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
_PREFERENCE = _all_to("other_loss", "beta max_prompt_length loss_weights num_generations reward_funcs rl kl_coef")

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
    keys={**_TRAINER, **_SFT, **_MODEL, **_DATASET_ARGUMENTS, **_HANDBOOK, **_PREFERENCE},
    prefixes=_TRAINER_PREFIXES,
    defaults=SFT_DEFAULTS,
    defaults_of="TRL",
    lora_defaults={**PEFT_DEFAULTS, "r": 16, "lora_alpha": 32.0, "lora_dropout": 0.05},
    lora_defaults_of="TRL",
    marks=frozenset({"dataset_name", "use_peft", "dataset_train_split", "dataset_mixer", "dataset_mixture",
                     "lora_target_modules", "model_revision", "assistant_only_loss"}),
)  # fmt: skip

AXOLOTL = Dialect(
    style="axolotl",
    keys={
        **_TRAINER,
        "base_model": Key("model"),
        "base_model_config": Key("tokenizer"),
        "revision_of_model": Key("revision"),
        "base_model_ignore_patterns": Key("model_loading"),
        **_same("model_type tokenizer_type processor_type load_in_8bit load_in_4bit chat_template eot_tokens "
                "special_tokens unfrozen_parameters trust_remote_code neftune_noise_alpha device_map rope_scaling"),
        "adapter": Key("use_lora", _peft_method),
        "lora_r": Key("r"),
        **_same("lora_alpha lora_dropout lora_on_cpu"),
        "lora_target_modules": Key("target_modules"),
        "lora_target_linear": Key("target_modules", _all_linear),
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
        **_all_to("lora_variant", "peft peft_layer_replication relora relora_steps"),
        **_all_to("loraplus", "loraplus_lr_ratio"),
        **_all_to("other_quantization", "gptq quantization qat"),
        **_all_to("fused_kernels", "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
                  "unsloth_lora_mlp liger_rope liger_rms_norm liger_glu_activation liger_layer_norm "
                  "liger_fused_linear_cross_entropy liger_cross_entropy cut_cross_entropy flash_attn_cross_entropy "
                  "flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv chunked_cross_entropy"),
        "plugins": Key("fused_kernels", _plugins),
        "noisy_embedding_alpha": Key("neftune_noise_alpha"),
        "chat_template_jinja": Key("chat_template"),
        "default_system_message": Key("dataset_kwargs"),
        "auto_resume_from_checkpoints": Key("resume_from_checkpoint"),
        "resize_token_embeddings_to_32x": Key("added_tokens"),
        **_all_to("use_fast_tokenizer", "tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files"),
        "tokenizer_config": Key("tokenizer"),
        "gpu_memory_limit": Key("gpu_memory_utilization"),
        "bnb_config_kwargs": Key("bnb_4bit_quant_storage"),
        "sequence_len": Key("max_length"),
        "excess_length_strategy": Key("long_rows"),
        "sample_packing": Key("packing"),
        "eval_sample_packing": Key("eval_packing"),
        "pad_to_sequence_len": Key("pad_to_sequence_len"),
        **_all_to("sample_packing_tuning", "sample_packing_group_size sample_packing_bin_size "
                  "sample_packing_sequentially sample_packing_eff_est total_num_tokens multipack_real_batches"),
        "batch_flattening": Key("batch_flattening"),
        "micro_batch_size": Key("per_device_train_batch_size"),
        "batch_size": Key("auto_find_batch_size"),
        "eval_batch_size": Key("per_device_eval_batch_size"),
        "num_epochs": Key("num_train_epochs"),
        "optimizer": Key("optim"),
        "lr_scheduler": Key("lr_scheduler_type"),
        "cosine_min_lr_ratio": Key("cosine_min_lr_ratio"),
        **_all_to("embedding_learning_rate", "embedding_lr embedding_lr_scale lr_groups"),
        **_all_to("optim_args", "cosine_constant_lr_ratio lr_quadratic_warmup adam_epsilon2 adam_beta3 "
                  "torchdistx_path lr_div_factor"),
        "train_on_inputs": Key("train_on_inputs"),
        "datasets": Key("dataset"),
        "test_datasets": Key("eval_dataset"),
        "val_set_size": Key("val_set_size"),
        **_all_to("dataset_cache", "dataset_prepared_path dataset_keep_in_memory dataset_shard_num dataset_shard_idx"),
        "skip_prepare_dataset": Key("skip_prepare_dataset"),
        "shuffle_merged_datasets": Key("shuffle_merged_datasets"),
        "dataset_processes": Key("dataset_num_proc"),
        "evals_per_epoch": Key("evals_per_epoch"),
        "saves_per_epoch": Key("saves_per_epoch"),
        "early_stopping_patience": Key("early_stopping_patience"),
        "wandb_log_model": Key("tracker_project"),
        "use_tensorboard": Key("report_to", _tensorboard),
        **_all_to("tracker_project", "use_mlflow use_comet use_wandb"),
        **_same("flash_attention sdp_attention xformers_attention eager_attention attn_implementation"),
        **_all_to("flash_attention", "s2_attention flex_attention sage_attention"),
        **_all_to("tensor_parallel_size", "dp_shard_size dp_replicate_size tensor_parallel_size"),
        **_all_to("context_parallel_size", "sequence_parallel_degree context_parallel_size ring_attn_func"),
        **_all_to("fsdp", "fsdp_version fsdp_final_state_dict_type"),
        "rl": Key("other_loss"),
        "rl_beta": Key("other_loss"),
        "tokens": Key("added_tokens"),
        "added_tokens_overrides": Key("added_tokens"),
        "strict": Key("debug"),
        "gc_steps": Key("torch_empty_cache_steps"),
        "profiler_steps": Key("profiling"),
        "low_cpu_mem_usage": Key("low_cpu_mem_usage"),
    },
    prefixes={**_TRAINER_PREFIXES, "mlflow_": "tracker_project", "comet_": "tracker_project"},
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

LLAMA_FACTORY = Dialect(
    style="llama-factory",
    keys={
        **_TRAINER,
        "model_name_or_path": Key("model"),
        "model_revision": Key("revision"),
        "adapter_name_or_path": Key("start_from"),
        "trust_remote_code": Key("trust_remote_code"),
        "cache_dir": Key("cache_dir"),
        "use_fast_tokenizer": Key("use_fast_tokenizer"),
        "flash_attn": Key("attn_implementation"),
        "enable_liger_kernel": Key("use_liger_kernel"),
        "use_unsloth": Key("fused_kernels"),
        "quantization_bit": Key("load_in_4bit", _bits),
        "quantization_method": Key("bnb_4bit_quant_storage"),
        "quantization_type": Key("bnb_4bit_quant_type"),
        "double_quantization": Key("bnb_4bit_use_double_quant"),
        "quantization_device_map": Key("device_map"),
        "upcast_layernorm": Key("autocast_adapter_dtype"),
        "rope_scaling": Key("rope_scaling"),
        "resize_vocab": Key("added_tokens"),
        "add_tokens": Key("added_tokens"),
        "add_special_tokens": Key("added_tokens"),
        "new_special_tokens": Key("added_tokens"),
        "disable_gradient_checkpointing": Key("gradient_checkpointing", _negated),
        "use_reentrant_gc": Key("gradient_checkpointing_kwargs"),
        "stage": Key("stage"),
        "pure_bf16": Key("bf16"),
        "finetuning_type": Key("use_lora", _peft_method),
        "lora_rank": Key("r"),
        **_same("lora_alpha lora_dropout use_rslora use_dora"),
        "lora_target": Key("target_modules"),
        "additional_target": Key("modules_to_save"),
        "create_new_adapter": Key("inference_mode"),
        **_all_to("init_lora_weights", "pissa_init"),
        **_all_to("lora_variant", "pissa_iter pissa_convert"),
        **_all_to("loraplus", "loraplus_lr_ratio loraplus_lr_embedding"),
        **_all_to("optim_args", "use_galore use_apollo use_badam use_adam_mini use_muon"),
        **_all_to("loss_type", "use_dft_loss use_asft_loss use_eaft_loss"),
        "dataset": Key("dataset"),
        "eval_dataset": Key("eval_dataset"),
        "dataset_dir": Key("dataset_dir"),
        "media_dir": Key("dataset_dir"),
        "template": Key("chat_template"),
        "cutoff_len": Key("max_length"),
        "train_on_prompt": Key("train_on_inputs"),
        "mask_history": Key("mask_history"),
        "streaming": Key("dataset_streaming"),
        "buffer_size": Key("dataset_streaming"),
        "mix_strategy": Key("mix_strategy"),
        "interleave_probs": Key("mix_strategy"),
        **_all_to("dataset_cache", "overwrite_cache tokenized_path preprocessing_batch_size data_shared_file_system"),
        "preprocessing_num_workers": Key("dataset_num_proc"),
        "max_samples": Key("max_samples"),
        "ignore_pad_token_for_loss": Key("dataset_kwargs"),
        "val_size": Key("val_set_size"),
        "packing": Key("packing"),
        "neat_packing": Key("packing"),
        "tool_format": Key("tool_format"),
        "plot_loss": Key("plot_loss"),
        "include_effective_tokens_per_second": Key("logging_other"),
        "early_stopping_steps": Key("early_stopping_patience"),
        "ray_run_name": Key("launcher"),
        "freeze_vision_tower": Key("finetune_vision_layers", _negated),
        "freeze_multi_modal_projector": Key("finetune_vision_layers", _negated),
        "use_swanlab": Key("tracker_project"),
        **_all_to("generation", "predict_with_generate max_new_tokens temperature top_p top_k do_sample"),
        **_all_to("other_loss", "pref_beta pref_loss pref_ftx reward_model ref_model"),
    },
    prefixes={**_TRAINER_PREFIXES, "swanlab_": "tracker_project", "ray_": "launcher", "galore_": "optim_args",
              "apollo_": "optim_args", "badam_": "optim_args"},
    defaults={**HF_DEFAULTS, "max_length": 2048, "gradient_checkpointing": True, "use_lora": True, "stage": "sft",
              "train_on_inputs": False},
    defaults_of="LLaMA-Factory",
    lora_defaults={"r": 8, "lora_alpha": _twice, "lora_dropout": 0.0, "target_modules": "all-linear"},
    lora_defaults_of="LLaMA-Factory",
    marks=frozenset({"finetuning_type", "stage", "cutoff_len", "lora_rank", "lora_target", "template"}),
)  # fmt: skip

_FAST_MODEL = {
    "model_name": Key("model"),
    "max_seq_length": Key("max_length"),
    **_same("dtype load_in_4bit load_in_8bit load_in_16bit device_map token trust_remote_code revision "
            "attn_implementation use_exact_model_name fast_inference gpu_memory_utilization max_memory rope_scaling "
            "cache_dir low_cpu_mem_usage use_cache"),
    "torch_dtype": Key("dtype"),
    "pretrained_model_name_or_path": Key("model"),
    "full_finetuning": Key("use_lora", _negated),
    **_all_to("other_quantization", "load_in_fp8"),
    **_all_to("gradient_checkpointing", "use_gradient_checkpointing"),
    **_all_to("fast_inference", "max_lora_rank float8_kv_cache disable_log_stats unsloth_vllm_standby"),
}  # fmt: skip
LORA_CONFIG = {
    **_same("r lora_alpha lora_dropout target_modules use_rslora use_dora modules_to_save bias init_lora_weights "
            "rank_pattern alpha_pattern layers_to_transform layers_pattern exclude_modules target_parameters "
            "trainable_token_indices task_type fan_in_fan_out inference_mode peft_type ensure_weight_tying "
            "runtime_config base_model_name_or_path megatron_config megatron_core random_state "
            "autocast_adapter_dtype finetune_vision_layers finetune_language_layers finetune_attention_modules "
            "finetune_mlp_modules"),
    "revision": Key("base_model_name_or_path"),
    "max_seq_length": Key("max_length"),
    **_all_to("gradient_checkpointing", "use_gradient_checkpointing"),
    **_all_to("init_lora_weights", "loftq_config"),
    **_all_to("lora_variant", "eva_config corda_config lora_ga_config velora_config alora_invocation_tokens use_qalora "
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
        **_TRAINER, **_SFT, **_FAST_MODEL, **LORA_CONFIG,
        "model_name_or_path": Key("model"), "base_model": Key("model"), "lora_r": Key("r"), "lora_rank": Key("r"),
        "dataset": Key("dataset"), "dataset_name": Key("dataset"), "dataset_split": Key("dataset_split"),
        "chat_template": Key("chat_template"),
        "num_epochs": Key("num_train_epochs"), "batch_size": Key("per_device_train_batch_size"),
        "random_seed": Key("seed"), "train_on_completions": Key("completion_only_loss"),
        "train_on_responses_only": Key("completion_only_loss"),
        "lr_scheduler": Key("lr_scheduler_type"), "optimizer": Key("optim"),
        "vision_all_linear": Key("finetune_vision_layers"), "use_loftq": Key("init_lora_weights"),
        **_all_to("tracker_project", "enable_wandb"), "enable_tensorboard": Key("report_to", _tensorboard),
        "tensorboard_dir": Key("logging_other"), "log_frequency": Key("logging_steps"),
        **_all_to("generation", "temperature top_p top_k min_p max_new_tokens repetition_penalty"),
        **_all_to("push_to_hub", "save_method save_gguf save_model save_path quantization push_model hub_path"),
        "revision": Key("revision"), "use_lora": Key("use_lora"),
    },
    prefixes=_TRAINER_PREFIXES,
    defaults={**UNSLOTH_DEFAULTS, "use_lora": True},
    defaults_of="Unsloth",
    lora_defaults=UNSLOTH_LORA,
    lora_defaults_of="Unsloth",
    marks=frozenset({"use_gradient_checkpointing", "max_seq_length", "train_on_completions", "random_seed",
                     "finetune_vision_layers"}),
)  # fmt: skip

DIALECTS: dict[str, Dialect] = {d.style: d for d in (TRL, AXOLOTL, LLAMA_FACTORY, UNSLOTH)}

# Scripts: what may stand in which call. TrainingArguments and SFTConfig are read alike.
BITS_AND_BYTES = {
    **_same("load_in_8bit load_in_4bit llm_int8_threshold llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload "
            "llm_int8_has_fp16_weight bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant "
            "bnb_4bit_quant_storage"),
}  # fmt: skip
TRAINER_CONFIG = {**_TRAINER, **_SFT, **_PREFERENCE}
FAST_MODEL = _FAST_MODEL
AUTO_MODEL = {
    "pretrained_model_name_or_path": Key("model"),
    **_same(
        "dtype attn_implementation device_map low_cpu_mem_usage trust_remote_code revision token max_memory "
        "use_cache cache_dir load_in_4bit load_in_8bit"
    ),
    "torch_dtype": Key("dtype"),
    **_all_to("attn_implementation", "use_flash_attention_2"),
    **_all_to("model_loading", "local_files_only use_safetensors variant subfolder config"),
    **_all_to("token", "use_auth_token"),
    **_all_to("rope_scaling", "rope_scaling"),
}
TRAINER_CALL = {
    **_SFT,
    **_same("model neftune_noise_alpha dataset_num_proc formatting_func"),
    **_all_to("generation", "compute_metrics preprocess_logits_for_metrics"),
}
LAUNCHERS = {
    **_all_to("devices", "num_processes nproc_per_node nproc-per-node num_gpus"),
    **_all_to("launcher", "num_machines machine_rank main_process_ip main_process_port main_process_port "
              "rdzv_backend rdzv_endpoint rdzv_id master_addr master_port node_rank standalone multi_gpu "
              "num_cpu_threads_per_process dynamo_backend same_network rdzv_conf module max_restarts hostfile include "
              "use_deepspeed use_fsdp gpu_ids debug m"),
    "config_file": Key("config_file"),
    "deepspeed_config_file": Key("deepspeed"),
    "gradient_accumulation_steps": Key("gradient_accumulation_steps"),
}  # fmt: skip
