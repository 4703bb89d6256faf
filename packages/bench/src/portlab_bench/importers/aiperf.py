"""aiperf's `profile_export_aiperf.json` (schema 1) and `profile_export.jsonl`, as aiperf 0.13.0 writes them.

Every value stands beside its unit. The summary has no single requests; the lines of the .jsonl are requests, with the
gaps between their events, so that all is made anew from them. The definitions:

    time_to_first_token   first event with content - start: ours
    request_latency       last event with content - start: our e2e; its percentiles may include failed requests
    inter_token_latency   of a request (request_latency - time_to_first_token) / (tokens - 1): our TPOT; with
                          --per-chunk-usage less all tokens of the first event instead of one
    inter_chunk_latency   gaps between events with content: our ITL
"""

import datetime
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from portlab_bench import metrics
from portlab_bench.importers.reading import Imported, Loose, definitions, one_line, summary, validated
from portlab_bench.schema import Cell, CellFigures, Distribution, Outcome, RequestRecord, ServeRun
from portlab_spec.errors import UserError

TOOL = "aiperf"
SCHEMA = "1."
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0}
QUANTILES = ("p1", "p10", "p50", "p90", "p95", "p99")
Nanoseconds = Annotated[int, Field(ge=0)]


class Value(Loose):
    """A metric of one request."""

    value: float | list[float]
    unit: str


class Metadata(Loose):
    """When and in which phase a request ran."""

    credit_issued_ns: Nanoseconds | None = None
    request_start_ns: Nanoseconds
    request_end_ns: Nanoseconds
    benchmark_phase: str
    was_cancelled: bool = False


class Line(Loose):
    """One request of `profile_export.jsonl`."""

    metadata: Metadata
    metrics: dict[str, Value]
    error: dict[str, Any] | None = None


class Metric(Loose):
    """A metric of the summary."""

    unit: str
    avg: float | None = None
    min: float | None = None
    max: float | None = None
    count: int | None = None
    p1: float | None = None
    p10: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class Summary(Loose):
    """`profile_export_aiperf.json`."""

    schema_version: str
    aiperf_version: str
    input_config: dict[str, Any]
    run_info: dict[str, Any] | None = None
    was_cancelled: bool | None = None
    is_complete: bool | None = None
    start_time: str
    request_count: Metric | None = None
    error_request_count: Metric | None = None
    benchmark_duration: Metric | None = None
    request_throughput: Metric | None = None
    output_token_throughput: Metric | None = None
    total_isl: Metric | None = None
    total_osl: Metric | None = None
    time_to_first_token: Metric | None = None
    request_latency: Metric | None = None
    inter_token_latency: Metric | None = None
    inter_chunk_latency: Metric | None = None


def recognises(document: Any) -> bool:
    """Whether a JSON value is a summary of this tool, or one of its requests."""
    if not isinstance(document, dict):
        return False
    if "aiperf_version" in document:
        return True
    metadata = document.get("metadata")
    return isinstance(metadata, dict) and "benchmark_phase" in metadata and "metrics" in document


def read(documents: Sequence[Any], path: Path, source: str) -> Imported:
    """A run of one cell, from a summary or from requests.

    Raises:
        UserError: another schema, not of the shape, no requests, an unknown unit.
    """
    if any("aiperf_version" in document for document in documents):
        return _summary_run(documents, path, source)
    return _requests_run(documents, path, source)


def _requests_run(documents: Sequence[Any], path: Path, source: str) -> Imported:
    where = str(path)
    lines = [validated(Line, raw, f"{path}, line {i}", TOOL) for i, raw in enumerate(documents, start=1)]
    lines.sort(key=lambda line: line.metadata.request_start_ns)
    begin = lines[0].metadata.request_start_ns
    records = tuple(_record(i, line, begin, where) for i, line in enumerate(lines))
    notes = ["output tokens counted by the server or, if it does not, by tokenising the text again"]
    cell = Cell(
        name="all requests",
        mode="open",
        arrivals="not in the file",
        seed=None,
        processes=None,
        figures=metrics.figures(records),
        findings=(definitions(notes),),
    )
    run = ServeRun(
        when=datetime.datetime.fromtimestamp(begin / 1e9, datetime.UTC).isoformat(timespec="seconds"),
        url="",
        model="",
        server={},
        workload={},
        client={"tool": TOOL},
        source=source,
        cells=(cell,),
    )
    return Imported(run, {cell.name: records})


