"""From requests to figures. Every definition is here, once; docs/bench.md holds them beside those of other tools."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from portlab_bench.schema import CellFigures, Distribution, Quantile, RequestRecord

QUANTILES = {"p1": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_Z = 1.959963984540054  # of the normal distribution, for 95 %


def ttft(record: RequestRecord) -> float | None:
    """Seconds from sending to the first event with tokens; None if there was none."""
    return record.chunks[0] - record.sent if record.chunks else None


def tpot(record: RequestRecord) -> float | None:
    """Seconds per output token after the first; None of fewer than two tokens, or if all came in one event.

    Servers pass a tool call on once it is whole: the time between its tokens is not seen, and it is not zero.
    """
    if record.output_tokens < 2 or len(record.chunks) < 2:
        return None
    return (record.chunks[-1] - record.chunks[0]) / (record.output_tokens - 1)


def e2e(record: RequestRecord) -> float | None:
    """Seconds from sending to the last event with tokens; None if there was none."""
    return record.chunks[-1] - record.sent if record.chunks else None


METRICS = {"ttft": ttft, "tpot": tpot, "e2e": e2e}


def meets(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether an answer meets every objective. One of a single token has no TPOT and meets any."""
    if record.outcome != "ok" or not record.chunks:
        return False
    values = ((METRICS[name](record), limit) for name, limit in objectives.items())
    return all(value is None or value <= limit for value, limit in values)


def distribution(values: Iterable[float]) -> Distribution | None:
    """Mean and quantiles with 95 % confidence intervals; None of no values.

    The interval of a quantile is between two order statistics, which need no assumption on the distribution: the i-th
    smallest value lies below the q-quantile with the probability that a binomial (n, q) is at least i. The normal
    approximation to that binomial gives the ranks; where they leave the sample, there is no interval. The interval of
    the mean is Student's t, by the normal above 30 values and by its expansion below.
    """
    sample = np.sort(np.fromiter(values, dtype=np.float64))
    n = len(sample)
    if not n:
        return None
    mean = float(sample.mean())
    half = _t95(n - 1) * float(sample.std(ddof=1)) / math.sqrt(n) if n > 1 else None
    return Distribution(
        count=n,
        mean=mean,
        mean_low=None if half is None else mean - half,
        mean_high=None if half is None else mean + half,
        minimum=float(sample[0]),
        maximum=float(sample[-1]),
        quantiles={name: _quantile(sample, q) for name, q in QUANTILES.items()},
    )


def _quantile(sample: np.ndarray, q: float) -> Quantile:
    n = len(sample)
    value = float(np.quantile(sample, q))  # linear between order statistics, as numpy, vLLM and guidellm do
    spread = _Z * math.sqrt(n * q * (1 - q))
    low, high = math.floor(n * q - spread), math.ceil(n * q + spread)
    if low < 1 or high > n - 1:
        return Quantile(value=value)
    return Quantile(value=value, low=float(sample[low - 1]), high=float(sample[high]))


def _t95(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by the Cornish-Fisher expansion (within 0.5 % from 3 degrees on)."""
    if freedom < 3:
        return {1: 12.706, 2: 4.303}[freedom]
    z, n = _Z, freedom
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return z + sum(terms)


def figures(
    records: Sequence[RequestRecord],
    *,
    objectives: Mapping[str, float] | None = None,
    client_load: float | None = None,
    prefix_hits: float | None = None,
) -> CellFigures | None:
    """The figures of a cell; None if no counted request was answered.

    Args:
        records: of the cell, warm-up included, which is left out here.
        objectives: seconds by metric, for goodput.
        client_load: share of one core that the busiest client process used; None if not measured.
        prefix_hits: share of prompt tokens that the server's prefix cache held, from its metrics; where it gives
            none, from what the answers say.
    """
    counted = [r for r in records if not r.warm_up]
    good = [r for r in counted if r.outcome == "ok" and r.chunks]
    if not good:
        return None
    bad = [r for r in counted if r.outcome != "ok" or not r.chunks]
    start = min(r.sent for r in counted)
    end = max(r.chunks[-1] for r in good)
    duration = end - start
    prompts = [r.prompt_tokens for r in good]
    prompt_tokens = sum(p for p in prompts if p is not None) if None not in prompts else None
    met = sum(meets(r, objectives) for r in counted) if objectives else None
    output_tokens = sum(r.output_tokens for r in good)
    return CellFigures(
        duration=duration,
        requests=len(counted),
        outcomes=dict(Counter(_outcome(r) for r in counted)),
        finishes=dict(Counter(r.finish or "none" for r in good)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tokens_from=dict(Counter(r.tokens_from for r in good)),
        ttft=distribution(_known(map(ttft, good))),
        tpot=distribution(_known(map(tpot, good))),
        itl=distribution(gap for r in good for gap in np.diff(r.chunks)),
        e2e=distribution(_known(map(e2e, good))),
        normalised=distribution((r.chunks[-1] - r.sent) / r.output_tokens for r in good if r.output_tokens),
        lag=distribution(r.sent - r.scheduled for r in counted if r.scheduled is not None),
        failed_after=distribution(r.done - r.sent for r in bad if r.done is not None),
        request_throughput=len(good) / duration,
        output_throughput=output_tokens / duration,
        prompt_throughput=None if prompt_tokens is None else prompt_tokens / duration,
        goodput=None if met is None else met / duration,
        attainment=None if met is None else met / len(counted),
        prefix_hits=_cached(good) if prefix_hits is None else prefix_hits,
        client_load=client_load,
        concurrency=sum((r.done or r.sent) - r.sent for r in counted) / duration,
    )


def _outcome(record: RequestRecord) -> str:
    """An answer without a token is no answer, whatever the status said."""
    return "empty" if record.outcome == "ok" and not record.chunks else record.outcome


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _cached(records: Sequence[RequestRecord]) -> float | None:
    pairs = [(r.cached_tokens, r.prompt_tokens) for r in records]
    known = [(c, p) for c, p in pairs if c is not None and p]
    return sum(c for c, _ in known) / sum(p for _, p in known) if known and len(known) == len(pairs) else None


def knee(points: Sequence[tuple[float, float]], share: float = 0.99) -> float | None:
    """The largest rate whose attainment is at least `share`, with all smaller rates so too; None if there is none."""
    last = None
    for rate, attainment in sorted(points):
        if attainment < share:
            break
        last = rate
    return last
