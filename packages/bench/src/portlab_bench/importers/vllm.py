"""`vllm bench serve --save-result [--save-detailed] [--append-result]`, as `vllm/benchmarks/serve.py` 0.32.0 writes it.

The file does not name vLLM's version. Times in arrays are seconds, in summaries milliseconds. Its definitions:

    ttft          first event with choices - start, whether it holds text or not
    itls          gaps between such events, the last one with a finish reason included
    e2el          last such event - start
    tpot          (e2el - ttft) / (output tokens - 1), of answers with at least two
    start         when the request was begun, behind the client's own limit of concurrency
    output_lens   the server's usage, else the answer's text tokenised again

which are ours, but that an event without tokens may count as the first or last. `duration`, behind all throughputs,
ends when the last request has, failures included; ours ends with the last token.
"""

import datetime
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from portlab_bench import metrics
from portlab_bench.importers.reading import (
    Imported,
    Loose,
    definitions,
    one_line,
    require_same_lengths,
    require_same_mean,
    summary,
    unique,
    validated,
)
from portlab_bench.schema import Cell, CellFigures, Distribution, Finding, Mode, Outcome, RequestRecord, ServeRun
from portlab_spec.errors import UserError

TOOL = "vllm bench serve"
MARKS = {"endpoint_type", "model_id", "tokenizer_id", "num_prompts", "request_rate", "duration"}
MS = 1e-3
# Waiting for the client's own limit hides in no latency: above this share of the latency the cell is not an open loop.
QUEUED_SHARE = 0.01
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Result(Loose):
    """One result; keys as vLLM names them."""

    date: str
    backend: str
    model_id: str
    tokenizer_id: str | None
    label: str | None = None
    num_prompts: Annotated[int, Field(gt=0)]
    request_rate: Positive | Literal["inf"]
    burstiness: Positive = 1.0
    max_concurrency: Annotated[int, Field(gt=0)] | None = None
    ramp_up_strategy: str | None = None
    duration: Positive
    completed: Count
    failed: Count | None = None
    total_input_tokens: Count
    total_output_tokens: Count
    request_throughput: Seconds
    output_throughput: Seconds
    input_lens: list[Count] | None = None
    output_lens: list[Count] | None = None
    ttfts: list[Seconds] | None = None
    itls: list[list[Seconds]] | None = None
    latencies: list[Seconds] | None = None
    start_times: list[float] | None = None
    queue_times: list[Seconds] | None = None
    errors: list[str] | None = None

    @property
    def detailed(self) -> bool:
        """Whether single requests can be rebuilt."""
        arrays = (self.input_lens, self.output_lens, self.ttfts, self.itls, self.start_times, self.errors)
        return all(array is not None for array in arrays)


def recognises(document: Any) -> bool:
    """Whether a JSON value is a result of this tool."""
    return isinstance(document, dict) and document.keys() >= MARKS


def read(documents: Sequence[Any], path: Path, source: str) -> Imported:
    """A run of one cell for each result in the file.

    Raises:
        UserError: not of the shape, no requests, or results of different models.
    """
    cells: list[Cell] = []
    records: dict[str, tuple[RequestRecord, ...]] = {}
    results = []
    for number, document in enumerate(documents):
        where = str(path) if len(documents) == 1 else f"{path}, result {number + 1}"
        result = validated(Result, document, where, TOOL)
        results.append(result)
        cell, requests = _cell(result, document, where, [c.name for c in cells])
        cells.append(cell)
        if requests:
            records[cell.name] = requests
    if len(models := {result.model_id for result in results}) > 1:
        raise UserError(
            f"holds results of several models ({', '.join(sorted(models))})", where=str(path), fix="Import one each"
        )
    first = results[0]
    run = ServeRun(
        when=_when(first.date, str(path)),
        url="",
        model=first.model_id,
        server={},
        workload={"backend": first.backend, "tokenizer": first.tokenizer_id, "prompts": first.num_prompts},
        client={"tool": TOOL, "metadata": _metadata(documents[0])},
        source=source,
        cells=tuple(cells),
    )
    return Imported(run, records)


