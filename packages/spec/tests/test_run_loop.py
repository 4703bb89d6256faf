"""The loop of a run: what is read, measured and saved after which step, and where a run ends."""

import contextlib
import signal

import pytest

from portlab_spec.errors import CheckFailed
from portlab_spec.recipe import Optimizer, Recipe
from portlab_spec.run.loop import Launched, Numbers, run_steps
from portlab_spec.run.monitor import Throughput, Work
from portlab_spec.run.signals import Preempted, Preemption
from portlab_spec.run.train_log import TrainLog
from portlab_spec.schedule import learning_rates

WORK = Work(examples=4, tokens=40, computed=20, flops=100)


class FakeSteps:
    """Notes every call. Step k, from 1, has the loss 1/k; monitored losses are told beforehand."""

    def __init__(self, monitored=(), compiles=(0,), losses=()):
        self.calls, self.saved = [], {}
        self._monitored, self._compiles, self._losses = list(monitored), compiles, dict(losses)

    def prepare(self, step):
        self.calls.append(f"prepare {step + 1}")
        return step in self._compiles

    def launch(self, step):
        number = step + 1
        self.calls.append(f"launch {number}")

        def read():
            self.calls.append(f"read {number}")
            return Numbers(self._losses.get(number, 1 / number), grad_norm=2.0, accuracy=0.5)

        return Launched([f"row-{number}"], WORK, step in self._compiles, read)

    def measure(self):
        self.calls.append("measure")
        return self._monitored.pop(0)

    def save(self, done, log, monitored):
        self.calls.append(f"save {done}")
        self.saved[done] = log, monitored

    def wait(self):
        self.calls.append("wait")


class Leaving(Preemption):
    """Asked to leave after some step."""

    def __init__(self, after=None):
        super().__init__()
        self._after = after

    def due(self, step):
        return step == self._after


class Tracked:
    def __init__(self):
        self.lines = []

    def __call__(self, step, values):
        self.lines.append((step, values))


def recipe(**settings):
    return Recipe(**{"steps": 4, "save_every": 100} | settings)


def run(recipe, steps, log=None, *, leave_after=None, track=None, **more):
    return run_steps(
        recipe,
        steps,
        log or TrainLog(),
        Throughput(1, "cpu"),
        track=track or Tracked(),
        preemption=Leaving(leave_after),
        advance=lambda done, note: None,
        **more,
    )


def test_numbers_are_read_while_the_next_step_computes():
    steps = FakeSteps()
    run(recipe(steps=3), steps)
    assert steps.calls == [
        *("prepare 1", "launch 1"),
        *("prepare 2", "launch 2", "read 1"),
        *("prepare 3", "launch 3", "read 2"),
        *("read 3", "save 3"),
    ]


def test_what_is_saved_knows_its_own_step():
    steps = FakeSteps()
    run(recipe(save_every=2), steps)
    assert {done: log.losses for done, (log, _) in steps.saved.items()} == {
        2: [1, 1 / 2],
        4: [1, 1 / 2, 1 / 3, 1 / 4],
    }


def test_a_step_is_measured_before_it_is_saved():
    steps = FakeSteps(monitored=[0.9, 0.8])
    ended = run(recipe(save_every=2, eval_every=2), steps)
    assert [call for call in steps.calls if "read" not in call][-4:] == ["prepare 4", "launch 4", "measure", "save 4"]
    assert ended.log.evals == [(2, 0.9), (4, 0.8)]
    assert [(log.evals, monitored) for log, monitored in steps.saved.values()] == [
        ([(2, 0.9)], 0.9),
        ([(2, 0.9), (4, 0.8)], 0.8),
    ]


def test_the_last_step_is_measured_and_saved_wherever_it_falls():
    steps = FakeSteps(monitored=[0.9, 0.8])
    ended = run(recipe(steps=5, eval_every=3), steps)
    assert [step for step, _ in ended.log.evals] == [3, 5]
    assert list(steps.saved) == [5]


