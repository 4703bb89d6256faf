"""`portlab-bench serve` and `portlab-bench mock`."""

import asyncio
import datetime
import math
import os
import platform
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from portlab_bench import metrics, roofline
from portlab_bench.load.arrivals import Arrivals, read_trace
from portlab_bench.load.client import Target
from portlab_bench.load.server import Server
from portlab_bench.load.workloads import Name, workload
from portlab_bench.machines import Precision
from portlab_bench.mock import Behaviour, MockServer
from portlab_bench.schema import Cell, ServeRun
from portlab_bench.sweep import Load, Sweep
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.files import write_json
from portlab_spec.report import versions

Numbers = Annotated[str, tyro.conf.arg(metavar="N,N,...")]


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Put a load on a server and measure it: one cell for each rate or concurrency."""

    url: str
    """Address of an OpenAI-compatible server, http://host:port."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder to make: serve.json, and each cell's requests."""
    model: str | None = None
    """Name of the model; left out, the only one that the server has."""
    workload: Name = "tool-calls"
    """What is asked."""
    qps: Numbers | None = None
    """Open loop: requests per second of each cell, sent when due, whatever the server does."""
    concurrency: Numbers | None = None
    """Closed loop: requests under way in each cell."""
    trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Open loop: times of sending, seconds, one a line."""
    arrivals: Arrivals = "poisson"
    """Gaps between requests of --qps."""
    seconds: float = 30.0
    """Length of a cell, after its warm-up."""
    warm_up: float = 5.0
    """Seconds of load before, which count in no figure."""
    slo: Annotated[str | None, tyro.conf.arg(metavar="ttft=500ms,tpot=50ms,e2e=2s")] = None
    """Objectives: goodput counts the answers that meet all of them."""
    input_tokens: int | None = None
    """Length of made-up prompts."""
    output_tokens: int | None = None
    """Length of answers (tool-calls: most tokens)."""
    data: str | None = None
    """Data set or file of the tool calls."""
    cold: bool = False
    """Tool calls that share nothing, so that a prefix cache holds nothing."""
    hardware: str = ""
    """Slice or GPUs of the server: v6e-8, 2xH100."""
    architecture: str = ""
    """Published model that --model is one of (gemma-4-31B): with --hardware, figures above its peak are refused."""
    precision: Precision = "bf16"
    """Of the weights and products."""
    seed: int = 0
    """Of prompts and arrivals; every cell has one of its own made from it."""
    processes: int | Literal["auto"] = "auto"
    """Client processes; auto repeats a cell with twice as many while the client itself is too slow."""
    timeout: float = 600.0
    """Seconds that a request may take."""
    anchor: bool = True
    """Repeat the first cell at the end: a server that changed meanwhile spoils the comparison."""
    header: tuple[str, ...] = ()
    """Further headers, NAME=VALUE. OPENAI_API_KEY, if set, is sent as the key."""


def parse_numbers(text: str, option: str) -> list[float]:
    """Positive numbers of a list.

    Raises:
        UserError: an entry is none.
    """
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 0 < value < math.inf:
            raise UserError(f"{option} {text}: {part.strip()!r} is no positive number", fix="Write such as 1,2,4")
        found.append(value)
    return found


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_seconds(text: str, what: str) -> float:
    """A duration with its unit: 500ms, 0.5s.

    Raises:
        UserError: no number, no unit, not positive.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", text.strip())
    if not match or not float(match[1]):
        raise UserError(f"{what}: {text!r} is no duration", fix="Write a number with its unit, such as 500ms or 2s")
    return float(match[1]) * _UNITS[match[2]]


def parse_objectives(text: str | None) -> dict[str, float]:
    """Objectives by metric, seconds.

    Raises:
        UserError: a metric that is none, one named twice, or no duration.
    """
    found: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in metrics.METRICS or name in found:
            raise UserError(f"--slo {part.strip()!r}: no such metric, or named twice", fix="Use ttft, tpot and e2e")
        found[name] = parse_seconds(value, f"--slo {name}")
    return found


def loads(command: ServeCommand) -> list[Load]:
    """The cells that are asked for.

    Raises:
        UserError: not exactly one of --qps, --concurrency and --trace, or not well given.
    """
    if sum(option is not None for option in (command.qps, command.concurrency, command.trace)) != 1:
        raise UserError("give one of --qps, --concurrency and --trace", fix="Such as --qps 1,2,4,8")
    if command.trace is not None:
        return [Load(f"trace {command.trace.name}", trace=read_trace(command.trace))]
    if command.qps is not None:
        cells = [Load(f"qps {rate:g}", rate=rate) for rate in parse_numbers(command.qps, "--qps")]
    else:
        places = parse_numbers(command.concurrency or "", "--concurrency")
        if any(value != int(value) for value in places):
            raise UserError(f"--concurrency {command.concurrency}: not whole", fix="Write such as 1,8,64")
        cells = [Load(f"concurrency {value:g}", concurrency=int(value)) for value in places]
    if len({cell.name for cell in cells}) != len(cells):
        raise UserError("a cell is named twice", fix="Name each rate once; --anchor repeats the first")
    if command.anchor and len(cells) > 1:
        first = cells[0]
        cells.append(Load(first.name, first.rate, first.concurrency, anchor=True))
    return cells