def _cell(
    result: Result, raw: Mapping[str, Any], where: str, taken: Sequence[str]
) -> tuple[Cell, tuple[RequestRecord, ...]]:
    if result.completed + (result.failed or 0) == 0:
        raise UserError("holds no request", where=where, fix="Repeat the run")
    rate = None if result.request_rate == "inf" else float(result.request_rate)
    mode: Mode = "open" if rate is not None else "closed"
    limit = result.max_concurrency
    name = f"qps {rate:g}" if rate is not None else f"concurrency {limit or result.num_prompts}"
    if rate is not None and limit:
        name += f", at most {limit} at once"
    notes = [
        "events without tokens may count as first or last",
        "output tokens counted by the server or, if it does not, by tokenising the text again",
    ]
    requests = _requests(result, where) if result.detailed else ()
    figures = metrics.figures(requests) if requests else _from_summary(result, raw, where, notes)
    if requests:
        _check(result, raw, figures, requests, where)
    if raw.get("request_goodput") is not None:
        notes.append("goodput left out: the file does not say for which objectives")
    findings = [definitions(notes)]
    if rate is not None and limit and result.queue_times and result.latencies:
        findings.append(_queue(result.queue_times, result.latencies))
    cell = Cell(
        name=unique(name, taken),
        mode=mode,
        rate=rate,
        concurrency=limit if limit or mode == "open" else result.num_prompts,
        arrivals=_arrivals(result, rate),
        seed=None,
        processes=None,
        figures=figures,
        findings=tuple(findings),
    )
    return cell, requests


def _requests(result: Result, where: str) -> tuple[RequestRecord, ...]:
    arrays = {
        name: array
        for name in ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors")
        if (array := getattr(result, name)) is not None
    }
    n = require_same_lengths(arrays, where)
    if not n:
        raise UserError("holds no request", where=where, fix="Repeat the run")
    begin = min(arrays["start_times"])
    queued = result.queue_times if result.request_rate != "inf" else None
    records = []
    for i in range(n):
        sent = arrays["start_times"][i] - begin
        error, outputs, first = arrays["errors"][i], arrays["output_lens"][i], arrays["ttfts"][i]
        good = not error and (outputs > 0 or first > 0)
        if good and not first > 0:
            raise UserError(
                f"request {i + 1} was answered in no time (ttft {first})", where=where, fix="Repeat the run"
            )
        records.append(
            RequestRecord(
                index=i,
                scheduled=None if queued is None else sent - queued[i],
                sent=sent,
                chunks=tuple(itertools.accumulate(arrays["itls"][i], initial=sent + first)) if good else (),
                done=sent + first + sum(arrays["itls"][i]) if good else None,
                prompt_tokens=arrays["input_lens"][i],
                output_tokens=outputs if good else 0,
                tokens_from="tool",
                outcome="ok" if good else _outcome(error),
                error="" if good else one_line(error) or "no answer, and no reason given",
            )
        )
    return tuple(records)


def _outcome(error: str) -> Outcome:
    if "Traceback" in error:
        return "timeout" if "Timeout" in one_line(error) else "broken"
    return "malformed" if error.startswith(("Never received", "Stream ended")) else "http_error"


def _check(
    result: Result, raw: Mapping[str, Any], figures: CellFigures | None, records: Sequence[RequestRecord], where: str
) -> None:
    """Hold the rebuilt requests against the summary that vLLM made of the same ones."""
    answered = figures.outcomes.get("ok", 0) if figures else 0
    if answered != result.completed:
        raise UserError(
            f"contradicts itself: {result.completed} requests completed, {answered} of its requests have no error",
            where=where,
            fix="Import the file as the tool wrote it",
        )
    if figures is None:
        return
    if figures.output_tokens != result.total_output_tokens:
        raise UserError(
            f"contradicts itself: {result.total_output_tokens} output tokens in all, "
            f"{figures.output_tokens} in its requests",
            where=where,
            fix="Import the file as the tool wrote it",
        )
    # vLLM counts a TPOT of zero where all tokens of an answer came in one event; we count none.
    answered_long = [r for r in records if r.outcome == "ok" and r.output_tokens > 1 and r.chunks]
    theirs = metrics.distribution((r.chunks[-1] - r.chunks[0]) / (r.output_tokens - 1) for r in answered_long)
    for name, ours in (_by_name(figures) | {"tpot": theirs}).items():
        said = _number(raw, f"mean_{name}_ms", where)
        require_same_mean(name, None if said is None else said * MS, ours, where)


