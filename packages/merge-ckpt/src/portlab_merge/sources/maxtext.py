"""LoRA checkpoints of MaxText: Gemma 3 and Gemma 4, layers scanned or not.

Paths and axes as MaxText 0.2.5 writes them (layers/nnx_decoders.py, models/gemma3.py, gemma4.py, gemma4_small.py;
qwix 0.1.8, `_src/providers/lora.py`), the meaning of names by checkpoint_conversion/utils/param_mapping.py. A leaf is
`<kernel>_lora_a` (in, r) or `<kernel>_lora_b` (r, out), heads flattened, head-major. Layers that are scanned are
stacked behind the first axis, (in, blocks, r) and (r, blocks, out): that is `param_scan_axis: 1`, the default, which no
checkpoint records. Scaling is alpha / rank. Its own checkpoints (item `items`) say what alpha was and whether layers
are scanned; those of its fine-tuning, saved by Tunix (item `model_params`), say nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel as Record
from pydantic import ConfigDict, ValidationError

from portlab_merge.adapter import Adapter, LoraSettings, ModuleUpdate, check_trained, check_values, leaf_digest
from portlab_merge.contract import Alpha, Rank
from portlab_merge.orbax_store import KeyPath
from portlab_merge.sources import Given, Tree
from portlab_spec.errors import UserError
from portlab_spec.models.targets import scaling

NAME = "maxtext"
# Five sliding layers and a global one; Gemma 4 E2B and E4B are never scanned.
PATTERN = 6
# Moments of the optimiser carry the names of the weights.
_OPTIMIZER = ("opt_state", "optimizer")
# The model in a Linen-style save; in a train state of nnx; beside a reference model, in RL.
_WRAPPERS = {"params", "model", "base"}
_SIDE = re.compile(r"(.+)_lora_([ab])")
_EXPERTS = re.compile(r"mlp/moe_block/MoeBlock_0/(wi_0|wi_1|wo)")
_MODULES = {
    "self_attention/query/kernel": "self_attn.q_proj",
    "self_attention/key/kernel": "self_attn.k_proj",
    "self_attention/value/kernel": "self_attn.v_proj",
    "self_attention/out/kernel": "self_attn.o_proj",
    "mlp/wi_0/kernel": "mlp.gate_proj",
    "mlp/wi_1/kernel": "mlp.up_proj",
    "mlp/wo/kernel": "mlp.down_proj",
    "mlp/moe_block/shared_experts/wi_0/kernel": "mlp.gate_proj",
    "mlp/moe_block/shared_experts/wi_1/kernel": "mlp.up_proj",
    "mlp/moe_block/shared_experts/wo/kernel": "mlp.down_proj",
    "mlp/moe_block/MoeBlock_0/gate/kernel": "router.proj",
    "per_layer_input_gate/kernel": "per_layer_input_gate",
    "per_layer_projection/kernel": "per_layer_projection",
}
_PER_LAYER_PROJECTION = "decoder/per_layer_embedder/per_layer_model_projection/kernel"


@dataclass(frozen=True)
class _Form:
    """Where layers sit in the tree: the layer at index (i, j, ...) of the stacked axes is first + i * strides[0] + ...

    Attributes:
        path: regular expression of the folder, whose group is added to `first`.
        strides: of each stacked axis.
        first: the first layer.
        remainder: count from behind the last whole block.
    """

    path: re.Pattern[str]
    strides: tuple[int, ...] = ()
    first: int = 0
    remainder: bool = False

    @property
    def scanned(self) -> bool:
        return bool(self.strides) or self.remainder


_FORMS = (
    _Form(re.compile(r"decoder/layers_(\d+)")),
    _Form(re.compile(r"decoder/layers/layers_([0-5])"), (PATTERN,)),
    _Form(re.compile(r"decoder/layers_remainder/layers_([0-5])"), remainder=True),
    _Form(re.compile(r"decoder/scanned_blocks/local_layers"), (PATTERN, 1)),
    _Form(re.compile(r"decoder/scanned_blocks/global_layer"), (PATTERN,), first=PATTERN - 1),
)


@dataclass(frozen=True)
class _Pair:
    """A and B of one kernel: (in, *stacked, r) and (r, *stacked, out), f32, for `module` of the layers of `form`.

    Attributes:
        name: of the kernel in the checkpoint.
        module: in transformers, within a layer; of the whole model if `form` is None.
        form: where its layers sit.
        first: layer of the first position, remainders apart.
        a: as stored.
        b: as stored.
    """

    name: str
    module: str
    form: _Form | None
    first: int
    a: np.ndarray
    b: np.ndarray

    @property
    def strides(self) -> tuple[int, ...]:
        return self.form.strides if self.form else ()

    @property
    def blocks(self) -> int | None:
        """Number of whole blocks, if they are stacked here."""
        return self.a.shape[1] if PATTERN in self.strides else None


class _Lora(Record):
    """The keys of `custom_metadata["lora"]`, MaxText's LoRA config, that a merge needs."""

    model_config = ConfigDict(extra="ignore")

    lora_rank: Rank
    lora_alpha: Alpha


