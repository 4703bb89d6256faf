"""Traces of some steps."""

import jax.numpy as jnp
import pytest

from portlab_jax.profiling import Profiler
from portlab_spec.recipe import Profile


class Traces:
    """Records which steps a trace held."""

    def __init__(self, monkeypatch):
        self.open, self.calls = False, []
        monkeypatch.setattr("jax.profiler.start_trace", self.start)
        monkeypatch.setattr("jax.profiler.stop_trace", self.stop)

    def start(self, folder):
        assert not self.open
        self.open = True
        self.calls.append("start")

    def stop(self):
        assert self.open
        self.open = False
        self.calls.append("stop")


@pytest.mark.parametrize(
    ("profile", "steps", "calls"),
    [
        (Profile(), 9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (Profile(start=3, steps=2), 6, [0, 1, "start", 2, 3, "stop", 4, 5]),
        (Profile(start=1, steps=1), 2, ["start", 0, "stop", 1]),
        (Profile(start=2, steps=9), 3, [0, "start", 1, 2, "stop"]),  # the run ends first
    ],
)
def test_a_window_of_steps_is_traced(tmp_path, monkeypatch, profile, steps, calls):
    traces = Traces(monkeypatch)
    with Profiler(profile, tmp_path) as profiler:
        for number in range(steps):
            with profiler.step(number):
                traces.calls.append(number)
    assert traces.calls == calls


def test_a_failed_step_ends_its_trace(tmp_path, monkeypatch):
    traces = Traces(monkeypatch)
    with pytest.raises(ZeroDivisionError), Profiler(Profile(start=1, steps=5), tmp_path) as profiler, profiler.step(0):
        raise ZeroDivisionError
    assert traces.calls == ["start", "stop"]


def test_jax_writes_the_trace(tmp_path):
    with Profiler(Profile(start=1, steps=1), tmp_path / "profile") as profiler, profiler.step(0):
        jnp.ones(3).sum().block_until_ready()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
