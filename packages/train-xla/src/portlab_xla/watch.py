"""What a run is told while it trains: losses as they arrive from the device, and graphs that it did not plan for."""

import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from portlab_spec.run.monitor import Throughput, Work, require_finite
from portlab_xla.devices.device import Device
from portlab_xla.loss import Sums

# Everything that a step reads exists before the first one, so that each shape has one graph: see optim.py.
WARM_UP = 1


class StepInfo(NamedTuple):
    """A step whose numbers are on their way.

    Attributes:
        number: from 1.
        rows: ids of its rows.
        work: what it computes.
        rate: learning rate.
    """

    number: int
    rows: Sequence[str]
    work: Work
    rate: float


class Arrived(NamedTuple):
    """Numbers of some steps, in order, and when the device was done with the last."""

    steps: list[StepInfo]
    values: list[float]
    at: float


class StepLog:
    """Losses and gradient norms, read from the device every so many steps and never waited for.

    Args:
        device: that computes them.
        every: steps between reads.
        throughput: told how long steps took.
        track: takes the metrics of a step.
        losses: of the steps before.
    """

    def __init__(
        self,
        device: Device,
        every: int,
        throughput: Throughput,
        track: Callable[[int, dict[str, float]], None],
        *,
        losses: Sequence[float] = (),
    ) -> None:
        self._device, self._every, self._throughput, self._track = device, every, throughput, track
        self._waiting: list[tuple[StepInfo, torch.Tensor]] = []
        self._arrived: queue.Queue[Arrived] = queue.Queue()
        self._under_way = 0
        self._since = time.perf_counter()
        self.losses = list(losses)
        self.compiled: set[int] = set()  # steps that compiled, which is known once they are launched

    def add(self, step: StepInfo, sums: Sums, grad_norm: torch.Tensor) -> None:
        """Take in a step; call it before the device's `sync` that computes the step."""
        # One tensor: each that is read is a transfer of its own.
        self._waiting.append((step, torch.stack((sums.loss, sums.correct, grad_norm))))
        if len(self._waiting) >= self._every:
            self._read()

    def _read(self) -> None:
        steps = [step for step, _ in self._waiting]
        vectors = [vector for _, vector in self._waiting]
        self._waiting = []
        self._under_way += 1

        def receive(values: list[float]) -> None:
            self._arrived.put(Arrived(steps, values, time.perf_counter()))

        self._device.read_later(vectors, receive)

    def collect(self) -> None:
        """Record what has arrived by now.

        Raises:
            CheckFailed: a loss or gradient norm is no number; names the step and its rows.
        """
        while not self._arrived.empty():
            self._record(self._arrived.get())

    def flush(self) -> None:
        """Wait for every step so far and record it.

        Raises:
            CheckFailed: as `collect`.
        """
        if self._waiting:
            self._read()
            self._device.sync()
        while self._under_way:
            self._record(self._arrived.get())

    def pause(self) -> None:
        """Leave the time until now out of the throughput."""
        self._since = time.perf_counter()

    def _record(self, arrived: Arrived) -> None:
        self._under_way -= 1
        seconds = (arrived.at - self._since) / len(arrived.steps)
        self._since = arrived.at
        compiled = any(step.number in self.compiled for step in arrived.steps)
        triples = zip(*[iter(arrived.values)] * 3, strict=True)
        for step, (loss, correct, grad_norm) in zip(arrived.steps, triples, strict=True):
            self._throughput.add(step.work, seconds, compiled=compiled)
            require_finite(loss, grad_norm, step.number, step.rows)
            self.losses.append(loss)
            values = {"loss": loss, "grad_norm": grad_norm, "token_accuracy": correct, "learning_rate": step.rate}
            self._track(step.number, values | self._throughput.rates())


class CompileBudget:
    """Counts the graphs that a run compiles: the first steps of each shape may, later ones should not.

    A graph more means minutes lost on a TPU each time, and its usual cause is a shape or a number that changes from
    step to step.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen = device.compilations()
        self._steps_of: dict[int, int] = {}
        self.planned = self.unplanned = 0

    def step(self, number: int, layout: int) -> tuple[bool, str]:
        """Account for a step that was launched.

        Args:
            number: of the step, from 1.
            layout: which of the run's shapes it has.

        Returns:
            Did it compile; and a warning if it should not have, else nothing.
        """
        new = self._new()
        uses = self._steps_of[layout] = self._steps_of.get(layout, 0) + 1
        if not new:
            return False, ""
        if uses <= WARM_UP:
            self.planned += new
            return True, ""
        self.unplanned += new
        return True, (
            f"step {number} compiled {new} new graph(s), {self.unplanned} since the shapes were warm: something in it "
            "differs from the steps before"
        )

    def forgive(self) -> None:
        """Leave out what was compiled since the last step: measuring and saving have graphs of their own."""
        self.planned += self._new()

    def _new(self) -> int:
        count = self._device.compilations()
        new, self._seen = count - self._seen, count
        return new
