"""Every layout that Orbax writes is read, whatever devices wrote it; steps are chosen with care."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from portlab_merge import steps
from portlab_merge.checkpoint import read_checkpoint
from portlab_merge.location import open_location
from portlab_merge.orbax_store import open_item, read_arrays
from portlab_spec.errors import UserError


def pick_step(folder, wanted="latest"):
    return steps.pick_step(open_location(str(folder)), wanted)


def assert_leaves(checkpoint, tree):
    adapter = checkpoint.adapter
    assert adapter.problems == ()
    assert len(adapter.updates) == 3 * len(tree["lora"])
    for update in adapter.updates:
        target, row = update.leaf.removeprefix("lora/").removesuffix("]").split("[")
        np.testing.assert_array_equal(update.a, tree["lora"][target]["a"][int(row)])
        np.testing.assert_array_equal(update.b, tree["lora"][target]["b"][int(row)])
    np.testing.assert_array_equal(adapter.rows.values, tree["token_rows"])


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
def test_every_layout_is_read(base, make_tree, describe, save, tmp_path, ocdbt, zarr3):
    tree = make_tree(base)
    save(tmp_path, tree, describe(base, tree), ocdbt=ocdbt, zarr3=zarr3)
    stored = json.loads((tmp_path / "7" / "adapter" / "_METADATA").read_text())
    assert (stored["use_ocdbt"], stored["use_zarr3"]) == (ocdbt, zarr3)
    assert_leaves(read_checkpoint(tmp_path), tree)


SAVE_SHARDED = """
import sys, json, numpy as np, jax, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
assert jax.device_count() == 8
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
tree = dict(np.load(sys.argv[1]))
a = jax.device_put(tree["a"], NamedSharding(mesh, P(None, "fsdp", "tp")))
b = jax.device_put(tree["b"], NamedSharding(mesh, P(None, "tp", "fsdp")))
with ocp.CheckpointManager(sys.argv[2], options=ocp.CheckpointManagerOptions()) as manager:
    item = {"lora": {"self_attn.q_proj": {"a": a, "b": b}}}
    manager.save(3, args=ocp.args.Composite(adapter=ocp.args.PyTreeSave(item)), custom_metadata={})
"""


def test_a_step_saved_on_eight_devices_is_read_without_them(tmp_path):
    random = np.random.default_rng(0)
    arrays = {"a": random.normal(size=(3, 8, 4)).astype("f4"), "b": random.normal(size=(3, 4, 16)).astype("f4")}
    np.savez(tmp_path / "tree.npz", **arrays)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SAVE_SHARDED, str(tmp_path / "tree.npz"), str(tmp_path / "run")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    leaves, faults = read_arrays(open_item(pick_step(tmp_path / "run").item))
    assert faults == {}
    for side, expected in arrays.items():
        np.testing.assert_array_equal(leaves["lora", "self_attn.q_proj", side], expected)


def test_latest_is_the_highest_number(base, make_tree, describe, save, tmp_path):
    tree = make_tree(base)
    for step in (2, 9, 10):
        save(tmp_path, tree, describe(base, tree), step=step)
    assert pick_step(tmp_path).number == 10
    assert pick_step(tmp_path, "9").number == 9


def test_an_adapter_exported_into_the_run_is_no_step(run):
    (run.folder / "adapter").mkdir()
    assert pick_step(run.folder).number == 7


def test_a_renamed_step_is_refused(run):
    with pytest.raises(UserError, match="the name of a step folder is its number"):
        pick_step(run.step.rename(run.step.with_name("best")))


def test_run_checkpoints_and_step_folders_are_all_accepted(run):
    for folder in (run.folder, run.folder / "checkpoints", run.step):
        assert pick_step(folder).number == 7


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda step: (step / "commit_success.txt").unlink(), "no commit_success.txt"),
        (lambda step: (step / "adapter" / "_METADATA").unlink(), "no adapter/_METADATA"),
        (lambda step: (step / "_CHECKPOINT_METADATA").unlink(), "no _CHECKPOINT_METADATA"),
        (lambda step: step.rename(step.with_name("9.orbax-checkpoint-tmp-5")), "its save never finished"),
        (lambda step: (step / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null}'), "no commit time"),
    ],
)
def test_incomplete_steps_are_passed_over_and_named(run, spoil, reason):
    shutil.copytree(run.step, run.step.with_name("9"))
    spoil(run.step.with_name("9"))
    step = pick_step(run.folder)
    assert step.number == 7
    assert len(step.skipped) == 1
    assert reason in step.skipped[0]
    with pytest.raises(UserError, match=r"no complete step 9 .*incomplete: step 9"):
        pick_step(run.folder, "9")


def test_a_missing_step_lists_those_that_exist(run):
    with pytest.raises(UserError, match=r"no complete step 8 \(complete steps: 7\)"):
        pick_step(run.folder, "8")


@pytest.mark.parametrize("metadata", [None, {}, {"lora": {"lora_rank": 4}}, {"format": "other/2"}])
def test_a_checkpoint_without_our_metadata_is_refused(base, make_tree, save, tmp_path, metadata):
    save(tmp_path, make_tree(base), metadata)
    with pytest.raises(UserError, match="Read today: portlab-lora/1"):
        read_checkpoint(tmp_path)


def test_broken_metadata_names_every_key(run):
    path = run.step / "_CHECKPOINT_METADATA"
    stored = json.loads(path.read_text())
    del stored["custom_metadata"]["lora"]["alpha"]
    stored["custom_metadata"]["lora"]["rank"] = 0
    stored["custom_metadata"]["base"]["files_sha256"] = {}
    path.write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"lora\.rank.*lora\.alpha.*base\.files_sha256"):
        read_checkpoint(run.folder)


def biggest_data_file(step):
    return max((f for f in (step / "adapter").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def test_missing_and_truncated_data_is_a_fault(run):
    file = biggest_data_file(run.step)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], None):
        file.write_bytes(content) if content is not None else file.unlink()
        assert any("cannot be read" in problem for problem in read_checkpoint(run.folder).adapter.problems)


def test_a_missing_chunk_is_not_read_as_zeros(base, make_tree, describe, save, tmp_path):
    tree = make_tree(base)
    save(tmp_path, tree, describe(base, tree), ocdbt=False)
    (tmp_path / "7" / "adapter" / "lora.self_attn.q_proj.a" / "0.0.0").unlink()
    [problem] = read_checkpoint(tmp_path).adapter.problems
    assert "leaf lora/self_attn.q_proj/a cannot be read" in problem


def test_a_flipped_bit_is_a_fault(base, make_tree, describe, save, tmp_path):
    # Random f32 hardly compress, so the middle of the file is data whichever codec wrote it.
    tree = make_tree(base)
    save(tmp_path, tree, describe(base, tree), ocdbt=False)
    file = tmp_path / "7" / "adapter" / "lora.mlp.up_proj.b" / "0.0.0"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    differs = "leaf lora/mlp.up_proj/b differs from what the trainer saved (sha256)"
    assert read_checkpoint(tmp_path).adapter.problems == (differs,)


def test_leaf_digest_is_of_the_little_endian_bytes(run):
    value = run.tree["lora"]["self_attn.q_proj"]["a"]
    digest = hashlib.sha256(value.astype("<f4").tobytes("C")).hexdigest()
    assert run.metadata["leaf_sha256"]["lora/self_attn.q_proj/a"] == digest
