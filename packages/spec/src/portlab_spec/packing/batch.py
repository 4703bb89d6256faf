"""Batches of one static shape.

Shape letters: A accumulation micro-batches, G groups, R packed rows, T row length, B block, Q = T/B query blocks,
KF and KS listed key blocks, S supervised slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.packing.blocks import table, visible_blocks, widest
from portlab_spec.packing.dealing import deal, first_fit
from portlab_spec.packing.trie import SortedRows, Tree

Array = Any  # numpy on the host, jax under jit

# Sharing makes attention follow a tree, one more key block for every query block. Fewer tokens than this (a <bos>,
# say) are cheaper repeated, and rows that share nothing may use faster kernels.
MIN_SHARED = 16


class Rows(NamedTuple):
    """Packed rows, each a forest laid out depth first, int32 (A, G, R, T); (G, R, T) within a micro-batch.

    Token i sees token j of the same packed row if j <= i < ends[j]; in sliding attention also
    positions[i] - positions[j] < window.

    Attributes:
        tokens: ids, 0 at padding.
        positions: depth of the token, which is its index in the rows that it stands for.
        ends: index one past the last token that may see this one; 0 at padding.
    """

    tokens: Array
    positions: Array
    ends: Array


class Blocks(NamedTuple):
    """Key blocks of each query block that hold a visible pair of tokens, ascending, -1 = unused entry.

    Attributes:
        full: int32 (A, G, R, Q, KF).
        sliding: int32 (A, G, R, Q, KS); all unused if there is no window.
    """

    full: Array
    sliding: Array


class Batch(NamedTuple):
    """Arrays of one step; a micro-batch of it lacks the leading axis.

    Attributes:
        rows: the packed rows.
        blocks: what attention visits.
        slots: int32 (A, G, S), flat index into R*T of the token that predicts.
        targets: int32 (A, G, S), the token to predict.
        weights: float32 (A, G, S), number of the step's rows that supervise this target here; 0 at padding.
    """

    rows: Rows
    blocks: Blocks
    slots: Array
    targets: Array
    weights: Array


@dataclass(frozen=True)
class Packing:
    """How rows become packed rows.

    Attributes:
        groups: parts of the mesh that see their own rows, data * fsdp.
        accumulate: micro-batches of a step.
        window: of sliding attention, None without.
        share_prefix: hold once what rows start with in common; else every row is a tree of its own.
        pack: put several trees into a packed row; else one.
        max_row_length: tokens of a packed row at most, for attention that costs with the square of it; longer trees
            are cut and repeat what they share. A multiple of the block, or it is rounded up to one. None: all trees
            of a part in one row, which wastes least.
        min_shared: fewer tokens in common are not shared.
    """

    groups: int = 1
    accumulate: int = 1
    window: int | None = None
    share_prefix: bool = True
    pack: bool = True
    max_row_length: int | None = None
    min_shared: int = MIN_SHARED

    @property
    def parts(self) -> int:
        """Parts that a step's rows are dealt to."""
        return self.groups * self.accumulate

    def deal(self, rows: Sequence[Row]) -> list[list[Tree]]:
        """The trees of each part: the groups of the first micro-batch, of the second, ...

        Raises:
            UserError: a row is longer than `max_row_length`, or its first token is supervised.
        """
        ordered = SortedRows.of(rows, self.min_shared if self.share_prefix else None)
        trees = [piece for tree in ordered.trees() for piece in ordered.cut(tree, self.max_row_length)]
        return [[ordered.tree(tree) for tree in part] for part in deal(ordered, trees, self.parts)]

    def into_rows(self, sizes: Sequence[int], row_length: int) -> list[list[int]]:
        """Which trees of a part stand in which packed row."""
        return first_fit(sizes, row_length) if self.pack else [[i] for i in range(len(sizes))]


