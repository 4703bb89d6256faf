"""Rows of a batch as tries: what several rows start with is held once.

Sorted by their tokens, the rows of a batch stand in the depth-first order of their radix trie, and what a row has in
common with the one before it is what the trie already holds of it. So the depth-first layout of the trie is each
row's remaining tokens, one row after the other, and no node is ever built.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError


class Span(NamedTuple):
    """Some of the rows of `SortedRows`, from `start` up to `stop`, as a tree of their own."""

    start: int
    stop: int


class Tree(NamedTuple):
    """One tree, laid out depth first; indices count from its first token.

    Attributes:
        tokens, positions, ends: int32 (n,), see `portlab_spec.packing.Rows`.
        slots, targets: int32 (s,), ascending, each pair once.
        weights: float32 (s,), number of rows that supervise the pair.
    """

    tokens: np.ndarray
    positions: np.ndarray
    ends: np.ndarray
    slots: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class SortedRows:
    """The rows of a batch in lexicographic order of their tokens; equal rows stay in their order.

    Attributes:
        rows: in that order.
        ids: tokens of each, int32.
        shared: int64 (n,), tokens that a row has in common with the one before it; 0 where a tree begins.
        added: int64 (n + 1,), tokens that are held of the rows before each.
    """

    rows: list[Row]
    ids: list[np.ndarray]
    shared: np.ndarray
    added: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Row], min_shared: int | None) -> Self:
        """Sort rows and find what they share.

        Args:
            rows: rows of one batch.
            min_shared: rows that have fewer tokens in common share nothing; None: no row shares anything.

        Raises:
            UserError: the first token of a row is supervised, which nothing can predict.
        """
        for row in rows:
            if row.loss[0]:
                raise UserError(
                    "the first token of the row is supervised, and nothing stands before it that could predict it",
                    where=row.id,
                    fix="Start the row with <bos>, or take its first token out of the loss",
                )
        ids = [np.frombuffer(array("i", row.ids), np.int32) for row in rows]
        # Big-endian bytes compare as the ids do, and much faster than tuples.
        keys = [tokens.astype(">u4").tobytes() for tokens in ids]
        order = sorted(range(len(rows)), key=keys.__getitem__)
        ids = [ids[i] for i in order]
        shared = np.zeros(len(rows), np.int64)
        if min_shared is not None:
            shared[1:] = [_common(a, b) for a, b in pairwise(ids)]
            shared[shared < min_shared] = 0
        lengths = np.array([len(tokens) for tokens in ids], np.int64)
        return cls([rows[i] for i in order], ids, shared, np.concatenate([[0], np.cumsum(lengths - shared)]))

    def trees(self) -> list[Span]:
        """The trees; no two of them share anything."""
        starts = np.flatnonzero(self.shared == 0).tolist()
        return [Span(a, b) for a, b in pairwise([*starts, len(self.rows)])]

    def size(self, span: Span) -> int:
        """Tokens of the tree of these rows, with what they share with the rows before them."""
        return int(self.added[span.stop] - self.added[span.start] + self.shared[span.start])

    def fitting(self, span: Span, room: int) -> Span:
        """The first rows of a span whose tree has at most `room` tokens; may be none."""
        limit = room - self.shared[span.start] + self.added[span.start]
        stop = int(np.searchsorted(self.added, limit, side="right")) - 1
        return Span(span.start, max(span.start, min(stop, span.stop)))

    def cut(self, span: Span, room: int | None) -> list[Span]:
        """A tree as trees of at most `room` tokens each, which repeat what they share.

        Raises:
            UserError: a row alone is longer.
        """
        parts: list[Span] = []
        while room is not None and self.size(span) > room:
            first = self.fitting(span, room)
            if first.stop == first.start:
                raise UserError(
                    f"the row has {len(self.ids[span.start])} tokens, and a packed row at most {room}",
                    where=self.rows[span.start].id,
                    fix="Lower max_length, or let packed rows be longer",
                )
            parts.append(first)
            span = Span(first.stop, span.stop)
        return [*parts, span]

    def tree(self, span: Span) -> Tree:
        """Lay a tree out."""
        ids = self.ids[span.start : span.stop]
        shared = [0, *self.shared[span.start + 1 : span.stop].tolist()]
        lengths = [len(tokens) for tokens in ids]
        at = [0, *np.cumsum(np.subtract(lengths, shared)).tolist()]
        positions = [np.arange(a, b, dtype=np.int32) for a, b in zip(shared, lengths, strict=True)]
        ends = np.empty(at[-1], np.int32)
        # What a row holds at some depth is seen until the first later row that holds another token there.
        end_of_depth = np.full(max(lengths), at[-1], np.int32)
        for i in reversed(range(len(ids))):
            ends[at[i] : at[i + 1]] = end_of_depth[shared[i] : lengths[i]]
            end_of_depth[shared[i] :] = at[i]
        tokens = np.concatenate([x[common:] for x, common in zip(ids, shared, strict=True)])
        return Tree(tokens, np.concatenate(positions), ends, *self._supervised(span, shared, at))

    def _supervised(
        self, span: Span, shared: Sequence[int], at: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, targets and weights of a tree whose rows begin at `at`."""
        slots, targets = [], []
        index_of_depth = np.zeros(max(len(x) for x in self.ids[span.start : span.stop]), np.int64)
        for i, number in enumerate(range(*span)):
            ids = self.ids[number]
            index_of_depth[shared[i] : len(ids)] = np.arange(at[i], at[i + 1])
            supervised = np.flatnonzero(np.frombuffer(bytes(self.rows[number].loss), np.bool_))
            slots.append(index_of_depth[supervised - 1])
            targets.append(ids[supervised])
        pairs, counts = np.unique(np.concatenate(slots) << 32 | np.concatenate(targets), return_counts=True)
        return (pairs >> 32).astype(np.int32), (pairs & 0xFFFFFFFF).astype(np.int32), counts.astype(np.float32)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Number of tokens that both start with."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    first = int(differ.argmax())
    return first if differ[first] else length
