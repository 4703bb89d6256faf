"""What a benchmark and the trainers it compares hand each other: a work folder.

Needs numpy alone, since every contender reads it in an environment of its own.

    settings.json     `Settings`
    batches.jsonl     one line per optimiser step: a list of rows [token ids, loss flags]
    adapter.npz       initial LoRA values of each adapted layer, "layers.3.self_attn.q_proj.a" (in, rank) and ".b"
                      (rank, out), float32
    NAME.json         what the contender NAME measured, `Measured`
"""

import json
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """One example: token ids, and for each whether it is a training target."""

    ids: list[int]
    loss: list[bool]


@dataclass(frozen=True)
class Settings:
    """What is the same for every contender.

    Attributes:
        model: folder with config.json and safetensors.
        device: cpu or cuda.
        dtype: float32 or bfloat16, of the frozen weights.
        rank, alpha, targets: LoRA in PEFT's terms.
        learning_rate, b1, b2, eps, weight_decay, clip_norm: AdamW, constant rate, gradients clipped to a global norm.
        micro_batch: rows that a contender computes at a time, by its name.
    """

    model: str
    device: str
    dtype: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    learning_rate: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float
    micro_batch: dict[str, int]


class Job(NamedTuple):
    """A work folder, read."""

    settings: Settings
    batches: list[list[Row]]
    adapter: dict[str, np.ndarray]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.ids) for batch in self.batches for row in batch)


@dataclass
class Measured:
    """What one contender reports.

    Attributes:
        losses: mean over the supervised tokens of each step's batch, before its update.
        step_seconds: wall time of each step; the first compiles.
        first_step_at: time.time() when the first step was done.
        peak_memory_bytes: of the process's resident memory, or of the device's allocations.
        versions: of the packages that did the work.
    """

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    first_step_at: float = 0.0
    peak_memory_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def record_step(self, seconds: float) -> None:
        """Note that a step has ended now and how long it took."""
        self.first_step_at = self.first_step_at or time.time()
        self.step_seconds.append(seconds)

    def write(self, folder: Path, name: str, *distributions: str) -> None:
        """Leave NAME.json in the work folder."""
        self.versions = {d: version(d) for d in distributions}
        (folder / f"{name}.json").write_text(json.dumps(asdict(self)))


def write_job(folder: Path, job: Job) -> None:
    """Make a work folder."""
    (folder / "settings.json").write_text(json.dumps(asdict(job.settings)))
    lines = (json.dumps([[row.ids, [int(flag) for flag in row.loss]] for row in batch]) for batch in job.batches)
    (folder / "batches.jsonl").write_text("".join(f"{line}\n" for line in lines))
    np.savez(folder / "adapter.npz", **job.adapter)


def read_job(folder: Path) -> Job:
    """Read a work folder."""
    raw = json.loads((folder / "settings.json").read_text())
    settings = Settings(**{**raw, "targets": tuple(raw["targets"])})
    lines = (folder / "batches.jsonl").read_text().splitlines()
    batches = [[Row(ids, [bool(flag) for flag in loss]) for ids, loss in json.loads(line)] for line in lines]
    with np.load(folder / "adapter.npz") as file:
        adapter = {name: file[name] for name in file.files}
    return Job(settings, batches, adapter)


def peak_resident_bytes() -> int:
    """Largest resident set of this process's own image (Linux: VmHWM, which unlike ru_maxrss starts anew at exec)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")
