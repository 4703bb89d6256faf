"""Who computes which rows: parts of a step with about equal numbers of tokens, and packed rows within a part."""

import heapq
from collections.abc import Sequence

from portlab_spec.packing.trie import SortedRows, Span


def deal(rows: SortedRows, trees: Sequence[Span], parts: int) -> list[list[Span]]:
    """Deal trees to parts so that the largest part is small.

    All parts are padded to the largest, so its size is the cost of the step. A tree stays whole where that costs
    nothing; otherwise it is cut, and every piece repeats what it shares with the others. Deterministic.

    Args:
        rows: rows of a step.
        trees: their trees.
        parts: groups times micro-batches.

    Returns:
        The trees of each part; a part is empty if there are fewer rows than parts.
    """
    if parts == 1:
        return [list(trees)]
    sizes = [rows.size(tree) for tree in trees]
    # Between what equal parts without repetitions would hold and everything in one part, the least that suffices.
    low, high = max(-(-sum(sizes) // parts), 1) - 1, sum(sizes)
    best: list[list[Span]] = [list(trees), *([] for _ in range(parts - 1))]
    while high - low > 1:
        capacity = (low + high) // 2
        dealt = _deal(rows, trees, parts, capacity)
        if dealt is None:
            low = capacity
        else:
            high, best = min(capacity, max(sum(map(rows.size, part)) for part in dealt)), dealt
    return best


def _deal(rows: SortedRows, trees: Sequence[Span], parts: int, capacity: int) -> list[list[Span]] | None:
    """The largest tree to the emptiest part, cut if it does not fit there; None if not even a row of it fits."""
    dealt: list[list[Span]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    left = [(-rows.size(tree), tree) for tree in trees]
    heapq.heapify(left)
    while left:
        negative_size, tree = heapq.heappop(left)
        load, part = loads[0]
        piece = tree if load - negative_size <= capacity else rows.fitting(tree, capacity - load)
        if piece.start == piece.stop:
            return None
        dealt[part].append(piece)
        heapq.heapreplace(loads, (load + rows.size(piece), part))
        if piece.stop < tree.stop:
            rest = Span(piece.stop, tree.stop)
            heapq.heappush(left, (-rows.size(rest), rest))
    return dealt


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of the items in each bin; an item larger than `capacity` gets a bin of its own."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for b, room in enumerate(free):
            if sizes[i] <= room:
                bins[b].append(i)
                free[b] -= sizes[i]
                break
        else:
            bins.append([i])
            free.append(capacity - sizes[i])
    return bins
