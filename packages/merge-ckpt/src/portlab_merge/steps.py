"""Which step of a run to read: one that is complete.

Nothing here writes: an Orbax CheckpointManager on a user's folder may delete what it thinks is unfinished
(google/orbax#394), so none is ever made.
"""

import re
from dataclasses import dataclass
from typing import Any

from portlab_merge.location import Location
from portlab_merge.orbax_store import TREE
from portlab_spec.errors import UserError

METADATA, COMMITTED = "_CHECKPOINT_METADATA", "commit_success.txt"
# Where trainers put the arrays in a step: train-jax; Tunix; MaxText; Orbax's own defaults, old and new.
ITEMS = ("adapter", "model_params", "items", "default", "state", "pytree")
# Metrics of which less is better; of all others more is.
_LESS_IS_BETTER = re.compile(r"loss|perplexity|error|monitored", re.IGNORECASE)
_STEP_NAME = re.compile(r"(?:.+_)?(\d+)")
_UNFINISHED_NAME = re.compile(r"(?:.*_)?(\d+)\.orbax-checkpoint-tmp.*")


@dataclass(frozen=True)
class Step:
    """A complete step.

    Attributes:
        number: its number; None for a checkpoint that was saved on its own.
        folder: its folder.
        item: the folder of its arrays.
        metadata: the trainer's `custom_metadata`.
        metrics: by name, as far as the trainer saved them.
        skipped: what was passed over to find it ("step 12: no commit_success.txt").
    """

    number: int | None
    folder: Location
    item: Location
    metadata: dict[str, Any]
    metrics: dict[str, float]
    skipped: tuple[str, ...] = ()


def pick_step(run: Location, wanted: str = "latest") -> Step:
    """Find a complete step in a run folder, its checkpoints folder, or the step folder itself.

    Args:
        run: any of the three.
        wanted: "latest", a step number, or "best:" and a metric.

    Raises:
        UserError: no such step or metric, or it is incomplete.
    """
    if not re.fullmatch(r"latest|\d+|best:.+", wanted):
        fix = "Pass --step latest, --step N or --step best:METRIC"
        raise UserError(f"--step {wanted} is neither a number nor 'latest' nor 'best:METRIC'", fix=fix)
    # A run folder may hold an exported `adapter` as well, so only Orbax's own files make a step.
    if run.child(METADATA).exists() or item_of(run) is not None:
        return _only(run, wanted)
    root = run.child("checkpoints") if "checkpoints" in run.folders() else run
    complete: dict[int, Location] = {}
    incomplete: dict[int, str] = {}
    names = root.folders()
    expect_mark = any(root.child(f"{name}/{COMMITTED}").exists() for name in names)
    for name in names:
        if match := _STEP_NAME.fullmatch(name) or _UNFINISHED_NAME.fullmatch(name):
            number, folder = int(match[1]), root.child(name)
            if reason := why_incomplete(folder, expect_mark):
                incomplete[number] = reason
            elif number in complete:
                raise UserError(f"step {number} exists twice", where=str(root), fix="Pass the step's own folder")
            else:
                complete[number] = folder
    skipped = tuple(f"step {n}: {incomplete[n]}" for n in sorted(incomplete) if n not in complete)
    steps = {number: _open(number, folder, skipped) for number, folder in complete.items()}
    if wanted.startswith("best:"):
        return _best(steps, wanted.removeprefix("best:"), root)
    number = max(complete, default=-1) if wanted == "latest" else int(wanted)
    if number not in complete:
        have = f"complete steps: {', '.join(map(str, sorted(complete))) or 'none'}"
        passed = f"; incomplete: {'; '.join(skipped)}" if skipped else ""
        what = "no complete step" if wanted == "latest" else f"no complete step {number}"
        raise UserError(f"{what} ({have}{passed})", where=str(root), fix="Check --ckpt and --step")
    return steps[number]