def test_where_the_best_is_kept_whatever_is_measured_is_saved():
    steps = FakeSteps(monitored=[0.9, 0.8])
    run(recipe(eval_every=2, keep_best=True), steps)
    assert list(steps.saved) == [2, 4]


def test_patience_ends_the_run_at_a_saved_step():
    steps = FakeSteps(monitored=[0.5, 0.6, 0.7])
    ended = run(recipe(steps=100, eval_every=2, patience=2), steps)
    assert ended.done == 6
    assert list(steps.saved) == [6]


def test_a_run_whose_patience_was_over_takes_no_more_steps():
    log = TrainLog([1.0, 0.9], 3.0, [(1, 0.5), (2, 0.6)])
    steps = FakeSteps()
    assert run(recipe(eval_every=1, patience=1), steps, log).done == 2
    assert steps.calls == []


def test_a_run_that_is_asked_to_leave_has_its_step_on_disk():
    steps = FakeSteps()
    with pytest.raises(Preempted, match="after step 2, which is saved") as left:
        run(recipe(), steps, leave_after=2)
    assert left.value.exit_code == 128 + signal.SIGTERM
    assert steps.calls[-3:] == ["read 2", "save 2", "wait"]


def test_a_run_that_is_asked_to_leave_at_its_end_has_ended():
    assert run(recipe(), FakeSteps(), leave_after=4).done == 4


def test_a_run_goes_on_where_its_log_ends():
    steps = FakeSteps()
    ended = run(recipe(), steps, TrainLog([1.0, 0.5], 100.0, []))
    assert [call for call in steps.calls if call.startswith("launch")] == ["launch 3", "launch 4"]
    assert ended.log.losses == [1.0, 0.5, 1 / 3, 1 / 4]
    assert ended.log.seconds == pytest.approx(100.0, abs=1.0)
    assert ended.seconds < 1.0


def test_a_finished_run_has_nothing_to_do():
    log = TrainLog([0.1] * 4, 7.0, [])
    steps = FakeSteps()
    ended = run(recipe(), steps, log)
    assert (ended.done, ended.log.losses, steps.calls) == (4, log.losses, [])


def test_the_log_that_was_given_stays_as_it_was():
    log = TrainLog([1.0], 0.0, [(1, 0.9)])
    run(recipe(eval_every=2), FakeSteps(monitored=[0.5, 0.4]), log)
    assert log == TrainLog([1.0], 0.0, [(1, 0.9)])


def test_a_loss_that_is_no_number_names_its_own_step_and_rows():
    steps = FakeSteps(losses={2: float("nan")})
    with pytest.raises(CheckFailed, match=r"loss of step 2 is nan.*row-2"):
        run(recipe(), steps)
    assert steps.saved == {}


def test_every_step_is_tracked_with_its_learning_rate():
    track, settings = Tracked(), Optimizer(learning_rate=1e-2)
    run(recipe(optimizer=settings), FakeSteps(), track=track)
    assert [step for step, _ in track.lines] == [1, 2, 3, 4]
    rates = [values["learning_rate"] for _, values in track.lines]
    assert rates == pytest.approx(learning_rates(settings, 4).tolist())
    assert {"loss": 0.25, "grad_norm": 2.0, "token_accuracy": 0.5}.items() <= track.lines[-1][1].items()


def test_steps_that_compiled_do_not_count_as_speed():
    track = Tracked()
    run(recipe(), FakeSteps(compiles=(0, 2)), track=track)
    assert ["examples_per_second" in values for _, values in track.lines] == [False, True, True, True]


def test_a_profiler_is_around_the_step_and_what_is_read_in_it():
    steps = FakeSteps()

    @contextlib.contextmanager
    def around(number):
        steps.calls.append(f"enter {number}")
        yield
        steps.calls.append(f"leave {number}")

    run(recipe(steps=3), steps, around=around)
    assert steps.calls == [
        *("prepare 1", "enter 1", "launch 1", "leave 1"),
        *("prepare 2", "enter 2", "launch 2", "read 1", "leave 2"),
        *("prepare 3", "enter 3", "launch 3", "read 2", "leave 3"),
        *("read 3", "save 3"),
    ]