def _by_name(figures: CellFigures) -> dict[str, Distribution | None]:
    return {"ttft": figures.ttft, "tpot": figures.tpot, "itl": figures.itl, "e2el": figures.e2e}


def _from_summary(result: Result, raw: Mapping[str, Any], where: str, notes: list[str]) -> CellFigures | None:
    """What a result without arrays gives."""
    notes.append("throughput over the time until the last request ended, failures included")
    if not result.completed:
        return None
    latencies = result.latencies if not result.failed else None  # of failures the array holds zeros
    if latencies is not None and len(latencies) != result.completed:
        latencies = None
    open_loop = result.request_rate != "inf"
    outcomes = {"ok": result.completed} | ({"http_error": result.failed} if result.failed else {})
    if result.failed:
        notes.append("failures are counted as http_error: without --save-detailed their kind is not in the file")
    missing = [name for name in ("ttft", "tpot", "itl", "e2el") if f"mean_{name}_ms" not in raw]
    if missing and not (missing == ["e2el"] and latencies):
        notes.append(f"not in the file: {', '.join(missing)} (see --percentile-metrics)")
    return CellFigures(
        duration=result.duration,
        requests=result.completed + (result.failed or 0),
        outcomes=outcomes,
        finishes={},
        prompt_tokens=result.total_input_tokens,
        output_tokens=result.total_output_tokens,
        tokens_from={"tool": result.completed},
        ttft=_summary(raw, "ttft", result.completed, where),
        tpot=_summary(raw, "tpot", None, where),
        itl=_summary(raw, "itl", None, where),
        e2e=metrics.distribution(latencies) if latencies else _summary(raw, "e2el", result.completed, where),
        normalised=None,
        lag=metrics.distribution(result.queue_times) if open_loop and result.queue_times else None,
        failed_after=None,
        request_throughput=result.request_throughput,
        output_throughput=result.output_throughput,
        prompt_throughput=result.total_input_tokens / result.duration,
        goodput=None,
        attainment=None,
        prefix_hits=None,
        client_load=None,
        concurrency=sum(latencies) / result.duration if latencies else None,
    )


def _summary(raw: Mapping[str, Any], name: str, count: int | None, where: str) -> Distribution | None:
    percentiles = {
        key[: -len(f"_{name}_ms")]: _number(raw, key, where)
        for key in raw
        if re.fullmatch(rf"p[0-9.]+_{re.escape(name)}_ms", key)
    }
    mean = _number(raw, f"mean_{name}_ms", where)
    median = _number(raw, f"median_{name}_ms", where)
    return summary(mean=mean, quantiles={"p50": median} | percentiles, scale=MS, count=count)


def _number(raw: Mapping[str, Any], key: str, where: str) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UserError(f"{key} is {value!r}, not a time", where=where, fix="Import the file as the tool wrote it")
    return float(value)


def _queue(queue_times: Sequence[float], latencies: Sequence[float]) -> Finding:
    share = sum(queue_times) / max(sum(latencies), 1e-9)
    return Finding(
        guard="client_queue",
        ok=share <= QUEUED_SHARE,
        what=f"requests waited in the client for {share:.1%} of their latency, up to {max(queue_times):.3g} s, "
        "which no latency of the file includes",
    )


def _arrivals(result: Result, rate: float | None) -> str:
    if result.ramp_up_strategy:
        return f"{result.ramp_up_strategy} ramp"
    if rate is None:
        return "closed" if result.max_concurrency else "all at once"
    return "poisson" if result.burstiness == 1 else f"gamma {result.burstiness:g}"


def _when(date: str, where: str) -> str:
    try:
        return datetime.datetime.strptime(date, "%Y%m%d-%H%M%S").isoformat()
    except ValueError:
        raise UserError(
            f"its date is {date!r}, not YYYYMMDD-HHMMSS", where=where, fix="Import the file as the tool wrote it"
        ) from None


def _metadata(raw: Mapping[str, Any]) -> dict[str, str]:
    """What was given by `--metadata KEY=VALUE`: texts under keys that are none of the tool's own."""
    own = set(Result.model_fields) | {"endpoint_type", "generated_texts"}
    return {key: value for key, value in raw.items() if key not in own and isinstance(value, str)}
