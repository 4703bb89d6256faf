"""Watching a run: losses that are no numbers, patience, rates; the signals and traces around its steps."""

import os
import signal
import threading

import jax.numpy as jnp
import pytest

from portlab_jax.monitor import Throughput, Work, patience_is_over, require_finite
from portlab_jax.profiling import Profiler
from portlab_jax.signals import Preempted, Preemption
from portlab_spec import cli
from portlab_spec.errors import CheckFailed
from portlab_spec.recipe import Profile

NAN, INF = float("nan"), float("inf")


def test_finite_numbers_pass():
    require_finite(0.0, 1e30, 1, ["a"])


@pytest.mark.parametrize(
    ("loss", "norm", "says"),
    [
        (NAN, 1.0, "the loss of step 4 is nan"),
        (INF, NAN, "the loss of step 4 is inf"),
        (2.5, INF, "the gradient norm of step 4 is inf, with a loss of 2.5"),
    ],
)
def test_anything_else_names_the_step_and_its_rows(loss, norm, says):
    with pytest.raises(CheckFailed) as failed:
        require_finite(loss, norm, 4, ["steps-01", "steps-07"])
    assert says in str(failed.value)
    assert "look at its rows: steps-01, steps-07" in str(failed.value)


def test_a_large_batch_is_not_named_whole():
    with pytest.raises(CheckFailed, match=r"r31 and 68 more$"):
        require_finite(NAN, 1.0, 1, [f"r{i}" for i in range(100)])


@pytest.mark.parametrize(
    ("losses", "patience", "over"),
    [
        ([], 2, False),
        ([3, 2, 1], 1, False),
        ([3, 2, 2], 1, True),  # a tie is no improvement
        ([3, 2, 4, 5], 3, False),
        ([3, 2, 4, 5], 2, True),
        ([3, 4, 2, 5], 2, False),
        ([3, 4, 5, 6], 0, False),
    ],
)
def test_patience(losses, patience, over):
    assert patience_is_over(list(enumerate(losses)), patience) is over


def test_rates_leave_out_the_steps_that_compiled():
    throughput = Throughput(devices=2, device_kind="TPU v5 lite")
    throughput.add(Work(32, 9000, 1300, 10**12), 60.0, compiled=True)
    assert throughput.rates() == {}
    for seconds in (0.5, 1.5):
        throughput.add(Work(32, 9000, 1300, 197 * 10**12), seconds, compiled=False)
    assert throughput.rates() == {
        "seconds_per_step": 1.0,
        "examples_per_second": 32,
        "tokens_per_second": 9000,
        "computed_tokens_per_second": 1300,
        "mfu": 0.5,
    }


def test_an_unknown_device_gets_no_mfu():
    throughput = Throughput(devices=1, device_kind="cpu")
    throughput.add(Work(1, 1, 1, 1), 1.0, compiled=False)
    assert "mfu" not in throughput.rates()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_asks_to_leave_after_the_step(number, code, capsys):
    def main(_):
        with Preemption() as preemption:
            assert not preemption.due(6)
            os.kill(os.getpid(), number)
            assert preemption.due(7)
            raise preemption.leave(7)

    with pytest.raises(SystemExit) as end:
        cli.run("train-jax", main, [])
    assert end.value.code == code
    line = f"train-jax: error: stopped by {number.name} after step 7, which is saved. Run the same command to go on\n"
    assert capsys.readouterr().err == line


def test_a_second_signal_finds_the_handler_from_before():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with Preemption():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with Preemption():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


def test_another_thread_may_train_and_is_not_interrupted():
    seen = []

    def train():
        with Preemption() as preemption:
            seen.append(preemption.due(1))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [False]


def test_preempted_is_no_failed_check():
    assert Preempted(signal.SIGTERM, 3).exit_code not in (0, 1, 2, 130)


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