def run_serve(command: ServeCommand) -> int:
    """Measure, write the run, print its table; 1 if a guard marks a cell."""
    asked_loads = loads(command)
    objectives = parse_objectives(command.slo)
    peaks = roofline.peaks(command.hardware, command.architecture, command.precision)
    if command.out.exists():
        raise UserError("exists", where=str(command.out), fix="Choose another --out")
    if not (command.seconds > 0 and command.warm_up >= 0 and command.timeout > 0):
        raise UserError("--seconds, --warm-up and --timeout must be positive", fix="--warm-up may be 0")
    asked = workload(
        command.workload,
        input_tokens=command.input_tokens,
        output_tokens=command.output_tokens,
        data=command.data,
        cold=command.cold,
    )
    headers = _headers(command.header)
    server = Server(command.url, headers)
    sweep = Sweep(
        target=Target.parse(command.url, headers),
        server=server,
        model=server.choose_model(command.model),
        workload=asked,
        out=command.out,
        arrivals=command.arrivals,
        seconds=command.seconds,
        warm_up=command.warm_up,
        timeout=command.timeout,
        seed=command.seed,
        processes=command.processes,
        objectives=objectives,
        peaks=peaks,
        tell=Console(stderr=True, highlight=False).print,
    )
    command.out.mkdir(parents=True)
    cells = sweep.run(asked_loads)
    run = ServeRun(
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        url=command.url,
        model=sweep.model,
        server=server.describe(),
        workload=asked.describe(),
        objectives=objectives,
        hardware=command.hardware,
        client={
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "versions": versions("portlab-bench", "httptools", "uvloop"),
        },
        knee=_knee(cells),
        cells=cells,
    )
    write_json(command.out / "serve.json", run.model_dump(mode="json"))
    Console(highlight=False).print(as_table(run))
    bad = {cell.name: [f.what for f in cell.findings if not f.ok] for cell in cells if not cell.valid}
    if bad:
        name, why = next(iter(bad.items()))
        raise CheckFailed(
            f"{len(bad)} of {len(cells)} cells are marked, first {name}: {'; '.join(why)}",
            where=str(command.out / "serve.json"),
            fix="They are kept, and in no table; docs/bench.md says what each guard means",
        )
    return 0


def _knee(cells: Sequence[Cell]) -> float | None:
    points = [
        (cell.rate, cell.figures.attainment)
        for cell in cells
        if cell.valid and cell.rate is not None and cell.figures and cell.figures.attainment is not None
    ]
    return metrics.knee(points)


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9-]+", name):
            raise UserError(f"--header {text!r} is none", fix="Write NAME=VALUE")
        headers[name] = value
    return headers


def as_table(run: ServeRun) -> Table:
    """The cells of a run for a terminal, milliseconds and tokens per second."""
    table = Table(title=f"{run.workload.get('name', '')} on {run.model}: p50 / p99 in ms")
    for heading in ("cell", "answers/s", "TTFT", "TPOT", "ITL", "E2E", "tokens/s", "goodput/s", "marked by"):
        table.add_column(heading, justify="left" if heading in ("cell", "marked by") else "right")
    for cell in run.cells:
        name = f"{cell.name}{' again' if cell.anchor else ''}"
        marks = ", ".join(dict.fromkeys(f.guard for f in cell.findings if not f.ok))
        f = cell.figures
        if f is None:
            table.add_row(name, *["-"] * 7, marks)
            continue
        spans = (
            f"{d.quantiles['p50'].value * 1e3:,.1f} / {d.quantiles['p99'].value * 1e3:,.1f}" if d else "-"
            for d in (f.ttft, f.tpot, f.itl, f.e2e)
        )
        good = "-" if f.goodput is None else f"{f.goodput:.2f}"
        table.add_row(name, f"{f.request_throughput:.2f}", *spans, f"{f.output_throughput:,.0f}", good, marks)
    if run.knee is not None:
        table.caption = f"objectives hold up to {run.knee:g} requests/s"
    return table


@dataclass(frozen=True, kw_only=True)
class MockCommand:
    """A server with known delays, to try a bench on: vLLM's chat endpoint, streamed, /metrics and /log."""

    port: int = 8000
    """0 takes a free one."""
    ttft: str = "50ms"
    """From a request's turn to its first token."""
    itl: str = "10ms"
    """Between tokens."""
    jitter: float = 0.0
    """Share by which both vary."""
    tokens: int = 16
    """Of an answer."""
    slots: int = 1_000_000
    """Requests answered at once; others wait."""
    kind: Literal["text", "reasoning", "calls"] = "text"
    """What the tokens are."""
    burst: int = 1
    """Tokens in an event."""
    fail_every: int = 0
    """Every n-th request gets status 500."""
    drop_every: int = 0
    """Every n-th connection breaks in the middle."""
    usage: bool = True
    """End with the server's token counts."""
    cached: float = 0.0
    """Share of each prompt that the prefix cache claims to have held."""


def run_mock(command: MockCommand) -> int:
    """Serve until SIGTERM or SIGINT."""
    behaviour = Behaviour(
        parse_seconds(command.ttft, "--ttft"),
        parse_seconds(command.itl, "--itl"),
        command.jitter,
        command.tokens,
        command.slots,
        command.kind,
        command.burst,
        command.fail_every,
        command.drop_every,
        command.usage,
        command.cached,
    )

    async def serve() -> None:
        listening = await MockServer(behaviour).start(port=command.port)
        print(f"listening on http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()

    asyncio.run(serve())
    return 0
