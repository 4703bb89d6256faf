"""From rows of tokens to batches of one static shape.

A batch holds `groups` groups (one per part of the mesh that sees its own rows). Each group holds the shared prefix
once, rows of packed suffixes, and the flat list of supervised positions. The shape is planned over the whole run,
so that the step compiles once.

Shape letters: G groups, P prefix, R rows, T row length, S supervised slots per group.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from portlab_spec.data.tokens import Row, shared_prefix_length

Array = Any  # numpy on the host, jax under jit

_ROW_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Batch(NamedTuple):
    """Arrays of one step; the leading axis is the group.

    Attributes:
        prefix: int32 (G, P).
        tokens, segments, positions: int32 (G, R, T), see `portlab_jax.model.Rows`.
        slots: int32 (G, S), flat index into R*T of the token that predicts.
        targets: int32 (G, S), the token to predict.
        weights: float32 (G, S), 1 for a supervised token, 0 for padding.
    """

    prefix: Array
    tokens: Array
    segments: Array
    positions: Array
    slots: Array
    targets: Array
    weights: Array


@dataclass(frozen=True)
class Layout:
    """The static shape of every batch of a run."""

    prefix: int
    rows: int
    row_length: int
    slots: int
    groups: int
    chunk: int

    @property
    def tokens_per_step(self) -> int:
        """Token positions that the model computes in one step, padding included."""
        return self.groups * (self.prefix + self.rows * self.row_length)


def plan_layout(
    batches: Sequence[Sequence[Row]], *, groups: int = 1, share_prefix: bool = True, pack: bool = True
) -> Layout:
    """The smallest layout that holds every batch of a run.

    Args:
        batches: the rows of each step.
        groups: parts of the mesh that see their own rows.
        share_prefix: hold the common prefix once; else every row carries its own.
        pack: put several segments in a row; else one segment per row, padded to the longest.
    """
    rows = [row for batch in batches for row in batch]
    prefix = shared_prefix_length(rows) if share_prefix else 0
    longest = max(len(row.ids) for row in rows) - prefix
    # Twice the longest suffix leaves first-fit little waste; longer rows only add masked attention.
    row_length = _bucket(2 * longest) if pack else _multiple(longest, 8)
    n_rows = n_slots = 1
    for batch in batches:
        for part in _deal(batch, groups):
            packed = _first_fit([len(r.ids) - prefix for r in part], row_length if pack else 0)
            n_rows = max(n_rows, len(packed))
            n_slots = max(n_slots, sum(sum(r.loss) for r in part))
    # Chunks of at most 128 positions keep the logits of one chunk at 134 MB in float32.
    chunks = math.ceil(n_slots / 128)
    chunk = _multiple(math.ceil(n_slots / chunks), 8)
    return Layout(prefix, n_rows, row_length, chunk * chunks, groups, chunk)


def pack_batch(rows: Sequence[Row], layout: Layout, *, pack: bool = True) -> Batch:
    """Pack one step's rows into the planned layout."""
    parts = [_pack_group(part, layout, pack) for part in _deal(rows, layout.groups)]
    return Batch(*(np.stack(field) for field in zip(*parts, strict=True)))


def _pack_group(rows: Sequence[Row], layout: Layout, pack: bool) -> Batch:
    p = layout.prefix
    shape = (layout.rows, layout.row_length)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    slots, targets = (np.zeros(layout.slots, np.int32) for _ in range(2))
    weights = np.zeros(layout.slots, np.float32)
    used = 0
    packed = _first_fit([len(r.ids) - p for r in rows], layout.row_length if pack else 0)
    for r, members in enumerate(packed):
        at = 0
        for number, index in enumerate(members, start=1):
            suffix = rows[index].ids[p:]
            end = at + len(suffix)
            tokens[r, at:end] = suffix
            segments[r, at:end] = number
            positions[r, at:end] = np.arange(p, p + len(suffix))
            supervised = np.flatnonzero(rows[index].loss)
            span = slice(used, used + len(supervised))
            slots[span] = r * layout.row_length + at + (supervised - p) - 1
            targets[span] = np.array(rows[index].ids)[supervised]
            weights[span] = 1.0
            used, at = span.stop, end
    prefix = np.array(rows[0].ids[:p] if rows else (0,) * p, np.int32)
    return Batch(prefix, tokens, segments, positions, slots, targets, weights)


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of the items in each bin. Capacity 0 puts one item in each."""
    if not capacity:
        return [[i] for i in range(len(lengths))]
    bins: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for b, space in enumerate(free):
            if lengths[i] <= space:
                bins[b].append(i)
                free[b] -= lengths[i]
                break
        else:
            bins.append([i])
            free.append(capacity - lengths[i])
    return bins


def _deal(rows: Sequence[Row], groups: int) -> list[Sequence[Row]]:
    return [rows[g::groups] for g in range(groups)]


def _bucket(length: int) -> int:
    return next((size for size in _ROW_LENGTHS if size >= length), _multiple(length, 1024))


def _multiple(value: int, of: int) -> int:
    return math.ceil(value / of) * of


def batch_order(rows: Sequence[Row], batch_size: int, steps: int, seed: int) -> Iterator[list[Row]]:
    """The rows of each step: epochs of shuffled rows, interleaved so that every stretch is balanced by stratum.

    A pure function of its arguments: resuming at step k is skipping k batches.
    """
    strata: dict[str, list[Row]] = {}
    for row in rows:
        strata.setdefault(row.stratum, []).append(row)
    queue: list[Row] = []
    epoch = 0
    for _ in range(steps):
        while len(queue) < batch_size:
            rng = np.random.default_rng([seed, epoch])
            keyed: list[tuple[float, str, Row]] = []
            for name in sorted(strata):
                members = strata[name]
                order = rng.permutation(len(members))
                offsets = rng.random(len(members))
                # The i-th of n lies somewhere in the i-th of n equal stretches of the epoch.
                keyed += [((i + offsets[i]) / len(members), members[j].id, members[j]) for i, j in enumerate(order)]
            queue += [row for _, _, row in sorted(keyed, key=lambda k: k[:2])]
            epoch += 1
        yield queue[:batch_size]
        queue = queue[batch_size:]
