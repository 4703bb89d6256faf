"""The layers of a model by kind, and how layers of one kind are stacked.

Sliding and full layers of Gemma differ in their window and RoPE, in Gemma 4 in their shapes too. A kind holds all that
decides a layer's shapes and computation. Layers of one kind are stacked on a leading axis and run as a loop, so that
compile time does not grow with depth; a model is a short list of sections, each repeating a pattern of stacks:

    Gemma 3 1B   4 x (5 sliding, 1 full), then 1 x (2 sliding)
    Gemma 4 E2B  3 x (4 sliding, 1 full), then 4 x (4 sliding_shared, 1 full_shared)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one kind of layer.

    Attributes:
        theta: base of the wavelengths.
        factor: positions are divided by it (linear scaling).
        fraction: share of the head's pairs that rotate; the others stand still (Gemma 4's proportional RoPE).
        scaling: name of another scaling ("llama3", "yarn"), which these numbers do not describe; transformers knows it.
    """

    theta: float
    factor: float = 1.0
    fraction: float = 1.0
    scaling: str | None = None


@dataclass(frozen=True)
class LayerKind:
    """What decides the shapes and the computation of a layer.

    Attributes:
        attention: "sliding" or "full".
        head_dim: size of a head.
        kv_heads: key/value heads.
        mlp: width of the dense MLP.
        window: tokens that a token of a sliding layer sees, itself included; None for a full layer.
        rope: rotary embedding.
        key_is_value: no v_proj: the projected keys, normed without a scale, are the values.
        shares_kv: no keys and values of its own: it takes those of the last layer of its attention that has them.
    """

    attention: Literal["sliding", "full"]
    head_dim: int
    kv_heads: int
    mlp: int
    window: int | None
    rope: Rope
    key_is_value: bool = False
    shares_kv: bool = False

    @property
    def name(self) -> str:
        """Name of the kind's stack."""
        return f"{self.attention}_shared" if self.shares_kv else self.attention


@dataclass(frozen=True)
class Stack:
    """Layers of one kind whose parameters are stacked on axis 0, in the order of `layers`.

    A section runs `repeats` times over its stacks, `count` layers of each at a time.
    """

    name: str
    kind: LayerKind
    layers: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Section:
    """A pattern of stacks that repeats."""

    stacks: tuple[Stack, ...]
    repeats: int


def find_sections(layers: Sequence[LayerKind]) -> tuple[Section, ...]:
    """Sections of a model, first to last; greedy, the longest stretch that repeats first.

    A kind that returns in a later section gets a stack of its own ("sliding_2"), so that no stack is cut.
    """
    runs = [(kind, len(list(group))) for kind, group in groupby(layers)]
    sections: list[Section] = []
    used: Counter[str] = Counter()
    at = first_layer = 0
    while at < len(runs):
        pattern, repeats = _best_pattern(runs[at:])
        period = sum(count for _, count in pattern)
        stacks = []
        offset = first_layer
        for kind, count in pattern:
            used[kind.name] += 1
            name = kind.name if used[kind.name] == 1 else f"{kind.name}_{used[kind.name]}"
            numbers = tuple(offset + r * period + c for r in range(repeats) for c in range(count))
            stacks.append(Stack(name, kind, numbers, count))
            offset += count
        sections.append(Section(tuple(stacks), repeats))
        at += len(pattern) * repeats
        first_layer += period * repeats
    return tuple(sections)


Run = tuple[LayerKind, int]


def _best_pattern(runs: list[Run]) -> tuple[list[Run], int]:
    """The pattern at the start of `runs` whose repetitions cover the most runs, and how often it repeats."""
    best, covered = (runs[:1], 1), 1
    for length in range(2, min(4, len(runs) // 2) + 1):
        repeats = 1
        while runs[repeats * length : (repeats + 1) * length] == runs[:length]:
            repeats += 1
        if repeats > 1 and repeats * length > covered:
            best, covered = (runs[:length], repeats), repeats * length
    return best
