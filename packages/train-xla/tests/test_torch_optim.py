"""Optimisers and learning rates in PyTorch: formulas by hand, and the table that every trainer reads."""

import numpy as np
import pytest
import torch
from torch import nn

from portlab_spec.recipe import Optimizer as Settings
from portlab_spec.schedule import learning_rates
from portlab_xla.optim import make_optimizer, make_scheduler

SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")
STEPS = 12


def settings(**fields):
    return Settings(**{"learning_rate": 4e-4, "warmup_steps": 3, "final_fraction": 0.1, **fields})


def step(optimizer, parameter, grad, rate=1.0):
    optimizer.param_groups[0]["lr"] = rate
    parameter.grad = torch.as_tensor(grad, dtype=torch.float32)
    optimizer.step()
    return parameter.detach().numpy().copy()


@pytest.mark.parametrize("first", [0, 5, 11])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_step_has_the_rate_of_the_table(schedule, first):
    chosen = settings(schedule=schedule)
    optimizer = make_optimizer(chosen, [nn.Parameter(torch.ones(1))])
    scheduler = make_scheduler(chosen, STEPS, first, optimizer)
    rates = []
    for _ in range(first, STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == learning_rates(chosen, STEPS)[first:].tolist()


def test_adamw_is_the_formula_with_decoupled_decay():
    b1, b2, eps, decay, rate = 0.5, 0.75, 1e-2, 0.1, 0.3
    start, grads = np.array([[2.0, 5.0]]), [np.array([[3.0, -4.0]]), np.array([[-1.0, 0.5]])]
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer = make_optimizer(settings(b1=b1, b2=b2, eps=eps, weight_decay=decay), [parameter])
    weight, first, second = start, 0.0, 0.0
    for t, grad in enumerate(grads, 1):
        first, second = b1 * first + (1 - b1) * grad, b2 * second + (1 - b2) * grad**2
        update = first / (1 - b1**t) / (np.sqrt(second / (1 - b2**t)) + eps)
        weight = weight - rate * (update + decay * weight)
        np.testing.assert_allclose(step(optimizer, parameter, grad, rate), weight, rtol=1e-6)


def adafactor(shape, **fields):
    parameter = nn.Parameter(torch.zeros(shape))
    return make_optimizer(settings(name="adafactor", **fields), [parameter]), parameter


def test_adafactor_factors_the_second_moment_of_large_matrices():
    rng = np.random.default_rng(0)
    optimizer, parameter = adafactor((128, 160))
    rows, columns, weight = 0.0, 0.0, np.zeros((128, 160))
    for t in range(1, 4):
        grad = rng.normal(0, 1 + t, (128, 160))
        past = 1 - t**-0.8
        rows = past * rows + (1 - past) * (grad**2).mean(1)
        columns = past * columns + (1 - past) * (grad**2).mean(0)
        update = grad / np.sqrt(np.outer(rows, columns) / rows.mean())
        weight = weight - 0.1 * update / max(1, np.sqrt((update**2).mean()))
        np.testing.assert_allclose(step(optimizer, parameter, grad, 0.1), weight, rtol=1e-4, atol=1e-6)
    assert {name: tuple(value.shape) for name, value in optimizer.state[parameter].items()} == {
        "rows": (128,), "columns": (160,),
    }  # fmt: skip


@pytest.mark.parametrize("shape", [(127, 200), (5,), ()])
def test_adafactor_holds_small_second_moments_whole(shape):
    optimizer, parameter = adafactor(shape)
    step(optimizer, parameter, np.full(shape, 3.0))
    assert optimizer.state[parameter]["square"].shape == shape


def test_adafactor_leaves_zero_weights_with_a_step_of_the_rate():
    optimizer, parameter = adafactor((2, 4))
    np.testing.assert_allclose(step(optimizer, parameter, np.full((2, 4), 7.0), 0.1), -0.1, rtol=1e-6)


def test_adafactor_bounds_the_root_mean_square_of_a_step():
    optimizer, parameter = adafactor((4, 4))
    step(optimizer, parameter, np.full((4, 4), 1e-3))
    before = parameter.detach().numpy().copy()
    moved = step(optimizer, parameter, np.full((4, 4), 1e3)) - before
    np.testing.assert_allclose(np.sqrt((moved**2).mean()), 1.0, rtol=1e-5)


def test_adafactor_decays_weights_apart_from_the_gradient():
    parameter = nn.Parameter(torch.full((2, 2), 4.0))
    optimizer = make_optimizer(settings(name="adafactor", weight_decay=0.5), [parameter])
    np.testing.assert_allclose(step(optimizer, parameter, np.zeros((2, 2)), 0.1), 4 * (1 - 0.05), rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_what_got_no_gradient_stays(name):
    parameter = nn.Parameter(torch.ones(2, 2))
    make_optimizer(settings(name=name, weight_decay=0.5), [parameter]).step()
    assert torch.equal(parameter, torch.ones(2, 2))
