"""Rows, adapters and random models for the benchmarks that compare trainers."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from peers.exchange import Row
from portlab_spec.assets import default_model
from portlab_spec.conversation import Conversation, Message
from portlab_spec.data import load_dataset
from portlab_spec.data.tokens import tokenize
from portlab_spec.formats import FORMATS
from portlab_spec.models import GemmaConfig, param_table, plan_adapter
from portlab_spec.recipe import Lora
from portlab_spec.safetensors_file import Writer
from portlab_spec.tokenizer import Tokenizer

MAX_LENGTH = 1024
# Tunix gives K and V one A between them, which PEFT's adapters cannot express: all others can be equal everywhere.
TARGETS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def fitness_rows() -> list[Row]:
    """Training rows of fitness-213: seven declarations that all share, then a question; the call is supervised."""
    train = [c for c in load_dataset("fitness-213") if c.split == "train"]
    order = np.random.default_rng(0).permutation(len(train))
    return _tokenized([train[i] for i in order], "functiongemma")


def dolly_rows(count: int = 64) -> list[Row]:
    """Made-up instructions and answers of 60 to 500 tokens that share nothing but the opening of the turn.

    They have the shape of databricks-dolly-15k; the text is words drawn from the tokenizer's vocabulary.
    """
    tokenizer = Tokenizer.load(default_model().path)
    vocabulary = json.loads((default_model().path / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(
        token[1:] for token in vocabulary if re.fullmatch("▁[a-z]{4,}", token) and vocabulary[token] < 20_000
    )
    rng = np.random.default_rng(0)
    conversations = []
    for i, first in enumerate(rng.permutation(words)[:count]):
        length = rng.integers(50, 480)
        asked = int(length * rng.uniform(0.3, 0.7))
        text = [str(first), *map(str, rng.choice(words, length - 1))]
        messages = (
            Message(role="user", content=" ".join(text[:asked])),
            Message(role="assistant", content=" ".join(text[asked:])),
        )
        conversations.append(Conversation(id=f"dolly-{i}", messages=messages))
    rows = _tokenized(conversations, "gemma3-json")
    assert len(tokenizer.encode("<bos><start_of_turn>user\n")) == _common_start(rows)
    return rows


def _tokenized(conversations: Sequence[Conversation], fmt: str) -> list[Row]:
    rows = tokenize(conversations, FORMATS[fmt], Tokenizer.load(default_model().path), MAX_LENGTH)
    return [Row(list(row.ids), list(row.loss)) for row in rows]


def _common_start(rows: Sequence[Row]) -> int:
    for i, tokens in enumerate(zip(*(row.ids for row in rows), strict=False)):
        if len(set(tokens)) > 1:
            return i
    return min(len(row.ids) for row in rows)


def random_rows(count: int, length: int, shared: int, vocab_size: int) -> list[Row]:
    """Rows of one length of random tokens: the first `shared` are the same in all, what follows is supervised."""
    rng = np.random.default_rng(0)
    start = rng.integers(3, vocab_size, shared).tolist()
    supervised = [i >= max(shared, 1) for i in range(length)]
    return [Row([*start, *rng.integers(3, vocab_size, length - shared).tolist()], supervised) for _ in range(count)]


def adapter_values(config: GemmaConfig, lora: Lora) -> dict[str, np.ndarray]:
    """One random adapter for all contenders; b is not zero, so that every gradient flows from the first step."""
    rng = np.random.default_rng(0)
    values = {}
    for leaf in plan_adapter(config, lora):
        into, out = leaf.into.size, leaf.out.size
        for module in leaf.modules(""):
            values[f"{module}.a"] = rng.uniform(-1, 1, (into, leaf.rank)).astype(np.float32) / np.float32(into**0.5)
            values[f"{module}.b"] = rng.normal(0, 0.002, (leaf.rank, out)).astype(np.float32)
    return values


def gemma3_shape(
    layers: int, hidden: int, mlp: int, *, head_dim: int = 256, vocab: int = 262_144, window: int = 512
) -> dict[str, Any]:
    """A Gemma 3 text configuration as transformers writes it: four heads, one of keys, every sixth layer full."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "max_position_embeddings": 32_768,
        "sliding_window": window,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def write_random_model(folder: Path, shape: dict[str, Any]) -> GemmaConfig:
    """A Hugging Face folder with random bfloat16 weights; each tensor is drawn by itself, so memory stays small."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=2))
    config = GemmaConfig.load(folder)
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    sizes = {
        name: (param.init, tuple(dim.size for dim in param.dims))
        for param in param_table(config)
        for name in param.tensor_names("model.")
    }
    rng = np.random.default_rng(0)
    with Writer(folder / "model.safetensors", {name: (bfloat16, size) for name, (_, size) in sizes.items()}) as writer:
        for name, (init, size) in sizes.items():
            drawn = rng.standard_normal(size, np.float32) * (0.02 if init == "normal" else 0.0)
            writer.write(name, drawn.astype(bfloat16))
    return config