def _record(index: int, line: Line, begin: int, where: str) -> RequestRecord:
    at = f"{where}, request {index + 1}"
    meta = line.metadata
    sent, done = (meta.request_start_ns - begin) / 1e9, (meta.request_end_ns - begin) / 1e9
    first = _seconds(line.metrics, "time_to_first_token", at)
    gaps = _seconds(line.metrics, "inter_chunk_latency", at)
    failed = line.error is not None or meta.was_cancelled
    chunks: tuple[float, ...] = ()
    if not failed:
        if not first:
            raise UserError("has no time_to_first_token: it was not streamed", where=at, fix="Pass --streaming")
        if len(first) != 1 or not first[0] > 0 or min(gaps, default=0) < 0 or done < sent:
            raise UserError("has a time that is not positive", where=at, fix="Import the file as the tool wrote it")
        chunks = tuple(itertools.accumulate(gaps, initial=sent + first[0]))
    return RequestRecord(
        index=index,
        sent=sent,
        chunks=chunks,
        done=done,
        prompt_tokens=_tokens(line.metrics, "input_sequence_length", at),
        output_tokens=0 if failed else _tokens(line.metrics, "output_sequence_length", at) or 0,
        tokens_from="tool",
        outcome=_outcome(line) if failed else "ok",
        error=one_line(str((line.error or {}).get("message") or "cancelled")) if failed else "",
        warm_up=meta.benchmark_phase.lower() == "warmup",
    )


def _outcome(line: Line) -> Outcome:
    if line.metadata.was_cancelled:
        return "cancelled"
    error = line.error or {}
    if "timeout" in str(error.get("type", "")).lower():
        return "timeout"
    return "http_error" if isinstance(error.get("code"), int) else "broken"


def _seconds(values: Mapping[str, Value], name: str, where: str) -> list[float]:
    if name not in values:
        return []
    value, scale = values[name].value, _scale(values[name].unit, where)
    return [one * scale for one in (value if isinstance(value, list) else [value])]


def _scale(unit: str, where: str) -> float:
    try:
        return SECONDS[unit]
    except KeyError:
        raise UserError(
            f"has a time in {unit!r}", where=where, fix=f"Units that are read: {', '.join(SECONDS)}"
        ) from None


def _tokens(values: Mapping[str, Value], name: str, where: str) -> int | None:
    if name not in values:
        return None
    value = values[name].value
    if isinstance(value, list) or value < 0 or value != int(value):
        raise UserError(f"{name} is {value!r}, not a count", where=where, fix="Import the file as the tool wrote it")
    return int(value)


def _summary_run(documents: Sequence[Any], path: Path, source: str) -> Imported:
    where = str(path)
    if len(documents) > 1:
        raise UserError("holds more than one summary", where=where, fix="Import one each")
    said = validated(Summary, documents[0], where, TOOL)
    if not said.schema_version.startswith(SCHEMA):
        raise UserError(f"is of schema {said.schema_version}; {SCHEMA}x is read", where=where, fix="Use aiperf 0.13")
    if said.was_cancelled or said.is_complete is False:
        raise UserError("the run was not finished", where=where, fix="Repeat the run")
    try:
        when = datetime.datetime.fromisoformat(said.start_time).isoformat(timespec="seconds")
    except ValueError:
        raise UserError(
            f"its start_time is {said.start_time!r}", where=where, fix="Import the file as the tool wrote it"
        ) from None
    notes = ["single requests are in profile_export.jsonl: import that for intervals and normalised latency"]
    figures = _figures(said, where, notes)
    config = said.input_config
    name, mode, rate, concurrency = _load(config)
    endpoint = config.get("endpoint")
    urls = endpoint.get("urls") if isinstance(endpoint, dict) else None
    cell = Cell(
        name=name,
        mode="open" if mode == "open" else "closed",
        rate=rate,
        concurrency=concurrency,
        arrivals="not in the file" if mode == "open" else "closed",
        seed=(said.run_info or {}).get("random_seed"),
        processes=None,
        figures=figures,
        findings=(definitions(notes),),
    )
    run = ServeRun(
        when=when,
        url=str(urls[0]) if isinstance(urls, list) and urls else "",
        model=_model(config.get("models")),
        server={},
        workload={},
        client={"tool": f"{TOOL} {said.aiperf_version}"},
        source=source,
        cells=(cell,),
    )
    return Imported(run, {})


