"""Shares and their bootstrap intervals.

Both intervals are percentile bootstraps over examples, at 95 %, from 2,000 resamples with a fixed seed. The
resamples are not built: their totals are drawn from the distribution that these have.

`metric`: a share of examples. Resampling n zeros and ones with replacement and adding them up is a draw from
Binomial(n, hits / n).

`ratio`: a share of calls, of which an example may have any number. The calls of one answer stand or fall
together, so whole examples are resampled: the share is a ratio of two sums over them. Examples with the same
(hits, count) are interchangeable, so how often each such pair is drawn is Multinomial(n, shares of the pairs).
A resample without any call has no share and is left out.

When all examples agree the interval is a point: read `count` beside it.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from portlab_spec.conversation import Record
from portlab_spec.errors import UserError

RESAMPLES = 2_000
CONFIDENCE = 0.95
BOOTSTRAP_SEED = 0


class Metric(Record):
    """A share, `hits` of `count` examples or calls, with its 95 % interval; all three are between 0 and 1."""

    value: float
    low: float
    high: float
    hits: int
    count: int


def metric(hits: int, count: int) -> Metric:
    """A share of examples with its bootstrap interval.

    Raises:
        UserError: `count` is zero.
    """
    if count == 0:
        raise UserError("there is no example to score", fix="Choose a split that has rows")
    resamples = np.random.default_rng(BOOTSTRAP_SEED).binomial(count, hits / count, RESAMPLES) / count
    return _metric(hits, count, resamples)


def ratio(pairs: Sequence[tuple[int, int]]) -> Metric:
    """A share of calls: (hits, count) of each example, summed, with a bootstrap interval over the examples.

    Raises:
        UserError: no example has anything to count.
    """
    hits, count = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
    if count == 0:
        raise UserError("there is no call to score", fix="Leave the metric out")
    kinds = Counter(pairs)
    share_of_kind = np.array(list(kinds.values())) / len(pairs)
    drawn = np.random.default_rng(BOOTSTRAP_SEED).multinomial(len(pairs), share_of_kind, RESAMPLES)
    sums = drawn @ np.array(list(kinds))  # [resample, (hits, count)]
    sums = sums[sums[:, 1] > 0]
    return _metric(hits, count, sums[:, 0] / sums[:, 1])


def _metric(hits: int, count: int, resamples: np.ndarray) -> Metric:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resamples, [tail, 1 - tail])
    return Metric(value=hits / count, low=float(low), high=float(high), hits=hits, count=count)