class MaxTextSource:
    """`decoder/.../<module>/kernel_lora_{a,b}`, alone, with its optimiser, or among the weights of the base."""

    name = NAME

    def recognises(self, paths: Sequence[KeyPath], metadata: Mapping[str, Any]) -> bool:
        return any(self.wants(path) and _kernel(path).startswith("decoder/") for path in paths)

    def wants(self, path: KeyPath) -> bool:
        return path[0] not in _OPTIMIZER and "_lora_" in path[-1]

    def read(self, tree: Tree, given: Given) -> Adapter:
        leaves, faults, metadata = tree
        arrays = {_name(path): array for path, array in leaves.items()}
        problems = [f"leaf {_name(path)} cannot be read ({reason})" for path, reason in sorted(faults.items())]
        problems += check_values(arrays)
        pairs = list(_pairs(leaves, faults, problems))
        settings = _settings(pairs, metadata, given)
        blocks = _blocks(pairs, problems)
        problems += _contradictions(pairs, settings, metadata)
        updates = [update for pair in pairs for update in _updates(pair, settings, blocks, problems)]
        problems += check_trained((pair.module, pair.b) for pair in pairs)
        return Adapter(
            origin=NAME,
            lora=settings,
            updates=tuple(updates),
            leaf_sha256={name: leaf_digest(array) for name, array in arrays.items()},
            problems=tuple(problems),
            record=metadata,
        )


def _name(path: KeyPath) -> str:
    return ".".join(path)


def _kernel(path: KeyPath) -> str:
    """The path in the model of what a leaf adapts, without its side."""
    wrappers = next((i for i, key in enumerate(path) if key not in _WRAPPERS), 0)
    match = _SIDE.fullmatch(path[-1])
    return "/".join((*path[wrappers:-1], match[1] if match else path[-1]))


def _pairs(leaves: Mapping[KeyPath, np.ndarray], faults: Mapping[KeyPath, str], problems: list[str]) -> Iterator[_Pair]:
    """A and B that belong together and whose place is known; each leaf that is in none is a problem."""
    sides: dict[KeyPath, dict[str, KeyPath]] = {}
    for path in sorted(leaves):
        if match := _SIDE.fullmatch(path[-1]):
            sides.setdefault((*path[:-1], match[1]), {})[match[2]] = path
        else:
            problems.append(f"leaf {_name(path)} is neither lora_a nor lora_b")
    for kernel, found in sides.items():
        if len(found) == 2:
            if pair := _place(_name(kernel), found, leaves, problems):
                yield pair
            continue
        side, path = next(iter(found.items()))
        other = "b" if side == "a" else "a"
        if (*path[:-1], f"{kernel[-1]}_lora_{other}") not in faults:  # reported already
            problems.append(f"leaf {_name(path)} lacks its lora_{other}")


def _place(
    name: str, found: Mapping[str, KeyPath], leaves: Mapping[KeyPath, np.ndarray], problems: list[str]
) -> _Pair | None:
    kernel, a, b = _kernel(found["a"]), leaves[found["a"]], leaves[found["b"]]
    form, first, module = _locate(kernel)
    if not module:
        reason = "are of no module that can be merged"
        if _EXPERTS.search(kernel):
            reason = "adapt routed experts, whose gate and up are one tensor in Hugging Face: they cannot be merged"
        problems.append(f"leaves {name}_lora_a and _lora_b {reason}")
        return None
    stacked = len(form.strides) if form else 0
    if a.ndim != 2 + stacked or b.ndim != a.ndim or a.shape[1:-1] != b.shape[1:-1] or a.shape[-1] != b.shape[0]:
        axes = "".join((", blocks", ", layers")[:stacked])
        problems.append(
            f"leaves {name}_lora_a {a.shape} and _lora_b {b.shape} do not fit together: "
            f"expected (in{axes}, r) and (r{axes}, out), stacked from axis 1 on (MaxText's param_scan_axis: 1)"
        )
        return None
    return _Pair(name, module, form, first, a.astype(np.float32), b.astype(np.float32))


