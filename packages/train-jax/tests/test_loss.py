"""The chunked loss and its hand-written gradient against the plain definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portlab_jax.loss import supervised_loss

V, D, S = 40, 8, 12
IDS = (3, 7, 8)


def plain(hidden, token_rows, embedding, targets, weights):
    if token_rows is not None:
        embedding = embedding.at[jnp.array(IDS)].set(token_rows)
    log_probs = jax.nn.log_softmax(hidden @ embedding.T)
    return -jnp.sum(jnp.take_along_axis(log_probs, targets[:, None], 1)[:, 0] * weights)


@pytest.fixture
def case(rng):
    hidden, rows, embedding = (rng.normal(size=s).astype(np.float32) for s in ((S, D), (len(IDS), D), (V, D)))
    targets = rng.integers(0, V, S).astype(np.int32)
    targets[:3] = IDS
    weights = (rng.random(S) < 0.7).astype(np.float32)
    weights[:3] = 1
    return tuple(map(jnp.asarray, (hidden, rows, embedding, targets, weights)))


@pytest.mark.parametrize("chunk", [1, 4, 12])
@pytest.mark.parametrize("with_rows", [True, False])
def test_value_and_gradients(case, chunk, with_rows):
    hidden, rows, embedding, targets, weights = case
    rows = rows if with_rows else None
    ids = IDS if with_rows else ()

    def ours(hidden, rows):
        return 2.5 * supervised_loss(hidden, rows, embedding, targets, weights, ids, chunk)

    def reference(hidden, rows):
        return 2.5 * plain(hidden, rows, embedding, targets, weights)

    np.testing.assert_allclose(ours(hidden, rows), reference(hidden, rows), rtol=1e-6)
    argnums = (0, 1) if with_rows else 0
    got, expected = (jax.grad(f, argnums)(hidden, rows) for f in (ours, reference))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_padding_slots_have_no_effect(case):
    hidden, rows, embedding, targets, weights = case
    grad = jax.grad(lambda h: supervised_loss(h, rows, embedding, targets, weights, IDS, 4))(hidden)
    assert not np.asarray(grad)[np.asarray(weights) == 0].any()
    other = targets.at[np.flatnonzero(np.asarray(weights) == 0)].set(0)
    assert supervised_loss(hidden, rows, embedding, targets, weights, IDS, 4) == supervised_loss(
        hidden, rows, embedding, other, weights, IDS, 4
    )
