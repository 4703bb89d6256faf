"""Checkpoints of Tunix (google-tunix 0.1.7, `sft/checkpoint_manager.py`): Gemma 3 and 4 in flax nnx, LoRA of qwix.

A step's item `model_params` is the state of the LoRA parameters or of the whole model. Layers are a list:
`layers.0.attn.q_einsum.w_lora_a`. No metadata says what alpha was.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from portlab_merge.adapter import Adapter
from portlab_merge.orbax_store import KeyPath
from portlab_merge.sources import Given, Tree
from portlab_merge.sources.einsum import Factor, has_place, read_adapter
from portlab_spec.errors import UserError

_LEAF = re.compile(r"(w|kernel)_lora_([ab])")
ROOTS = ("layers", "embedder", "vision_encoder")  # of Tunix's Gemma models


class TunixSource:
    """`{"layers": {"0": {"attn": {"q_einsum": {"w_lora_a": (D, r), "w_lora_b": (r, N, H)}, ...}}}}`."""

    name = "tunix"

    def recognises(self, paths: Sequence[KeyPath], metadata: Mapping[str, Any]) -> bool:
        return any(path[0] in ROOTS and self.wants(path) for path in paths)

    def wants(self, path: KeyPath) -> bool:
        return path[-1].endswith(("_lora_a", "_lora_b"))

    def read(self, tree: Tree, given: Given) -> Adapter:
        leaves, faults, metadata = tree
        if given.use_rslora:
            fix = "Leave out --rslora"
            raise UserError("Tunix scales by alpha / rank, never by alpha / sqrt(rank)", where=given.where, fix=fix)
        if given.alpha is None:
            raise UserError(
                "a checkpoint of Tunix does not say what alpha was",
                where=given.where,
                fix="Pass --alpha, the value given to qwix.LoraProvider",
            )
        return read_adapter(self.name, leaves, faults, _locate, given.alpha, metadata)


def _locate(path: KeyPath, array: np.ndarray) -> Sequence[Factor]:
    match = _LEAF.fullmatch(path[-1])
    layer, module = (int(path[1]), path[2:-1]) if path[0] == "layers" and path[1].isdecimal() else (None, path[:-1])
    weight = ".".join(module)
    if match is None or not has_place(layer, weight):
        return ()
    return (Factor(layer, weight, "a" if match[2] == "a" else "b", ".".join(path), array),)
