"""What a PEFT LoRA folder looks like on disk, for reading and writing alike.

Names and layouts are those of peft 0.21.2 (tuners/lora/config.py, tuners/lora/layer.py, utils/save_and_load.py,
tuners/trainable_tokens). A key is `base_model.model.<module>.<part>`:

    lora_A.weight (r, in), lora_B.weight (out, r)   a linear layer
    lora_embedding_A (r, V), lora_embedding_B (D, r)   an embedding (V, D)
    token_adapter.trainable_tokens_delta (n, D)   rows of an embedding: full values, in spite of the name;
        PEFT before 0.18 forgets to scale them as Gemma's embedding does

Experts are `target_parameters` (ParamWrapper): one pair of matrices for all of a layer, lora_A (E * r, in) with the
ranks of an expert side by side, lora_B (out, r * E) with the experts of a rank side by side. Of two parameters of one
module, PEFT wraps the first, in the order of the module, and then the wrapper: the first is `<module>.base_layer`.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
EXPERTS = ("gate_up_proj", "down_proj")  # parameters of a module of experts, in its order
# Names inside multimodal models: of transformers >= 4.52, and of releases before it.
KeyStyle = Literal["new", "old"]
_WRAPPED: dict[KeyStyle, str] = {"new": "model.language_model.", "old": "language_model.model."}

# Some trainers leave out the prefix or keep the adapter's name ("default") that PEFT takes off when it saves.
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\."
    r"(?:(?P<part>lora_[AB])(?:\.\w+)?\.weight"
    r"|(?P<embedding>lora_embedding_[AB])(?:\.\w+)?"
    r"|token_adapter\.(?P<rows>trainable_tokens_delta)(?:\.\w+)?)"
)
# PEFT adds the base's own matrix when an embedding is adapted (save_embedding_layers="auto").
_BASE_COPY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+\.)?(embed_tokens|lm_head)\.base_layer\.weight")

Part = Literal["lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "trainable_tokens_delta", "base copy"]


class Key(NamedTuple):
    """The module that a tensor belongs to, and what it is of it."""

    module: str
    part: Part


def parse_key(key: str) -> Key | None:
    """Take a tensor's name apart; None for one that means something else."""
    if _BASE_COPY.fullmatch(key):
        return Key(key.removeprefix(PREFIX).removesuffix(".base_layer.weight"), "base copy")
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    part: Part = match["part"] or match["embedding"] or match["rows"]  # type: ignore[assignment]
    return Key(match["module"], part)


def lora_keys(module: str) -> tuple[str, str]:
    """Names of lora_A and lora_B of a linear layer."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def embedding_keys(module: str) -> tuple[str, str]:
    """Names of lora_embedding_A (r, V) and lora_embedding_B (D, r)."""
    return f"{PREFIX}{module}.lora_embedding_A", f"{PREFIX}{module}.lora_embedding_B"


def rows_key(embedding: str) -> str:
    """Name of the trained rows of an embedding."""
    return f"{PREFIX}{embedding}.token_adapter.trainable_tokens_delta"


def module_path(tensor: str, style: KeyStyle = "new") -> str:
    """Path of the module in transformers that holds a tensor of the base.

    Multimodal Gemma 3 is published as `language_model.model.*` and loaded as `model.language_model.*` since
    transformers 4.52 (conversion_mapping.py); the other names are module paths already.
    """
    module = tensor.removesuffix(".weight")
    for prefix in _WRAPPED.values():
        if module.startswith(prefix):
            return _WRAPPED[style] + module.removeprefix(prefix)
    return module


def key_style_of(keys: Iterable[str]) -> KeyStyle:
    """The style that the names of an adapter's tensors are written in; "new" where both are the same."""
    return "old" if any(key.startswith(PREFIX + _WRAPPED["old"]) for key in keys) else "new"


def pack_experts(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """lora_A (E * r, in) and lora_B (out, r * E) of the factors (E, in, r) and (E, r, out)."""
    a_side_by_side = a.swapaxes(0, 1).reshape(a.shape[1], -1)
    b_side_by_side = b.swapaxes(0, 1).reshape(-1, b.shape[2])
    return a_side_by_side.T, b_side_by_side.T


def unpack_experts(lora_a: np.ndarray, lora_b: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors (E, in, r) and (E, r, out) of lora_A (E * r, in) and lora_B (out, r * E)."""
    a = lora_a.T.reshape(lora_a.shape[1], -1, rank).swapaxes(0, 1)
    b = lora_b.T.reshape(rank, -1, lora_b.shape[0]).swapaxes(0, 1)
    return a, b
