"""The static shapes of a run: few, and none larger than its steps need."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from portlab_spec.data.batching import assign_bucket, buckets
from portlab_spec.data.tokens import Row
from portlab_spec.packing.batch import Layout, Packing, place
from portlab_spec.packing.blocks import visible_blocks, widest
from portlab_spec.packing.trie import Tree

BLOCKS = (32, 64, 128, 256)

# Rows that share nothing may use faster kernels, which is worth a few tokens.
MIN_SAVING = 0.05

# Chunks of at most 128 positions keep the logits of one chunk at 134 MB in float32.
MAX_CHUNK = 128

# What a token costs beside attention, in pairs of tokens attended, forward and backward: for LoRA on Gemma 3 270M
# 4 * 5.6M / (3.5 * 4 * 1024) operations per layer. Larger models have more, which makes padding count for more.
_PAIRS_PER_TOKEN = 1600

# A pair of blocks costs as if one side were so much longer: small blocks move more data for each product. Fitted to
# a CPU, 4 query heads of 256 and one key head: blocks of 32, 64, 128 and 256 took 119, 112, 108 and 98 ns for a pair.
_BLOCK_OVERHEAD = 8

# Gemma 3 has five sliding layers for each full one; Gemma 4 four or five.
_SLIDING_SHARE = 5 / 6

_SAMPLE = 8  # steps by which the block is chosen


@dataclass(frozen=True)
class Need:
    """What one step asks of its layout.

    Attributes:
        sizes: tokens of the trees of each part.
        slots: supervised slots of the part that has most.
        tokens: of the step's rows as they stand.
    """

    sizes: tuple[tuple[int, ...], ...]
    slots: int
    tokens: int

    @property
    def held(self) -> int:
        """Tokens after sharing."""
        return sum(map(sum, self.sizes))

    @property
    def largest(self) -> int:
        """Tokens of the largest part."""
        return max(map(sum, self.sizes))


@dataclass(frozen=True)
class Plan:
    """The layouts of a run.

    Attributes:
        layouts: each compiles once.
        choice: index of the layout of each step.
        row_tokens: tokens of all steps' rows as they stand.
        held_tokens: tokens after sharing.
    """

    layouts: tuple[Layout, ...]
    choice: tuple[int, ...]
    row_tokens: int
    held_tokens: int

    def layout(self, step: int) -> Layout:
        """Layout of a step, counted from 0."""
        return self.layouts[self.choice[step]]

    @property
    def computed_tokens(self) -> int:
        """Token positions that the model computes over the run, padding included."""
        return sum(self.layouts[i].tokens_per_step for i in self.choice)

    def summary(self) -> str:
        """One line for the log."""
        shapes = ", ".join(
            f"{layout.accumulate} x {layout.groups} x {layout.rows} x {layout.row_length}" for layout in self.layouts
        )
        return (
            f"{self.row_tokens:,} tokens of rows held in {self.held_tokens:,}, computed as {self.computed_tokens:,}; "
            f"micro-batches x groups x rows x length: {shapes}"
        )


def plan(
    batches: Sequence[Sequence[Row]],
    packing: Packing,
    *,
    max_shapes: int = 1,
    min_block: int = 32,
    max_chunk: int = MAX_CHUNK,
    min_saving: float = MIN_SAVING,
) -> Plan:
    """The layouts that hold every step of a run, at least work.

    Args:
        batches: rows of each step.
        packing: how to pack them.
        max_shapes: layouts at most.
        min_block: smallest block of attention: 128 on accelerators, whose tiles are that wide.
        max_chunk: supervised slots whose logits are computed at a time, at most.
        min_saving: share of all tokens, 0 to 1, below which nothing is shared after all.

    Raises:
        UserError: what `Packing.deal` raises; no batches.
    """
    needs = [_need(batch, packing) for batch in batches]
    if packing.share_prefix and sum(n.held for n in needs) > (1 - min_saving) * sum(n.tokens for n in needs):
        packing = replace(packing, share_prefix=False)
        needs = [_need(batch, packing) for batch in batches]
    # Tokens and slots both grow with the rows; their sum stands for the work of a step.
    work = [need.largest + need.slots for need in needs]
    bounds = buckets(work, max_shapes, multiple_of=1)
    choice = [bounds.index(assign_bucket(w, bounds)) for w in work]
    layouts = []
    for number in range(len(bounds)):
        members = [i for i, c in enumerate(choice) if c == number]
        layouts.append(
            _layout([batches[i] for i in members], [needs[i] for i in members], packing, min_block, max_chunk)
        )
    # One kind of rows for all layouts, so that attention is chosen once; and equal layouts are one.
    plain, one_segment = all(x.plain for x in layouts), all(x.one_segment for x in layouts)
    layouts = [replace(x, plain=plain, one_segment=one_segment) for x in layouts]
    distinct = tuple(dict.fromkeys(layouts))
    return Plan(
        layouts=distinct,
        choice=tuple(distinct.index(layouts[c]) for c in choice),
        row_tokens=sum(need.tokens for need in needs),
        held_tokens=sum(need.held for need in needs),
    )


def _need(batch: Sequence[Row], packing: Packing) -> Need:
    parts = packing.deal(batch)
    sizes = tuple(tuple(len(tree.tokens) for tree in part) for part in parts)
    slots = max(sum(len(tree.slots) for tree in part) for part in parts)
    return Need(sizes, slots, sum(len(row.ids) for row in batch))


def _layout(
    batches: Sequence[Sequence[Row]], needs: Sequence[Need], packing: Packing, min_block: int, max_chunk: int
) -> Layout:
    parts = sorted({part for need in needs for part in need.sizes}, key=sum, reverse=True)
    blocks = [b for b in BLOCKS if b >= min_block and (packing.max_row_length or b) % b == 0] or [min_block]
    candidates = [(block, *_shape(parts, packing, block)) for block in blocks]
    if len(candidates) > 1:
        largest = sorted(range(len(needs)), key=lambda i: -needs[i].largest)[:_SAMPLE]
        sample = [packing.deal(batches[i]) for i in largest]
        block, rows, row_length = min(candidates, key=lambda c: _cost(sample, packing, *c))
    else:
        ((block, rows, row_length),) = candidates
    full = sliding = 1
    plain = one_segment = True
    for batch in batches:
        for trees in packing.deal(batch):
            packed = packing.into_rows([len(tree.tokens) for tree in trees], row_length)
            one_segment &= all(len(members) == 1 for members in packed)
            plain &= all((tree.ends == len(tree.tokens)).all() for tree in trees)
            for seen in _visible(trees, packing, block, rows, row_length):
                full = max(full, widest(seen[0]))
                sliding = max(sliding, widest(seen[1]))
    slots = max(need.slots for need in needs)
    chunks = max(math.ceil(slots / max_chunk), 1)
    chunk = _multiple(max(math.ceil(slots / chunks), 1), 8)
    return Layout(
        packing=packing,
        rows=rows,
        row_length=row_length,
        block=block,
        full_blocks=full,
        sliding_blocks=sliding,
        slots=chunk * chunks,
        chunk=chunk,
        plain=plain,
        one_segment=one_segment,
    )


def _shape(parts: Sequence[Sequence[int]], packing: Packing, block: int) -> tuple[int, int]:
    """Packed rows and row length for parts of such trees, largest part first: least R * T, then least R."""
    tree = _multiple(max((max(part, default=1) for part in parts), default=1), block)
    total = max(sum(parts[0]), 1)
    if not packing.pack:
        return max(1, *map(len, parts)), tree
    if packing.max_row_length is None:
        return 1, _multiple(total, block)
    longest = _multiple(packing.max_row_length, block)
    lengths = {tree}
    fewest = math.ceil(total / longest)
    for rows in range(fewest, fewest + 3):
        length = max(_multiple(math.ceil(total / rows), block), tree)
        while length < longest and not all(len(packing.into_rows(part, length)) <= rows for part in parts):
            length += block
        lengths.add(length)
    shapes = [(max(1, *(len(packing.into_rows(part, length)) for part in parts)), length) for length in lengths]
    return min(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))


def _cost(
    sample: Sequence[Sequence[Sequence[Tree]]], packing: Packing, block: int, rows: int, row_length: int
) -> float:
    """Work of some steps in a layout, in attended pairs of tokens."""
    pairs = 0.0
    for parts in sample:
        for trees in parts:
            for full, sliding in _visible(trees, packing, block, rows, row_length):
                share = 0.0 if packing.window is None else _SLIDING_SHARE
                pairs += (1 - share) * len(full) + share * len(sliding)
    tokens = len(sample) * packing.parts * rows * row_length
    return pairs * block * (block + _BLOCK_OVERHEAD) + tokens * _PAIRS_PER_TOKEN


def _visible(
    trees: Sequence[Tree], packing: Packing, block: int, rows: int, row_length: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Visible blocks of each packed row of a part, for full and for sliding attention."""
    packed = packing.into_rows([len(tree.tokens) for tree in trees], row_length)
    placed, *_ = place(trees, packed, rows, row_length)
    seen = []
    for ends, positions in zip(placed.ends, placed.positions, strict=True):
        full = visible_blocks(ends, positions, block, None)
        sliding = full[:0] if packing.window is None else visible_blocks(ends, positions, block, packing.window)
        seen.append((full, sliding))
    return seen


def _multiple(value: int, of: int) -> int:
    return math.ceil(value / of) * of