def _locate(kernel: str) -> tuple[_Form | None, int, str]:
    """Form, first layer and module in transformers of a kernel; no module if it is unknown."""
    if kernel == _PER_LAYER_PROJECTION:
        return None, 0, "per_layer_model_projection"
    for form in _FORMS:
        if match := re.match(rf"{form.path.pattern}/", kernel):
            first = form.first + int(match[1] if match.groups() else 0)
            return form, first, _MODULES.get(kernel[match.end() :], "")
    return None, 0, ""


def _settings(pairs: Sequence[_Pair], metadata: Mapping[str, Any], given: Given) -> LoraSettings:
    """Rank and alpha: what MaxText recorded, else what the user says.

    Raises:
        UserError: broken metadata, alpha neither recorded nor given, or given otherwise than recorded.
    """
    if given.use_rslora:
        raise UserError("MaxText scales by alpha / rank, never rank-stabilised", where=given.where, fix="Drop --rslora")
    recorded = metadata.get("lora")
    if recorded is None:
        if given.alpha is None:
            fix = "Pass --alpha, the lora.lora_alpha of the training run"
            raise UserError("the checkpoint does not say LoRA's alpha", where=given.where, fix=fix)
        return LoraSettings(rank=pairs[0].a.shape[-1] if pairs else 1, alpha=given.alpha)
    try:
        lora = _Lora.model_validate(recorded)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"MaxText's LoRA metadata is broken: {faults}", where=given.where, fix="Save again") from None
    if given.alpha not in (None, lora.lora_alpha):
        what = f"alpha is {lora.lora_alpha:g} in the checkpoint, not {given.alpha:g}"
        raise UserError(what, where=given.where, fix="Leave out --alpha")
    return LoraSettings(rank=lora.lora_rank, alpha=lora.lora_alpha)


def _blocks(pairs: Sequence[_Pair], problems: list[str]) -> int | None:
    """Number of whole blocks of layers, if scanned leaves tell it."""
    numbers: dict[int, str] = {}
    for pair in pairs:
        if pair.blocks is not None:
            numbers.setdefault(pair.blocks, pair.name)
    if len(numbers) > 1:
        listed = ", ".join(f"{number} in {name}" for number, name in numbers.items())
        problems.append(f"scanned leaves disagree on the number of blocks: {listed}")
    return max(numbers, default=None)


def _contradictions(pairs: Sequence[_Pair], lora: LoraSettings, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Where leaves and metadata, or leaves among themselves, say different things."""
    for pair in pairs:
        if pair.a.shape[-1] != lora.rank:
            source = "the metadata says" if "lora" in metadata else "others have"
            yield f"leaf {pair.name}_lora_a has rank {pair.a.shape[-1]}, {source} {lora.rank}"
        if pair.strides == (PATTERN, 1) and pair.a.shape[2] != PATTERN - 1:
            yield f"leaf {pair.name}_lora_a stacks {pair.a.shape[2]} sliding layers a block, expected {PATTERN - 1}"
    forms = [pair.form for pair in pairs if pair.form]
    scan_layers = metadata.get("scan_layers")
    if scan_layers is not None and any(form.scanned != bool(scan_layers) for form in forms):
        yield f"the metadata says scan_layers={bool(scan_layers)} and the leaves are stored otherwise"


def _updates(pair: _Pair, lora: LoraSettings, blocks: int | None, problems: list[str]) -> Iterator[ModuleUpdate]:
    """The updates of a pair, one for each layer."""
    factor = scaling(lora.alpha, pair.a.shape[-1], use_rslora=False)
    if pair.form is None:
        yield ModuleUpdate(f"model.{pair.module}", pair.name, pair.a, pair.b, factor)
        return
    first = pair.first
    if pair.form.remainder:
        if blocks is None:
            problems.append(f"leaves of {pair.name} come after whole blocks, of which the checkpoint holds no leaf")
            return
        first += PATTERN * blocks
    for index in np.ndindex(pair.a.shape[1:-1]):
        layer = first + sum(i * stride for i, stride in zip(index, pair.strides, strict=True))
        leaf = pair.name + (f"[:, {', '.join(map(str, index))}]" if index else "")
        at = (slice(None), *index)
        yield ModuleUpdate(f"model.layers.{layer}.{pair.module}", leaf, pair.a[at], pair.b[at], factor)
