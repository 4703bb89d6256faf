"""LoRA on the einsum weights of Gemma in flax, as Tunix and google-deepmind/gemma keep it.

Both factor a weight the same way (qwix `providers/lora.py`, gemma `peft/_einsum_utils.py`): A has the contracted axes
and then the rank, B the rank and then the other axes, each in the weight's own order. A weight that stands for several
linear layers has an axis for them, the first of B behind the rank; the layers share A. Where a dot_general multiplies
the weight, qwix stores both as matrices, with the axes flattened in the same order.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from portlab_merge.adapter import Adapter, LoraSettings, ModuleUpdate, check_trained, check_values, leaf_digest
from portlab_merge.orbax_store import KeyPath
from portlab_spec.models.targets import scaling


@dataclass(frozen=True)
class Weight:
    """A weight in flax, and the linear layers of Hugging Face that it is.

    Attributes:
        modules: their names, within the layer or within the model; if several, in the order of B's axis for them.
        a: axes of A.
        b: axes of B.
        root: the model divides the weight by the square root of its input size, but not the factors. Hugging Face
            divides what the layer returns, so the update of its weight is larger by that root.
    """

    modules: tuple[str, ...]
    a: str
    b: str
    root: bool = False


# D width of the model, N heads, K heads of keys and values, H width of a head, F of the MLP, P of per-layer inputs,
# L layers, r rank.
IN_LAYERS = {
    "attn.q_einsum": Weight(("self_attn.q_proj",), "D r", "r N H"),
    "attn.k_einsum": Weight(("self_attn.k_proj",), "D r", "r K H"),  # the values are the keys: there is no v_proj
    "attn.kv_einsum": Weight(("self_attn.k_proj", "self_attn.v_proj"), "D r", "r 2 K H"),
    "attn.qkv_einsum": Weight(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "D r", "r 3 N H"),
    "attn.attn_vec_einsum": Weight(("self_attn.o_proj",), "N H r", "r D"),
    "mlp.gate_proj": Weight(("mlp.gate_proj",), "D r", "r F"),
    "mlp.up_proj": Weight(("mlp.up_proj",), "D r", "r F"),
    "mlp.down_proj": Weight(("mlp.down_proj",), "F r", "r D"),
    "mlp.gating_einsum": Weight(("mlp.gate_proj", "mlp.up_proj"), "D r", "r 2 F"),
    "mlp.linear": Weight(("mlp.down_proj",), "F r", "r D"),
    "per_layer_input_gate": Weight(("per_layer_input_gate",), "D r", "r P"),
    "per_layer_projection": Weight(("per_layer_projection",), "P r", "r D"),
}
OUTSIDE = {
    "embedder.per_layer_model_projection": Weight(("per_layer_model_projection",), "D r", "r L P", root=True),
}


@dataclass(frozen=True)
class Factor:
    """One side of one weight, as stored.

    Attributes:
        layer: number of the layer; None outside of the layers.
        weight: path of its module within the layer, or within the model ("attn.q_einsum").
        side: A or B.
        leaf: where it is stored, for people.
        array: its values.
    """

    layer: int | None
    weight: str
    side: Literal["a", "b"]
    leaf: str
    array: np.ndarray


# The factors that a leaf holds: one, one for each layer, or none that Hugging Face's model has a place for.
Locate = Callable[[KeyPath, np.ndarray], Sequence[Factor]]


def has_place(layer: int | None, weight: str) -> bool:
    """Is a flax module one or more linear layers of Hugging Face's model?"""
    return weight in (OUTSIDE if layer is None else IN_LAYERS)


def read_adapter(
    origin: str,
    leaves: Mapping[KeyPath, np.ndarray],
    faults: Mapping[KeyPath, str],
    locate: Locate,
    alpha: float | None,
    record: Mapping[str, Any],
) -> Adapter:
    """The adapter that a tree holds.

    Args:
        origin: name of the format.
        leaves: the tree's LoRA leaves, as stored.
        faults: those that cannot be read, and why.
        locate: what a leaf is.
        alpha: of all modules; None where the format has none and the product counts as it is.
        record: metadata of the step.
    """
    stored = {".".join(path): array for path, array in leaves.items()}
    problems = [f"leaf {'.'.join(path)} cannot be read ({reason})" for path, reason in sorted(faults.items())]
    problems += check_values(stored)
    pairs = _pair(leaves, locate, problems)
    updates = [u for sides in pairs for u in _updates(sides, alpha, problems, partner_lost=bool(faults))]
    problems += check_trained((b.weight, b.array) for sides in pairs if (b := sides.get("b")))
    return Adapter(
        origin=origin,
        lora=_settings(updates, alpha),
        updates=tuple(updates),
        leaf_sha256={name: leaf_digest(array) for name, array in stored.items()},
        problems=tuple(problems),
        record=record,
    )


