"""Recomputing in the backward pass changes memory, never the result; depth changes neither program nor compile time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portlab_jax.lora import AdapterOptions, init_adapter
from portlab_jax.mesh import MeshPlan
from portlab_jax.step import StepOptions, gradients
from portlab_jax.weights import random_params
from portlab_spec.models import FULL, SLIDING, GemmaConfig, plan_adapter
from portlab_spec.recipe import Lora, Mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

POLICIES = ["none", "dots", "block", "offload"]


def deep_config(layers):
    """Gemma 4 with 5 sliding layers to 1 full one."""
    return GemmaConfig.from_dict(
        {
            "model_type": "gemma4_text",
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "global_head_dim": 16,
            "sliding_window": 16,
            "layer_types": ([SLIDING] * 5 + [FULL]) * (layers // 6),
            "hidden_size_per_layer_input": 0,
        }
    )


class Deep:
    """A random model of some depth with an adapter, and the gradients of its step as a function to compile."""

    def __init__(self, layers, batch, chunk):
        self.mesh = MeshPlan.create(Mesh(data=1, fsdp=1, tp=1), jax.devices()[:1])
        self.config = deep_config(layers)
        self.leaves = plan_adapter(self.config, Lora(rank=2))
        self.batch, self.chunk = batch, chunk
        with jax.set_mesh(self.mesh.mesh):
            self.params = random_params(self.config, jnp.float32, self.mesh, jax.random.key(0))
            adapter = init_adapter(self.leaves, jax.random.key(1))
        self.adapter = jax.tree.map(lambda leaf: leaf + 0.01, adapter)

    def lowered(self, remat):
        options = StepOptions(self.config, AdapterOptions(self.leaves), remat=remat)
        step = jax.jit(gradients, static_argnames=("options", "chunk"))
        with jax.set_mesh(self.mesh.mesh):
            return step.lower(self.adapter, self.params, self.batch, options=options, chunk=self.chunk)

    def run(self, compiled):
        sums, _, grads = compiled(self.adapter, self.params, self.batch)
        return float(sums.loss), grads


@pytest.fixture(scope="module")
def deep(make_rows, packed):
    """12 layers and long rows: activations outweigh everything else."""
    rows = make_rows(n=8, prefix=100)
    return Deep(12, *packed(rows, deep_config(12), share_prefix=False))


@pytest.fixture(scope="module")
def compiled(deep):
    return {remat: deep.lowered(remat).compile() for remat in POLICIES}


@pytest.mark.parametrize("remat", POLICIES[1:])
def test_every_policy_computes_the_same(deep, compiled, remat):
    loss, grads = deep.run(compiled[remat])
    expected_loss, expected = deep.run(compiled["none"])
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for (path, x), y in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(x - y) <= 1e-6 * np.linalg.norm(y), jax.tree_util.keystr(path)


def test_policies_trade_memory_for_work(compiled):
    temporaries = {remat: compiled[remat].memory_analysis().temp_size_in_bytes for remat in POLICIES}
    assert temporaries["block"] < temporaries["dots"] < temporaries["none"]


@pytest.mark.parametrize("remat", ["none", "block"])
def test_the_program_does_not_grow_with_depth(deep, remat):
    deeper = Deep(24, deep.batch, deep.chunk)
    shallow, twice = (model.lowered(remat).as_text().count("\n") for model in (deep, deeper))
    assert twice == shallow
