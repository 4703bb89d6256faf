"""Dropout of LoRA: on the adapter's input alone, unbiased, and only while training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portlab_jax.lora import AdapterOptions, Ends, Low, init_adapter, linear
from portlab_jax.step import StepOptions, gradients
from portlab_spec.errors import UserError
from portlab_spec.models import Dim, plan_adapter
from portlab_spec.recipe import Lora

ENDS = Ends.of((Dim(6), Dim(8)))


@pytest.fixture
def layer(rng):
    """Input (1, 5, 8), weight (6, 8) and low-rank matrices."""
    x, weight, a, b = (jnp.array(rng.normal(size=s), jnp.float32) for s in ((1, 5, 8), (6, 8), (8, 2), (2, 6)))
    return x, weight, Low(a, b)


def test_its_mean_is_the_layer_without_it(layer):
    x, weight, low = layer
    keep = jax.random.bernoulli(jax.random.key(0), 0.7, (20_000, *x.shape))
    outputs = jax.vmap(lambda mask: linear(x, weight, low, ENDS, mask, 0.3))(keep)
    error = np.asarray(outputs.mean(0) - linear(x, weight, low, ENDS))
    assert np.abs(error / (np.asarray(outputs.std(0)) / np.sqrt(len(keep)))).max() < 4.5  # standard errors, 30 values


def test_the_base_sees_every_input(layer):
    x, weight, low = layer
    nothing = jnp.zeros(x.shape, bool)
    np.testing.assert_allclose(linear(x, weight, low, ENDS, nothing, 0.3), linear(x, weight, None, ENDS), rtol=1e-6)


def test_only_a_step_with_a_key_drops(tiny_one, make_rows, packed):
    leaves = plan_adapter(tiny_one.config, Lora(rank=2))
    batch, chunk = packed(make_rows(n=2), tiny_one.config)
    step = jax.jit(gradients, static_argnames=("options", "chunk"))
    with jax.set_mesh(tiny_one.mesh.mesh):
        adapter = jax.tree.map(lambda leaf: leaf + 0.05, init_adapter(leaves, jax.random.key(0)))

        def loss(dropout, key):
            options = StepOptions(tiny_one.config, AdapterOptions(leaves, dropout))
            return float(step(adapter, tiny_one.params, batch, options=options, chunk=chunk, dropout_key=key)[0].loss)

        without, one, again, other = loss(0.0, None), *(loss(0.5, jax.random.key(i)) for i in (1, 1, 2))
        assert loss(0.5, None) == without
    assert one == again
    assert len({without, one, other}) == 3


def test_experts_have_none(tiny_model):
    leaves = plan_adapter(tiny_model("gemma4, experts").config, Lora(targets=("q_proj", "experts.down_proj")))
    with pytest.raises(UserError, match=r"lora.dropout: dropout does not act on experts"):
        AdapterOptions(leaves, dropout=0.1)
