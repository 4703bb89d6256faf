"""Static shapes with little padding, and prompts that are computed once.

A TPU step is compiled for one shape. Rows of many lengths either share the shape of the longest, and most of what is
computed is padding, or fall into a few buckets, each compiled once: `buckets` finds the best few. Rows with the same
prompt need it only once: `group_by_prefix` says which rows those are, and what it saves.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from portlab_spec.data.tokens import Row, shared_prefix_length
from portlab_spec.errors import UserError

# ------------------------------------------------------------------------------------------------ buckets


def buckets(lengths: Sequence[int], max_buckets: int, multiple_of: int = 128) -> list[int]:
    """The bucket sizes, ascending, that need the fewest computed tokens.

    The optimum, by dynamic programming over the u distinct lengths after rounding: O(u^2 k) for k buckets. The largest
    bucket is the longest length rounded up; a bucket is used by at least one row.

    Args:
        lengths: tokens of each row, 1 or more.
        max_buckets: how many sizes at most: one compilation each.
        multiple_of: every size is a multiple of it. 128 is the lane width of a TPU: shorter tiles are padded to it.

    Raises:
        UserError: no rows, or a row, `max_buckets` or `multiple_of` below 1.
    """
    for name, value in (("max_buckets", max_buckets), ("multiple_of", multiple_of), ("a row", min(lengths, default=1))):
        if value < 1:
            raise UserError(f"{name} is {value}", fix="Give 1 or more")
    if not lengths:
        raise UserError("there are no rows to put in buckets", fix="Check the data set and its splits")

    counts = Counter(-(-int(length) // multiple_of) * multiple_of for length in lengths)
    sizes = sorted(counts)
    below = np.concatenate([[0], np.cumsum([counts[size] for size in sizes])])  # rows in the first i sizes
    # cost[j]: tokens computed for the rows of the first j sizes, the last of which is a bucket.
    unused = np.iinfo(np.int64).max // 2
    cost = np.full(len(sizes) + 1, unused, np.int64)
    cost[0] = 0
    came_from: list[np.ndarray] = []
    for _ in range(min(max_buckets, len(sizes))):
        best = np.full_like(cost, unused)
        origin = np.zeros_like(cost)
        for j, size in enumerate(sizes, start=1):
            options = cost[:j] + size * (below[j] - below[:j])
            origin[j] = options.argmin()
            best[j] = options[origin[j]]
        came_from.append(origin)
        cost = best

    chosen, j = [], len(sizes)
    for origin in reversed(came_from):
        chosen.append(sizes[j - 1])
        j = int(origin[j])
    return chosen[::-1]


def assign_bucket(length: int, sizes: Sequence[int]) -> int:
    """The smallest bucket that holds a row.

    Args:
        length: tokens of the row.
        sizes: ascending, as from `buckets`.

    Raises:
        UserError: the row is longer than the largest bucket.
    """
    at = int(np.searchsorted(sizes, length))
    if at == len(sizes):
        raise UserError(
            f"a row of {length} tokens is longer than the largest bucket of {sizes[-1] if sizes else 0}",
            fix="Plan the buckets over all rows, or fit the rows to max_length first",
        )
    return sizes[at]


@dataclass(frozen=True)
class BucketUse:
    """What falls into one bucket: its size, its rows, and how many of `size * rows` tokens are real."""

    size: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class Padding:
    """Real and computed tokens of rows in buckets.

    Attributes:
        uses: one entry per bucket, ascending.
        one_bucket: tokens that would be computed with the largest bucket alone.
    """

    uses: tuple[BucketUse, ...]
    one_bucket: int

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(use.tokens for use in self.uses)

    @property
    def computed(self) -> int:
        """Tokens with padding."""
        return sum(use.size * use.rows for use in self.uses)

    @property
    def waste(self) -> float:
        """Share of the computed tokens that is padding, 0 to 1."""
        return 1 - self.tokens / self.computed if self.computed else 0.0


def padding(lengths: Sequence[int], sizes: Sequence[int]) -> Padding:
    """What the rows cost in these buckets.

    Raises:
        UserError: a row is longer than the largest bucket.
    """
    rows: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for length in lengths:
        size = assign_bucket(length, sizes)
        rows[size] += 1
        tokens[size] += length
    uses = tuple(BucketUse(size, rows[size], tokens[size]) for size in sizes)
    return Padding(uses, one_bucket=len(lengths) * max(sizes, default=0))


# ------------------------------------------------------------------------------------------ shared prefixes


@dataclass(frozen=True)
class PrefixGroup:
    """Rows that start with the same tokens; packed together, these are computed once.

    Attributes:
        prefix: number of those tokens. At least one token before the first supervised one stays in the row.
        rows: in the order of the data set.
    """

    prefix: int
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the rows as they stand."""
        return sum(len(row.ids) for row in self.rows)

    def saved(self, batch_size: int | None = None) -> int:
        """Tokens not computed in one pass over the rows, with the prefix once per batch of `batch_size` rows.

        Without a batch size, the limit: the prefix once in all.
        """
        batches = -(-len(self.rows) // (batch_size or len(self.rows)))
        return self.prefix * (len(self.rows) - batches)


def group_by_prefix(rows: Sequence[Row], min_rows: int = 2) -> list[PrefixGroup]:
    """Groups of rows with the same tools and developer text, each to be packed alone.

    Every row is in exactly one group. Keys with fewer than `min_rows` rows are not worth batches of their own: their
    rows make up the last group, which shares whatever they all start with. Groups of rows that merely ask alike are
    not formed, although they would share a little more: their batches would hold one kind of question each.

    Args:
        rows: as from `portlab_spec.data.tokens.tokenize`.
        min_rows: for training, the batch size is a good choice.

    Returns:
        Groups in the order of their first rows, the mixed group last.
    """
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.prefix_key, []).append(row)
    groups = [members for members in by_key.values() if len(members) >= min_rows]
    mixed = [row for row in rows if len(by_key[row.prefix_key]) < min_rows]
    if mixed:
        groups.append(mixed)
    return [PrefixGroup(shared_prefix_length(members), tuple(members)) for members in groups]


def share_saved(groups: Sequence[PrefixGroup], batch_size: int | None = None) -> float:
    """Share of all tokens, 0 to 1, that packing each group alone does not compute; see `PrefixGroup.saved`."""
    tokens = sum(group.tokens for group in groups)
    return sum(group.saved(batch_size) for group in groups) / tokens if tokens else 0.0
