"""Checkpoints of google-deepmind/gemma (PyPI gemma 4.0.1): Gemma 3 in flax linen, with the package's own LoRA.

`gm.ckpts.save_params` writes the parameters as a bare tree, `layer_0/attn/q_einsum/_LoRAEinsum_0/lora/a`; its trainer
(Kauldron) puts them under `params`, beside an optimiser state with leaves of the same names. In the layout of released
checkpoints (`gm/ckpts/_compat.py`) keys hold slashes and start with `transformer`, and layers may be stacked:
`transformer/stacked_layers/attention_type_2/...` holds layers 2, 2 + p, 2 + 2 p, ... for a pattern of p layers.
There is no alpha: the product of the factors is added as it is.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from portlab_merge.adapter import Adapter
from portlab_merge.orbax_store import KeyPath
from portlab_merge.sources import Given, Tree
from portlab_merge.sources.einsum import Factor, has_place, read_adapter
from portlab_spec.errors import UserError

ROOTS = ("params", "transformer")  # what a path may start with
_LAYER = re.compile(r"layer_(\d+)")
_PATTERN = re.compile(r"attention_type_(\d+)")
# The wrapper has a scope of its own: numbered within its module, or named for one weight of several.
_WRAPPER = re.compile(r"_LoRAEinsum_(\w+)")


class GemmaSource:
    """`{"layer_0": {"attn": {"q_einsum": {"_LoRAEinsum_0": {"lora": {"a": (D, r), "b": (r, N, H)}}}}}}`."""

    name = "gemma"

    def recognises(self, paths: Sequence[KeyPath], metadata: Mapping[str, Any]) -> bool:
        return any(self.wants(path) and any(map(_WRAPPER.fullmatch, _keys(path))) for path in paths)

    def wants(self, path: KeyPath) -> bool:
        keys = _keys(path)
        return keys[0] != "opt_state" and keys[-2:] in (("lora", "a"), ("lora", "b"))

    def read(self, tree: Tree, given: Given) -> Adapter:
        leaves, faults, metadata = tree
        if given.alpha is not None or given.use_rslora:
            raise UserError(
                "LoRA of google-deepmind/gemma has no alpha: it adds the product of its factors as it is",
                where=given.where,
                fix="Leave out --alpha, --rslora",
            )
        period = 1 + max((int(match[1]) for path in (*leaves, *faults) if (match := _stack(path))), default=0)

        def locate(path: KeyPath, array: np.ndarray) -> Sequence[Factor]:
            return _locate(path, array, period)

        return read_adapter(self.name, leaves, faults, locate, None, metadata)


def _locate(path: KeyPath, array: np.ndarray, period: int) -> Sequence[Factor]:
    """The factors of a leaf: one for each layer that is stacked in it."""
    name = ".".join(path)
    *module, _, last = _keys(path)
    side: Literal["a", "b"] = "a" if last == "a" else "b"
    if first := _stack(path):
        weight = _weight(module[2:])
        layers = range(int(first[1]), int(first[1]) + period * len(array), period)
        rows = [Factor(layer, weight, side, f"{name}[{i}]", array[i]) for i, layer in enumerate(layers)]
        return rows if has_place(0, weight) else ()
    number = _LAYER.fullmatch(module[0]) if module else None
    layer = int(number[1]) if number else None
    weight = _weight(module[1:] if number else module)
    return (Factor(layer, weight, side, name, array),) if has_place(layer, weight) else ()


def _weight(module: Sequence[str]) -> str:
    """Path of the adapted weight: the wrapper's own name counts where it names the weight."""
    names = (match[1] if (match := _WRAPPER.fullmatch(key)) else key for key in module)
    return ".".join(name for name in names if not name.isdecimal())


def _stack(path: KeyPath) -> re.Match[str] | None:
    keys = _keys(path)
    return _PATTERN.fullmatch(keys[1]) if keys[0] == "stacked_layers" else None


def _keys(path: KeyPath) -> tuple[str, ...]:
    """The path key by key, slashes taken apart, without its root."""
    keys = tuple("/".join(path).split("/"))
    return keys[1:] if keys[0] in ROOTS and len(keys) > 1 else keys
