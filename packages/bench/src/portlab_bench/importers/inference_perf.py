"""inference-perf's lifecycle reports, as inference-perf 0.7.0 writes them. Times are seconds.

    stage_N_lifecycle_metrics.json, summary_lifecycle_metrics.json    a summary of a stage, or of all
    per_request_lifecycle_metrics.json                                every request, with a time for each token

No file names the model, the version or the date. The definitions:

    time_to_first_token      first token - start, of answers with at least two
    time_per_output_token    (last token - first) / (tokens - 1): ours
    inter_token_latency      gaps between tokens, those of one event being zero: not ours, which are between events
    request_latency          end of the stream - start: later than the last token
    normalized_time_per_output_token   request_latency / tokens
    schedule_delay           start - scheduled, of all requests: our lag

The requests' token times give the events back: tokens of one event have the same time.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from portlab_bench import metrics
from portlab_bench.importers.reading import Imported, Loose, definitions, one_line, summary, validated
from portlab_bench.schema import Cell, CellFigures, Distribution, RequestRecord, ServeRun, TokenSource
from portlab_spec.errors import UserError

TOOL = "inference-perf"
KEYS = {"median": "p50"} | {name: name for name in ("p1", "p10", "p90", "p95", "p99")}
Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Latency(Loose):
    """Distributions by name; null of no values."""

    time_per_output_token: dict[str, float] | None = None
    time_to_first_token: dict[str, float] | None = None


class Throughput(Loose):
    """Rates over the whole time."""

    output_tokens_per_sec: Seconds
    input_tokens_per_sec: Seconds
    requests_per_sec: Seconds


class Tokens(Loose):
    """Tokens of all answered requests."""

    total: Seconds


class Successes(Loose):
    """What was answered."""

    count: Count
    latency: Latency
    throughput: Throughput
    prompt_tokens: Tokens
    output_tokens: Tokens
    client_fallback_requests: dict[str, int] = Field(default={})


class Failures(Loose):
    """What was not."""

    count: Count


class Load(Loose):
    """What was sent."""

    count: Count
    schedule_delay: dict[str, float] | None = None
    requested_rate: float | None = None
    concurrency: int | None = None


class Summary(Loose):
    """A summary of a stage or of all."""

    benchmark_time_seconds: Seconds
    load_summary: Load
    successes: Successes
    failures: Failures


class Computed(Loose):
    """Metrics of one request."""

    time_to_first_token: Seconds | None = None
    inter_token_latencies: list[Seconds] = Field(default=[])
    input_tokens: Count | None = None
    output_tokens: Count | None = None


class Response(Loose):
    """What the client kept of the answer."""

    output_tokens: Count = 0
    server_usage: dict[str, Any] | None = None
    output_token_times: list[float] = Field(default=[])


class Info(Loose):
    """Details of a request."""

    input_tokens: Count | None = None
    response_metrics: Response | None = None


class Error(Loose):
    """Why a request failed."""

    error_type: str
    error_msg: str


class Request(Loose):
    """One request."""

    start_time: float
    end_time: float
    info: Info | None = None
    computed_metrics: Computed | None = None
    error: Error | None = None


def recognises(document: Any) -> bool:
    """Whether a JSON value is a summary of this tool, or its list of requests."""
    if isinstance(document, dict):
        return {"benchmark_time_seconds", "load_summary", "successes", "failures"} <= document.keys()
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(entry, dict) and {"start_time", "end_time", "error"} <= entry.keys() for entry in document)
    )


def read(documents: Sequence[Any], path: Path, source: str) -> Imported:
    """A run of one cell, from a summary or from requests. Its model and date are empty: no file says them.

    Raises:
        UserError: not of the shape, no requests, requests without times of their tokens.
    """
    if len(documents) > 1:
        raise UserError("holds more than one report", where=str(path), fix="Import one each")
    (document,) = documents
    if isinstance(document, list):
        cell, records = _requests_cell(document, path)
    else:
        cell, records = _summary_cell(validated(Summary, document, str(path), TOOL), path), ()
    run = ServeRun(
        when="", url="", model="", server={}, workload={}, client={"tool": TOOL}, source=source, cells=(cell,)
    )
    return Imported(run, {cell.name: records} if records else {})


def _summary_cell(said: Summary, path: Path) -> Cell:
    load, good, failed = said.load_summary, said.successes.count, said.failures.count
    if not good + failed:
        raise UserError("holds no request", where=str(path), fix="Repeat the run")
    if good + failed != load.count:
        raise UserError(
            f"contradicts itself: {load.count} requests, {good} answered, {failed} failed",
            where=str(path),
            fix="Import the file as the tool wrote it",
        )
    closed = load.concurrency is not None and load.concurrency > 0
    rate = load.requested_rate if load.requested_rate and load.requested_rate > 0 and not closed else None
    name = f"concurrency {load.concurrency}" if closed else f"qps {rate:g}" if rate else "all stages"
    notes = [
        "time to first token without answers of a single token",
        "itl left out: it counts the tokens of one event as gaps of zero",
        "e2e and normalised left out: they end with the stream, not with the last token",
        "throughput over the time until the last request ended, failures included",
    ]
    if fallback := said.successes.client_fallback_requests.get("output"):
        notes.append(f"output tokens of {fallback} answers counted by the client's tokenizer")
    return Cell(
        name=name,
        mode="closed" if closed else "open",
        rate=rate,
        concurrency=load.concurrency if closed else None,
        arrivals="closed" if closed else "not in the file",
        seed=None,
        processes=None,
        figures=_figures(said, closed=closed, where=str(path)),
        findings=(definitions(notes),),
    )


def _figures(said: Summary, *, closed: bool, where: str) -> CellFigures | None:
    good, failed = said.successes, said.failures.count
    if not good.count:
        return None
    if not said.benchmark_time_seconds > 0:
        raise UserError("took no time", where=where, fix="Repeat the run")
    rates = good.throughput
    return CellFigures(
        duration=said.benchmark_time_seconds,
        requests=good.count + failed,
        outcomes={"ok": good.count} | ({"http_error": failed} if failed else {}),
        finishes={},
        prompt_tokens=round(good.prompt_tokens.total),
        output_tokens=round(good.output_tokens.total),
        tokens_from={"tool": good.count},
        ttft=_distribution(good.latency.time_to_first_token, where),
        tpot=_distribution(good.latency.time_per_output_token, where),
        itl=None,
        e2e=None,
        normalised=None,
        lag=None if closed else _distribution(said.load_summary.schedule_delay, where, signed=True),
        failed_after=None,
        request_throughput=rates.requests_per_sec,
        output_throughput=rates.output_tokens_per_sec,
        prompt_throughput=rates.input_tokens_per_sec,
        goodput=None,
        attainment=None,
        prefix_hits=None,
        client_load=None,
        concurrency=None,
    )


def _distribution(said: dict[str, float] | None, where: str, *, signed: bool = False) -> Distribution | None:
    if said is None:
        return None
    if "mean" not in said or (not signed and min(said.values()) < 0):
        raise UserError(
            "has a distribution without a mean, or with negative times", where=where, fix="Import it as it was written"
        )
    return summary(
        mean=said["mean"],
        quantiles={ours: said.get(theirs) for theirs, ours in KEYS.items()},
        scale=1.0,
        minimum=said.get("min"),
        maximum=said.get("max"),
    )


def _requests_cell(document: list[Any], path: Path) -> tuple[Cell, tuple[RequestRecord, ...]]:
    requests = [validated(Request, raw, f"{path}, request {i}", TOOL) for i, raw in enumerate(document, start=1)]
    requests.sort(key=lambda request: request.start_time)
    begin = requests[0].start_time
    records = tuple(_record(i, request, begin, f"{path}, request {i + 1}") for i, request in enumerate(requests))
    notes = ["all stages of the file together: it does not tell them apart"]
    cell = Cell(
        name="all requests",
        mode="open",
        arrivals="not in the file",
        seed=None,
        processes=None,
        figures=metrics.figures(records),
        findings=(definitions(notes),),
    )
    return cell, records


def _record(index: int, request: Request, begin: float, where: str) -> RequestRecord:
    sent, done = request.start_time - begin, request.end_time - begin
    if done < sent:
        raise UserError("ends before it starts", where=where, fix="Import the file as the tool wrote it")
    if request.error is not None:
        timeout = "timeout" in request.error.error_type.lower()
        http = request.error.error_type.startswith("HTTP Error")
        return RequestRecord(
            index=index,
            sent=sent,
            done=done,
            outcome="timeout" if timeout else "http_error" if http else "broken",
            error=one_line(request.error.error_msg) or request.error.error_type,
        )
    tokens, source = _tokens(request)
    return RequestRecord(
        index=index,
        sent=sent,
        chunks=_events(request, begin, where),
        done=done,
        prompt_tokens=_prompt_tokens(request),
        cached_tokens=_cached_tokens(request),
        output_tokens=tokens,
        tokens_from=source,
    )


def _events(request: Request, begin: float, where: str) -> tuple[float, ...]:
    """Times of the events: tokens of one event have the same."""
    response = request.info.response_metrics if request.info else None
    computed = request.computed_metrics
    if response and response.output_token_times:
        times = [time - begin for time in response.output_token_times]
    elif computed and computed.time_to_first_token is not None:
        first = request.start_time - begin + computed.time_to_first_token
        times = list(itertools.accumulate(computed.inter_token_latencies, initial=first))
    else:
        raise UserError(
            "has no times of its tokens",
            where=where,
            fix="Stream the answers, and keep info or computed_metrics in the report",
        )
    if times[0] <= request.start_time - begin or any(b < a for a, b in itertools.pairwise(times)):
        raise UserError("has its tokens in the wrong order", where=where, fix="Import the file as the tool wrote it")
    return tuple(time for time, _ in itertools.groupby(times))


def _usage(request: Request) -> dict[str, Any]:
    response = request.info.response_metrics if request.info else None
    return (response.server_usage or {}) if response else {}


def _prompt_tokens(request: Request) -> int | None:
    for key in ("prompt_tokens", "input_tokens"):
        if isinstance(count := _usage(request).get(key), int) and count >= 0:
            return count
    if request.info and request.info.input_tokens is not None:
        return request.info.input_tokens
    return request.computed_metrics.input_tokens if request.computed_metrics else None


def _cached_tokens(request: Request) -> int | None:
    details = _usage(request).get("prompt_tokens_details")
    count = details.get("cached_tokens") if isinstance(details, dict) else None
    return count if isinstance(count, int) and count >= 0 else None


def _tokens(request: Request) -> tuple[int, TokenSource]:
    response = request.info.response_metrics if request.info else None
    usage = _usage(request)
    for key in ("completion_tokens", "output_tokens"):
        if isinstance(count := usage.get(key), int) and count >= 0:
            return count, "usage"
    if request.computed_metrics and request.computed_metrics.output_tokens is not None:
        return request.computed_metrics.output_tokens, "tool"
    return (response.output_tokens if response else 0), "tool"
