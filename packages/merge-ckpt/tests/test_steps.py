"""A step by its metric, checkpoints that were saved on their own, and those of older Orbax."""

import json
import shutil

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest

from portlab_merge.location import open_location
from portlab_merge.orbax_store import open_item, read_arrays
from portlab_merge.steps import pick_step
from portlab_spec.errors import UserError

ARRAYS = {"layer": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, "a/b": np.ones(2, np.float32)}


def pick(folder, wanted="latest"):
    return pick_step(open_location(str(folder)), wanted)


def assert_read(step):
    arrays, faults = read_arrays(open_item(step.item))
    assert faults == {}
    assert set(arrays) == {("layer", "w"), ("a/b",)}
    np.testing.assert_array_equal(arrays["layer", "w"], ARRAYS["layer"]["w"])


@pytest.fixture
def measured(tmp_path):
    """Steps 1 to 3 with metrics, as an Orbax v0 manager saves them."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["accuracy"], enable_async_checkpointing=False)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step, (loss, accuracy) in enumerate([(3.0, 0.1), (1.0, 0.7), (2.0, 0.9)], start=1):
            metrics = {"loss": loss, "accuracy": accuracy}
            manager.save(step, args=ocp.args.StandardSave(ARRAYS), metrics=metrics)
    return tmp_path / "run"


def test_best_is_the_least_loss_and_the_most_of_anything_else(measured):
    assert pick(measured, "best:loss").number == 2
    assert pick(measured, "best:accuracy").number == 3
    assert pick(measured).metrics == {"loss": 2.0, "accuracy": 0.9}
    assert_read(pick(measured, "best:loss"))


def test_a_metric_that_no_step_has_lists_those_there_are(measured):
    with pytest.raises(UserError, match=r"no step has a metric bleu \(there are: accuracy, loss\)"):
        pick(measured, "best:bleu")


def test_best_by_the_monitored_loss_of_our_own_runs(run):
    for number, loss in ((5, 0.5), (6, 0.2), (7, 0.4)):
        folder = run.step.with_name(str(number))
        if not folder.exists():
            shutil.copytree(run.step, folder)
        stored = json.loads((folder / "_CHECKPOINT_METADATA").read_text())
        stored["custom_metadata"]["monitored"] = loss
        (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(stored))
    assert pick(run.folder, "best:loss").number == 6


@pytest.mark.parametrize("wanted", ["newest", "-1", "best:", "1.5"])
def test_what_is_no_step_is_refused(measured, wanted):
    with pytest.raises(UserError, match=r"neither a number nor 'latest' nor 'best:METRIC'"):
        pick(measured, wanted)


def test_a_checkpoint_of_its_own_needs_no_number(tmp_path):
    """Orbax v1's `save`."""
    ocp_v1.save(tmp_path / "alone", ARRAYS)
    step = pick(tmp_path / "alone")
    assert step.number is None
    assert_read(step)


def test_arrays_may_lie_in_the_folder_itself(tmp_path):
    """Orbax v0's StandardCheckpointer."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "alone", ARRAYS)
    step = pick(tmp_path / "alone")
    assert step.number is None
    assert_read(step)


def test_v1_checkpointers_write_steps(tmp_path):
    with ocp_v1.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(4, ARRAYS, custom_metadata={"x": 1})
    step = pick(tmp_path / "run")
    assert (step.number, step.metadata) == (4, {"x": 1})
    assert_read(step)


def test_steps_of_orbax_before_the_mark_are_complete_by_their_name(measured):
    for number in (1, 2, 3):
        (measured / str(number) / "commit_success.txt").unlink(missing_ok=True)
    assert pick(measured).number == 3


def test_a_step_without_the_mark_beside_steps_with_it_is_incomplete(measured):
    (measured / "3" / "commit_success.txt").unlink()
    step = pick(measured)
    assert step.number == 2
    assert step.skipped == ("step 3: no commit_success.txt",)


def test_another_step_of_a_step_folder_is_refused(measured):
    with pytest.raises(UserError, match="--step 2 but the folder is one step"):
        pick(measured / "3", "2")
