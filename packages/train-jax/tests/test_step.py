"""The training step and the loop around it: compiled once, state donated, watched, refused where it must be."""

import dataclasses
import json
import logging
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_rows import tool_rows
from training_runs import SETTINGS, TOKEN_IDS, save_random_model

from portlab_jax.checkpoint import Checkpoints
from portlab_jax.compiled import Compiled
from portlab_jax.leaf_digests import leaf_digests
from portlab_jax.lora import AdapterOptions, init_adapter
from portlab_jax.mesh import MeshPlan
from portlab_jax.setup import Setup, initial_state, set_up
from portlab_jax.step import StepOptions, TrainState, batch_sums, gradients
from portlab_jax.trainer import TrainedLeaves, require_gradients, train
from portlab_jax.weights import load_params
from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.mesh import mesh_sizes
from portlab_spec.models import FULL, SLIDING, plan_adapter
from portlab_spec.packing import BatchOrder, Packing, pack_batch, plan
from portlab_spec.recipe import Lora, Mesh, Recipe
from portlab_spec.run.monitor import count_work

pytestmark = pytest.mark.usefixtures("quick_compilation")

DENSE = {
    "model_type": "gemma3_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 6,
    "layer_types": [SLIDING, FULL],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("model"), DENSE)


def set_up_run(model, changes=None):
    recipe = Recipe.model_validate(SETTINGS | (changes or {}))
    return set_up(recipe, ModelFolder(model, "tiny", None), () if recipe.method == "full" else TOKEN_IDS)


def train_from(setup, state, folder, rows=None, **more):
    recipe = setup.recipe
    folder.mkdir(exist_ok=True)
    order = BatchOrder(rows or tool_rows(), recipe.batch_size, recipe.steps, recipe.seed)
    with Checkpoints(folder / "checkpoints", keep=recipe.keep, keep_best=recipe.keep_best) as checkpoints:
        return train(setup, state, order, checkpoints, folder=folder, **more)


# --- a run that overfits: its monitored loss soon rises


class Finished(NamedTuple):
    """What a run was given, and what it left."""

    setup: Setup
    initial: TrainState
    trained: TrainedLeaves
    folder: Path
    xla_compilations: Counter
    said: list[str]

    @property
    def metrics(self):
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


