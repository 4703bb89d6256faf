"""Learning rates by hand."""

import numpy as np
import pytest

from portlab_spec.recipe import Optimizer
from portlab_spec.schedule import learning_rates

SHAPES = {
    # Peak 1, two warm-up steps: 1/3 and 2/3, then the peak at step 2. Ten steps, the last of them step 9.
    "constant": [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [1 / 3, 2 / 3, 1, 1 - 0.9 / 7, 1 - 1.8 / 7, 1 - 2.7 / 7, 1 - 3.6 / 7, 1 - 4.5 / 7, 1 - 5.4 / 7, 0.1],
    "wsd": [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1],
    "inverse_sqrt": [1 / 3, 2 / 3, 1, *((3 / (t + 1)) ** 0.5 for t in range(3, 10))],
    "cosine": [1 / 3, 2 / 3, *(0.1 + 0.45 * (1 + np.cos(np.pi * t / 7)) for t in range(8))],
}


def rates(steps, **fields):
    settings = {"learning_rate": 1.0, "warmup_steps": 2, "final_fraction": 0.1, "decay_fraction": 0.3, **fields}
    return learning_rates(Optimizer(**settings), steps)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_by_hand(shape):
    np.testing.assert_array_max_ulp(rates(10, schedule=shape), np.float32(SHAPES[shape]), maxulp=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_peak_is_a_factor(shape):
    scaled = rates(10, schedule=shape, learning_rate=4e-4)
    np.testing.assert_array_max_ulp(scaled, np.float32(4e-4 * np.array(SHAPES[shape])), maxulp=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_float32_for_each_step_and_none_of_them_zero(shape):
    table = rates(1000, schedule=shape, warmup_steps=100)
    assert (table.dtype, table.shape) == (np.float32, (1000,))
    assert table.min() > 0
    assert table.argmax() == 100


def test_no_warm_up_starts_at_the_peak():
    np.testing.assert_array_max_ulp(rates(3, schedule="linear", warmup_steps=0), np.float32([1, 0.55, 0.1]), maxulp=1)


def test_a_decay_that_fills_the_run_starts_behind_the_warm_up():
    filled = rates(10, schedule="wsd", decay_fraction=0.8)
    np.testing.assert_array_max_ulp(filled, rates(10, schedule="linear"), maxulp=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_step_has_the_peak(shape):
    assert rates(1, schedule=shape, warmup_steps=0).tolist() == [1.0]
