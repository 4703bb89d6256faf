"""What becomes of every setting of a GPU recipe: one table.

A rule's fate is what holds for most values; where the value decides, `port` says so in the note.
"""

from dataclasses import dataclass
from typing import Literal

Fate = Literal["carries", "changes", "cannot", "drops"]
Kind = Literal["float", "int", "bool", "text", "list", "names", "any"]

FATES: dict[Fate, str] = {
    "carries": "means the same here",
    "changes": "means something else on TPU, or is said in another way",
    "cannot": "a Portlab recipe cannot say it",
    "drops": "has no place here, and changes nothing that is learnt",
}


@dataclass(frozen=True)
class Rule:
    """What becomes of one setting.

    Attributes:
        name: neutral name, in Hugging Face's terms where they have one.
        kind: type of the value; `list` splits text at commas, `names` is text or a list of it.
        fate: what becomes of it.
        to: recipe keys that say it, separated by commas.
        why: the reason, one or two plain sentences.
        docs: file and anchor under docs/.
        off: values at which a setting that cannot be said is not in use.
        loss: a setting that cannot be said changes what is learnt, so that it is an error unless accepted.
        computed: on TPU the value does not matter, so that it need not be known.
    """

    name: str
    kind: Kind
    fate: Fate
    to: str
    why: str
    docs: str
    off: tuple[object, ...] = ()
    loss: bool = False
    computed: bool = False


