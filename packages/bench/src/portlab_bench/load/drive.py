"""One cell: requests sent when they are due, or as many as are to be under way; in one process or several."""

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from portlab_bench.load.client import Client, Target
from portlab_bench.schema import RequestRecord

_START_DELAY = 0.05  # seconds in which a process that is ready waits for the cell's zero


@dataclass(frozen=True)
class Job:
    """What one process sends.

    Attributes:
        target: where to.
        bodies: requests, in the order of sending.
        indices: their numbers in the cell.
        more: a closed loop that outruns the list goes on with what this makes of a number.
        step: from one of its numbers to the next.
        times: seconds from the start at which each is due; None in a closed loop.
        concurrency: requests under way in a closed loop.
        seconds: a closed loop sends nothing after that.
        warm_up: seconds from the start whose requests do not count.
        timeout: seconds that a request may take.
    """

    target: Target
    bodies: Sequence[bytes]
    indices: Sequence[int]
    more: Callable[[int], bytes] | None
    step: int
    times: Sequence[float] | None
    concurrency: int
    seconds: float
    warm_up: float
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Attributes:
        records: of each request that was sent.
        load: share of a core that the busiest process used.
        start: the records' zero on time.monotonic.
    """

    records: list[RequestRecord]
    load: float
    start: float


def drive(
    target: Target,
    bodies: Sequence[bytes],
    *,
    more: Callable[[int], bytes] | None = None,
    times: np.ndarray | None = None,
    concurrency: int = 0,
    seconds: float = 0.0,
    warm_up: float = 0.0,
    timeout: float = 600.0,
    processes: int = 1,
) -> Outcome:
    """Send a cell's requests.

    Args:
        target: where to.
        bodies: requests, made beforehand.
        more: makes those that a closed loop needs beyond them, by number; without it, it ends where they do.
        times: when each is due (open loop); float64 (requests,), seconds.
        concurrency: requests under way (closed loop).
        seconds: length of a closed loop.
        warm_up: seconds whose requests do not count.
        timeout: seconds that a request may take.
        processes: client processes, which take turns with the requests.
    """
    processes = max(1, min(processes, concurrency or len(bodies)))
    jobs = [
        Job(
            target,
            bodies[p::processes],
            range(p, len(bodies), processes),
            more,
            processes,
            None if times is None else times[p::processes].tolist(),
            concurrency // processes + (p < concurrency % processes),
            seconds,
            warm_up,
            timeout,
        )
        for p in range(processes)
    ]
    if processes == 1:
        outcomes = [run_job(jobs[0], _soon)]
    else:
        context = multiprocessing.get_context("spawn")
        shared = (context.Barrier(processes), context.Value("d", 0.0))
        with ProcessPoolExecutor(processes, context, _join, shared) as pool:
            outcomes = list(pool.map(_run_together, jobs))
    records = sorted((record for outcome in outcomes for record in outcome.records), key=lambda r: r.index)
    return Outcome(records, max(outcome.load for outcome in outcomes), outcomes[0].start)


_together: tuple[Any, Any] | None = None  # of a client process: where it waits for the others, and the common start


def _join(barrier: Any, start: Any) -> None:
    global _together
    _together = barrier, start


def _run_together(job: Job) -> Outcome:
    assert _together
    try:
        return run_job(job, _common_start)
    except BaseException:
        _together[0].abort()  # or the others wait for ever
        raise


def _soon() -> float:
    return time.monotonic() + _START_DELAY


def _common_start() -> float:
    """The cell's zero, once all processes are ready for it, on the clock that they share."""
    assert _together
    barrier, start = _together
    if barrier.wait() == 0:
        start.value = _soon()
    barrier.wait()
    return start.value


def run_job(job: Job, start: Callable[[], float]) -> Outcome:
    """Send what one process has to send, and count its own processor time.

    Args:
        job: what to send.
        start: asked when all is ready, says when the cell begins: its zero, in the near future, on time.monotonic.
    """
    # A collection in the middle would stop the clock of every answer that arrives meanwhile.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return _run(_send_all(job, start))
    finally:
        gc.enable()
        gc.unfreeze()


def _run(main: Coroutine[Any, Any, Outcome]) -> Outcome:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


async def _send_all(job: Job, begin: Callable[[], float]) -> Outcome:
    client = Client(job.target, job.timeout)
    with contextlib.suppress(OSError):  # every request will say so
        await client.connect(job.concurrency or min(len(job.bodies), 8))
    start = begin()
    await asyncio.sleep(start - time.monotonic())
    wall, cpu = time.monotonic(), time.process_time()
    records = await (_closed(job, client, start) if job.times is None else _open(job, client, start))
    used = (time.process_time() - cpu) / (time.monotonic() - wall)
    await client.close()
    marked = [r.model_copy(update={"warm_up": True}) if _early(r, job) else r for r in records]
    return Outcome(marked, used, start)


def _early(record: RequestRecord, job: Job) -> bool:
    return (record.sent if record.scheduled is None else record.scheduled) < job.warm_up


async def _open(job: Job, client: Client, start: float) -> list[RequestRecord]:
    assert job.times is not None
    tasks = []
    for body, index, due in zip(job.bodies, job.indices, job.times, strict=True):
        if (wait := start + due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(client.send(body, index, start, due)))
    return list(await asyncio.gather(*tasks))


async def _closed(job: Job, client: Client, start: float) -> list[RequestRecord]:
    queue = _requests(job)
    records: list[RequestRecord] = []

    async def one_after_the_other() -> None:
        while time.monotonic() - start < job.seconds:
            body, index = next(queue, (b"", 0))
            if not body:
                return
            records.append(await client.send(body, index, start))

    await asyncio.gather(*(one_after_the_other() for _ in range(job.concurrency)))
    return records


def _requests(job: Job) -> Iterator[tuple[bytes, int]]:
    yield from zip(job.bodies, job.indices, strict=True)
    if job.more:
        first = job.indices[-1] + job.step if job.indices else 0
        for index in itertools.count(first, job.step):
            yield job.more(index), index
