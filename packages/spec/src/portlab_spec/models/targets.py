"""Which linear layers LoRA adapts, and with which rank: PEFT's rules over the parameter table.

A target is a module's last name (`q_proj`), the end of its path (`self_attn.q_proj`), or a regular expression that
matches its whole path (`.*layers\\.(0|1)\\..*q_proj`). Keys of rank and alpha patterns are expressions for the end of
a path. Experts are bare parameters, not modules: a target has to name them (`experts.down_proj`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import AfterValidator

from portlab_spec.errors import UserError
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.table import PREFIXES, Dim, Param, param_table


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error})") from None
    return pattern


# A regular expression in a pydantic model.
ModulePattern = Annotated[str, AfterValidator(_check_pattern)]

_PLAIN = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


class LoraSettings(Protocol):
    """The part of a recipe's adapter section that decides what is adapted."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def use_rslora(self) -> bool: ...
    @property
    def targets(self) -> tuple[str, ...]: ...
    @property
    def rank_pattern(self) -> Mapping[str, int]: ...
    @property
    def alpha_pattern(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class AdapterLeaf:
    """One pair of stacked LoRA matrices: a (m, in, r) and b (m, r, out), for m layers of one stack.

    Experts have an axis of their own behind m.

    Attributes:
        key: unique name: the parameter's key, with the rank if several ranks occur in it.
        param: what is adapted.
        index: positions within the stack, ascending.
        rank: inner dimension.
        scaling: factor on the product.
    """

    key: str
    param: Param
    index: tuple[int, ...]
    rank: int
    scaling: float

    @property
    def out(self) -> Dim:
        """Output dimension of the adapted matrix."""
        return self.param.dims[-2]

    @property
    def into(self) -> Dim:
        """Input dimension."""
        return self.param.dims[-1]

    @property
    def experts(self) -> tuple[Dim, ...]:
        """The experts' dimension, if there is one."""
        return self.param.dims[:-2]

    @property
    def whole(self) -> bool:
        """Are all layers of the stack adapted?"""
        return len(self.index) == self.param.count

    def modules(self, prefix: str) -> list[str]:
        """Dotted module paths in transformers, in stacking order."""
        paths = self.param.modules(prefix)
        return [paths[i] for i in self.index]


def plan_adapter(config: GemmaConfig, lora: LoraSettings) -> tuple[AdapterLeaf, ...]:
    """What a recipe's LoRA section adapts in a model, in table order.

    Raises:
        UserError: a target or a pattern matches nothing that can be adapted; the message lists what exists.
    """
    linears = [p for p in param_table(config) if p.target]
    matched = {p.key: set[int]() for p in linears}
    for target in lora.targets:
        _check_regex(target)
        hits = [(p, i) for p in linears for i, path in enumerate(_paths(p)) if _matches(target, path, p)]
        if not hits:
            raise _no_match(target, config, linears)
        for p, i in hits:
            matched[p.key].add(i)
    leaves = [leaf for p in linears if matched[p.key] for leaf in _leaves(p, sorted(matched[p.key]), lora)]
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, name):
            modules = (m for leaf in leaves for prefix in PREFIXES for m in leaf.modules(prefix))
            if not any(pattern_key({pattern: 0}, module) for module in modules):
                adapted = ", ".join(sorted({leaf.param.name for leaf in leaves}))
                raise UserError(
                    f"the pattern {pattern!r} matches no adapted layer", where=f"lora.{name}", fix=f"Adapted: {adapted}"
                )
    return tuple(leaves)


