"""A training run's checkpoints: choose a step that is complete, read its adapter.

Nothing here writes: an Orbax CheckpointManager on a user's folder may delete what it thinks is unfinished
(google/orbax#394), so none is ever made.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from portlab_merge.contract import AdapterMetadata, parse_metadata
from portlab_merge.orbax_store import read_item
from portlab_spec.errors import UserError
from portlab_spec.files import read_json

ITEM = "adapter"
STEP_METADATA = "_CHECKPOINT_METADATA"
_STEP_NAME = re.compile(r"(?:.+_)?(\d+)")
_UNFINISHED_NAME = re.compile(r"(?:.*_)?(\d+)\.orbax-checkpoint-tmp.*")


@dataclass(frozen=True)
class Step:
    """A complete step, and what was passed over to find it ("step 12: no commit_success.txt")."""

    number: int
    folder: Path
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The adapter of one step.

    Attributes:
        step: where it was read.
        metadata: the trainer's record.
        leaves: f32 arrays by leaf name ("lora/self_attn.q_proj/a", "token_rows").
        faults: leaves that could not be read, or whose content is not what the trainer saved, and why.
    """

    step: Step
    metadata: AdapterMetadata
    leaves: dict[str, np.ndarray]
    faults: dict[str, str]

    @property
    def digest(self) -> str:
        """Hex sha256 that names the adapter: of the sorted lines "<leaf> <sha256>"."""
        lines = [f"{name} {digest}\n" for name, digest in sorted(self.metadata.leaf_sha256.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def pick_step(run: Path, wanted: str = "latest") -> Step:
    """Find a complete step in a run folder, its checkpoints folder, or the step folder itself.

    Args:
        run: any of the three.
        wanted: "latest" or a step number.

    Raises:
        UserError: no such step, or it is incomplete.
    """
    if wanted != "latest" and not wanted.isdecimal():
        raise UserError(f"--step {wanted} is neither a number nor 'latest'", fix="Pass --step latest or --step N")
    if not run.is_dir():
        raise UserError("checkpoint folder not found", where=str(run), fix="Pass --ckpt RUN")
    # A run folder may hold an exported `adapter` as well, so only Orbax's own files make a step.
    if (run / STEP_METADATA).exists() or (run / ITEM / "_METADATA").exists():
        candidates = [run.resolve()]
        root = run.resolve().parent
        if not _STEP_NAME.fullmatch(run.resolve().name):
            raise UserError("the name of a step folder is its number", where=str(run), fix="Name it as Orbax did")
    else:
        root = run / "checkpoints" if (run / "checkpoints").is_dir() else run
        candidates = [path for path in root.iterdir() if path.is_dir()]
    complete: dict[int, Path] = {}
    incomplete: dict[int, str] = {}
    for path in candidates:
        if match := _STEP_NAME.fullmatch(path.name) or _UNFINISHED_NAME.fullmatch(path.name):
            number, reason = int(match[1]), why_incomplete(path)
            if reason:
                incomplete[number] = reason
            elif number in complete:
                raise UserError(f"step {number} exists twice", where=str(root), fix="Pass the step's own folder")
            else:
                complete[number] = path
    skipped = tuple(f"step {n}: {incomplete[n]}" for n in sorted(incomplete) if n not in complete)
    number = max(complete, default=-1) if wanted == "latest" else int(wanted)
    if number not in complete:
        have = f"complete steps: {', '.join(map(str, sorted(complete))) or 'none'}"
        passed = f"; incomplete: {'; '.join(skipped)}" if skipped else ""
        what = "no complete step" if wanted == "latest" else f"no complete step {number}"
        raise UserError(f"{what} ({have}{passed})", where=str(root), fix="Check --ckpt and --step")
    return Step(number, complete[number], skipped)


def why_incomplete(step: Path) -> str:
    """Why a step folder must not be used, or "" if it is complete.

    Orbax >= 0.12.3 puts `commit_success.txt` into a step on every file system once all else is written.
    """
    if ".orbax-checkpoint-tmp" in step.name:
        return "its save never finished"
    for name in (STEP_METADATA, "commit_success.txt", f"{ITEM}/_METADATA"):
        if not (step / name).exists():
            return f"no {name}"
    if not _step_metadata(step).get("commit_timestamp_nsecs"):
        return f"{STEP_METADATA} has no commit time"
    return ""


def read_metadata(step: Step) -> AdapterMetadata:
    """The trainer's record of a step.

    Raises:
        UserError: there is none, or it is not one that we read.
    """
    return parse_metadata(_step_metadata(step.folder).get("custom_metadata"), str(step.folder))


def read_checkpoint(step: Step) -> Checkpoint:
    """Read metadata and leaves of a step; leaves that are not as saved are listed as faults.

    Raises:
        UserError: metadata that we cannot read.
    """
    metadata = read_metadata(step)
    arrays, unreadable = read_item(step.folder / ITEM)
    faults = {"/".join(path): f"cannot be read ({reason})" for path, reason in unreadable.items()}
    leaves = {"/".join(path): array for path, array in arrays.items()}
    for name, array in leaves.items():
        if fault := _leaf_fault(array, metadata.leaf_sha256.get(name)):
            faults[name] = fault
    return Checkpoint(step, metadata, leaves, faults)


def _leaf_fault(array: np.ndarray, expected: str | None) -> str:
    if array.dtype != np.float32:
        return f"is {array.dtype}, expected float32"
    if not np.isfinite(array).all():
        return f"holds {array.size - int(np.isfinite(array).sum())} values that are not finite"
    # Orbax compresses without a checksum, so a flipped bit reads as other numbers and no error.
    if expected and hashlib.sha256(array.astype("<f4", copy=False)).hexdigest() != expected:
        return "differs from what the trainer saved (sha256)"
    return ""


def _step_metadata(step: Path) -> dict[str, Any]:
    value = read_json(step / STEP_METADATA, "step metadata")
    return value if isinstance(value, dict) else {}