class XlaCompilations(logging.Handler):
    """Counts compilations by name as JAX logs them."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def emit(self, record):
        message = record.getMessage()
        if message.startswith("Finished XLA compilation of"):
            self.names[message.split()[4]] += 1


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    settings = {"eval_every": 2, "patience": 2, "keep_best": True, "optimizer": {"learning_rate": 5e-2}}
    setup = set_up_run(model, settings)
    folder = tmp_path_factory.mktemp("run")
    said = []
    handler = XlaCompilations()
    logging.getLogger("jax").addHandler(handler)
    try:
        with jax.set_mesh(setup.mesh.mesh), jax.log_compiles():
            state = initial_state(setup)
            trained = train_from(setup, state, folder, monitored=tool_rows(6, seed=1), say=said.append)
    finally:
        logging.getLogger("jax").removeHandler(handler)
    return Finished(setup, state, trained, folder, handler.names, said)


def test_rows_of_every_length_compile_once(finished):
    assert len({len(row.ids) for row in tool_rows()}) > 5
    assert finished.trained.compilations == 1
    assert finished.xla_compilations["jit(step)"] == 1
    assert len(finished.said) == 1


def test_the_state_is_donated_and_the_base_is_not(finished):
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(finished.initial))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(finished.setup.frozen))


def test_patience_ends_the_run(finished):
    taken, evals = len(finished.trained.log.losses), finished.trained.log.evals
    assert taken < finished.setup.recipe.steps
    assert [step for step, _ in evals] == list(range(2, taken + 1, 2))
    losses = [loss for _, loss in evals]
    assert min(losses[-2:]) >= min(losses[:-2])


def test_the_best_leaves_are_given_back(finished):
    trained = finished.trained
    best, _ = min(trained.log.evals, key=lambda pair: pair[1])
    assert trained.step == best < len(trained.log.losses)
    kept = json.loads((finished.folder / "checkpoints" / str(best) / "_CHECKPOINT_METADATA").read_text())
    assert kept["custom_metadata"]["leaf_sha256"] == leaf_digests(trained.adapter)


def test_metrics_are_written_step_by_step(finished):
    steps = [line for line in finished.metrics if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert [line["loss"] for line in steps] == finished.trained.log.losses
    assert {"grad_norm", "token_accuracy", "learning_rate"} <= steps[0].keys()
    assert {"examples_per_second", "computed_tokens_per_second"} <= steps[-1].keys()
    monitored = [(line["step"], line["monitored_loss"]) for line in finished.metrics if "monitored_loss" in line]
    assert monitored == finished.trained.log.evals


# --- runs that are stopped or refused


@pytest.fixture
def poisoned(model, tmp_path):
    """Trains from a state of which one leaf is changed."""

    def run(key, part, value):
        setup = set_up_run(model, {"steps": 4})
        with jax.set_mesh(setup.mesh.mesh):
            state = initial_state(setup)
            state.adapter["lora"][key][part] = jnp.full_like(state.adapter["lora"][key][part], value)
            return train_from(setup, state, tmp_path)

    return run


def test_a_loss_that_is_no_number_names_step_and_rows(poisoned, tmp_path):
    rows = BatchOrder(tool_rows(), 8, 4, seed=0)[0]
    with pytest.raises(CheckFailed, match=r"loss of step 1 is nan") as failed:
        poisoned("full.self_attn.q_proj", "b", float("nan"))
    assert ", ".join(row.id for row in rows) in str(failed.value)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_leaf_without_gradient_is_named(poisoned):
    with pytest.raises(CheckFailed, match=r"no gradient reaches lora/full\.self_attn\.v_proj/b"):
        poisoned("full.self_attn.v_proj", "a", 0.0)


def test_what_has_no_gradient_at_first_is_no_fault():
    require_gradients({"lora/full.self_attn.q_proj/a": 0.0, "lora/full.self_attn.q_proj/b": 0.1, "token_rows": 0.0})


@pytest.fixture(scope="module")
def other_base(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("other"), DENSE, seed=1)


REFUSALS = {
    "rank": ({"lora": SETTINGS["lora"] | {"rank": 8}}, r"its adapter differs \(lora.rank 4, now 8\)"),
    "targets": (
        {"lora": SETTINGS["lora"] | {"targets": ["q_proj"]}},
        "it has down_proj, v_proj",
    ),
    "optimiser": ({"optimizer": {"name": "adafactor"}}, "its optimiser is adamw, now adafactor"),
    "base": ({}, r"its base differs \(model.safetensors\)"),
    "data": ({}, "its training rows or their order differ"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_checkpoint_of_another_run_is_refused(finished, model, other_base, what):
    changes, message = REFUSALS[what]
    setup = set_up_run(other_base if what == "base" else model, changes)
    rows = tool_rows(seed=9) if what == "data" else tool_rows()
    with jax.set_mesh(setup.mesh.mesh), pytest.raises(UserError, match=message):
        train_from(setup, initial_state(setup), finished.folder, rows)


# --- compiling on purpose


def test_a_new_shape_is_compiled_and_named(caplog):
    compiled = Compiled(jax.jit(lambda batch, scale: batch["x"] * scale), "the step")
    for _ in range(2):
        compiled({"x": jnp.ones((2, 3))}, 2.0)
    assert (compiled.count, caplog.text) == (1, "")
    np.testing.assert_array_equal(compiled({"x": jnp.ones((4, 3))}, 2.0), jnp.full((4, 3), 2.0))
    assert compiled.count == 2
    assert "the step is compiled anew: 0.x was float32[2,3], is float32[4,3]" in caplog.text


# --- numbers


def moved(adapter):
    """Away from the start, where half of the leaves have no gradient."""
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda leaf: leaf + 0.05 * jax.random.normal(next(keys), leaf.shape), adapter)


class Problem:
    """A model of conftest with an adapter that has moved."""

    def __init__(self, tiny):
        leaves = plan_adapter(tiny.config, Lora(rank=4, targets=("q_proj", "v_proj", "down_proj")))
        self.tiny, self.options = tiny, StepOptions(tiny.config, AdapterOptions(leaves, token_ids=TOKEN_IDS))
        embedding = tiny.params["embed_tokens"]
        with jax.set_mesh(tiny.mesh.mesh):
            fresh = init_adapter(leaves, jax.random.key(0), embedding=embedding, token_ids=TOKEN_IDS)
        self.adapter = moved(fresh)

    def gradients(self, batch, chunk, params=None, **changes):
        options = dataclasses.replace(self.options, **changes)
        with jax.set_mesh(self.tiny.mesh.mesh):
            step = jax.jit(gradients, static_argnames=("options", "chunk"))
            sums, total, grads = step(self.adapter, params or self.tiny.params, batch, options=options, chunk=chunk)
        return float(sums.loss / total), grads


def pack(rows, config, **packing):
    found = plan([rows], Packing(window=config.window, **packing))
    return pack_batch(rows, found.layout(0)), found.layout(0).chunk


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param(40, id="longer than the window"),
        pytest.param(1, id="only <bos>", marks=pytest.mark.slow),
        pytest.param(0, id="nothing"),
    ],
)
@pytest.mark.parametrize("case", ["gemma3, two kv heads", "gemma3, scaled global rope"], ids=["2 heads", "1 head"])
def test_packed_rows_have_the_gradients_of_padded_rows(tiny_model, one_row_each, case, prefix):
    """What rows have in common counts once for all of them, under windows of 6 and 8 tokens and two kinds of heads."""
    problem = Problem(tiny_model(case))
    rows = tool_rows(8, prefix=prefix)
    expected_loss, expected = problem.gradients(*one_row_each(rows))
    loss, grads = problem.gradients(*pack(rows, problem.tiny.config))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y), jax.tree_util.keystr(path)


def test_bfloat16_stays_close_to_float32(tiny_one):
    problem = Problem(tiny_one)
    batch, chunk = pack(tool_rows(4), tiny_one.config)
    low, _ = load_params(tiny_one.folder, tiny_one.config, jnp.dtype(jnp.bfloat16), tiny_one.mesh)
    loss, exact = problem.gradients(batch, chunk)
    rounded_loss, rounded = problem.gradients(batch, chunk, low, dtype=jnp.dtype(jnp.bfloat16))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(rounded))
    exact, rounded = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]) for g in (exact, rounded))
    assert rounded_loss == pytest.approx(loss, rel=0.02)
    assert np.dot(exact, rounded) > 0.99 * np.linalg.norm(exact) * np.linalg.norm(rounded)


def test_dropout_changes_the_loss_only_with_a_key(tiny_one):
    problem = Problem(tiny_one)
    batch, chunk = pack(tool_rows(4), tiny_one.config)
    micro = jax.tree.map(lambda x: x[0], batch)
    options = dataclasses.replace(problem.options, adapter=dataclasses.replace(problem.options.adapter, dropout=0.5))

    @jax.jit
    def loss(key):
        return batch_sums(problem.adapter, tiny_one.params, micro, options, chunk, key).loss

    with jax.set_mesh(tiny_one.mesh.mesh):
        assert loss(None) == loss(None)
        assert loss(jax.random.key(0)) == loss(jax.random.key(0))
        assert len({float(loss(key)) for key in (None, jax.random.key(0), jax.random.key(1))}) == 3


@pytest.mark.parametrize("method", ["lora", "full"])
def test_flops_are_those_that_xla_counts(tmp_path, method):
    """Without padding, and in short rows: XLA counts the masked half of attention too."""
    wide = DENSE | {"hidden_size": 128, "intermediate_size": 1024, "vocab_size": 512}
    setup = set_up_run(save_random_model(tmp_path, wide), {"method": method})
    ids = np.random.default_rng(0).integers(3, 96, (4, 32)).tolist()
    rows = [Row(f"r{i}", tuple(line), (False,) * 24 + (True,) * 8) for i, line in enumerate(ids)]
    layout = setup.plan([rows]).layout(0)
    batch = pack_batch(rows, layout)
    assert (batch.rows.ends > 0).all()
    assert (batch.weights > 0).all()
    with jax.set_mesh(setup.mesh.mesh):
        step = jax.jit(gradients, static_argnames=("options", "chunk"))
        arguments = (initial_state(setup).adapter, setup.frozen, batch)
        lowered = step.lower(*arguments, options=setup.for_layout(layout), chunk=layout.chunk)
    counted = lowered.compile().cost_analysis()["flops"]
    assert count_work(setup.config, setup.size, rows, batch, method=setup.recipe.method).flops == pytest.approx(
        counted, rel=0.04
    )


# --- meshes

GIB = 2**30


@pytest.mark.parametrize(
    ("recipe", "devices", "weights", "memory", "rows", "sizes"),
    [
        pytest.param(Mesh(), 1, 0, None, 32, (1, 1, 1), id="one device"),
        pytest.param(Mesh(), 8, 1 * GIB, 16 * GIB, 32, (8, 1, 1), id="weights fit: copies"),
        pytest.param(Mesh(), 8, 24 * GIB, 16 * GIB, 32, (2, 4, 1), id="weights cut until half a device holds a part"),
        pytest.param(Mesh(), 8, 500 * GIB, 16 * GIB, 32, (1, 8, 1), id="weights that never fit are cut all ways"),
        pytest.param(Mesh(), 8, 1 * GIB, 16 * GIB, 4, (4, 1, 2), id="fewer rows than devices: heads are cut"),
        pytest.param(Mesh(), 8, 48 * GIB, 16 * GIB, 4, (1, 4, 2), id="cut by tp, the rest by fsdp"),
        pytest.param(Mesh(), 8, 1 * GIB, None, 32, (8, 1, 1), id="a device that tells no memory"),
        pytest.param(Mesh(tp=2), 8, 0, None, 32, (4, 1, 2), id="tp told"),
        pytest.param(Mesh(fsdp=4), 8, 0, None, 32, (2, 4, 1), id="fsdp told"),
        pytest.param(Mesh(data=2), 8, 0, None, 32, (2, 4, 1), id="data told: the rest is fsdp"),
        pytest.param(Mesh(data=2, fsdp=2), 8, 0, None, 32, (2, 2, 2), id="data and fsdp told: the rest is tp"),
    ],
)
def test_what_the_recipe_leaves_open_is_chosen(recipe, devices, weights, memory, rows, sizes):
    chosen = mesh_sizes(recipe, devices, weight_bytes=weights, memory=memory, rows=rows)
    assert tuple(chosen.values()) == sizes


def test_a_mesh_needs_exactly_the_devices():
    with pytest.raises(UserError, match=r"data 1 x fsdp 1 x tp 2 is not the 1 device"):
        MeshPlan.create(Mesh(tp=2), jax.devices()[:1])