def pattern_key(pattern: Mapping[str, object], module: str) -> str | None:
    """The first key of a rank or alpha pattern that matches the end of a module's path, PEFT's rule."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", module)), None)


def scaling(alpha: float, rank: int, use_rslora: bool) -> float:
    """Factor of the low-rank product: alpha / rank, with rsLoRA alpha / sqrt(rank) (arXiv 2312.03732)."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def module_regex(modules: Sequence[str], known: Iterable[str]) -> str:
    r"""A regular expression that matches exactly these modules among those that a model has.

    PEFT matches a list of names by suffix, which takes in vision and audio towers as well; a string it matches with
    whole paths. Layers are written `\d+` if that says the same as their numbers.

    Args:
        modules: dotted paths.
        known: paths of all the model's modules.
    """
    layers_of: dict[tuple[str, str], set[int]] = defaultdict(set)
    plain = []
    for module in modules:
        if match := re.fullmatch(r"(.*\.layers)\.(\d+)\.(.+)", module):
            layers_of[match[1], match[3]].add(int(match[2]))
        else:
            plain.append(re.escape(module))
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (prefix, name), layers in layers_of.items():
        groups[prefix, tuple(sorted(layers))].append(re.escape(name))
    have = set(known)
    branches = []
    for (prefix, numbers), names in groups.items():
        tail = rf"\.({'|'.join(sorted(names))})"
        every = re.escape(prefix) + r"\.\d+" + tail
        listed = re.escape(prefix) + rf"\.({'|'.join(map(str, numbers))})" + tail
        reached = {module for module in have if re.fullmatch(every, module)}
        branches.append(every if reached <= set(modules) else listed)
    return "|".join(branches + sorted(plain))


def describe(leaves: Sequence[AdapterLeaf]) -> str:
    """What is adapted, in one line: how many layers of which modules."""
    counts: dict[str, int] = {}
    for leaf in leaves:
        counts[leaf.param.name] = counts.get(leaf.param.name, 0) + len(leaf.index)
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _leaves(param: Param, index: list[int], lora: LoraSettings) -> list[AdapterLeaf]:
    """One leaf for each rank and scaling among the matched layers."""
    paths = param.modules("model.")
    groups: dict[tuple[int, float], list[int]] = {}
    for i in index:
        rank = pattern_value(lora.rank_pattern, paths[i], lora.rank)
        alpha = pattern_value(lora.alpha_pattern, paths[i], lora.alpha)
        groups.setdefault((rank, scaling(alpha, rank, lora.use_rslora)), []).append(i)
    return [
        AdapterLeaf(param.key if len(groups) == 1 else f"{param.key}@{number}", param, tuple(members), rank, factor)
        for number, ((rank, factor), members) in enumerate(groups.items())
    ]


def pattern_value[T](pattern: Mapping[str, T], module: str, default: T) -> T:
    """A module's entry in a rank or alpha pattern, or the default."""
    key = pattern_key(pattern, module)
    return default if key is None else pattern[key]


def _paths(param: Param) -> list[str]:
    return [name.removesuffix(".weight") for name in param.tensor_names("")]


def _matches(target: str, path: str, param: Param) -> bool:
    if param.name.startswith("experts.") and "experts" not in target:
        return False
    if _PLAIN.fullmatch(target):
        return any(f".{prefix}{path}".endswith(f".{target}") for prefix in PREFIXES)
    return any(re.fullmatch(target, prefix + path) for prefix in PREFIXES)


def _check_regex(target: str) -> None:
    try:
        re.compile(target)
    except re.error as error:
        message = f"the LoRA target {target!r} is not a regular expression ({error})"
        raise UserError(message, where="lora.targets", fix="Mend it, or give a module's name") from None


def _no_match(target: str, config: GemmaConfig, linears: Sequence[Param]) -> UserError:
    others = [p for p in param_table(config) if not p.target and any(_matches(target, path, p) for path in _paths(p))]
    if others:
        return UserError(
            f"the LoRA target {target!r} matches only {others[0].name}, which is not a linear layer that LoRA adapts",
            where="lora.targets",
            fix=f"Known: {_known(linears)}",
        )
    return UserError(
        f"the LoRA target {target!r} matches no linear layer", where="lora.targets", fix=f"Known: {_known(linears)}"
    )


def _known(linears: Sequence[Param]) -> str:
    names = dict.fromkeys(p.name if p.name.startswith("experts.") else p.name.rpartition(".")[2] for p in linears)
    return ", ".join(names)
