"""What makes a cell's figures worthless, however good they look. A cell that a guard marks is kept, and in no table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from portlab_bench.roofline import SLACK
from portlab_bench.schema import Cell, CellFigures, Finding, Quantile

# A client that uses more of its core than this answers late itself, and what it then measures is itself.
MOST_CLIENT_LOAD = 0.8
# Lateness of sending, at the 99th percentile, beside the median time to first token.
MOST_LAG_SECONDS, MOST_LAG_SHARE = 0.005, 0.02
# A prefix cache may hold what prompts share and a little more: blocks, and templates that stand around the text.
CACHE_MARGIN = 0.1
MOST_FAILURES = 0.01
MOST_CUT_OFF = 0.05
MOST_DRIFT = 0.1


@dataclass(frozen=True)
class Expected:
    """What is known of a cell beforehand.

    Attributes:
        shared: share of the prompts' text that others have too.
        fixed: answers end at max_tokens by intent.
        peaks: prompt tokens, and output tokens, per second that the hardware cannot pass; None if it is not known.
    """

    shared: float
    fixed: bool
    peaks: tuple[float, float] | None = None


def check(figures: CellFigures | None, expected: Expected) -> tuple[Finding, ...]:
    """All guards that look at one cell."""
    if figures is None:
        return (Finding(guard="answers", ok=False, what="no request was answered"),)
    return tuple(_findings(figures, expected))


def _findings(f: CellFigures, expected: Expected) -> Iterator[Finding]:
    failed = sum(count for outcome, count in f.outcomes.items() if outcome != "ok")
    yield Finding(guard="failures", ok=failed <= MOST_FAILURES * f.requests, what=f"{failed} of {f.requests} failed")
    if f.client_load is not None:
        what = f"the client used {f.client_load:.0%} of a core"
        yield Finding(guard="client", ok=f.client_load <= MOST_CLIENT_LOAD, what=what)
    if f.lag and f.ttft:
        late = f.lag.quantiles["p99"].value
        allowed = max(MOST_LAG_SECONDS, MOST_LAG_SHARE * f.ttft.quantiles["p50"].value)
        yield Finding(guard="lag", ok=late <= allowed, what=f"p99 of sending {late * 1e3:.1f} ms late")
    hits = f.prefix_hits
    if hits is None:
        yield Finding(guard="prefix cache", ok=True, what="the server does not say what its prefix cache held")
    else:
        what = f"the prefix cache held {hits:.0%} of the prompts, which share {expected.shared:.0%}"
        yield Finding(guard="prefix cache", ok=hits <= expected.shared + CACHE_MARGIN, what=what)
    yield _finishes(f, expected)
    by_chunks = f.tokens_from.get("chunks", 0)
    yield Finding(
        guard="token count",
        ok=not by_chunks,
        what="counted by the server" if not by_chunks else f"{by_chunks} answers without the server's count",
    )
    if expected.peaks:
        prefill, decode = expected.peaks
        # What the prefix cache held was not computed.
        prompt = (f.prompt_throughput or 0.0) * (1 - (hits or 0.0))
        share = prompt / prefill + f.output_throughput / decode
        yield Finding(
            guard="roofline",
            ok=share <= SLACK,
            what=f"{prompt:,.0f} prompt and {f.output_throughput:,.0f} output tokens/s are {share:.1%} of the peak",
        )


def _finishes(f: CellFigures, expected: Expected) -> Finding:
    cut = f.finishes.get("length", 0)
    total = sum(f.finishes.values())
    seen = ", ".join(f"{count} {reason}" for reason, count in sorted(f.finishes.items()))
    # Answers of a model that does not stop measure its faults, unless their length was ordered.
    return Finding(guard="finish reasons", ok=expected.fixed or cut <= MOST_CUT_OFF * total, what=seen)


def check_anchors(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Cells with what repeated ones say: if a repetition departs, the server changed during the run."""
    first = {cell.name: cell for cell in cells if not cell.anchor}
    drifts: list[Finding] = []
    for cell in cells:
        before = first.get(cell.name)
        if not cell.anchor or not before or not before.figures or not cell.figures:
            continue
        for what, old, new in (
            ("p50 of TTFT", before.figures.ttft, cell.figures.ttft),
            ("p50 of TPOT", before.figures.tpot, cell.figures.tpot),
        ):
            if old and new:
                a, b = old.quantiles["p50"], new.quantiles["p50"]
                drift = b.value / a.value - 1 if a.value else 0.0
                apart = not _overlap(a, b)
                drifts.append(
                    Finding(
                        guard="anchor",
                        ok=abs(drift) <= MOST_DRIFT or not apart,
                        what=f"{what} of {cell.name}, asked again at the end: {drift:+.0%}",
                    )
                )
    return tuple(cell.model_copy(update={"findings": (*cell.findings, *drifts)}) for cell in cells)


def _overlap(a: Quantile, b: Quantile) -> bool:
    """Whether two samples cannot tell the quantiles apart; of samples too small for an interval, never."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return False
    return a.low <= b.high and b.low <= a.high
