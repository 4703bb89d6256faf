"""Which rows make up each step."""

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import overload

import numpy as np

from portlab_spec.data.tokens import Row


class BatchOrder(Sequence[list[Row]]):
    """The rows of every step: epochs of shuffled rows, interleaved so that every stretch is balanced by stratum.

    Step k is a pure function of the arguments and k, computed when it is asked for.

    Args:
        rows: each is used once per epoch.
        batch_size: rows of a step.
        steps: length of the sequence.
        seed: of the shuffles.
        group_by_prefix: draw each batch from as few `prefix_key`s as possible, so that its rows share more; batches
            are balanced by stratum within a key only.
    """

    def __init__(
        self, rows: Sequence[Row], batch_size: int, steps: int, seed: int, *, group_by_prefix: bool = False
    ) -> None:
        self.rows, self.batch_size, self.steps, self.seed = list(rows), batch_size, steps, seed
        self.group_by_prefix = group_by_prefix
        make = _grouped_epoch if group_by_prefix else _epoch
        self._epoch = lru_cache(2)(lambda number: make(self.rows, batch_size, seed, number))

    def __len__(self) -> int:
        return self.steps

    @overload
    def __getitem__(self, step: int) -> list[Row]: ...
    @overload
    def __getitem__(self, step: slice) -> list[list[Row]]: ...
    def __getitem__(self, step: int | slice) -> list[Row] | list[list[Row]]:
        if isinstance(step, slice):
            return [self[i] for i in range(*step.indices(self.steps))]
        if not -self.steps <= step < self.steps:
            raise IndexError(step)
        first = step % self.steps * self.batch_size
        places = (divmod(i, len(self.rows)) for i in range(first, first + self.batch_size))
        return [self.rows[self._epoch(epoch)[i]] for epoch, i in places]

    def digest(self) -> str:
        """SHA-256 of the rows in their order: all that a row is."""
        total = hashlib.sha256()
        for row in self.rows:
            total.update(f"{row.id}\0{row.stratum}\0{row.prefix_key}\0{len(row.ids)}\0".encode())
            total.update(np.frombuffer(array("i", row.ids), np.int32).astype("<i4").tobytes() + bytes(row.loss))
        return total.hexdigest()


def _epoch(rows: Sequence[Row], batch_size: int, seed: int, epoch: int) -> list[int]:
    """Indices of the rows in the order of an epoch."""
    return _interleaved(rows, range(len(rows)), np.random.default_rng([seed, epoch]))


def _grouped_epoch(rows: Sequence[Row], batch_size: int, seed: int, epoch: int) -> list[int]:
    """As `_epoch`: whole batches of one prefix key, in random order, then batches of what is left of the keys."""
    rng = np.random.default_rng([seed, epoch])
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row.prefix_key, []).append(i)
    whole: list[list[int]] = []
    left: list[int] = []
    names = sorted(members)
    for name in (names[i] for i in rng.permutation(len(names))):
        order = _interleaved(rows, members[name], rng)
        full = len(order) // batch_size * batch_size
        whole += [order[i : i + batch_size] for i in range(0, full, batch_size)]
        left += order[full:]
    # Batches do not begin anew with an epoch: its first rows complete the last batch of the epoch before.
    lead = min(-epoch * len(rows) % batch_size, len(rows))
    tail = (len(rows) - lead) % batch_size
    while len(left) < lead + tail:
        left += whole.pop(int(rng.integers(len(whole))))
    middle = left[lead : len(left) - tail]
    whole += [middle[i : i + batch_size] for i in range(0, len(middle), batch_size)]
    shuffled = [i for b in rng.permutation(len(whole)) for i in whole[b]]
    return [*left[:lead], *shuffled, *left[len(left) - tail :]]


def _interleaved(rows: Sequence[Row], chosen: Sequence[int], rng: np.random.Generator) -> list[int]:
    """The chosen rows, shuffled, with the rows of every stratum spread evenly."""
    strata: dict[str, list[int]] = {}
    for i in chosen:
        strata.setdefault(rows[i].stratum, []).append(i)
    keyed: list[tuple[float, str, int]] = []
    for name in sorted(strata):
        members = strata[name]
        order = rng.permutation(len(members))
        offsets = rng.random(len(members))
        # The k-th of n lies somewhere in the k-th of n equal stretches of the epoch.
        keyed += [((k + offsets[k]) / len(members), rows[members[j]].id, members[j]) for k, j in enumerate(order)]
    return [i for _, _, i in sorted(keyed)]
