"""Damaged checkpoints: each is passed over with one line that says why, and the one before it is used."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from portlab_jax.checkpoint import Checkpoints
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.run.metadata import FORMATS
from portlab_spec.run.train_log import TrainLog


class State(NamedTuple):
    """The shape of the trainer's state."""

    adapter: Any
    opt: Any
    step: Any
    key: Any


def state_at(step):
    # Random and large enough that Orbax writes the values to files of their own.
    adapter, mu, nu = (
        {"lora": {"q_proj": {"a": jnp.array(values, jnp.float32)}}}
        for values in np.random.default_rng(step).normal(size=(3, 2, 40, 30))
    )
    opt = (optax.EmptyState(), optax.ScaleByAdamState(jnp.int32(step), mu, nu))
    return State(adapter, opt, jnp.int32(step), jax.random.key_data(jax.random.key(0)))


METADATA = {"format": FORMATS["lora"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "c"
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state_at(step), TrainLog([0.5] * step, 1.0), METADATA, data={"step": step})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "c"))


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


FAULTS = {
    "a data file cut in half": lambda step: truncate(largest(step / "adapter")),
    "a bit flipped in the adapter": lambda step: flip(largest(step / "adapter"), 3000),
    "a bit flipped in the optimiser state": lambda step: flip(largest(step / "state"), 3000),
    "a data file missing": lambda step: largest(step / "adapter").unlink(),
    "an item missing": lambda step: shutil.rmtree(step / "state"),
    "an empty step": empty,
    "no commit record": lambda step: (step / "_CHECKPOINT_METADATA").unlink(),
    "a commit record cut in half": lambda step: truncate(step / "_CHECKPOINT_METADATA"),
    "an empty commit record": lambda step: (step / "_CHECKPOINT_METADATA").write_text(""),
    "the list of arrays missing": lambda step: (step / "adapter/_METADATA").unlink(),
    "the list of arrays cut in half": lambda step: truncate(step / "state/_METADATA"),
    "the database's manifest cut in half": lambda step: truncate(step / "adapter/manifest.ocdbt"),
    "the log cut in half": lambda step: truncate(step / "log/metadata"),
    "another loss in the log": lambda step: (step / "log/metadata").write_text(
        json.dumps({"loss": [0.5, 0.4], "seconds": 1.0, "evals": []})
    ),
    "another place in the data": lambda step: (step / "data/metadata").write_text('{"step": 7}'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, caplog, fault):
    FAULTS[fault](folder / "2")
    with caplog.at_level(logging.WARNING, "portlab_jax"), Checkpoints(folder) as checkpoints:
        restored = checkpoints.resume(state_at(0), METADATA)
        assert checkpoints.latest == 1
    assert restored.step == 1
    assert restored.data == {"step": 1}
    assert jnp.array_equal(restored.state.adapter["lora"]["q_proj"]["a"], state_at(1).adapter["lora"]["q_proj"]["a"])
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("portlab_jax")]
    assert len(lines) == 1
    assert "2 is skipped: " in lines[0]
    assert "\n" not in lines[0]


def test_the_step_can_be_saved_again_and_the_damaged_one_is_set_aside(folder):
    flip(largest(folder / "2/adapter"), 3000)
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.resume(state_at(0), METADATA)
        checkpoints.save(state_at(2), TrainLog([0.5, 0.5], 1.0), METADATA)
    assert restored.step == 1
    assert (folder / "2.damaged").is_dir()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.resume(state_at(0), METADATA).step == 2


def test_when_all_are_damaged_the_run_starts_anew(folder):
    for step in ("1", "2"):
        flip(largest(folder / step / "adapter"), 3000)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.resume(state_at(0), METADATA) is None
        assert checkpoints.latest is None


def test_a_damaged_best_is_forgotten(tmp_path):
    with Checkpoints(tmp_path / "c", keep_best=True) as checkpoints:
        for step, loss in ((1, 0.3), (2, 0.2)):
            checkpoints.save(state_at(step), TrainLog([0.5] * step, 1.0), METADATA, monitored=loss)
    flip(largest(tmp_path / "c/2/adapter"), 3000)
    with Checkpoints(tmp_path / "c", keep_best=True) as checkpoints:
        checkpoints.resume(state_at(0), METADATA)
        assert checkpoints.best == (1, 0.3)


def test_asking_for_a_damaged_step_is_a_failed_check(folder):
    flip(largest(folder / "2/adapter"), 3000)
    with (
        Checkpoints(folder) as checkpoints,
        pytest.raises(CheckFailed, match="step 2 is damaged: lora/q_proj/a is not"),
    ):
        checkpoints.restore(2, state_at(0))


def test_what_an_interrupted_save_left_is_removed(folder):
    partial = folder / "3.orbax-checkpoint-tmp"
    shutil.copytree(folder / "2", partial)
    with Checkpoints(folder) as checkpoints:
        assert not partial.exists()
        assert checkpoints.resume(state_at(0), METADATA).step == 2


def test_other_folders_are_left_alone(folder):
    (folder / "notes").mkdir()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps == [1, 2]
    assert (folder / "notes").is_dir()


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def fail(manager, *args, **kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing local file: No space left on device")

    with Checkpoints(tmp_path / "c") as checkpoints:
        monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
        with pytest.raises(UserError, match="the disk is full, the checkpoint could not be written"):
            checkpoints.save(state_at(1), TrainLog([0.5], 1.0), METADATA)


def test_an_old_step_whose_removal_was_cut_off_goes_without_a_word(folder, caplog):
    (folder / "1" / "adapter" / "_METADATA").unlink()
    with Checkpoints(folder, keep=1) as checkpoints:
        assert checkpoints.steps == [2]
    assert sorted(path.name for path in folder.iterdir()) == ["2"]
    assert not caplog.records


def test_a_step_that_is_still_wanted_is_set_aside(folder):
    (folder / "1" / "adapter" / "_METADATA").unlink()
    with Checkpoints(folder, keep=2):
        assert (folder / "1.damaged").is_dir()
