"""The training step: compiled once, state donated, schedule as documented, bfloat16 close to float32."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from portlab_jax.lora import AdapterOptions, count, init_adapter
from portlab_jax.mesh import MeshPlan
from portlab_jax.packing import batch_order, pack_batch, plan_layout
from portlab_jax.step import batch_loss, learning_rate_schedule, make_optimizer
from portlab_jax.trainer import Setup, compiled_step, initial_state
from portlab_jax.weights import load_params
from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.models import match_targets, param_table
from portlab_spec.recipe import Lora, Mesh, Optimizer, Recipe

LORA = Lora(rank=4, alpha=8.0)
OPTIMIZER = Optimizer(learning_rate=1e-2)
STEPS = 10


def uneven_rows(rng, n=24):
    """Rows of many lengths behind one prefix."""
    shared = rng.integers(3, 96, 12).tolist()
    rows = []
    for i in range(n):
        question, answer = rng.integers(1, 30), rng.integers(1, 9)
        ids = (*shared, *rng.integers(3, 96, question + answer).tolist())
        rows.append(Row(f"r{i}", ids, (False,) * (12 + question) + (True,) * answer))
    return rows


@pytest.fixture
def run(tiny_one, rng):
    """A run's batches, layout, initial state and jitted step, as the trainer makes them."""
    recipe = Recipe(lora=LORA, optimizer=OPTIMIZER, steps=STEPS)
    folder = ModelFolder(tiny_one.folder, "tiny", None)
    options = AdapterOptions.from_recipe(LORA)
    setup = Setup(recipe, folder, tiny_one.config, tiny_one.params, tiny_one.mesh, options)
    batches = list(batch_order(uneven_rows(rng), 6, STEPS, seed=0))
    layout = plan_layout(batches)
    return batches, layout, initial_state(setup), compiled_step(setup, layout)


def test_it_compiles_once_over_rows_of_every_length(run, tiny_one):
    batches, layout, state, step = run
    losses = []
    for batch in batches:
        state, metrics = step(state, tiny_one.params, pack_batch(batch, layout))
        losses.append(float(metrics.loss))
    assert step._cache_size() == 1
    assert int(state.step) == STEPS
    assert losses[-1] < losses[0]


def test_the_state_is_donated(run, tiny_one):
    batches, layout, state, step = run
    step(state, tiny_one.params, tiny_one.mesh.put_rows(pack_batch(batches[0], layout)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.adapter))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(tiny_one.params))


def test_clipping_bounds_the_update_not_the_reported_norm(tiny_one, rng):
    grads = {"x": jnp.full(4, 100.0)}
    transform = make_optimizer(Optimizer(clip_norm=1.0), STEPS)
    clipped, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    assert float(optax.tree.norm(clipped)) == pytest.approx(1.0)
    update, _ = transform.update(grads, transform.init(grads), grads)
    assert np.isfinite(update["x"]).all()


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedules(kind):
    optimizer = Optimizer(learning_rate=1.0, warmup_steps=3, schedule=kind, final_fraction=0.1)
    rates = [float(learning_rate_schedule(optimizer, 20)(i)) for i in range(20)]
    assert rates[0] == pytest.approx(0.25)
    assert rates[3] == pytest.approx(1.0)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(1.0 if kind == "constant" else 0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))


def test_bfloat16_base_stays_close_to_float32(tiny_one, rng):
    rows = uneven_rows(rng, 4)
    layout = plan_layout([rows])
    adapter = init_adapter(tiny_one.config, LORA, jax.random.key(0))
    adapter = jax.tree.map(lambda leaf: leaf + 0.01, adapter)
    options = AdapterOptions.from_recipe(LORA)
    low = load_params(tiny_one.folder, tiny_one.config, jnp.dtype(jnp.bfloat16), tiny_one.mesh)
    values = []
    for params in (tiny_one.params, low):
        loss, grads = jax.jit(
            lambda p: jax.value_and_grad(batch_loss)(
                adapter, p, pack_batch(rows, layout), tiny_one.config, options, layout.chunk
            )
        )(params)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
        values.append((float(loss), np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)])))
    (loss, exact), (rounded_loss, rounded) = values
    assert rounded_loss == pytest.approx(loss, rel=0.02)
    assert np.dot(exact, rounded) > 0.99 * np.linalg.norm(exact) * np.linalg.norm(rounded)


def test_dropout_changes_the_loss_only_with_a_key(tiny_one, rng):
    rows = uneven_rows(rng, 4)
    layout = plan_layout([rows])
    adapter = jax.tree.map(lambda leaf: leaf + 0.05, init_adapter(tiny_one.config, LORA, jax.random.key(0)))
    options = AdapterOptions(LORA.scaling, dropout=0.5)

    def forward(params, batch, key):
        return batch_loss(adapter, params, batch, tiny_one.config, options, layout.chunk, dropout_key=key)

    jitted = jax.jit(forward)

    def loss(key):
        return float(jitted(tiny_one.params, pack_batch(rows, layout), key))

    assert loss(None) == loss(None)
    assert loss(jax.random.key(0)) == loss(jax.random.key(0))
    assert loss(jax.random.key(0)) != loss(jax.random.key(1))
    assert loss(jax.random.key(0)) != loss(None)


def test_targets_by_last_and_dotted_name(tiny_one):
    table = param_table(tiny_one.config)
    names = [p.name for p in match_targets(table, ("q_proj", "mlp.up_proj"))]
    assert names == ["self_attn.q_proj", "mlp.up_proj"]
    with pytest.raises(UserError, match="matches no linear layer"):
        match_targets(table, ("norm",))
    adapter = init_adapter(tiny_one.config, Lora(rank=2, targets=("q_proj",)), jax.random.key(0))
    layers, d, q = 4, 32, 64
    assert count(adapter) == layers * 2 * (d + q)


def test_adding_a_target_keeps_the_others_initial_values(tiny_one):
    one, two = (
        init_adapter(tiny_one.config, Lora(rank=2, targets=t), jax.random.key(0))
        for t in (("q_proj",), ("q_proj", "v_proj"))
    )
    name = "self_attn.q_proj"
    np.testing.assert_array_equal(one["lora"][name]["a"], two["lora"][name]["a"])


def test_a_mesh_needs_exactly_the_devices():
    with pytest.raises(UserError, match="is not the 1 device"):
        MeshPlan.create(Mesh(tp=2))