def _pair(leaves: Mapping[KeyPath, np.ndarray], locate: Locate, problems: list[str]) -> list[dict[str, Factor]]:
    """The two sides of each weight, layer by layer."""
    pairs: dict[tuple[int, str], dict[str, Factor]] = {}
    for path, array in leaves.items():
        factors = locate(path, array)
        if not factors and _acts(path, leaves):
            problems.append(f"leaf {'.'.join(path)} adapts no linear layer of Hugging Face's text model")
        for factor in factors:
            sides = pairs.setdefault((-1 if factor.layer is None else factor.layer, factor.weight), {})
            if factor.side in sides:
                problems.append(f"leaf {factor.leaf} is the same as {sides[factor.side].leaf}")
            sides[factor.side] = factor
    return [pairs[key] for key in sorted(pairs)]


def _acts(path: KeyPath, leaves: Mapping[KeyPath, np.ndarray]) -> bool:
    """Does the pair of a leaf add anything? Around an encoder that saw no input B is still zero."""
    b = leaves.get((*path[:-1], path[-1][:-1] + "b"))  # the last key of A differs in its last letter
    return b is None or bool(b.any())


def _updates(
    sides: Mapping[str, Factor], alpha: float | None, problems: list[str], *, partner_lost: bool
) -> Iterator[ModuleUpdate]:
    """The updates of the linear layers that a weight is."""
    if len(sides) < 2:
        if not partner_lost:  # else it may be the one that cannot be read
            (only,) = sides.values()
            problems.append(f"leaf {only.leaf} has no other factor beside it")
        return
    a, b = sides["a"], sides["b"]
    weight = (OUTSIDE if a.layer is None else IN_LAYERS)[a.weight]
    if not _fits(weight, a.array.shape, b.array.shape):
        expected = f"expected A ({weight.a.replace(' ', ', ')}) and B ({weight.b.replace(' ', ', ')})"
        problems.append(f"leaf {a.leaf} is {a.array.shape} and {b.leaf} is {b.array.shape}, {expected}")
        return
    rank = b.array.shape[0]
    a_ir = a.array.reshape(-1, rank).astype(np.float32)
    b_rmo = b.array.reshape(rank, len(weight.modules), -1).astype(np.float32)
    if weight.root:
        b_rmo *= np.float32(math.sqrt(len(a_ir)))
    factor = 1.0 if alpha is None else scaling(alpha, rank, use_rslora=False)
    for i, module in enumerate(weight.modules):
        path = f"model.{module}" if a.layer is None else f"model.layers.{a.layer}.{module}"
        yield ModuleUpdate(path, b.leaf, a_ir, np.ascontiguousarray(b_rmo[:, i]), factor)


def _fits(weight: Weight, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    whole_a, whole_b = (len(axes.split()) for axes in (weight.a, weight.b))
    if len(a) not in (2, whole_a) or len(b) not in (2, whole_b) or a[-1] != b[0] or 0 in (*a, *b):
        return False
    count = len(weight.modules)
    return count == 1 or (b[1] == count if len(b) == whole_b else b[1] % count == 0)


def _settings(updates: Sequence[ModuleUpdate], alpha: float | None) -> LoraSettings:
    """The commonest rank, and the modules that have another."""
    if not updates:
        return LoraSettings(0, 0.0)
    rank = Counter(update.rank for update in updates).most_common(1)[0][0]
    others = {u.module.removeprefix("model."): u.rank for u in updates if u.rank != rank}
    if alpha is not None:
        return LoraSettings(rank, alpha, rank_pattern=others)
    return LoraSettings(rank, float(rank), rank_pattern=others, alpha_pattern={m: float(r) for m, r in others.items()})
