"""What a serving run leaves: each request as it was, the cells they belong to, and what the guards say.

Times are seconds on one monotonic clock, counted from the start of the cell. `docs/bench.md` gives the definitions of
the metrics, beside those of other tools.
"""

from typing import Any, Literal

from pydantic import Field

from portlab_spec.conversation import Record

Mode = Literal["open", "closed"]
TokenSource = Literal["usage", "chunks", "tool"]
Outcome = Literal["ok", "http_error", "broken", "timeout", "server_error", "malformed", "cancelled"]


class RequestRecord(Record):
    """One request as the client saw it.

    Attributes:
        index: in the cell's order of sending.
        scheduled: when it should have been sent; None in a closed loop, where the answer before decides.
        sent: when its first byte went to the socket's buffer, connecting included in what follows.
        chunks: arrival of every event that carried tokens: text, reasoning or a piece of a call.
        kinds: how many of those carried text, reasoning, calls; an event may carry several.
        done: when the stream ended, by `[DONE]` or the end of the body.
        prompt_tokens: as the server counts them; None if it did not say.
        cached_tokens: of those, what its prefix cache held; None if it did not say.
        output_tokens: by `tokens_from`.
        tokens_from: "usage" if the server counted, "chunks" if each event is taken for one token, "tool" if the record
            was imported and its tool does not say which.
        finish: finish_reason of the last choice.
        outcome: "ok", or what went wrong.
        error: of a failure: status and the server's words, on one line.
        warm_up: sent before the measurement began; in no figure.
    """

    index: int
    scheduled: float | None = None
    sent: float
    chunks: tuple[float, ...] = ()
    kinds: dict[str, int] = Field(default={})
    done: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    tokens_from: TokenSource = "chunks"
    finish: str | None = None
    outcome: Outcome = "ok"
    error: str = ""
    warm_up: bool = False


class Finding(Record):
    """What a guard says of a cell.

    Attributes:
        guard: its name, as in docs/bench.md.
        ok: False marks the cell, which then is in no table.
        what: the figures that it looked at.
    """

    guard: str
    ok: bool
    what: str


class Quantile(Record):
    """A quantile of a sample with a distribution-free confidence interval; None where the sample is too small."""

    value: float
    low: float | None = None
    high: float | None = None


class Distribution(Record):
    """A metric over the requests that have it.

    Attributes:
        count: how many; None of an imported summary that does not say
        mean: with `mean_low` and `mean_high`, its 95 % confidence interval (None below two values).
        minimum, maximum: None of an imported summary that does not give them.
        quantiles: by name: p1, p10, p50, p90, p95, p99.
    """

    count: int | None = None
    mean: float
    mean_low: float | None = None
    mean_high: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    quantiles: dict[str, Quantile]


class CellFigures(Record):
    """The figures of a cell. Seconds, tokens per second, requests per second.

    Attributes:
        duration: from the first counted request's sending to the last counted event.
        requests: counted: sent after the warm-up.
        outcomes: how they ended, by `Outcome`.
        finishes: finish reasons of those that ended well.
        ttft: first token event - sent.
        tpot: (last token event - first) / (output tokens - 1), of answers with two tokens in two events at least.
        itl: gaps between token events, pooled.
        e2e: last token event - sent.
        normalised: e2e / output tokens.
        lag: sent - scheduled; None in a closed loop.
        failed_after: of failures: seconds from sending until they were known; None if there were none.
        request_throughput: answers per second.
        output_throughput: output tokens per second, of all that ended well.
        prompt_throughput: prompt tokens per second, where the server counts them.
        goodput: answers per second that meet every objective; None without objectives.
        attainment: share of all counted requests that do; failures do not.
        prefix_hits: share of prompt tokens that the server's prefix cache held; None if it does not say.
        client_load: share of one core that the busiest client process used; None of an imported run.
        concurrency: mean number of requests under way; None of an imported summary that does not give it.
    """

    duration: float
    requests: int
    outcomes: dict[str, int]
    finishes: dict[str, int]
    prompt_tokens: int | None
    output_tokens: int
    tokens_from: dict[str, int]
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    normalised: Distribution | None
    lag: Distribution | None
    failed_after: Distribution | None
    request_throughput: float
    output_throughput: float
    prompt_throughput: float | None
    goodput: float | None
    attainment: float | None
    prefix_hits: float | None
    client_load: float | None
    concurrency: float | None


class Cell(Record):
    """One load on one server.

    Attributes:
        name: "qps 4", "concurrency 8".
        mode: "open": requests are sent when due, whatever the server does; "closed": so many are under way.
        rate: requests per second of the open loop.
        concurrency: of the closed loop.
        arrivals: "poisson", "constant", "trace" (whose file the name says), or "closed".
        seed: of arrivals and prompts; no two cells share prompts. None of an imported run that does not give it.
        processes: client processes; None of an imported run.
        figures: None if nothing was answered.
        findings: of all guards; one that is not ok keeps the cell out of tables.
        anchor: the cell repeats an earlier one, to see whether the server changed meanwhile.
        records: file of its requests, beside this one.
    """

    name: str
    mode: Mode
    rate: float | None = None
    concurrency: int | None = None
    arrivals: str
    seed: int | None
    processes: int | None
    figures: CellFigures | None
    findings: tuple[Finding, ...]
    anchor: bool = False
    records: str = ""

    @property
    def valid(self) -> bool:
        """Whether it may stand in a table."""
        return self.figures is not None and all(finding.ok for finding in self.findings)


class ServeRun(Record):
    """`serve.json`: a sweep over one server.

    Attributes:
        server: what it says of itself: version, model, engine settings where `/metrics` has them.
        workload: name, and what it was made of.
        objectives: seconds, by metric: ttft, tpot, e2e.
        hardware: slice or GPUs, as the user named it; empty if not told.
        client: machine and versions.
        source: "portlab-bench", or the tool and file that it was imported from.
        knee: requests per second up to which the objectives hold; None if not asked or not found.
    """

    schema_version: Literal[1] = 1
    when: str
    url: str
    model: str
    server: dict[str, Any]
    workload: dict[str, Any]
    objectives: dict[str, float] = Field(default={})
    hardware: str = ""
    client: dict[str, Any]
    source: str = "portlab-bench"
    knee: float | None = None
    cells: tuple[Cell, ...]
