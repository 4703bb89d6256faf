"""A run compiles one program for each layout of its plan, and nothing behind it."""

from types import SimpleNamespace

import jax
import pytest
from toy_rows import tool_rows

from portlab_spec.packing import BatchOrder
from portlab_torchax.setup import initial_state
from portlab_torchax.training import TrainingSteps

STEPS = 50


class Compilations:
    """Counts what JAX hands to XLA."""

    def __init__(self):
        self.count = 0

    def __call__(self, event, *_, **__):
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def compilations():
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


@pytest.fixture(scope="module", params=[1, 3])
def run(request, toy, compilations):
    """50 steps over rows of mixed lengths: the steps, their plan, and JAX's count after each step."""
    setup = toy("qwen3", steps=STEPS, batch_size=1, max_shapes=request.param)
    rows = [row for prefix in (0, 40, 90) for row in tool_rows(6, prefix=prefix, seed=prefix)]
    order = BatchOrder(rows, setup.recipe.batch_size, STEPS, setup.recipe.seed)
    plan = setup.plan(order, max_shapes=request.param)
    said = []
    steps = TrainingSteps(setup, initial_state(setup), order, plan, None, None, said.append)
    counts, losses = [], []
    for number in range(STEPS):
        steps.prepare(number)
        losses.append(steps.launch(number).read().loss)
        counts.append(compilations.count)
    return SimpleNamespace(wanted=request.param, steps=steps, plan=plan, said=said, counts=counts, losses=losses)


def test_as_many_programs_as_layouts(run):
    assert len(run.plan.layouts) == run.wanted
    assert run.steps.programs.count == len(run.said) == run.wanted
    assert all("compiled the step for" in line and "GiB per device" in line for line in run.said)


def test_nothing_is_compiled_once_every_layout_was_met(run):
    warm = max(run.plan.choice.index(number) for number in range(run.wanted))
    assert len(set(run.counts[warm:])) == 1
    assert len(run.counts[warm:]) > STEPS // 2


def test_the_numbers_of_all_steps_are_finite(run):
    assert all(0 < loss < 100 for loss in run.losses)