def _carries(docs: str, *rows: tuple[str, Kind, str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(name, kind, "carries", to, why, docs) for name, kind, to, why in rows)


def _changes(docs: str, *rows: tuple[str, Kind, str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(name, kind, "changes", to, why, docs) for name, kind, to, why in rows)


def _drops(docs: str, why: str, names: str) -> tuple[Rule, ...]:
    return tuple(Rule(name, "any", "drops", "", why, docs, computed=True) for name in names.split())


_OFF = (None, False, 0, 0.0, "", "none", "None", "no", (), "false")


def _cannot(docs: str, *rows: tuple[str, Kind, str], off: tuple[object, ...] = ()) -> tuple[Rule, ...]:
    return tuple(Rule(name, kind, "cannot", "", why, docs, off=_OFF + off, loss=True) for name, kind, why in rows)


_LORA = "recipes.md#what-is-trained"
_OPTIMISER = "recipes.md#optimiser"
_BATCH = "recipes.md#batch-devices-and-memory"
_DATA = "recipes.md#model-data-and-format"
_WATCH = "recipes.md#watching-and-keeping"
_GLOBAL = "training-xla.md#batches-what-is-global"
_SHAPES = "training-xla.md#static-shapes-and-the-compile-budget"

_MODEL_RULES = (
    *_changes(
        _DATA,
        ("model", "text", "model, format", "the model carries over; its family decides the wire format"),
        ("chat_template", "any", "format", "a format writes Gemma's own template, with a mask that is right by "
         "construction; no other template can be trained"),
        ("tokenizer", "text", "", "the tokenizer is the model's own"),
        ("dtype", "text", "dtype", "the frozen base is bfloat16 on TPU; adapters, moments, norms and loss are float32"),
    ),
    *_carries(_DATA, ("revision", "text", "revision", "the same commit of the weights")),
    *_drops("training.md#attention", "the kernel is chosen for the device. Eager attention was advised for Gemma 2, "
            "whose attention logits are capped; Gemma 3 and 4 cap none there",
            "attn_implementation flash_attention sdp_attention xformers_attention eager_attention"),
    *_drops("training.md#attention", "a cache of keys and values is for generation", "use_cache"),
    *_drops("training.md#devices", "one process drives all devices; where weights lie is the mesh's matter",
            "device_map low_cpu_mem_usage max_memory"),
    *_drops("models.md", "models are read from config.json and safetensors; code of a repository is never run",
            "trust_remote_code model_init_kwargs model_type tokenizer_type processor_type model_loading "
            "use_fast_tokenizer cache_dir use_exact_model_name fast_inference gpu_memory_utilization"),
    *_drops("models.md", "downloads use the login of hf auth login", "token"),
    *_drops("formats.md#the-mask", "the format knows its own begin, stop and padding tokens, and learns the stop token",
            "eos_token pad_token special_tokens eot_tokens padding_side"),
    *_cannot(
        "formats.md#wire-formats",
        ("added_tokens", "any", "tokens that are not in Gemma's vocabulary cannot be added"),
        ("rope_scaling", "any", "the context is that of config.json"),
        ("unfrozen_parameters", "any", "all weights are trained, or adapters alone"),
    ),
    *_cannot("models.md", ("task_type", "text", "causal language models alone are trained"), off=("CAUSAL_LM",)),
)  # fmt: skip

_QUANTIZE_RULES = (
    *_changes(
        "training.md#lora-or-all-weights",
        ("load_in_4bit", "bool", "lora.quantize", "nf4 in our own blocks beside float32 adapters, by train-jax alone; "
         "a TPU has room for most Gemmas in bfloat16, and then none computes better"),
        ("load_in_8bit", "bool", "lora.quantize", "int8 with a scale for each output, without LLM.int8()'s float16 "
         "outliers; by train-jax alone"),
        ("bnb_4bit_quant_type", "text", "lora.quantize", "nf4 is the one 4-bit type here"),
    ),
    *_drops("training.md#lora-or-all-weights", "how bitsandbytes stores and computes; matters to memory alone",
            "bnb_4bit_compute_dtype bnb_4bit_use_double_quant bnb_4bit_quant_storage llm_int8_threshold "
            "llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight load_in_16bit "
            "prepare_model_for_kbit_training lora_on_cpu"),
    *_cannot("training.md#lora-or-all-weights",
             ("other_quantization", "any", "GPTQ, AWQ, FP8 and the like are not read; give the original weights")),
)  # fmt: skip

_LORA_RULES = (
    *_carries(
        _LORA,
        ("use_lora", "bool", "method", "adapters beside frozen weights, or all weights"),
        ("r", "int", "lora.rank", "the same rank"),
        ("lora_alpha", "float", "lora.alpha", "the same scale, alpha / rank"),
        ("lora_dropout", "float", "lora.dropout", "the same dropout on the adapter's input"),
        ("use_rslora", "bool", "lora.use_rslora", "alpha / sqrt(rank)"),
        ("rank_pattern", "any", "lora.rank_pattern", "PEFT's rule: an expression for the end of a module's path"),
        ("alpha_pattern", "any", "lora.alpha_pattern", "PEFT's rule"),
        ("start_from", "text", "lora.start_from", "goes on from that adapter"),
    ),
    *_changes(
        _LORA,
        ("target_modules", "names", "lora.targets", "layers of the text model alone; a vision tower is never adapted"),
        ("layers_to_transform", "any", "lora.targets", "said by regular expressions over the layer numbers"),
        ("finetune_attention_modules", "bool", "lora.targets", "the four projections of attention"),
        ("finetune_mlp_modules", "bool", "lora.targets", "the three projections of the MLP"),
        ("finetune_language_layers", "bool", "lora.targets", "the text model is what is trained"),
        ("finetune_vision_layers", "bool", "", "vision towers are copied, never trained"),
        ("trainable_token_indices", "any", "lora.train_control_rows", "the rows of the format's control tokens, which "
         "the format names itself"),
    ),
    *_drops(_LORA, "adapters are float32 and A has PEFT's uniform initialisation, as PEFT has by default",
            "autocast_adapter_dtype fan_in_fan_out inference_mode peft_type layers_pattern random_state "
            "ensure_weight_tying runtime_config base_model_name_or_path megatron_config megatron_core"),
    *_cannot(
        _LORA,
        ("modules_to_save", "list", "embedding and head cannot be trained whole beside adapters; with --accept "
         "lora.train_control_rows trains the rows of control tokens"),
        ("use_dora", "bool", "no magnitude vectors (DoRA)"),
        ("bias", "text", "biases are not trained"),
        ("other_peft", "any", "no PEFT method but LoRA"),
        ("lora_variant", "any", "a variant of LoRA that the recipe has no word for"),
        ("exclude_modules", "any", "name what is adapted instead, in lora.targets"),
        ("target_parameters", "any", "name experts in lora.targets, as experts.down_proj"),
        ("loraplus", "any", "A and B share one learning rate (no LoRA+)"),
        off=({},),
    ),
    *_cannot(
        _LORA,
        ("init_lora_weights", "any", "A is PEFT's kaiming-uniform and B zero, no other start (PiSSA, OLoRA, LoftQ, "
         "gaussian)"),
        off=(True, "default", "kaiming", "true"),
    ),
)  # fmt: skip

_OPTIMISER_RULES = (
    *_carries(
        _OPTIMISER,
        ("learning_rate", "float", "optimizer.learning_rate", "the same peak"),
        ("weight_decay", "float", "optimizer.weight_decay", "decoupled, as in AdamW"),
        ("adam_beta1", "float", "optimizer.b1", "the same decay of the first moment"),
        ("adam_beta2", "float", "optimizer.b2", "the same; written, as a recipe's own default is 0.99"),
        ("adam_epsilon", "float", "optimizer.eps", "the same, beside the root of the second moment"),
        ("max_grad_norm", "float", "optimizer.clip_norm", "the same global norm"),
        ("lr_scheduler_type", "text", "optimizer.schedule, optimizer.final_fraction", "the same shape; ours has its "
         "last rate in the last step, transformers' would have it one step later"),
        ("lr_scheduler_kwargs", "any", "optimizer.final_fraction, optimizer.decay_fraction", "the last rate as a share "
         "of the peak"),
        ("cosine_min_lr_ratio", "float", "optimizer.final_fraction", "the last rate as a share of the peak"),
        ("warmup_steps", "float", "optimizer.warmup_steps", "linear; our first step has rate peak / (w + 1), where "
         "transformers' has 0 and learns nothing"),
        ("seed", "int", "seed", "row order and initialisation, though no two libraries draw the same numbers"),
    ),
    *_changes(
        _OPTIMISER,
        ("optim", "text", "optimizer.name", "AdamW or Adafactor in float32; no fused, 8-bit or paged kernels, which "
         "are CUDA's: adapters' moments are small, and sharded"),
        ("warmup_ratio", "float", "optimizer.warmup_steps", "counted in steps of the whole run"),
        ("data_seed", "int", "", "one seed draws both row order and initialisation"),
    ),
    *_cannot(
        _OPTIMISER,
        ("optim_args", "any", "arguments of an optimiser that the recipe has no key for"),
        ("optim_target_modules", "any", "one optimiser for all that is trained"),
        ("embedding_learning_rate", "any", "one learning rate for all that is trained"),
        ("neftune_noise_alpha", "float", "no noise on embeddings (NEFTune)"),
        ("label_smoothing_factor", "float", "no label smoothing"),
        ("loss_type", "text", "plain cross-entropy on supervised tokens alone"),
        ("router_aux_loss_coef", "float", "no auxiliary loss for routers; the experts' routers are frozen under LoRA"),
        ("other_loss", "any", "another training method than supervised fine-tuning"),
        ("stage", "text", "supervised fine-tuning alone, no preference, reward or pre-training stage"),
        off=("nll", "chunked_nll", "sft", "SFTTrainer", "Trainer", "Seq2SeqTrainer", "UnslothTrainer"),
    ),
)  # fmt: skip

_BATCH_RULES = (
    *_changes(
        _GLOBAL,
        ("per_device_train_batch_size", "int", "batch_size", "the batch is written once for all devices: per device x "
         "devices x accumulation"),
        ("devices", "int", "batch_size", "counts in the batch; how many TPU chips there are changes no loss"),
        ("config_file", "text", "", "accelerate's file is not read: --devices says how many GPUs there were"),
        ("num_train_epochs", "float", "steps", "epochs x rows / batch, counted as the GPU trainer counts them"),
    ),
    *_carries(
        _GLOBAL,
        ("gradient_accumulation_steps", "int", "batch_size, accumulate", "the parts of a step; lower it where memory "
         "allows, the gradient stays that of the whole batch"),
        ("max_steps", "int", "steps", "the same number of steps"),
    ),
    *_changes(
        _SHAPES,
        ("packing", "bool", "pack, batch_size", "rows are packed into one planned shape, and a packed example never "
         "sees another; batch_size counts examples, not packed rows"),
        ("packing_strategy", "text", "pack", "no example is cut in two to fill a row"),
        ("group_by_length", "bool", "pack", "rows of one length are how a GPU avoids padding; packed rows of one shape "
         "do it on a TPU, which compiles once for each shape"),
    ),
    *_changes(
        "batching.md#rows-that-are-too-long",
        ("max_length", "int", "max_length", "the same limit, but an answer is never cut: what a longer row becomes is "
         "too_long"),
        ("long_rows", "text", "too_long", "error names the first long row, drop leaves them out; TRL would cut them"),
    ),
    *_changes(
        _BATCH,
        ("bf16", "bool", "dtype", "auto is bfloat16 on TPU, and float32 on a CPU"),
        ("fp16", "bool", "dtype", "float16 has no place on TPU: bfloat16 has float32's range, so that no loss scaler "
         "is needed; Gemma's activations leave float16's"),
        ("gradient_checkpointing", "any", "remat", "whole layers are computed again in the backward pass"),
        ("activation_offloading", "bool", "remat", "layers' inputs wait in host memory"),
    ),
    *_drops(_BATCH, "belongs to PyTorch's checkpointing; the JAX step has neither reentrance nor hooks",
            "gradient_checkpointing_kwargs"),
    *_drops(_SHAPES, "shapes are planned before the first step, and compiled once",
            "padding_free pad_to_multiple_of pad_to_sequence_len torch_compile torch_compile_backend "
            "torch_compile_mode length_column_name sample_packing_tuning multipack_real_batches eval_packing "
            "torch_empty_cache_steps batch_flattening shuffle_merged_datasets"),
    *_drops(_SHAPES, "batches are always full, and no row is dropped: the next epoch fills the last batch of one",
            "dataloader_drop_last"),
    *_drops("training-xla.md#static-shapes-and-the-compile-budget", "rows are prepared once, ahead of the steps",
            "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers "
            "dataloader_other dataset_num_proc dataset_prepared_path dataset_cache dataset_streaming "
            "remove_unused_columns shuffle_dataset"),
    *_drops("shared-prefix.md#logits-only-where-they-count", "Triton kernels of CUDA; here logits are computed only "
            "at supervised positions, in chunks",
            "use_liger_kernel liger_kernel_config cut_cross_entropy fused_kernels"),
    *_drops("training.md#devices", "replaced by the mesh: data, fsdp and tp are chosen so that the weights fit, and "
            "nothing is wrapped",
            "fsdp fsdp_config deepspeed tensor_parallel_size context_parallel_size ddp accelerator_config local_rank "
            "launcher"),
    *_drops("training.md#devices", "CUDA's and NCCL's own; XLA does its collectives itself",
            "cuda_env tf32 full_determinism"),
    *_drops(_GLOBAL, "the loss is always divided by the supervised tokens of the whole step",
            "average_tokens_across_devices"),
    *_cannot(_GLOBAL, ("auto_find_batch_size", "bool", "the batch that it would find is not known; give the number")),
)  # fmt: skip

_DATA_RULES = (
    *_changes(
        "data.md#files",
        ("dataset", "names", "data", "a file or folder on this machine; the Hub is not read while training"),
        ("dataset_format", "any", "", "the shape of a row is told by its marks"),
        ("dataset_split", "text", "train_splits", "rows carry their split: train, validation or test"),
        ("dataset_config", "text", "data", "take that configuration's files"),
        ("dataset_text_field", "text", "data", "conversations are read, not rendered text, whose mask is lost"),
        ("dataset_dir", "text", "data", "give the file itself"),
        ("formatting_func", "any", "", "rows are rendered by the format; the data must have one of the known shapes"),
        ("val_set_size", "float", "eval_split, monitor_split", "rows carry their split: toolspec split gives them one"),
        ("eval_dataset", "any", "eval_split", "rows of the splits validation and test, of the same data set"),
        ("max_samples", "int", "data", "take the rows out of the file"),
    ),
    *_changes(
        "formats.md#the-mask",
        ("completion_only_loss", "bool", "", "what the assistant says is learnt, calls and stop tokens included"),
        ("assistant_only_loss", "bool", "", "what the assistant says is learnt, calls and stop tokens included"),
        ("train_on_inputs", "bool", "", "what the assistant says is learnt, and nothing else can be"),
        ("data_collator", "text", "", "batches and masks are the format's; a collator of one's own is not read"),
        ("mask_history", "bool", "", 'a message with "supervised": false is not learnt'),
    ),
    *_drops("data.md#shapes", "columns and roles are known by the shape of a row",
            "message_mapping dataset_kwargs skip_prepare_dataset"),
    *_drops("formats.md#wire-formats", "the format declares tools and writes calls", "tool_format"),
    *_cannot(
        "data.md#files",
        ("dataset_mixture", "any", "one data set for a run; join the files yourself"),
        ("mix_strategy", "any", "one data set for a run"),
        off=("concat",),
    ),
)  # fmt: skip

_WATCH_RULES = (
    *_carries(
        _WATCH,
        ("logging_steps", "float", "log_every", "the same interval"),
        ("eval_steps", "float", "eval_every", "the same interval, over the validation split"),
        ("save_steps", "float", "save_every", "the same interval"),
        ("save_total_limit", "int", "keep", "the newest checkpoints that are kept"),
        ("early_stopping_patience", "int", "patience", "measurements without a new lowest loss"),
        ("load_best_model_at_end", "bool", "keep_best", "the checkpoint of the lowest monitored loss is exported"),
    ),
    *_changes(
        _WATCH,
        ("eval_strategy", "text", "eval_every", "counted in steps"),
        ("evals_per_epoch", "float", "eval_every", "counted in steps"),
        ("save_strategy", "text", "save_every", "counted in steps"),
        ("saves_per_epoch", "float", "save_every", "counted in steps"),
        ("report_to", "names", "trackers", "metrics.jsonl is always written; tensorboard and trackio go beside it"),
        ("metric_for_best_model", "text", "keep_best", "the monitored loss alone decides"),
    ),
    *_drops(_WATCH, "runs have a folder, a log and a report of their own",
            "output_dir run_name logging_other save_other eval_other per_device_eval_batch_size tracker_project "
            "log_level disable_tqdm plot_loss overwrite_output_dir skip_memory_metrics debug profiling"),
    *_drops("merging.md", "nothing is uploaded; the run folder holds adapter and merged model, and hf upload publishes "
            "them", "push_to_hub"),
    *_drops("training.md#stopping-and-going-on", "the same command goes on from the newest intact checkpoint",
            "resume_from_checkpoint"),
    *_drops(_DATA, "answers to held-out questions are generated before and after, greedily", "generation"),
    *_drops("porting-recipes.md#scripts", "comes after the training, or is no part of it", "not_training"),
)  # fmt: skip

GROUPS: dict[str, tuple[Rule, ...]] = {
    "Model": _MODEL_RULES,
    "Quantisation": _QUANTIZE_RULES,
    "LoRA": _LORA_RULES,
    "Optimiser and loss": _OPTIMISER_RULES,
    "Batch, precision and devices": _BATCH_RULES,
    "Data and mask": _DATA_RULES,
    "Watching and keeping": _WATCH_RULES,
}
RULES: dict[str, Rule] = {rule.name: rule for rules in GROUPS.values() for rule in rules}
