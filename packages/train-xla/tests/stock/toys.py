"""Toy random Gemma models, rows and trainer arguments that the scripts of this folder share."""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

VOCAB = 512
SLIDING, FULL = "sliding_attention", "full_attention"
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": [SLIDING, FULL],
    "max_position_embeddings": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def fsdp_v2(layer: str, **more: Any) -> dict[str, Any]:
    """Arguments that ask for FSDPv2 with every module of class `layer` wrapped."""
    wrap = {"xla": True, "xla_fsdp_v2": True, "transformer_layer_cls_to_wrap": [layer]}
    return {"fsdp": True, "fsdp_config": {**wrap, **more}}


def gemma3(**more: Any) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**SHAPE, "query_pre_attn_scalar": 16, **more}))


def one_layer() -> Gemma3ForCausalLM:
    """For what is counted per step: it compiles in half the time."""
    return gemma3(num_hidden_layers=1, layer_types=[SLIDING])


def gemma4(**more: Any) -> Gemma4ForCausalLM:
    torch.manual_seed(0)
    settings = {
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }
    return Gemma4ForCausalLM(Gemma4TextConfig(**SHAPE, **settings, **more))


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per id; the trainers need only its special tokens."""
    words = Tokenizer(WordLevel({f"w{word}": word for word in range(VOCAB)}, unk_token="w3"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", bos_token="w2")


def rows(count: int = 16, length: int = 32) -> Dataset:
    """Tokenised rows of one length, all of them supervised."""
    ids = torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(1)).tolist()
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * length] * count, "labels": ids})


def arguments(kind: type[TrainingArguments] = TrainingArguments, **more: Any) -> Any:
    """Arguments of a short quiet f32 run without the stock defaults that fail on XLA; `more` brings them back."""
    quiet = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return kind(**{**quiet, **more})
