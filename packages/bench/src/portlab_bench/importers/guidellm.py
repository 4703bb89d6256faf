"""guidellm's `benchmarks.json`, report version 2, as guidellm 0.8.1 writes it.

Latency of requests is in seconds, other times of summaries in milliseconds; time stamps are Unix seconds. It keeps of
each request when it began, its first and its last event with tokens, and when its stream ended. Its definitions:

    time_to_first_token_ms    first event with tokens - start: ours
    inter_token_latency_ms    of a request (last - first) / (tokens - 1): our TPOT; in summaries weighted by tokens
    time_per_output_token_ms  (last - start) / tokens: our normalised latency; in summaries weighted by tokens
    request_latency           end of the stream - start: later than the last token

So where all requests are kept (`sample_size` null, the default) everything but gaps between events is made anew from
them, and where they are not, little is left.
"""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from portlab_bench import metrics
from portlab_bench.importers.reading import (
    Imported,
    Loose,
    definitions,
    one_line,
    require_same_mean,
    summary,
    unique,
    validated,
)
from portlab_bench.schema import Cell, CellFigures, Distribution, Finding, Mode, Outcome, RequestRecord, ServeRun
from portlab_spec.errors import UserError

TOOL = "guidellm"
REPORT_VERSION = 2
MS = 1e-3
# Cut off by the tool itself at the end of its time. Of a server that falls behind these are the slow ones, so that what
# is left of them looks better than it was.
MOST_CUT_OFF = 0.1
QUANTILES = {"p01": "p1", "p10": "p10", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
Stamp = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Timings(Loose):
    """When what happened to a request."""

    targeted_start: Stamp | None = None
    request_start: Stamp | None = None
    first_token_iteration: Stamp | None = None
    last_token_iteration: Stamp | None = None
    token_iterations: Count = 0
    request_end: Stamp | None = None


class Info(Loose):
    """State of a request."""

    status: str
    timings: Timings
    error: str | None = None


class Usage(Loose):
    """Tokens as the server counts them."""

    total_tokens: Count | None = None
    cached_tokens: Count | None = None


class Request(Loose):
    """One request."""

    info: Info
    input_metrics: Usage
    output_metrics: Usage


class Requests(Loose):
    """All that were kept."""

    successful: list[Request]
    incomplete: list[Request]
    errored: list[Request]


class Summary(Loose):
    """A distribution; of no values its numbers are zeros."""

    mean: float
    min: float
    max: float
    count: Count
    percentiles: dict[str, float]


class ByStatus(Loose):
    """A distribution of the requests of each end."""

    successful: Summary


class Totals(Loose):
    """Requests by their end."""

    successful: Count
    incomplete: Count
    errored: Count


class Metrics(Loose):
    """What is taken from the summaries."""

    request_totals: Totals
    requests_per_second: ByStatus
    request_concurrency: ByStatus
    prompt_token_count: ByStatus
    output_token_count: ByStatus
    time_to_first_token_ms: ByStatus
    output_tokens_per_second: ByStatus


class Strategy(Loose):
    """How requests were sent."""

    type_: Literal["synchronous", "concurrent", "throughput", "constant", "poisson", "trace"]
    rate: Annotated[float, Field(gt=0)] | None = None
    streams: Annotated[int, Field(gt=0)] | None = None
    max_concurrency: Annotated[int, Field(gt=0)] | None = None
    random_seed: int | None = None


class Config(Loose):
    """What a benchmark was told."""

    strategy: Strategy
    sample_size: int | None = None
    backend: dict[str, Any]


class Scheduled(Loose):
    """Bounds of the measurement, without warm-up and cool-down."""

    measure_start_time: Stamp
    measure_end_time: Stamp


class Benchmark(Loose):
    """One load."""

    type_: Literal["generative_benchmark"]
    config: Config
    scheduler_metrics: Scheduled
    metrics: Metrics
    requests: Requests


class Metadata(Loose):
    """Versions."""

    version: int
    guidellm_version: str
    platform: str
    python_version: str


class Report(Loose):
    """The file."""

    metadata: Metadata
    benchmarks: list[Benchmark]


def recognises(document: Any) -> bool:
    """Whether a JSON value is a report of this tool."""
    if not isinstance(document, dict) or "benchmarks" not in document:
        return False
    metadata = document.get("metadata")
    return isinstance(metadata, dict) and "guidellm_version" in metadata


def read(documents: Sequence[Any], path: Path, source: str) -> Imported:
    """A run with a cell for each benchmark.

    Raises:
        UserError: another version, not of the shape, no benchmark or no request, at odds with itself.
    """
    where = str(path)
    if len(documents) > 1:
        raise UserError("holds more than one report", where=where, fix="Import one each")
    version = documents[0]["metadata"].get("version")
    if version != REPORT_VERSION:
        raise UserError(
            f"is of report version {version!r}; {REPORT_VERSION} is read", where=where, fix="Use guidellm 0.8"
        )
    report = validated(Report, documents[0], where, TOOL)
    if not report.benchmarks:
        raise UserError("holds no benchmark", where=where, fix="Repeat the run")
    cells: list[Cell] = []
    for number, benchmark in enumerate(report.benchmarks, start=1):
        cells.append(_cell(benchmark, f"{path}, benchmark {number}", [cell.name for cell in cells]))
    first = report.benchmarks[0]
    backend = first.config.backend
    began = datetime.datetime.fromtimestamp(first.scheduler_metrics.measure_start_time, datetime.UTC)
    run = ServeRun(
        when=began.isoformat(timespec="seconds"),
        url=str(backend.get("target") or ""),
        model=str(backend.get("model") or ""),
        server={},
        workload={"backend": backend.get("kind")},
        client={"tool": f"{TOOL} {report.metadata.guidellm_version}", "system": report.metadata.platform},
        source=source,
        cells=tuple(cells),
    )
    return Imported(run, {})


def _cell(benchmark: Benchmark, where: str, taken: Sequence[str]) -> Cell:
    totals = benchmark.metrics.request_totals
    if not totals.successful + totals.errored + totals.incomplete:
        raise UserError("holds no request", where=where, fix="Repeat the run")
    strategy = benchmark.config.strategy
    mode, name = _load(strategy)
    kept = benchmark.requests
    whole = benchmark.config.sample_size is None and len(kept.successful) >= totals.successful > 0
    notes = ["gaps between events (itl) are not kept"]
    figures = _from_requests(benchmark, where) if whole else _from_summaries(benchmark, notes)
    findings = [definitions(notes)]
    if totals.incomplete:
        share = totals.incomplete / (totals.successful + totals.errored + totals.incomplete)
        what = f"{totals.incomplete} requests ({share:.0%}) were under way when the tool ended; they are in no figure"
        findings.append(Finding(guard="cut off", ok=share <= MOST_CUT_OFF, what=what))
    return Cell(
        name=unique(name, taken),
        mode=mode,
        rate=strategy.rate,
        # In an open loop max_concurrency is the client's own room, thousands by default.
        concurrency=None if mode == "open" else strategy.streams or _at_once(strategy),
        arrivals=strategy.type_ if mode == "open" else "closed",
        seed=strategy.random_seed,
        processes=None,
        figures=figures,
        findings=tuple(findings),
    )


def _load(strategy: Strategy) -> tuple[Mode, str]:
    match strategy.type_:
        case "synchronous":
            return "closed", "concurrency 1"
        case "concurrent":
            return "closed", f"concurrency {strategy.streams}"
        case "throughput":
            return (
                "closed",
                "all at once" if not strategy.max_concurrency else f"concurrency {strategy.max_concurrency}",
            )
        case "trace":
            return "open", "trace"
        case _:
            return "open", f"{strategy.type_} qps {strategy.rate:g}" if strategy.rate else strategy.type_


def _at_once(strategy: Strategy) -> int | None:
    return 1 if strategy.type_ == "synchronous" else strategy.max_concurrency


def _from_requests(benchmark: Benchmark, where: str) -> CellFigures | None:
    records = _records(benchmark, where)
    figures = metrics.figures(records)
    if figures is None:
        return None
    window = benchmark.scheduler_metrics
    answered = [r for r in records if r.outcome == "ok" and not r.warm_up]
    if len(answered) == benchmark.metrics.request_totals.successful and window.measure_start_time:
        said = benchmark.metrics.time_to_first_token_ms.successful
        if said.count == len(answered):
            require_same_mean("ttft", said.mean * MS, figures.ttft, where)
    # First and last event alone are known: what lies between them is no gap.
    return figures.model_copy(update={"itl": None})


def _records(benchmark: Benchmark, where: str) -> list[RequestRecord]:
    """Requests with two events each, the first and the last with tokens; those before the measurement as warm-up."""
    start, end = benchmark.scheduler_metrics.measure_start_time, benchmark.scheduler_metrics.measure_end_time
    scheduled = benchmark.config.strategy.type_ in ("constant", "poisson", "trace")
    groups = benchmark.requests
    records: list[RequestRecord] = []
    outcomes: tuple[tuple[Outcome, list[Request]], ...] = (
        ("ok", groups.successful),
        ("server_error", groups.errored),
        ("cancelled", groups.incomplete),
    )
    for outcome, requests in outcomes:
        for request in requests:
            times = request.info.timings
            if times.request_start is None or (times.request_start > end):
                continue
            first, last = times.first_token_iteration, times.last_token_iteration
            ok = outcome == "ok"
            if ok and (first is None or last is None):
                raise UserError(
                    "a request has no times of its tokens: it was not streamed", where=where, fix="Stream the answers"
                )
            if ok and first is not None and last is not None and not times.request_start < first <= last:
                raise UserError(
                    "a request has its tokens in the wrong order, or before it was sent", where=where, fix="Repeat"
                )
            usage = request.output_metrics.total_tokens
            tokens = times.token_iterations if usage is None else usage
            chunks = () if not ok or first is None or last is None else (first, last) if tokens > 1 else (first,)
            records.append(
                RequestRecord(
                    index=len(records),
                    scheduled=None if not scheduled or times.targeted_start is None else times.targeted_start - start,
                    sent=times.request_start - start,
                    chunks=tuple(stamp - start for stamp in chunks),
                    done=None if times.request_end is None else times.request_end - start,
                    prompt_tokens=request.input_metrics.total_tokens,
                    cached_tokens=request.input_metrics.cached_tokens,
                    output_tokens=tokens if ok else 0,
                    tokens_from="chunks" if usage is None else "usage",
                    outcome=outcome,
                    error=one_line(request.info.error or ""),
                    # Not counted: what had ended before the measurement, and what the tool itself cut off.
                    warm_up=outcome == "cancelled" or (times.request_end or last or times.request_start) < start,
                )
            )
    return records


def _from_summaries(benchmark: Benchmark, notes: list[str]) -> CellFigures | None:
    m, window = benchmark.metrics, benchmark.scheduler_metrics
    totals = m.request_totals
    notes += [
        "its requests are not all kept, so that tpot and normalised, weighted by tokens in its summaries, "
        "and e2e, which ends with the stream, are not comparable",
        "throughput over its own window",
    ]
    duration = window.measure_end_time - window.measure_start_time
    if not totals.successful or duration <= 0:
        return None
    outcomes = {"ok": totals.successful, "server_error": totals.errored}
    return CellFigures(
        duration=duration,
        requests=sum(outcomes.values()),
        outcomes={name: count for name, count in outcomes.items() if count},
        finishes={},
        prompt_tokens=round(m.prompt_token_count.successful.mean * m.prompt_token_count.successful.count),
        output_tokens=round(m.output_token_count.successful.mean * m.output_token_count.successful.count),
        tokens_from={"tool": totals.successful},
        ttft=_distribution(m.time_to_first_token_ms.successful, MS),
        tpot=None,
        itl=None,
        e2e=None,
        normalised=None,
        lag=None,
        failed_after=None,
        request_throughput=m.requests_per_second.successful.mean,
        output_throughput=m.output_tokens_per_second.successful.mean,
        prompt_throughput=None,
        goodput=None,
        attainment=None,
        prefix_hits=None,
        client_load=None,
        concurrency=m.request_concurrency.successful.mean,
    )


def _distribution(said: Summary, scale: float) -> Distribution | None:
    if not said.count or min(said.min, said.mean) <= 0:
        return None
    quantiles = {ours: said.percentiles.get(theirs) for theirs, ours in QUANTILES.items()}
    return summary(
        mean=said.mean, quantiles=quantiles, scale=scale, count=said.count, minimum=said.min, maximum=said.max
    )
