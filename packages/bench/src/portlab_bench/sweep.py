"""The cells of a sweep over a server: each is asked once, and again with more client processes while those are slow."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from portlab_bench import metrics
from portlab_bench.guards import Expected, check, check_anchors
from portlab_bench.load.arrivals import Arrivals, schedule
from portlab_bench.load.client import Target
from portlab_bench.load.drive import drive
from portlab_bench.load.server import Counters, Server
from portlab_bench.load.workloads import Workload, shared_share
from portlab_bench.schema import Cell, RequestRecord
from portlab_spec.files import write_text

# Requests that a closed loop finds made, for each of its places; it makes further ones as it goes.
_MADE_BEFORE = 64


@dataclass(frozen=True)
class Load:
    """What a cell is to be: one of `rate`, `concurrency` and `trace`.

    Attributes:
        name: in tables and of its file.
        rate: requests per second, sent when due.
        concurrency: requests under way.
        trace: times of sending; float64 (requests,), seconds.
        anchor: the first cell again, at the end.
    """

    name: str
    rate: float | None = None
    concurrency: int | None = None
    trace: np.ndarray | None = None
    anchor: bool = False


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What the cells of a run have in common.

    Attributes:
        target: where requests go.
        server: whose counters are read.
        model: name on the server.
        workload: what is asked.
        out: folder of each cell's requests.
        arrivals: gaps between requests of a rate.
        seconds: length of a cell, after its warm-up.
        warm_up: seconds of load before.
        timeout: seconds that a request may take.
        seed: every cell has one of its own made from it.
        processes: client processes; "auto" doubles them while the client is what is too slow.
        objectives: by metric, seconds.
        peaks: FLOP/s and bytes/s that bound the figures; see `roofline.peaks`.
        tell: hears what is begun.
    """

    target: Target
    server: Server
    model: str
    workload: Workload
    out: Path
    arrivals: Arrivals
    seconds: float
    warm_up: float
    timeout: float
    seed: int
    processes: int | Literal["auto"]
    objectives: Mapping[str, float]
    peaks: tuple[float, float] | None
    tell: Callable[[str], object]

    def run(self, loads: Sequence[Load]) -> tuple[Cell, ...]:
        """All cells, with what the guards say of each."""
        return check_anchors([cell for number, load in enumerate(loads) for cell in self._tries(number, load)])

    def _tries(self, number: int, load: Load) -> list[Cell]:
        found: list[Cell] = []
        most = os.cpu_count() or 1
        processes = 1 if self.processes == "auto" else self.processes
        while True:
            file = f"{len(found) or ''}{load.name.replace(' ', '-')}{'-anchor' if load.anchor else ''}.jsonl"
            found.append(self._cell(load, cell_seed(self.seed, number, len(found)), processes, file))
            slow = any(f.guard in ("client", "lag") and not f.ok for f in found[-1].findings)
            if self.processes != "auto" or not slow or processes >= most:
                return found
            processes = min(2 * processes, most)

    def _cell(self, load: Load, seed: int, processes: int, file: str) -> Cell:
        times = self._times(load, seed)
        count = len(times) if times is not None else _MADE_BEFORE * (load.concurrency or 1)
        bodies = self.workload.bodies(self.model, count, seed)
        self.tell(f"{load.name}: {'' if times is None else f'{count} requests, '}{processes} client processes ...")
        before = self.server.counters()
        outcome = drive(
            self.target,
            bodies,
            more=partial(self.workload.body, self.model, seed),
            times=times,
            concurrency=load.concurrency or 0,
            seconds=self.warm_up + self.seconds,
            warm_up=self.warm_up,
            timeout=self.timeout,
            processes=processes,
        )
        hits = _hits(before, self.server.counters())
        figures = metrics.figures(
            outcome.records, objectives=self.objectives, client_load=outcome.load, prefix_hits=hits
        )
        expected = Expected(shared_share(bodies[: len(outcome.records)]), self.workload.fixed, self.peaks)
        _write_records(self.out / file, outcome.records)
        return Cell(
            name=load.name,
            mode="closed" if times is None else "open",
            rate=load.rate,
            concurrency=load.concurrency,
            arrivals="closed" if times is None else "trace" if load.trace is not None else self.arrivals,
            seed=seed,
            processes=processes,
            figures=figures,
            findings=check(figures, expected),
            anchor=load.anchor,
            records=file,
        )

    def _times(self, load: Load, seed: int) -> np.ndarray | None:
        if load.rate is None:
            return load.trace
        return schedule(self.arrivals, load.rate, self.warm_up + self.seconds, seed)


def cell_seed(seed: int, number: int, repeated: int) -> int:
    """Of a cell: neighbouring seeds of the user's, cells and repetitions share nothing, which a sum of them would."""
    return int(np.random.SeedSequence([seed, number, repeated]).generate_state(1)[0])


def _hits(before: Counters | None, after: Counters | None) -> float | None:
    """Share of the prompt tokens of a cell that the server's prefix cache held."""
    if before is None or after is None:
        return None
    added = after.since(before)
    queries = added.get("prefix_queries")
    return added.get("prefix_hits", 0.0) / queries if queries else None


def _write_records(path: Path, records: Sequence[RequestRecord]) -> None:
    write_text(path, "".join(record.model_dump_json(exclude_defaults=True) + "\n" for record in records))
