"""Which key blocks a query block of a packed row needs."""

import numpy as np


def visible_blocks(ends: np.ndarray, positions: np.ndarray, block: int, window: int | None) -> np.ndarray:
    """Pairs (query block, key block) that hold a token i and a token j that it sees, int64 (n, 2), ascending.

    Args:
        ends: int32 (T,), 0 at padding; T is a multiple of `block`.
        positions: int32 (T,).
        block: tokens of a block.
        window: if given, only j with positions[i] - positions[j] < window are seen.
    """
    length = len(ends)
    index = np.arange(length)
    # Tokens of a block that end together and stand together are a path: what sees one of them sees the last, which is
    # also the nearest to it.
    changes = (index % block == block - 1) | (ends != np.append(ends[1:], 0))
    last = index[changes & (ends > 0)]
    key_block, end = last // block, ends[last].astype(np.int64)
    spans = -(-end // block) - key_block
    number = np.repeat(np.arange(len(last)), spans)
    query_block = key_block[number] + np.arange(len(number)) - np.repeat(np.cumsum(spans) - spans, spans)
    if window is not None:
        # A query block's tokens from its first up to `end` are below the key in the tree; the least deep is nearest.
        least = np.minimum.accumulate(positions.reshape(-1, block), axis=1).ravel()
        reach = np.minimum(end[number], (query_block + 1) * block) - 1
        near = (query_block == key_block[number]) | (least[reach] - positions[last][number] < window)
        number, query_block = number[near], query_block[near]
    blocks = length // block
    pairs = np.sort(query_block * blocks + key_block[number])
    return np.stack(np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], blocks), axis=1)


def table(pairs: np.ndarray, blocks: int, width: int) -> np.ndarray:
    """The key blocks of each query block, int32 (blocks, width), ascending and then -1.

    Args:
        pairs: as from `visible_blocks`.
        blocks: Q, query blocks of a packed row.
        width: at least `widest(pairs)`.
    """
    out = np.full((blocks, width), -1, np.int32)
    first = np.searchsorted(pairs[:, 0], np.arange(blocks))
    out[pairs[:, 0], np.arange(len(pairs)) - first[pairs[:, 0]]] = pairs[:, 1]
    return out


def widest(pairs: np.ndarray) -> int:
    """Most key blocks of a query block."""
    return int(np.bincount(pairs[:, 0]).max(initial=0))
