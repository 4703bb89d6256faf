"""What a run is told while it trains: losses in order and late, and graphs that nobody planned."""

import pytest
import torch

from portlab_spec.errors import CheckFailed
from portlab_spec.run.monitor import Throughput, Work
from portlab_xla.loss import Sums
from portlab_xla.watch import CompileBudget, StepInfo, StepLog

WORK = Work(1, 2, 3, 4)


class Recorder:
    """A device whose values arrive when it is told to; it compiles when it is told to."""

    def __init__(self):
        self.requests, self.graphs = [], 0

    def read_later(self, tensors, receive):
        self.requests.append(lambda: receive([value for vector in tensors for value in vector.tolist()]))

    def arrive(self):
        self.requests.pop(0)()

    def sync(self):
        while self.requests:
            self.arrive()

    def compilations(self):
        return self.graphs


@pytest.fixture
def device():
    return Recorder()


@pytest.fixture
def tracked():
    return []


@pytest.fixture
def make_log(device, tracked):
    def make(every=1, losses=()):
        return StepLog(
            device, every, Throughput(1, "cpu"), lambda step, values: tracked.append((step, values)), losses=losses
        )

    return make


def add(log, number, loss, grad_norm=1.0):
    sums = Sums(torch.tensor(loss), torch.tensor(9.0), torch.tensor(0.5))
    log.add(StepInfo(number, [f"row {number}"], WORK, 0.25), sums, torch.tensor(grad_norm))


def test_nothing_is_recorded_before_it_arrives(device, make_log, tracked):
    log = make_log()
    add(log, 1, 5.0)
    log.collect()
    assert tracked == []
    device.arrive()
    log.collect()
    assert log.losses == [5.0]


def test_a_step_is_tracked_with_its_loss_norm_accuracy_and_rate(device, make_log, tracked):
    log = make_log()
    add(log, 1, 5.0, 2.0)
    device.sync()
    log.flush()
    ((step, values),) = tracked
    assert step == 1
    found = {name: values[name] for name in ("loss", "grad_norm", "token_accuracy", "learning_rate")}
    assert found == {"loss": 5.0, "grad_norm": 2.0, "token_accuracy": 0.5, "learning_rate": 0.25}


def test_several_steps_are_read_together(device, make_log, tracked):
    log = make_log(every=3)
    for number in (1, 2):
        add(log, number, float(number))
        assert not device.requests
    add(log, 3, 3.0)
    assert len(device.requests) == 1
    device.arrive()
    log.collect()
    assert [step for step, _ in tracked] == [1, 2, 3]


def test_flush_reads_what_is_left(device, make_log):
    log = make_log(every=4, losses=[9.0])
    for number in range(2, 8):
        add(log, number, float(number))
    device.sync()
    log.flush()
    assert log.losses == [9.0, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("loss", "grad_norm"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_what_is_no_number_ends_the_run_and_names_step_and_rows(device, make_log, loss, grad_norm):
    log = make_log()
    add(log, 1, 1.0)
    add(log, 2, loss, grad_norm)
    device.sync()
    with pytest.raises(CheckFailed, match=r"step 2(.|\n)*row 2"):
        log.flush()


def test_the_first_step_of_each_shape_may_compile(device):
    budget = CompileBudget(device)
    for number, layout in enumerate([0, 1, 2], 1):
        device.graphs += 2
        assert budget.step(number, layout) == (True, "")
    assert (budget.planned, budget.unplanned) == (6, 0)


def test_a_later_graph_is_warned_of_by_its_step(device):
    budget = CompileBudget(device)
    for number in range(1, 8):
        device.graphs += number in (1, 7)
        compiled, warning = budget.step(number, 0)
        assert compiled == (number in (1, 7))
        assert bool(warning) == (number == 7)
    assert "step 7 compiled 1 new graph(s)" in warning
    assert (budget.planned, budget.unplanned) == (1, 1)


def test_graphs_between_steps_are_forgiven(device):
    budget = CompileBudget(device)
    for number in (1, 2, 3):
        budget.step(number, 0)
    device.graphs += 5
    budget.forgive()
    assert budget.step(4, 0) == (False, "")
    assert (budget.planned, budget.unplanned) == (5, 0)
