"""Checkpoints: what a run needs to go on, and what merge-ckpt needs to trust it.

    <run>/checkpoints/<step>/adapter    the trained leaves, read by merge-ckpt
                            /state      optimiser state, step, PRNG key
                            /log        losses, evaluations and seconds up to this step
                            /data       where the data iterator stood
                            /_CHECKPOINT_METADATA   `custom_metadata`: see portlab_spec.run.metadata
    <run>/checkpoints/<step>.damaged    set aside by a later run, which said why

Orbax writes asynchronously into a temporary folder and renames it: a killed run leaves whole checkpoints only. What
is not caught by that, a disk that lost bytes or a copy that was cut off, is caught by digests: Orbax compresses
without a checksum, and a flipped bit reads as other numbers. The base model is never stored, only named and hashed.

Arrays are restored to the shardings that the run has now, whatever devices they were saved from. On several
processes, all of them call every method, on a file system that they share.
"""

import contextlib
import dataclasses
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from portlab_jax import TRAINER
from portlab_jax.leaf_digests import leaf_digests
from portlab_jax.step import TrainState
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.files import read_json, sha256_json
from portlab_spec.run.metadata import require_same_run
from portlab_spec.run.train_log import TrainLog

STEP_METADATA = "_CHECKPOINT_METADATA"
ITEMS = {"adapter": "_METADATA", "state": "_METADATA", "log": "metadata", "data": "metadata"}  # and a file of each

_log = logging.getLogger(__name__)


