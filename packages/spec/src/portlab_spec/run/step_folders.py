"""Checkpoints as folders of safetensors and JSON, for the trainers that do not save with Orbax.

    <run>/checkpoints/<step>/...          what the trainer writes
                            /state.json   step, losses, metadata of the run, digests of all of it

A folder appears whole or not at all, and goes likewise. Nothing in here waits for other processes.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from portlab_spec.errors import UserError
from portlab_spec.files import new_folder, read_json, sha256_file, sha256_json, write_json
from portlab_spec.run.metadata import require_same_run
from portlab_spec.run.train_log import TrainLog, best_step

STATE = "state.json"
GOING = ".removed"  # a checkpoint that is being removed


class Saved(NamedTuple):
    """A checkpoint whose files are what was written."""

    step: int
    folder: Path
    log: TrainLog


class StepFolders:
    """The checkpoints of a run.

    Args:
        folder: `<run>/checkpoints`.
        metadata: of the run, see `portlab_spec.run.metadata`.
        trainer: whose they are, "train-xla" say.
        keep: newest ones that stay.
        keep_best: also keep the one of the lowest monitored loss.
    """

    def __init__(self, folder: Path, metadata: Mapping[str, Any], *, trainer: str, keep: int, keep_best: bool) -> None:
        self._folder, self._metadata, self._trainer = folder, dict(metadata), trainer
        self._keep, self._keep_best = keep, keep_best

    def steps(self) -> list[int]:
        """Steps that are saved, ascending."""
        names = (path.name for path in self._folder.glob("*") if (path / STATE).is_file())
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        """Folder of a step."""
        return self._folder / str(step)

    def save(self, step: int, log: TrainLog, write: Callable[[Path], None]) -> None:
        """Save a step, once, and remove what need not be kept.

        Args:
            step: steps taken.
            log: up to it.
            write: puts the trainer's files into a folder.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if not (self.path(step) / STATE).exists():
            with new_folder(self.path(step)) as staging:
                write(staging)
                digests = {file.name: sha256_file(file) for file in sorted(staging.iterdir())}
                state = {"step": step, "log": log.to_json(), "metadata": self._metadata, "sha256": digests}
                write_json(staging / STATE, state | {"state_sha256": sha256_json(state)})
        kept = set(self.steps()[-self._keep :])
        if self._keep_best and (best := best_step(log.evals, self.steps())) is not None:
            kept.add(best)
        for old in set(self.steps()) - kept:
            self.path(old).rename(self._folder / f"{old}{GOING}")
        for folder in self._folder.glob(f"*{GOING}"):  # also what a run that was killed here left
            shutil.rmtree(folder)

    def latest(self) -> Saved | None:
        """The newest checkpoint, if there is one.

        Raises:
            UserError: it is damaged, or of another run.
        """
        if not (steps := self.steps()):
            return None
        folder = self.path(steps[-1])
        require_same_run(read_state(folder)["metadata"], self._metadata, str(folder), self._trainer)
        return self.read(steps[-1])

    def read(self, step: int) -> Saved:
        """The checkpoint of a step, its files checked.

        Raises:
            UserError: a file is not what was written.
        """
        folder = self.path(step)
        state = read_state(folder)
        for name, digest in state["sha256"].items():
            if not (folder / name).is_file() or sha256_file(folder / name) != digest:
                raise _damaged(folder, name)
        return Saved(state["step"], folder, TrainLog.from_json(state["log"]))


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        UserError: that is not what was written.
    """
    try:
        raw = read_json(folder / STATE, "state of the checkpoint")
    except UserError:
        raise _damaged(folder, STATE) from None
    if not isinstance(raw, dict) or raw.pop("state_sha256", None) != sha256_json(raw):
        raise _damaged(folder, STATE)
    return raw


def _damaged(folder: Path, name: str) -> UserError:
    return UserError(
        f"{name} is not what was written",
        where=str(folder),
        fix="Remove this folder: the run goes on from the one before",
    )
