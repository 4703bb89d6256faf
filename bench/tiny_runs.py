"""Tiny random Gemma models that a server accepts, and runs of train-jax's own format on any model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedTokenizerFast,
)

from portlab_jax.checkpoint import Checkpoints
from portlab_jax.step import TrainState
from portlab_spec.assets import ModelFolder
from portlab_spec.models import GemmaConfig, find_prefix, plan_adapter
from portlab_spec.recipe import Lora, Recipe
from portlab_spec.report import versions
from portlab_spec.run.metadata import run_metadata
from portlab_spec.run.train_log import TrainLog
from portlab_spec.safetensors_file import model_files
from portlab_spec.safetensors_header import read_header

VOCAB = 256
SLIDING, FULL = "sliding_attention", "full_attention"
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # vLLM's attention on a CPU has no smaller one but 32
    "sliding_window": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA4: dict[str, Any] = {
    "global_head_dim": 128,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
    "num_hidden_layers": 5,
    "hidden_size_per_layer_input": 0,
}
SHARED_KV = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
MODELS: dict[str, Any] = {
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**COMMON, num_hidden_layers=4, layer_types=[SLIDING] * 3 + [FULL], query_pre_attn_scalar=64)
    ),
    "gemma4": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**COMMON | GEMMA4)),
    "gemma4, keys are values": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(**COMMON | GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1)
    ),
    "gemma4, shared keys and values": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**COMMON | GEMMA4 | SHARED_KV)),
    "gemma4, experts": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**COMMON | GEMMA4 | EXPERTS)),
}


def write_model(name: str, folder: Path) -> Path:
    """A random float32 model of MODELS with a tokenizer of one token a word."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.5, 0.3)  # norms that are all alike would hide an exchange
            else:  # small embeddings, or every token would predict itself
                parameter.normal_(0, 0.04 if "embed_tokens" in path else 0.2)
    model.save_pretrained(folder)
    _add_shared_layers(model.config, folder / "model.safetensors")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(len(special), VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def _add_shared_layers(config: Any, file: Path) -> None:
    """Keys and values of layers that use others': the published files hold them, transformers does not save them."""
    tensors = load_file(file)
    shared = getattr(config, "num_kv_shared_layers", 0)
    for layer in range(config.num_hidden_layers - shared, config.num_hidden_layers):
        head = GEMMA4["global_head_dim"] if config.layer_types[layer] == FULL else COMMON["head_dim"]
        for name, shape in {
            "k_proj": (COMMON["num_key_value_heads"] * head, COMMON["hidden_size"]),
            "v_proj": (COMMON["num_key_value_heads"] * head, COMMON["hidden_size"]),
            "k_norm": (head,),
        }.items():
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.randn(shape)
    save_file(tensors, file, {"format": "pt"})


def write_run(base: Path, folder: Path, *, targets: Sequence[str] = (), strength: float = 1.0) -> Path:
    """A run with one step on a base: random adapters on every linear layer, or on those named, no token rows.

    Args:
        base: model folder.
        folder: to make.
        targets: as in a recipe.
        strength: elements of an update are about this divided by sqrt(in).
    """
    config = GemmaConfig.load(base)
    targets = targets or Lora().targets
    if config.experts and not any("experts" in name for name in targets):
        targets = (*targets, "experts.gate_up_proj", "experts.down_proj")
    recipe = Recipe(model=str(base), lora=Lora(rank=8, alpha=16, targets=tuple(targets)))
    random, lora = np.random.default_rng(1), {}
    leaves = plan_adapter(config, recipe.lora)
    for leaf in leaves:
        lead, into, out = (len(leaf.index), *(d.size for d in leaf.experts)), leaf.into.size, leaf.out.size
        sizes = {"a": (*lead, into, leaf.rank), "b": (*lead, leaf.rank, out)}
        scale = {"a": into**-0.5, "b": strength * leaf.rank**-0.5 / leaf.scaling}
        lora[leaf.key] = {side: jnp.array(random.normal(0, scale[side], sizes[side]), jnp.float32) for side in "ab"}
    names = [tensor.name for file in model_files(base) for tensor in read_header(file).tensors]
    prefix = find_prefix(names, str(base))
    metadata = run_metadata(
        recipe,
        ModelFolder(base, str(base), None),
        config.family,
        [(leaf.key, leaf.modules(prefix)) for leaf in leaves],
        versions=versions("jax", "orbax-checkpoint"),
    )
    state = TrainState({"lora": lora}, (), jnp.int32(1), jax.random.key_data(jax.random.key(0)))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(state, TrainLog([0.0], 0.0), metadata)
    return folder
