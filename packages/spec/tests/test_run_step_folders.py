"""Checkpoints as folders: whole or not there, checked when they are read, removed when newer ones are there."""

import json
import shutil

import pytest

from portlab_spec.errors import UserError
from portlab_spec.files import sha256_json
from portlab_spec.run.step_folders import StepFolders
from portlab_spec.run.train_log import TrainLog, best_step

METADATA = {"format": "portlab-lora/1", "data_sha256": "1"}


@pytest.fixture
def open_folders(tmp_path):
    def make(metadata=METADATA, *, keep=2, keep_best=False):
        return StepFolders(tmp_path / "checkpoints", metadata, trainer="train-xla", keep=keep, keep_best=keep_best)

    return make


def log_at(step, evals=()):
    return TrainLog([1 / (i + 1) for i in range(step)], 0.5 * step, list(evals))


def save(folders, step, evals=(), content="weights"):
    def write(folder):
        (folder / "weights.bin").write_text(f"{content} of {step}")

    folders.save(step, log_at(step, evals), write)


def damage(folder, how):
    state, weights = folder / "state.json", folder / "weights.bin"
    match how:
        case "flipped":
            weights.write_text("weights of 3!")
        case "missing":
            weights.unlink()
        case "edited":
            state.write_text(state.read_text().replace('"step": 4', '"step": 9'))
        case "cut off":
            state.write_text(state.read_text()[:40])
        case "no object":
            state.write_text("[]")


def test_what_was_saved_is_read(open_folders):
    save(open_folders(), 3, [(2, 0.7)])
    saved = open_folders().latest()
    assert (saved.step, saved.log) == (3, log_at(3, [(2, 0.7)]))
    assert (saved.folder / "weights.bin").read_text() == "weights of 3"


def test_nothing_saved_is_nothing_to_go_on_from(open_folders):
    assert open_folders().latest() is None


def test_a_step_is_saved_once(open_folders):
    folders = open_folders()
    save(folders, 3)
    save(folders, 3, content="others")
    assert (folders.path(3) / "weights.bin").read_text() == "weights of 3"


def test_the_newest_stay(open_folders, tmp_path):
    for step in (2, 4, 6, 10):
        save(open_folders(), step)
    assert open_folders().steps() == [6, 10]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["10", "6"]


def test_the_best_stays_beside_the_newest(open_folders):
    folders, evals = open_folders(keep=1, keep_best=True), []
    for step, loss in ((2, 0.9), (4, 0.3), (6, 0.5), (8, 0.4)):
        evals.append((step, loss))
        save(folders, step, evals)
    assert folders.steps() == [4, 8]


def test_a_save_that_fails_leaves_no_step(open_folders):
    folders = open_folders()

    def write(folder):
        (folder / "weights.bin").write_text("half")
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        folders.save(3, log_at(3), write)
    assert folders.steps() == []


def test_what_a_killed_process_was_removing_goes_with_the_next_save(open_folders, tmp_path):
    folders = open_folders()
    save(folders, 2)
    shutil.copytree(folders.path(2), tmp_path / "checkpoints/1.removed")
    save(folders, 3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


@pytest.mark.parametrize("how", ["flipped", "missing", "edited", "cut off", "no object"])
def test_damage_is_found_and_the_folder_named(open_folders, how):
    folders = open_folders()
    save(folders, 2)
    save(folders, 4)
    damage(folders.path(4), how)
    with pytest.raises(UserError, match=r"is not what was written\. Remove this folder") as found:
        folders.latest()
    assert str(folders.path(4)) in str(found.value)


def test_without_the_damaged_folder_the_run_goes_on(open_folders):
    folders = open_folders()
    save(folders, 2)
    save(folders, 4)
    damage(folders.path(4), "flipped")
    shutil.rmtree(folders.path(4))
    assert folders.latest().step == 2


def test_the_checkpoint_of_another_run_is_refused(open_folders):
    save(open_folders(), 2)
    with pytest.raises(UserError, match="training rows or their order differ"):
        open_folders(METADATA | {"data_sha256": "2"}).latest()


def test_the_state_names_what_it_holds(open_folders):
    save(open_folders(), 2)
    state = json.loads((open_folders().path(2) / "state.json").read_text())
    digest = state.pop("state_sha256")
    assert digest == sha256_json(state)
    assert state["metadata"] == METADATA
    assert list(state["sha256"]) == ["weights.bin"]


def test_a_log_goes_through_json_as_it_is():
    log = TrainLog([0.1, 1 / 3], 2.5, [(1, 0.7)])
    assert TrainLog.from_json(json.loads(json.dumps(log.to_json()))) == log


@pytest.mark.parametrize(
    ("evals", "saved", "best"),
    [
        ([], [2], None),
        ([(2, 0.9), (4, 0.3)], [2, 4], 4),
        ([(2, 0.3), (4, 0.3)], [2, 4], 2),
        ([(2, 0.3), (4, 0.9)], [4], 4),
    ],
    ids=["none measured", "the lowest", "of equals the first", "only what is saved"],
)
def test_the_best_step(evals, saved, best):
    assert best_step(evals, saved) == best
