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
    real = np.flatnonzero(ends)
    # All tokens of a key block that end together are seen from the same later tokens, and the deepest from farthest.
    keys, member = np.unique(real // block * (length + 1) + ends[real], return_inverse=True)
    deepest = np.zeros(len(keys), np.int64)
    np.maximum.at(deepest, member, positions[real])
    key_block, end = np.divmod(keys, length + 1)
    spans = -(-end // block) - key_block
    number = np.repeat(np.arange(len(keys)), spans)
    query_block = key_block[number] + np.arange(len(number)) - np.repeat(np.cumsum(spans) - spans, spans)
    if window is not None:
        # Least depth of a query block's tokens up to each; what lies before `end` is below the key in the tree.
        least = np.minimum.accumulate(positions.reshape(-1, block), axis=1).ravel()
        last = np.minimum(end[number], (query_block + 1) * block) - 1
        near = (query_block == key_block[number]) | (least[last] - deepest[number] < window)
        number, query_block = number[near], query_block[near]
    blocks = length // block
    return np.stack(np.divmod(np.unique(query_block * blocks + key_block[number]), blocks), axis=1)


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
