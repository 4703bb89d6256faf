"""LLaMA-Factory."""

from typing import Any

from portlab_port.dialects.table import Dialect, Key, Said, all_to, negated, peft_method, same
from portlab_port.dialects.trl import HF_DEFAULTS, TRAINER, TRAINER_PREFIXES


def _bits(value: Any) -> Any:
    return Said("load_in_8bit", True) if str(value) == "8" else str(value) == "4" or Said("other_quantization", value)


def _twice(rank: Any) -> Any:
    return 2.0 * rank if isinstance(rank, int) else rank


LLAMA_FACTORY = Dialect(
    style="llama-factory",
    keys={
        **TRAINER,
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
        "disable_gradient_checkpointing": Key("gradient_checkpointing", negated),
        "use_reentrant_gc": Key("gradient_checkpointing_kwargs"),
        "stage": Key("stage"),
        "pure_bf16": Key("bf16"),
        "finetuning_type": Key("use_lora", peft_method),
        "lora_rank": Key("r"),
        **same("lora_alpha lora_dropout use_rslora use_dora"),
        "lora_target": Key("target_modules"),
        "additional_target": Key("modules_to_save"),
        "create_new_adapter": Key("inference_mode"),
        **all_to("init_lora_weights", "pissa_init"),
        **all_to("lora_variant", "pissa_iter pissa_convert"),
        **all_to("loraplus", "loraplus_lr_ratio loraplus_lr_embedding"),
        **all_to("optim_args", "use_galore use_apollo use_badam use_adam_mini use_muon"),
        **all_to("loss_type", "use_dft_loss use_asft_loss use_eaft_loss"),
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
        **all_to("dataset_cache", "overwrite_cache tokenized_path preprocessing_batch_size data_shared_file_system"),
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
        "freeze_vision_tower": Key("finetune_vision_layers", negated),
        "freeze_multi_modal_projector": Key("finetune_vision_layers", negated),
        "use_swanlab": Key("tracker_project"),
        **all_to("generation", "predict_with_generate max_new_tokens temperature top_p top_k do_sample"),
        **all_to("other_loss", "pref_beta pref_loss pref_ftx reward_model ref_model"),
    },
    prefixes={**TRAINER_PREFIXES, "swanlab_": "tracker_project", "ray_": "launcher", "galore_": "optim_args",
              "apollo_": "optim_args", "badam_": "optim_args"},
    defaults={**HF_DEFAULTS, "max_length": 2048, "gradient_checkpointing": True, "use_lora": True, "stage": "sft",
              "train_on_inputs": False},
    defaults_of="LLaMA-Factory",
    lora_defaults={"r": 8, "lora_alpha": _twice, "lora_dropout": 0.0, "target_modules": "all-linear"},
    lora_defaults_of="LLaMA-Factory",
    marks=frozenset({"finetuning_type", "stage", "cutoff_len", "lora_rank", "lora_target", "template"}),
)  # fmt: skip
