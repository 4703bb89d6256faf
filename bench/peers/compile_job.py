"""What a benchmark and a peer whose training step is compiled for a TPU slice hand each other: a work folder.

Needs the standard library alone, since both sides read it in an environment of their own. The benchmark writes

    job.json              `CompileJob`

and starts the peer with `ENVIRONMENT` added to its own. The peer adds, for the program that each device runs,

    compiled.hlo.txt      the optimised HLO, scheduled
    memory.json           bytes of HBM on each device: argument, output, alias, temp, generated_code, peak
    cost.json             XLA's cost analysis as it comes (the body of a loop is counted once)
    parameters.json       values in the model on all devices together: base, adapter
    seconds.json          wall time: lower, compile
    versions.json         of the packages that did the work, by distribution

or, where the compiler refuses the program because it does not fit, seconds.json, parameters.json, versions.json and

    refused.txt           the compiler's message
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Without a TPU libtpu would ask the cloud's metadata server what it is part of. Its lock keeps a TPU to one process;
# a compiler may serve several.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@dataclass(frozen=True)
class CompileJob:
    """One training step to compile.

    Attributes:
        model: gemma3_270m or gemma3_1b.
        topology: slice as jax.experimental.topologies names it, such as v5e:2x4.
        device_kind: what the slice's devices must be, such as "TPU v5 lite".
        fsdp, tp: mesh; their product is the slice's number of devices.
        rank, alpha: LoRA.
        module_path: regular expression that matches the whole path of an adapted module, in the peer's own names.
        batch: rows that one call of the step computes, on all devices together.
        length: tokens of a row.
        accumulation: calls of the step per update of the adapter.
        dtype: of the frozen weights.
        adapter_dtype: of the adapter and its optimiser state; None leaves it to the peer.
        remat: the peer's own setting; Tunix has none, block and decoder.
    """

    model: str
    topology: str
    device_kind: str
    fsdp: int
    tp: int
    rank: int
    alpha: float
    module_path: str
    batch: int
    length: int
    accumulation: int = 1
    dtype: str = "bfloat16"
    adapter_dtype: str | None = None
    remat: str = "none"


def write_job(folder: Path, job: CompileJob) -> None:
    """Make a work folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(asdict(job), indent=1))


def read_job(folder: Path) -> CompileJob:
    """Read a work folder."""
    return CompileJob(**json.loads((folder / "job.json").read_text()))


def write_json(folder: Path, name: str, value: dict[str, Any]) -> None:
    """Leave NAME.json in the work folder."""
    (folder / f"{name}.json").write_text(json.dumps(value, indent=1))


def enter_environment() -> None:
    """What libtpu and JAX read, set for this process; takes effect before the first device is asked for."""
    os.environ |= ENVIRONMENT
