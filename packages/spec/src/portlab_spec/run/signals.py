"""Signals that ask a run to save and leave.

| signal  | sent by | the loop | exit code |
|---------|---------|----------|-----------|
| SIGTERM | clouds and Kubernetes, when a machine is taken away | ends its step, saves, leaves | 143 |
| SIGUSR1 | Slurm (`--signal=USR1@120`), ahead of a time limit | the same | 138 |
| SIGINT  | Ctrl-C | leaves at once; saves under way are finished | 130 |

Exit codes are the shell's 128 + number, so that a launcher tells a preempted run, to be started again by the same
command, from one that failed (1, 2). A second signal of the same kind ends the process at once.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from portlab_spec.errors import UserError

WATCHED = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(UserError):
    """The run was asked to leave, and has saved."""

    def __init__(self, by: signal.Signals, step: int) -> None:
        super().__init__(f"stopped by {by.name} after step {step}, which is saved", fix="Run the same command to go on")
        self.exit_code = 128 + by


class Preemption:
    """Listens while training runs, a context manager; elsewhere these signals end the process as ever.

    On several processes the machines get SIGTERM at different moments, and must leave after the same step. The trainer
    then brings a way to agree on one, which listens for SIGTERM itself; no signal is watched here.

    Args:
        agree: told the number of steps taken, says whether all processes are to leave now; None on one process.
    """

    def __init__(self, agree: Callable[[int], bool] | None = None) -> None:
        self._agree = agree
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Preemption":
        if self._agree is None and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in WATCHED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received = signal.Signals(number)
        signal.signal(number, self._before[self._received])

    def due(self, step: int) -> bool:
        """Should the run save and leave now? Every process has to ask after every step.

        Args:
            step: steps taken.
        """
        if self._agree is not None and self._agree(step):
            self._received = signal.SIGTERM
        return self._received is not None

    def leave(self, step: int) -> Preempted:
        """The error to raise once the checkpoint is on disk."""
        return Preempted(self._received or signal.SIGTERM, step)
