"""Learning rates by hand, and optimisers: clip, decay, factored moments, sharding of the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from portlab_jax.adafactor import scale_by_adafactor
from portlab_jax.optim import ADAFACTOR_CLIP, ADAFACTOR_DECAY, ADAFACTOR_MIN_SIZE, make_optimizer, state_bytes
from portlab_jax.schedule import learning_rate_schedule
from portlab_spec.recipe import Optimizer

SCHEDULES = {
    # Peak 1, two warm-up steps: 1/3 and 2/3, then the peak at step 2. Ten steps, the last of them step 9.
    "constant": [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [1 / 3, 2 / 3, 1, 1 - 0.9 / 7, 1 - 1.8 / 7, 1 - 2.7 / 7, 1 - 3.6 / 7, 1 - 4.5 / 7, 1 - 5.4 / 7, 0.1],
    "wsd": [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1],
    "inverse_sqrt": [1 / 3, 2 / 3, 1, *((3 / (t + 1)) ** 0.5 for t in range(3, 10))],
    "cosine": [1 / 3, 2 / 3, *(0.1 + 0.45 * (1 + np.cos(np.pi * t / 7)) for t in range(8))],
}


def optimizer(**fields):
    return Optimizer(
        **{"learning_rate": 1.0, "warmup_steps": 2, "final_fraction": 0.1, "decay_fraction": 0.3, **fields}
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_by_hand(name):
    rate = learning_rate_schedule(optimizer(schedule=name), 10)
    np.testing.assert_allclose([float(rate(t)) for t in range(10)], SCHEDULES[name], rtol=2e-6)


def test_no_warm_up_starts_at_the_peak():
    rate = learning_rate_schedule(optimizer(schedule="linear", warmup_steps=0), 3)
    np.testing.assert_allclose([float(rate(t)) for t in range(3)], [1, 0.55, 0.1], rtol=1e-6)


def test_a_decay_that_fills_the_run_starts_behind_the_warm_up():
    rate = learning_rate_schedule(optimizer(schedule="wsd", decay_fraction=0.8), 10)
    linear = learning_rate_schedule(optimizer(schedule="linear"), 10)
    np.testing.assert_allclose([float(rate(t)) for t in range(10)], [float(linear(t)) for t in range(10)], rtol=1e-6)


PEAK, FINAL, WARMUP, STEPS = 4e-4, 0.05, 3, 30
DECAY = STEPS - WARMUP - 1  # steps from the peak to the last
AFTER_WARMUP = {
    "constant": optax.constant_schedule(PEAK),
    "linear": optax.linear_schedule(PEAK, PEAK * FINAL, DECAY),
    "cosine": optax.cosine_decay_schedule(PEAK, DECAY, FINAL),
    "wsd": optax.linear_schedule(PEAK, PEAK * FINAL, 6, transition_begin=DECAY - 6),
}


@pytest.mark.parametrize("name", AFTER_WARMUP)
def test_the_shapes_are_those_of_optax(name):
    ramp = optax.linear_schedule(PEAK / (WARMUP + 1), PEAK, WARMUP)
    theirs = optax.join_schedules([ramp, AFTER_WARMUP[name]], [WARMUP])
    settings = {"learning_rate": PEAK, "warmup_steps": WARMUP, "final_fraction": FINAL, "decay_fraction": 0.2}
    ours = learning_rate_schedule(Optimizer(schedule=name, **settings), STEPS)
    np.testing.assert_allclose([float(ours(t)) for t in range(STEPS)], [theirs(t) for t in range(STEPS)], rtol=2e-6)


def test_the_last_rate_goes_on():
    rate = learning_rate_schedule(optimizer(schedule="linear"), 10)
    assert float(rate(10)) == float(rate(99)) == float(rate(9))


def flat(**fields):
    """An optimiser whose rate is 1 at every step."""
    return optimizer(schedule="constant", warmup_steps=0, **fields)


def one_update(transform, params, grads):
    updates, _ = transform.update(grads, transform.init(params), params)
    return updates


def test_adamw_is_the_formula_with_the_gradient_clipped_first():
    grad, b1, b2, eps, decay = np.array([[3.0, -4.0]]), 0.5, 0.75, 1e-2, 0.1
    params = {"a": jnp.array([[2.0, 5.0]])}
    clipped = grad / 5  # its norm is 5, the clip 1
    first, second = (1 - b1) * clipped / (1 - b1), (1 - b2) * clipped**2 / (1 - b2)
    expected = -(first / (np.sqrt(second) + eps) + decay * np.array([[2.0, 5.0]]))
    transform = make_optimizer(flat(b1=b1, b2=b2, eps=eps, weight_decay=decay), 10)
    np.testing.assert_allclose(one_update(transform, params, {"a": jnp.array(grad)})["a"], expected, rtol=1e-6)


def test_gradients_below_the_clip_are_left_alone():
    params, grads = {"a": jnp.ones((2, 2))}, {"a": jnp.full((2, 2), 0.1)}
    small, large = (make_optimizer(flat(eps=1.0, clip_norm=clip), 10) for clip in (0.2, 1e9))
    np.testing.assert_allclose(one_update(small, params, grads)["a"], one_update(large, params, grads)["a"], rtol=1e-6)


PARAMS = {
    "embed_tokens": jnp.ones((6, 4)),
    "norm": jnp.ones((4,)),
    "layers": {"sliding": {"q_proj": jnp.ones((3, 8, 4)), "input_norm": jnp.ones((3, 4)), "scalar": jnp.ones((3,))}},
}


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_full_fine_tuning_decays_matrices_alone(name):
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    updates = one_update(make_optimizer(flat(name=name, weight_decay=0.5), 10, method="full"), PARAMS, zero)
    decayed = jax.tree.map(lambda update: bool(jnp.all(update == -0.5)), updates)
    layers = {"q_proj": True, "input_norm": False, "scalar": False}
    assert decayed == {"embed_tokens": True, "norm": False, "layers": {"sliding": layers}}


def test_adapters_decay_whole():
    adapter = {"token_rows": jnp.ones((2, 4)), "lora": {"sliding.q_proj": {"a": jnp.ones((3, 4, 2))}}}
    updates = one_update(make_optimizer(flat(weight_decay=0.5), 10), adapter, jax.tree.map(jnp.zeros_like, adapter))
    assert jax.tree.all(jax.tree.map(lambda update: bool(jnp.all(update == -0.5)), updates))


def test_adafactor_holds_no_full_second_moment_and_no_first():
    params = {"layers": {"sliding": {"q_proj": jax.ShapeDtypeStruct((3, 512, 256), jnp.float32)}}}
    factors = 3 * (512 + 256)
    assert state_bytes(make_optimizer(flat(name="adafactor"), 10), params) < 4 * (factors + 16)
    assert state_bytes(make_optimizer(flat(name="adamw"), 10), params) > 4 * 2 * 3 * 512 * 256


def test_adafactor_leaves_zero_weights():
    params, grads = {"b": jnp.zeros((2, 4))}, {"b": jnp.ones((2, 4))}
    np.testing.assert_allclose(
        one_update(make_optimizer(flat(name="adafactor"), 10), params, grads)["b"], -1, rtol=1e-6
    )


STACKS = {
    "layers of an adapter": (("lora", "sliding.q_proj", "a"), (3, 160, 130), 1),
    "experts of an adapter": (("lora", "sliding.experts.down_proj", "b"), (2, 140, 130, 150), 2),
    "layers": (("layers", "sliding", "q_proj"), (3, 160, 130), 1),
    "experts": (("layers", "sliding", "experts.down_proj"), (2, 3, 130, 150), 2),
    "norms": (("layers", "sliding", "input_norm"), (130, 140), 1),
}


@pytest.mark.parametrize("stack", STACKS)
def test_adafactor_treats_stacked_layers_and_experts_one_by_one(stack):
    """Three steps of a stack are optax's of its members, each by itself."""
    (first, second, third), shape, stacked = STACKS[stack]
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(0, 1, shape[:stacked]))  # gradients that a common clip would treat alike
    grads = [
        rng.normal(0, 1, shape).astype(np.float32) * sizes.reshape(*sizes.shape, *[1] * (len(shape) - stacked))
        for _ in range(3)
    ]
    ours = scale_by_adafactor(decay=ADAFACTOR_DECAY, clip=ADAFACTOR_CLIP, min_size=ADAFACTOR_MIN_SIZE)
    theirs = optax.chain(
        optax.scale_by_factored_rms(decay_rate=ADAFACTOR_DECAY, min_dim_size_to_factor=ADAFACTOR_MIN_SIZE),
        optax.clip_by_block_rms(ADAFACTOR_CLIP),
    )

    def steps(transform, grads):
        state = transform.init(grads[0])
        for grad in grads:
            updates, state = transform.update(grad, state, grads[0])
        return updates

    found = steps(ours, [{first: {second: {third: jnp.array(grad)}}} for grad in grads])[first][second][third]
    some = [0, *rng.integers(0, sizes.size, 3)]
    for number in some:
        at = np.unravel_index(number, sizes.shape)
        expected = steps(theirs, [jnp.array(grad[at]) for grad in grads])
        np.testing.assert_allclose(found[at], expected, rtol=2e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_state_is_float32(name):
    state = jax.eval_shape(make_optimizer(flat(name=name), 10).init, PARAMS)
    kinds = {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert kinds == {jnp.dtype("float32")}