class Best(NamedTuple):
    """The checkpoint of the lowest monitored loss; of equals, the first."""

    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint, read and found intact.

    Attributes:
        step: steps taken.
        state: leaves placed as the run asked.
        log: up to this step.
        data: state of the data iterator, as it was given to `save`.
    """

    step: int
    state: TrainState
    log: TrainLog
    data: dict[str, Any]


class Damaged(Exception):
    """A checkpoint cannot be used; the message says why in a few words."""


class Checkpoints:
    """The checkpoints of one run, a context manager that waits for pending writes.

    Keeps the newest `keep`, and with `keep_best` the one of the lowest monitored loss beside them.
    """

    def __init__(self, folder: Path, *, keep: int = 2, keep_best: bool = False) -> None:
        self._folder = folder.absolute()
        self._keep, self._keep_best = keep, keep_best
        self._best: Best | None = None
        if _leads():
            self._tidy()
        ocp.multihost.sync_global_processes("portlab:checkpoints_tidied")
        options = ocp.CheckpointManagerOptions(
            enable_async_checkpointing=True, preservation_policy=_Preserved(self._preserve)
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=tuple(ITEMS))
        for step in self.steps:
            self._note_monitored(step, _metadata(self._step_folder(step)).get("monitored"))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with _one_line(self._folder):
                self._manager.close()
        finally:
            # Of a save that failed or was interrupted; a complete one has been renamed by now.
            if _leads():
                self._remove_partial()

    @property
    def steps(self) -> Sequence[int]:
        """Steps that have a checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self._manager.latest_step()

    @property
    def best(self) -> Best | None:
        """The best checkpoint there is, if a monitored loss was ever saved."""
        return self._best

    def save(
        self,
        state: TrainState,
        log: TrainLog,
        metadata: dict[str, Any],
        *,
        data: dict[str, Any] | None = None,
        monitored: float | None = None,
    ) -> None:
        """Save a step, once; the arrays are copied now, the write itself goes on in the background.

        Args:
            state: what the step left.
            log: up to this step.
            metadata: of `run_metadata`, and the probe; digests are added here.
            data: state of the data iterator, JSON.
            monitored: loss on the monitored split at this step, if it was measured.

        Raises:
            UserError: the disk is full; may concern the save before.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        rest, texts = {"opt": state.opt, "step": state.step, "key": state.key}, (log.to_json(), data or {})
        record = metadata | {
            "leaf_sha256": leaf_digests(state.adapter),
            "state_sha256": leaf_digests(rest),
            "json_sha256": [sha256_json(text) for text in texts],
            "monitored": monitored,
        }
        self._note_monitored(step, monitored)
        with _one_line(self._folder):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    adapter=ocp.args.StandardSave(state.adapter),
                    state=ocp.args.StandardSave(rest),
                    log=ocp.args.JsonSave(texts[0]),
                    data=ocp.args.JsonSave(texts[1]),
                ),
                custom_metadata=record,
                force=True,
            )

    def wait(self) -> None:
        """Return once all saves are on disk."""
        with _one_line(self._folder):
            self._manager.wait_until_finished()

    def resume(self, like: TrainState, metadata: dict[str, Any]) -> Restored | None:
        """The newest intact checkpoint; None if there is none, and the run starts anew.

        A damaged one is set aside with one line in the log, and the one before it is tried.

        Args:
            like: arrays, or shapes with shardings, of the state to restore.
            metadata: of this run; see `require_same_run`.

        Raises:
            UserError: the checkpoint belongs to another run.
        """
        self.wait()
        for step in reversed(self.steps):
            folder = self._step_folder(step)
            require_same_run(_metadata(folder), metadata, str(folder), TRAINER)
            try:
                return self._read(step, like)
            except Damaged as fault:
                self._set_aside(step, str(fault))
        return None

    def restore(self, step: int, like: TrainState) -> Restored:
        """The checkpoint of one step, placed as `like` is.

        Raises:
            CheckFailed: there is none, or it is damaged.
        """
        self.wait()
        try:
            return self._read(step, like)
        except Damaged as fault:
            raise CheckFailed(
                f"the checkpoint of step {step} is damaged: {fault}",
                where=str(self._folder),
                fix="Run the same command again: it goes on from the last intact checkpoint",
            ) from fault

    def _read(self, step: int, like: TrainState) -> Restored:
        rest = {"opt": like.opt, "step": like.step, "key": like.key}
        adapter, rest = jax.tree.map(_abstract, (like.adapter, rest))
        args = ocp.args.Composite(
            adapter=ocp.args.StandardRestore(adapter),
            state=ocp.args.StandardRestore(rest),
            log=ocp.args.JsonRestore(),
            data=ocp.args.JsonRestore(),
        )
        try:
            found = self._manager.restore(step, args=args)
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # the device's fault, not the checkpoint's
        except Exception as error:  # ValueError, KeyError, bare Exception, ...: whatever the bytes make it do
            raise Damaged(_first_line(error)) from error
        record = _metadata(self._step_folder(step))
        for name, item in (("leaf_sha256", found.adapter), ("state_sha256", found.state)):
            if changed := _changed(leaf_digests(item), record.get(name, {})):
                raise Damaged(f"{changed} is not what was saved (sha256)")
        if [sha256_json(text) for text in (found.log, found.data)] != record.get("json_sha256"):
            raise Damaged("its log or data state is not what was saved (sha256)")
        return Restored(
            step,
            like._replace(adapter=found.adapter, **found.state),
            TrainLog.from_json(found.log),
            found.data,
        )

    def _preserve(self, steps: Sequence[int]) -> list[bool]:
        best = self._best.step if self._keep_best and self._best else None
        return [i >= len(steps) - self._keep or step == best for i, step in enumerate(steps)]

    def _note_monitored(self, step: int, loss: float | None) -> None:
        if loss is not None and (self._best is None or loss < self._best.loss):
            self._best = Best(step, loss)

    def _step_folder(self, step: int) -> Path:
        return self._folder / str(step)

    def _tidy(self) -> None:
        """Remove what an interrupted save or removal left, set aside what only looks like a checkpoint."""
        self._remove_partial()
        folders = self._folder.iterdir() if self._folder.is_dir() else ()
        steps = {int(path.name): path for path in folders if path.is_dir() and path.name.isdecimal()}
        faults = {step: why_incomplete(path) for step, path in steps.items()}
        for step, fault in sorted(faults.items()):
            newer = sum(not found for other, found in faults.items() if other > step)
            if fault and newer >= self._keep and not self._keep_best:
                shutil.rmtree(steps[step])  # it was on its way out when the process was killed
            elif fault:
                _rename_damaged(steps[step], fault)

    def _set_aside(self, step: int, why: str) -> None:
        if _leads():
            _rename_damaged(self._step_folder(step), why)
        ocp.multihost.sync_global_processes(f"portlab:checkpoint_{step}_set_aside")
        self._manager.reload()
        self._best = None
        for left in self.steps:
            self._note_monitored(left, _metadata(self._step_folder(left)).get("monitored"))

    def _remove_partial(self) -> None:
        for partial in self._folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(partial, ignore_errors=True)


def why_incomplete(step: Path) -> str:
    """Why a step folder is no checkpoint, or "" if all its parts are there; reads no arrays."""
    for file in (STEP_METADATA, *(f"{item}/{file}" for item, file in ITEMS.items())):
        if not (step / file).is_file():
            return f"no {file}"
    try:
        committed = read_json(step / STEP_METADATA).get("commit_timestamp_nsecs")
    except (UserError, AttributeError):
        return f"{STEP_METADATA} is not JSON"
    return "" if committed else f"{STEP_METADATA} has no commit time"


@dataclasses.dataclass(frozen=True)
class _Preserved(ocp.checkpoint_managers.PreservationPolicy):
    """Orbax's question which checkpoints stay, answered by a function of their steps."""

    choose: Any

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        return self.choose([info.step for info in checkpoints])


def _metadata(folder: Path) -> dict[str, Any]:
    return read_json(folder / STEP_METADATA, "step metadata").get("custom_metadata") or {}


def _rename_damaged(folder: Path, why: str) -> None:
    _log.warning("checkpoint %s is skipped: %s; set aside as %s.damaged", folder, why, folder.name)
    aside = folder.with_name(f"{folder.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _changed(found: dict[str, str], saved: dict[str, str]) -> str:
    return next((name for name in found.keys() | saved.keys() if found.get(name) != saved.get(name)), "")


def _first_line(error: BaseException) -> str:
    """What a reader can use of an error: Orbax wraps TensorStore's, which is the one that names the file."""
    lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
    return f"it cannot be read ({lines[0][:400]})"


def _leads() -> bool:
    return jax.process_index() == 0


@contextlib.contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Turn Orbax's report of a full disk, a ValueError of TensorStore raised by a later call, into a user's error."""
    try:
        yield
    except ValueError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "No space left" not in str(error):
            raise
        raise UserError(
            "the disk is full, the checkpoint could not be written",
            where=str(folder),
            fix="Free some space and run the same command again: it goes on from the last complete checkpoint",
        ) from error
