"""Cross-entropy of supervised tokens in chunks is that of all of them at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portlab_torchax.loss import pick_slots, supervised_loss

GROUPS, SLOTS, HIDDEN, VOCAB = 2, 12, 5, 11


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 3, (GROUPS, SLOTS)).astype(np.float32)
    assert (weights == 0).any()
    return (
        rng.normal(0, 1, (HIDDEN, VOCAB)).astype(np.float32),
        rng.normal(0, 1, (GROUPS, SLOTS, HIDDEN)).astype(np.float32),
        rng.integers(0, VOCAB, (GROUPS, SLOTS)),
        weights,
    )


def product(matrix, hidden):
    return hidden @ matrix


def at_once(matrix, hidden, targets, weights, z_loss):
    """(loss, nll, correct), written out in float64."""
    logits = hidden.astype(np.float64) @ matrix.astype(np.float64)
    partition = np.log(np.exp(logits).sum(-1))
    nll = partition - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return [(x * weights).sum() for x in (nll + z_loss * partition**2, nll, logits.argmax(-1) == targets)]


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [1, 4, SLOTS])
def test_sums(chunk, z_loss, problem):
    matrix, hidden, targets, weights = problem
    found = supervised_loss(product, matrix, hidden, targets, weights, chunk=chunk, z_loss=z_loss)
    np.testing.assert_allclose(np.array(found), at_once(*problem, z_loss), rtol=1e-5)


@pytest.mark.parametrize("chunk", [4, SLOTS])
def test_gradients(chunk, problem):
    matrix, hidden, targets, weights = problem

    def loss(matrix, hidden):
        return supervised_loss(product, matrix, hidden, targets, weights, chunk=chunk, z_loss=0.3).loss

    found = jax.grad(loss, argnums=(0, 1))(jnp.asarray(matrix), jnp.asarray(hidden))
    softmax = jax.nn.softmax(hidden @ matrix)
    partition = jax.nn.logsumexp(hidden @ matrix, axis=-1)
    by_logits = (softmax * (1 + 0.6 * partition[..., None]) - jax.nn.one_hot(targets, VOCAB)) * weights[..., None]
    expected = jnp.einsum("gsd,gsv->dv", hidden, by_logits), by_logits @ matrix.T
    for gradient, direct in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, direct, rtol=1e-4, atol=1e-5)


def test_a_chunk_s_logits_are_computed_once(problem):
    """Forward and backward together: nothing is kept, and nothing computed again."""
    matrix, hidden, targets, weights = problem
    seen = []

    def head(own, h):
        jax.debug.callback(lambda: seen.append(h.shape))
        return product(own, h)

    jax.grad(lambda h: supervised_loss(head, matrix, h, targets, weights, chunk=4).loss)(jnp.asarray(hidden))
    jax.effects_barrier()
    assert seen == [(GROUPS, 4, HIDDEN)] * (SLOTS // 4)


def test_only_the_loss_has_a_gradient(problem):
    matrix, hidden, targets, weights = problem
    nll = jax.grad(lambda h: supervised_loss(product, matrix, h, targets, weights, chunk=4).nll)(jnp.asarray(hidden))
    np.testing.assert_array_equal(nll, 0)


def test_slots_are_picked_within_their_group():
    hidden = jnp.arange(2 * 6).reshape(2, 6, 1)
    picked = pick_slots(hidden, jnp.array([[5, 0, 0], [1, 5, 2]]))
    np.testing.assert_array_equal(picked[..., 0], [[5, 0, 0], [7, 11, 8]])