@dataclass(frozen=True)
class Layout:
    """The static shape of batches.

    Attributes:
        packing: how they were packed.
        rows: R, packed rows of a group in a micro-batch.
        row_length: T, a multiple of `block`.
        block: B, tokens of a block of attention.
        full_blocks: KF, most key blocks of a query block in full attention.
        sliding_blocks: KS, in sliding attention.
        slots: S, a multiple of `chunk`.
        chunk: supervised slots whose logits are computed at a time.
        plain: no tree of the run branches, so that `ends` is the same all over a tree and tells trees apart.
        one_segment: no packed row of the run holds more than one tree.
    """

    packing: Packing
    rows: int
    row_length: int
    block: int
    full_blocks: int
    sliding_blocks: int
    slots: int
    chunk: int
    plain: bool
    one_segment: bool

    @property
    def groups(self) -> int:
        """G, parts of the mesh that see their own rows."""
        return self.packing.groups

    @property
    def accumulate(self) -> int:
        """A, micro-batches of a step."""
        return self.packing.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Token positions that the model computes in one step, padding included."""
        return self.packing.parts * self.rows * self.row_length


def pack_batch(rows: Sequence[Row], layout: Layout) -> Batch:
    """Pack one step's rows into the layout that was planned for it.

    Raises:
        UserError: the rows do not fit; what `Packing.deal` raises.
    """
    parts = [_pack_part(trees, layout) for trees in layout.packing.deal(rows)]
    lead = (layout.accumulate, layout.groups)

    def stack(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(arrays).reshape(*lead, *arrays[0].shape)

    tokens, positions, ends, full, sliding, slots, targets, weights = map(stack, zip(*parts, strict=True))
    return Batch(Rows(tokens, positions, ends), Blocks(full, sliding), slots, targets, weights)


def _pack_part(trees: Sequence[Tree], layout: Layout) -> tuple[np.ndarray, ...]:
    packed = layout.packing.into_rows([len(tree.tokens) for tree in trees], layout.row_length)
    require_room("packed rows", len(packed), layout.rows)
    rows, slots, targets, weights = place(trees, packed, layout.rows, layout.row_length)
    require_room("supervised tokens", len(slots), layout.slots)
    quota = layout.row_length // layout.block
    full = np.full((layout.rows, quota, layout.full_blocks), -1, np.int32)
    sliding = np.full((layout.rows, quota, layout.sliding_blocks), -1, np.int32)
    for r in range(len(packed)):
        for out, window in ((full, None), (sliding, layout.packing.window)):
            if out is sliding and window is None:
                continue
            pairs = visible_blocks(rows.ends[r], rows.positions[r], layout.block, window)
            require_room("key blocks", widest(pairs), out.shape[-1])
            out[r] = table(pairs, quota, out.shape[-1])
    fill = (0, layout.slots - len(slots))
    return *rows, full, sliding, np.pad(slots, fill), np.pad(targets, fill), np.pad(weights, fill)


def place(
    trees: Sequence[Tree], packed: Sequence[Sequence[int]], rows: int, row_length: int
) -> tuple[Rows, np.ndarray, np.ndarray, np.ndarray]:
    """Lay trees side by side.

    Args:
        trees: of one part.
        packed: which of them stand in which packed row.
        rows: R.
        row_length: T.

    Returns:
        Arrays (R, T), and slots, targets and weights, one entry for each supervised token.

    Raises:
        UserError: a row of trees is longer than `row_length`.
    """
    out = Rows(*(np.zeros((rows, row_length), np.int32) for _ in Rows._fields))
    slots: list[np.ndarray] = [np.zeros(0, np.int32)]
    order = [i for members in packed for i in members]
    for r, members in enumerate(packed):
        at = 0
        for i in members:
            tree = trees[i]
            stop = at + len(tree.tokens)
            require_room("tokens in a packed row", stop, row_length)
            out.tokens[r, at:stop] = tree.tokens
            out.positions[r, at:stop] = tree.positions
            out.ends[r, at:stop] = tree.ends + at
            slots.append(tree.slots + np.int32(r * row_length + at))
            at = stop
    targets = np.concatenate([np.zeros(0, np.int32), *(trees[i].targets for i in order)])
    weights = np.concatenate([np.zeros(0, np.float32), *(trees[i].weights for i in order)])
    return out, np.concatenate(slots), targets, weights


def require_room(what: str, needed: int, room: int) -> None:
    """Refuse rows that a layout was not planned for."""
    if needed > room:
        raise UserError(
            f"the batch needs {needed} {what} and its layout has {room}", fix="Plan the layout over these rows"
        )
