"""A trace of a few steps for XProf, TensorBoard's profile plugin or Perfetto, in `<run>/profile`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from portlab_spec.recipe import Profile


class Profiler:
    """Traces the recipe's window of steps, a context manager that ends a trace under way.

    Steps are counted in this process: the first one compiles and would fill the trace, also after a restart.
    """

    def __init__(self, profile: Profile, folder: Path) -> None:
        self._first, self._last = profile.start, profile.start + profile.steps - 1
        self._folder = folder
        self._count = 0
        self._running = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step, up to its loss on the host.

        Args:
            number: the step's number, by which the trace names it.
        """
        self._count += 1
        if self._first <= self._count <= self._last and not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if self._count >= self._last:
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