def item_of(step: Location) -> Location | None:
    """The folder that holds a step's arrays, which may be the step itself."""
    return next((item for item in (*map(step.child, ITEMS), step) if item.child(TREE).exists()), None)


def why_incomplete(step: Location, expect_mark: bool) -> str:
    """Why a step folder must not be used, or "" if it is complete.

    Orbax >= 0.12.3 puts `commit_success.txt` into a step on every file system once all else is written; older ones
    renamed the folder instead.

    Args:
        step: its folder.
        expect_mark: that file should be there.
    """
    if ".orbax-checkpoint-tmp" in step.name:
        return "its save never finished"
    item = next((name for name in ITEMS if step.child(name).exists()), None)
    if item is None and not step.child(TREE).exists():
        return "it holds no arrays" if step.child(METADATA).exists() else f"no {METADATA}"
    wanted = {f"{item}/{TREE}": item is not None, COMMITTED: expect_mark or item == ITEMS[0]}
    wanted |= {METADATA: expect_mark or item == ITEMS[0]}
    for name in sorted(wanted):
        if wanted[name] and not step.child(name).exists():
            return f"no {name}"
    if step.child(METADATA).exists() and not _metadata(step).get("commit_timestamp_nsecs"):
        return f"{METADATA} has no commit time"
    return ""


def _only(folder: Location, wanted: str) -> Step:
    """The step that a folder is."""
    if reason := why_incomplete(folder, expect_mark=False):
        fix = "Check --ckpt and --step"
        raise UserError(f"no complete step (incomplete: {folder.name}: {reason})", where=str(folder), fix=fix)
    match = _STEP_NAME.fullmatch(folder.name)
    # A manager never puts arrays into the step's folder itself; a checkpointer of Orbax's version 0 does.
    alone = any(folder.child(name).exists() for name in ("orbax.checkpoint", TREE))
    alone = alone or not folder.child(METADATA).exists()
    if not (match or alone):
        raise UserError("the name of a step folder is its number", where=str(folder), fix="Name it as Orbax did")
    step = _open(int(match[1]) if match else None, folder, ())
    if wanted not in ("latest", str(step.number)):
        raise UserError(f"--step {wanted} but the folder is one step", where=str(folder), fix="Pass the run's folder")
    return step


def _open(number: int | None, folder: Location, skipped: tuple[str, ...]) -> Step:
    stored = _metadata(folder) if folder.child(METADATA).exists() else {}
    metadata, metrics = stored.get("custom_metadata"), stored.get("metrics")
    metadata = metadata if isinstance(metadata, dict) else {}
    metrics = metrics if isinstance(metrics, dict) else {}
    if folder.child("metrics/metrics").exists():  # where Orbax put them before they were part of the metadata
        older = folder.child("metrics/metrics").read_json("metrics")
        metrics = {**metrics, **older} if isinstance(older, dict) else metrics
    if metadata.get("monitored") is not None:
        metrics = {**metrics, "loss": metadata["monitored"]}
    # NaN, the one number that is not itself, would win every comparison or lose it.
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float) and value == value}
    item = item_of(folder)
    assert item is not None  # why_incomplete said so
    return Step(number, folder, item, metadata, numbers, skipped)


def _best(steps: dict[int, Step], metric: str, root: Location) -> Step:
    """The step with the best value of a metric; of equal ones the earlier."""
    measured = {number: step for number, step in sorted(steps.items()) if metric in step.metrics}
    if not measured:
        known = ", ".join(sorted({name for step in steps.values() for name in step.metrics})) or "none"
        raise UserError(f"no step has a metric {metric} (there are: {known})", where=str(root), fix="Pass --step N")
    sign = 1 if _LESS_IS_BETTER.search(metric) else -1
    return min(measured.values(), key=lambda step: sign * step.metrics[metric])


def _metadata(step: Location) -> dict[str, Any]:
    value = step.child(METADATA).read_json("step metadata")
    return value if isinstance(value, dict) else {}
