"""A difference with what is needed to explain it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from portlab_parity.compare import TOLERANCES, Difference, rms, roundings, rows
from portlab_parity.layers import Layers
from portlab_spec.evidence import Evidence, probe_columns
from portlab_spec.models import GemmaConfig

CLOSER = 0.1  # an explanation leaves at most this part of the difference


@dataclass(frozen=True)
class Case:
    """A difference between two backends, seen as a mistake of one of them.

    Attributes:
        good: of the backend that is taken to be right.
        bad: of the other.
        difference: the first between them.
        dtype: whose rounding counts.
        memo: what several causes ask for.
    """

    good: Evidence
    bad: Evidence
    difference: Difference
    dtype: str
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def tensor(self) -> str:
        """Name of what differs."""
        return self.difference.tensor

    @cached_property
    def config(self) -> GemmaConfig:
        """Of the base."""
        return GemmaConfig.load(self.good.about.model)

    @cached_property
    def layers(self) -> Layers:
        """To recompute what the base computes."""
        return Layers(self.good.about.model, self.good.named("adapter.0."), self.good.about.recipe.lora)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(ids) for ids, _ in rows(self.good)]

    @cached_property
    def longest(self) -> int:
        """The row whose inner values are kept."""
        return int(np.argmax(self.lengths))

    def states(self, name: str, row: int, evidence: Evidence | None = None) -> np.ndarray:
        """The probed tokens of a row in a tensor of hidden states."""
        counts = [len(probe_columns(n)) for n in self.lengths]
        start = sum(counts[:row])
        return (evidence or self.good).tensors[name][start : start + counts[row]]

    def layer_input(self, number: int) -> np.ndarray:
        """What a layer is given of the longest row, where both agree."""
        name = "hidden.embedding" if number == 0 else f"hidden.layer.{number - 1:02}"
        return self.states(name, self.longest)

    def error(self, found: np.ndarray, wanted: np.ndarray) -> float:
        """Largest distance in roundings."""
        return float(roundings(np.asarray(found, np.float64), np.asarray(wanted, np.float64), self.dtype).max())

    def near(self, found: np.ndarray, wanted: np.ndarray) -> bool:
        """Are both the same up to the stage's rounding?"""
        return self.error(found, wanted) <= max(self._tolerance, 1.0)

    def explains(self, found: np.ndarray, wanted: np.ndarray) -> bool:
        """Is `found` what the bad backend has, and so much nearer to it than the good one that it explains it?"""
        limit = max(self._tolerance, 1.0)
        whole = self.difference.error
        return self.error(found, wanted) <= (limit if not np.isfinite(whole) else min(limit, CLOSER * whole))

    @property
    def _tolerance(self) -> float:
        return float(getattr(TOLERANCES[self.difference.stage], self.dtype))


def constant_ratio(good: np.ndarray, bad: np.ndarray, within: float) -> float | None:
    """The factor between two tensors, if there is one for all elements; `within` is relative to their size."""
    size = float(np.square(good, dtype=np.float64).sum())
    if not size:
        return None
    factor = float((good.astype(np.float64) * bad).sum() / size)
    rest = rms(bad - factor * good.astype(np.float64))
    return factor if rest <= within * max(rms(bad), rms(good)) else None
