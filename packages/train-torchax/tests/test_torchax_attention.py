"""Attention is transformers' eager attention, but for tokens that see nothing, and refuses what it has not got."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torchax import interop
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

from portlab_spec.errors import UserError
from portlab_torchax.attention import attend
from portlab_torchax.functional import enabled

T, D = 7, 8


@pytest.fixture
def draw():
    rng = np.random.default_rng(0)
    return lambda *shape: rng.normal(0, 1, shape).astype(np.float32)


def masks():
    i, j = np.arange(T)[:, None], np.arange(T)[None]
    causal = (j <= i)[None, None]
    return {
        "none": None,
        "causal": causal,
        "window": causal & (i - j < 3),
        "another for each row": np.concatenate([causal, causal & (j != 2) | (i == j)]),
    }


def ours(query, key, value, mask, scaling):
    def attention(query, key, value):
        with enabled():
            tensors = interop.torch_view((query, key, value))
            seen = None if mask is None else interop.torch_view(jnp.asarray(mask))
            return interop.jax_view(attend(SimpleNamespace(), *tensors, seen, scaling)[0])

    return attention(*map(jnp.asarray, (query, key, value))), attention


def eager(query, key, value, mask, scaling):
    """transformers' own, which repeats keys and adds the most negative number where nothing is to be seen."""
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], training=False, head_dim=D)
    bias = None if mask is None else torch.where(torch.tensor(mask), 0.0, torch.finfo(torch.float32).min)
    return eager_attention_forward(module, *map(torch.as_tensor, (query, key, value)), bias, scaling=scaling)[0]


@pytest.mark.parametrize("scaling", [None, 1.0, 0.3])
@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_equals_eager_attention(heads, kv_heads, mask, scaling, draw):
    query, key, value = draw(2, heads, T, D), draw(2, kv_heads, T, D), draw(2, kv_heads, T, D)
    found, _ = ours(query, key, value, masks()[mask], scaling)
    assert found.shape == (2, T, heads, D)
    np.testing.assert_allclose(found, eager(query, key, value, masks()[mask], scaling), rtol=1e-4, atol=1e-5)


def test_gradients_equal_those_of_eager_attention(draw):
    arrays = draw(2, 4, T, D), draw(2, 2, T, D), draw(2, 2, T, D)
    mask, toward = masks()["window"], draw(2, T, 4, D)
    _, attention = ours(*arrays, mask, 0.3)
    found = jax.grad(lambda *x: (attention(*x) * toward).sum(), argnums=(0, 1, 2))(*map(jnp.asarray, arrays))
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
    (eager(*leaves, mask, 0.3) * torch.tensor(toward)).sum().backward()
    for gradient, leaf in zip(found, leaves, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-4, atol=1e-5)


def test_a_token_that_sees_nothing_is_finite_and_leaves_the_others_alone(draw):
    """torchax's own attention gives a number that is none, see test_torchax_stock_faults."""
    arrays = draw(1, 4, T, D), draw(1, 2, T, D), draw(1, 2, T, D)
    mask = masks()["causal"].copy()
    mask[..., 3, :] = False
    found, attention = ours(*arrays, mask, None)
    assert np.isfinite(found).all()
    expected = eager(*arrays, masks()["causal"], D**-0.5)
    others = np.arange(T) != 3
    np.testing.assert_allclose(found[:, others], expected[:, others], rtol=1e-4, atol=1e-5)
    gradients = jax.grad(lambda *x: attention(*x).sum(), argnums=(0, 1, 2))(*map(jnp.asarray, arrays))
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"dropout": 0.1}, "dropout of attention"),
        ({"softcap": 50.0}, "softcap of scores"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
    ],
)
def test_refuses_in_one_line_what_it_has_not_got(setting, said, draw):
    x = torch.tensor(draw(1, 4, T, D))
    with pytest.raises(UserError, match=f"SimpleNamespace wants {said}, which is not implemented") as no:
        attend(SimpleNamespace(), x, x, x, None, **setting)
    assert "\n" not in str(no.value)