def _figures(said: Summary, where: str, notes: list[str]) -> CellFigures | None:
    good, failed = _average(said.request_count), _average(said.error_request_count) or 0.0
    if not (good or 0) + failed:
        raise UserError("holds no request", where=where, fix="Repeat the run")
    if not good:
        return None
    needed = {
        name: getattr(said, name)
        for name in ("benchmark_duration", "request_throughput", "output_token_throughput", "total_osl")
    }
    if missing := [name for name, metric in needed.items() if _average(metric) is None]:
        raise UserError(f"has no {', '.join(missing)}", where=where, fix="Import the file as the tool wrote it")
    duration = said.benchmark_duration
    seconds = 0.0 if duration is None else (duration.avg or 0.0) * _scale(duration.unit, where)
    if not seconds > 0:
        raise UserError("took no time", where=where, fix="Repeat the run")
    for name, unit in (("request_throughput", "requests/sec"), ("output_token_throughput", "tokens/sec")):
        if needed[name].unit != unit:
            raise UserError(f"{name} is in {needed[name].unit!r}, not {unit}", where=where, fix="Use aiperf 0.13")
    if failed:
        notes.append("e2e is left out: with failures, its percentiles may include them")
    prompt_tokens = _average(said.total_isl)
    return CellFigures(
        duration=seconds,
        requests=round(good + failed),
        outcomes={"ok": round(good)} | ({"http_error": round(failed)} if failed else {}),
        finishes={},
        prompt_tokens=None if prompt_tokens is None else round(prompt_tokens),
        output_tokens=round(needed["total_osl"].avg),
        tokens_from={"tool": round(good)},
        ttft=_distribution(said.time_to_first_token, where),
        tpot=_distribution(said.inter_token_latency, where),
        itl=_distribution(said.inter_chunk_latency, where),
        e2e=None if failed else _distribution(said.request_latency, where),
        normalised=None,
        lag=None,
        failed_after=None,
        request_throughput=needed["request_throughput"].avg,
        output_throughput=needed["output_token_throughput"].avg,
        prompt_throughput=None if prompt_tokens is None else prompt_tokens / seconds,
        goodput=None,
        attainment=None,
        prefix_hits=None,
        client_load=None,
        concurrency=None,
    )


def _average(metric: Metric | None) -> float | None:
    return None if metric is None else metric.avg


def _distribution(metric: Metric | None, where: str) -> Distribution | None:
    if metric is None or metric.avg is None:
        return None
    values = {name: getattr(metric, name) for name in QUANTILES}
    if any(value is not None and value < 0 for value in (metric.avg, metric.min, *values.values())):
        raise UserError("has a negative time", where=where, fix="Import the file as the tool wrote it")
    return summary(
        mean=metric.avg,
        quantiles=values,
        scale=_scale(metric.unit, where),
        count=metric.count,
        minimum=metric.min,
        maximum=metric.max,
    )


def _load(config: Mapping[str, Any]) -> tuple[str, str, float | None, int | None]:
    """Name, mode, rate and concurrency of the profiled phase, where the configuration gives them."""
    phases = config.get("phases")
    entries = phases if isinstance(phases, list) else list(phases.values()) if isinstance(phases, dict) else []
    for phase in reversed([entry for entry in entries if isinstance(entry, dict)]):
        rate, concurrency = phase.get("rate"), phase.get("concurrency")
        if isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0:
            return f"qps {rate:g}", "open", float(rate), concurrency if isinstance(concurrency, int) else None
        if isinstance(concurrency, int) and concurrency > 0:
            return f"concurrency {concurrency}", "closed", None, concurrency
    return "all requests", "open", None, None


def _model(models: Any) -> str:
    """The only model's name, whatever form the configuration gives it in; empty if there are several."""
    if isinstance(models, dict):
        models = models.get("items", [])
    entries = models if isinstance(models, list) else [models]
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in entries]
    return names[0] if len(names) == 1 and isinstance(names[0], str) else ""
