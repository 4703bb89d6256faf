"""Kinds of checkpoints that can be read: whose tree it is, which leaves are the adapter, and what they update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from portlab_merge.adapter import Adapter
from portlab_merge.orbax_store import KeyPath


@dataclass(frozen=True)
class Given:
    """What the user says because a checkpoint may not: alpha is in no array.

    Attributes:
        alpha: LoRA's alpha, if typed.
        use_rslora: scale by alpha / sqrt(rank) rather than alpha / rank.
        tied_embeddings: the base's output matrix is its embedding.
        where: the checkpoint, for messages.
    """

    alpha: float | None = None
    use_rslora: bool = False
    tied_embeddings: bool = True
    where: str = ""


class Tree(NamedTuple):
    """The adapter in a step, as stored.

    Attributes:
        leaves: arrays of the wanted leaves.
        faults: wanted leaves that cannot be read, and why.
        metadata: `custom_metadata` of the step.
    """

    leaves: Mapping[KeyPath, np.ndarray]
    faults: Mapping[KeyPath, str]
    metadata: Mapping[str, Any]


class Source(Protocol):
    """A kind of checkpoint."""

    name: str

    def recognises(self, paths: Sequence[KeyPath], metadata: Mapping[str, Any]) -> bool:
        """Is a tree of these leaves, with this `custom_metadata` of its step, of this kind?"""
        ...

    def wants(self, path: KeyPath) -> bool:
        """Is this leaf the adapter's? Only those are read."""
        ...

    def read(self, tree: Tree, given: Given) -> Adapter:
        """The adapter in normal form; each leaf is used exactly once or named in its problems.

        Raises:
            UserError: metadata that is broken, or something the user has to say.
        """
        ...
