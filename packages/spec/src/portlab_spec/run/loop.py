"""The loop of a run: steps are launched, their numbers read one step late, losses measured, checkpoints saved.

What a step computes, and on what, is the trainer's. When something is read, measured or saved, and when a run ends, is
decided here, so that a recipe means the same whoever trains it.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from portlab_spec.recipe import Recipe
from portlab_spec.run.monitor import Throughput, Work, patience_is_over, require_finite
from portlab_spec.run.signals import Preemption
from portlab_spec.run.train_log import TrainLog
from portlab_spec.schedule import learning_rates

Track = Callable[[int, dict[str, float]], None]


class Numbers(NamedTuple):
    """What a step tells: means over its supervised tokens, and the norm of its gradient before the clip."""

    loss: float
    grad_norm: float
    accuracy: float


class Launched(NamedTuple):
    """A step on its way.

    Attributes:
        rows: ids of its rows.
        work: what it computes.
        compiled: was its program compiled for it? Then its time tells nothing of the rest.
        read: waits for its numbers.
    """

    rows: Sequence[str]
    work: Work
    compiled: bool
    read: Callable[[], Numbers]


class Steps(Protocol):
    """A trainer's steps."""

    def prepare(self, step: int) -> bool:
        """Get ready for a step, counted from 0: have its batch and its program; True if that took a compilation."""

    def launch(self, step: int) -> Launched:
        """Take a step, without waiting for it."""

    def measure(self) -> float:
        """The monitored loss of the model as it is."""

    def save(self, done: int, log: TrainLog, monitored: float | None) -> None:
        """Save the model after `done` steps, at which the monitored loss was measured, or None."""

    def wait(self) -> None:
        """Return once everything saved is on disk."""


@dataclass
class Progress:
    """What the loop has seen; numbers are read one step late, so that the devices never wait for the host."""

    rates: np.ndarray
    losses: list[float]
    throughput: Throughput
    track: Track
    pending: tuple[int, Launched] | None = None
    since: float = field(default_factory=time.perf_counter)

    def push(self, number: int, launched: Launched) -> None:
        """Take a step in, and read the one before."""
        self.flush()
        self.pending = number, launched

    def flush(self) -> None:
        """Wait for the latest step and record it.

        Raises:
            CheckFailed: its loss or gradient is not finite.
        """
        if self.pending is None:
            return
        (number, launched), self.pending = self.pending, None
        found = launched.read()
        now = time.perf_counter()
        self.throughput.add(launched.work, now - self.since, compiled=launched.compiled)
        self.since = now
        require_finite(found.loss, found.grad_norm, number, launched.rows)
        self.losses.append(found.loss)
        values = {"loss": found.loss, "grad_norm": found.grad_norm, "token_accuracy": found.accuracy}
        values["learning_rate"] = float(self.rates[number - 1])
        self.track(number, values | self.throughput.rates())

    def pause(self) -> None:
        """Leave the time until now out of the throughput."""
        self.since = time.perf_counter()


class Ended(NamedTuple):
    """Where a loop ended.

    Attributes:
        done: steps taken.
        log: of the whole run.
        seconds: that this loop took.
    """

    done: int
    log: TrainLog
    seconds: float


def run_steps(
    recipe: Recipe,
    steps: Steps,
    log: TrainLog,
    throughput: Throughput,
    *,
    track: Track,
    preemption: Preemption,
    advance: Callable[[float, str], None],
    around: Callable[[int], AbstractContextManager[object]] = lambda number: contextlib.nullcontext(),
) -> Ended:
    """Take the steps that are left of a run.

    Args:
        recipe: the run.
        steps: the trainer's.
        log: of the steps taken so far.
        throughput: told how long steps took.
        track: takes the metrics of a step.
        preemption: knows whether the run was asked to leave.
        advance: moves the progress bar.
        around: entered while a step, counted from 1, is taken: a profiler.

    Raises:
        CheckFailed: a loss or gradient is not finite.
        Preempted: asked to leave; the step is saved.
    """
    first = done = len(log.losses)
    evals, earlier, started = list(log.evals), log.seconds, time.perf_counter()
    progress = Progress(learning_rates(recipe.optimizer, recipe.steps), list(log.losses), throughput, track)
    for step in range(first, recipe.steps):
        if patience_is_over(evals, recipe.patience):
            break
        if steps.prepare(step):
            progress.pause()
        with around(step + 1):
            progress.push(step + 1, steps.launch(step))
        done = step + 1
        last, stop = done == recipe.steps, preemption.due(done)
        measure = recipe.eval_every > 0 and (done % recipe.eval_every == 0 or last)
        advance(done, f"loss {progress.losses[-1]:.4f}" if progress.losses else "")
        if not (measure or stop or last or done % recipe.save_every == 0):
            continue
        progress.flush()
        monitored = None
        if measure:
            monitored = steps.measure()
            evals.append((done, monitored))
            track(done, {"monitored_loss": monitored})
        over = patience_is_over(evals, recipe.patience)
        if (measure and recipe.keep_best) or stop or last or over or done % recipe.save_every == 0:
            so_far = TrainLog(list(progress.losses), earlier + time.perf_counter() - started, list(evals))
            steps.save(done, so_far, monitored)
        progress.pause()
        if stop and not last:
            steps.wait()
            raise preemption.leave(done)
    seconds = time.perf_counter() - started
    return Ended(done, TrainLog(progress.losses, earlier + seconds, evals), seconds)
