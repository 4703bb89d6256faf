"""LoRA's dropout in a compiled step: drawn anew each step, the same again for the same step, none in evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from portlab_spec.packing import pack_batch
from portlab_torchax.dropout import KeyedDropout, key_names
from portlab_torchax.functional import Functional
from portlab_torchax.setup import initial_state, jit_step
from portlab_torchax.step import make_evaluation

RATE = 0.3


@pytest.fixture(scope="module")
def setup(toy):
    return toy("qwen3", lora={"dropout": RATE})


@pytest.fixture(scope="module")
def step(setup, make_rows):
    """The compiled step on one batch: from the run's start, as step `number`."""
    rows = make_rows()
    layout = setup.plan([rows]).layouts[0]
    batch = setup.placement.put_rows(pack_batch(rows, layout), axis=1)
    with jax.checking_leaks():  # also of what lies in the model's own tensors afterwards
        state = initial_state(setup)
        compiled = jit_step(setup, state, layout).lower(state, setup.frozen, batch).compile()

    def run(number):
        state = initial_state(setup)._replace(step=jax.device_put(jnp.int32(number), setup.placement.replicated))
        return compiled(state, setup.frozen, batch)

    return run


def test_every_adapted_layer_has_a_key_of_its_own(setup):
    adapted = [name for name in setup.trained if ".lora_A." in name]
    assert len(setup.program.keys) == len(adapted) == len(set(setup.program.keys))
    values = setup.program.values(setup.start, setup.frozen, jax.random.key(0))
    keys = {tuple(np.asarray(values[name]).tolist()) for name in setup.program.keys}
    assert len(keys) == len(adapted)


def test_no_key_is_left_in_the_model(setup, step):
    step(0)
    buffers = dict(setup.program.model.module.named_buffers())
    assert all(type(buffers[name]) is torch.Tensor for name in setup.program.keys)


def test_other_steps_draw_other_masks(step):
    losses = {float(step(number)[1].loss) for number in range(4)}
    assert len(losses) == 4


def test_a_step_draws_the_same_again(step):
    (state, metrics), (again, metrics_again) = step(2), step(2)
    assert float(metrics.loss) == float(metrics_again.loss)
    for name, value in state.trained.items():
        np.testing.assert_array_equal(value, again.trained[name], err_msg=name)


def test_another_seed_draws_other_masks(toy, make_rows, gradients):
    losses = [float(gradients(toy("qwen3", lora={"dropout": RATE}), make_rows(), key=key)[0].loss) for key in (0, 1)]
    assert losses[0] != losses[1]


def test_evaluation_draws_nothing(setup, toy, make_rows):
    rows = make_rows()
    layout = setup.plan([rows]).layouts[0]
    batch = pack_batch(rows, layout)
    plain = toy("qwen3")
    found, expected = (
        float(jax.jit(make_evaluation(s.program, layout))(setup.start, s.frozen, batch)[0]) for s in (setup, plain)
    )
    assert found == pytest.approx(expected, rel=1e-6)


def drawn(key, shape=(100, 100), rate=RATE):
    dropout = Functional(KeyedDropout(rate))
    values = {"key": jax.random.key_data(jax.random.key(key))}
    return np.asarray(dropout(values, lambda module, x: module(x), jnp.ones(shape), training=True))


def test_what_is_kept_is_scaled_up_and_the_rest_is_zero():
    kept = drawn(0) != 0
    np.testing.assert_allclose(drawn(0)[kept], 1 / (1 - RATE), rtol=1e-6)
    # Five standard deviations of the mean of 10,000 draws.
    assert kept.mean() == pytest.approx(1 - RATE, abs=5 * (RATE * (1 - RATE) / kept.size) ** 0.5)


def test_masks_of_two_keys_are_independent():
    both = (drawn(0) != 0) & (drawn(1) != 0)
    share = (1 - RATE) ** 2
    assert both.mean() == pytest.approx(share, abs=5 * (share * (1 - share) / both.size) ** 0.5)


def test_no_dropout_needs_no_keys(toy):
    setup = toy("qwen3")
    assert setup.program.keys == () == tuple(key_names(setup.program.model.module))
    assert not any(isinstance(m, nn.Dropout) and m.p for m in setup.program.model.module.modules())
