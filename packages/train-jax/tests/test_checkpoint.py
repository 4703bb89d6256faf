"""Checkpoints: what comes back, which are kept, which belong to another run."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from portlab_jax.checkpoint import Checkpoints
from portlab_jax.leaf_digests import leaf_digests
from portlab_merge.contract import parse_metadata
from portlab_spec.assets import ModelFolder
from portlab_spec.errors import UserError
from portlab_spec.recipe import Lora, Recipe
from portlab_spec.run.metadata import run_metadata
from portlab_spec.run.train_log import TrainLog


class State(NamedTuple):
    """The shape of the trainer's state."""

    adapter: Any
    opt: Any
    step: Any
    key: Any


LEAVES = (("sliding.self_attn.q_proj", ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")),)


def state_at(step, rank=2):
    rng = np.random.default_rng(step)
    leaf = {"a": jnp.array(rng.normal(size=(2, 4, rank)), jnp.float32), "b": jnp.ones((2, rank, 4)) * step}
    adapter = {"lora": {LEAVES[0][0]: leaf}, "token_rows": jnp.full((1, 4), step, jnp.float32)}
    opt = optax.adamw(1e-3).init(adapter)
    return State(adapter, opt, jnp.int32(step), jax.random.key_data(jax.random.key(step)))


def log_at(step):
    return TrainLog([1 / (i + 1) for i in range(step)], 0.1 * step, [(i, 1 / i) for i in range(1, step)])


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return ModelFolder(folder, "a/base", None)


@pytest.fixture
def metadata(base):
    rows = ("model.embed_tokens.weight", (46,))
    return run_metadata(Recipe(), base, "gemma3", LEAVES, versions={"jax": "0"}, token_rows=rows)


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), a, b))


def test_everything_comes_back(tmp_path, metadata):
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(state_at(3), log_at(3), metadata, data={"epoch": 1, "order": [3, 1]})
    with Checkpoints(tmp_path / "c") as checkpoints:
        restored = checkpoints.resume(state_at(0), metadata)
    assert restored.step == 3
    assert equal(restored.state, state_at(3))
    assert jax.tree.structure(restored.state) == jax.tree.structure(state_at(3))
    assert restored.log == log_at(3)
    assert restored.data == {"epoch": 1, "order": [3, 1]}


def test_shapes_with_shardings_are_enough_to_restore(tmp_path, metadata):
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(state_at(3), log_at(3), metadata)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_at(0))
        assert equal(checkpoints.restore(3, shapes).state, state_at(3))


def test_no_checkpoint_means_a_new_run(tmp_path, metadata):
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.resume(state_at(0), metadata) is None


def test_the_same_step_is_saved_once(tmp_path, metadata):
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(state_at(1), log_at(1), metadata)
        checkpoints.save(state_at(1), log_at(1), metadata)
        assert checkpoints.steps == [1]


def test_the_newest_are_kept(tmp_path, metadata):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(state_at(step), log_at(step), metadata)
    assert Checkpoints(tmp_path / "c").steps == [4, 5]


def save_monitored(folder, metadata, losses, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(state_at(step), log_at(step), metadata, monitored=loss)
        return checkpoints.best


def test_the_best_is_kept_beside_the_newest(tmp_path, metadata):
    losses = {1: 0.5, 2: 0.3, 3: 0.3, 4: None, 5: 0.4, 6: 0.6}
    assert save_monitored(tmp_path / "c", metadata, losses, keep=2, keep_best=True) == (2, 0.3)
    assert Checkpoints(tmp_path / "c").steps == [2, 5, 6]


def test_the_best_is_known_after_a_restart_and_gives_way_to_a_better(tmp_path, metadata):
    save_monitored(tmp_path / "c", metadata, {1: 0.3, 2: 0.5, 3: 0.5}, keep=1, keep_best=True)
    assert Checkpoints(tmp_path / "c").best == (1, 0.3)
    assert save_monitored(tmp_path / "c", metadata, {4: 0.2, 5: 0.9}, keep=1, keep_best=True) == (4, 0.2)
    assert Checkpoints(tmp_path / "c").steps == [4, 5]


def test_without_keep_best_the_best_goes_like_the_others(tmp_path, metadata):
    save_monitored(tmp_path / "c", metadata, {1: 0.3, 2: 0.5, 3: 0.5}, keep=1)
    assert Checkpoints(tmp_path / "c").steps == [3]


def test_merge_ckpt_reads_the_metadata(tmp_path, metadata):
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(state_at(2), log_at(2), metadata)
    raw = json.loads((tmp_path / "c/2/_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    parsed = parse_metadata(raw, "here")
    assert [(leaf.target, leaf.modules) for leaf in parsed.lora.leaves] == list(LEAVES)
    assert parsed.lora.targets == ("q_proj",)
    assert parsed.lora.token_rows.ids == (46,)
    assert parsed.leaf_sha256 == leaf_digests(state_at(2).adapter)
    assert set(parsed.leaf_sha256) == {f"lora/{LEAVES[0][0]}/a", f"lora/{LEAVES[0][0]}/b", "token_rows"}


def test_a_digest_is_of_the_bytes():
    import hashlib

    array = np.arange(6, dtype="<f4").reshape(2, 3)
    assert leaf_digests({"x": jnp.array(array)}) == {"x": hashlib.sha256(array.tobytes()).hexdigest()}
    assert leaf_digests({"n": jnp.int32(258)}) == {"n": hashlib.sha256(b"\2\1\0\0").hexdigest()}
    assert leaf_digests({"h": jnp.ones(1, jnp.bfloat16)}) == {"h": hashlib.sha256(b"\x80\x3f").hexdigest()}


def test_a_checkpoint_of_another_run_is_refused(tmp_path, metadata, base):
    other = run_metadata(Recipe(lora=Lora(rank=8)), base, "gemma3", LEAVES, versions={})
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(state_at(1), log_at(1), metadata)
        with pytest.raises(UserError, match=r"its adapter differs \(lora.rank 16, now 8\)"):
            checkpoints.resume(state_at(0), other)
    assert (tmp_path / "c/1").exists(), "it is another's, and stays"
