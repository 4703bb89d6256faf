"""The repository's own results that tables rest on, in one file that travels with the wheel.

`collect` reads `bench/results/*.json` and keeps what tables show; the data file is written by it and by nothing else,
and a test holds the two together.
"""

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from portlab_bench.records import read_record
from portlab_spec.conversation import Record
from portlab_spec.errors import UserError
from portlab_spec.files import read_json, write_json
from portlab_spec.hardware import parse_slice

# Cases of bench_slices -> model, method, what is trained on.
JOBS = {
    "gemma3-270m": ("google/gemma-3-270m-it", "LoRA, functiongemma-fitness, shared prefix packed"),
    "gemma3-1b": ("google/gemma-3-1b-it", "LoRA, rows of 1,024 tokens, 256 supervised"),
    "gemma4-31b": ("google/gemma-4-31B-it", "LoRA, rows of 2,048 tokens, 256 supervised"),
    "gemma4-31b-fitness": ("google/gemma-4-31B-it", "LoRA, fitness-plus, shared prefix packed"),
}


class CompiledRun(Record):
    """A training run whose step the TPU compiler compiled for a slice.

    Attributes:
        job: key of `JOBS`.
        slice: Cloud name.
        mesh: axes.
        steps: of the run.
        rows, tokens: of a step, as the data give them, before anything is shared.
        hbm_needed, hbm_usable: bytes of a device, compiled.
        flops, hbm_traffic, sent: of a device and step, compiled: matrix products, bytes to and from HBM, bytes to
            other devices.
        compile_seconds: of the program, on the machine that compiled.
        step_seconds: modelled: the roofline over `Compiled.efficiency`.
        key: where it stands in the results.
    """

    job: str
    slice: str
    mesh: dict[str, int]
    steps: int
    rows: float
    tokens: float
    hbm_needed: int
    hbm_usable: int
    flops: float
    hbm_traffic: float
    sent: float
    compile_seconds: float
    step_seconds: float
    key: str


class RefusedRun(Record):
    """A training run that the compiler refused for a slice: a device has less memory than the step needs.

    Attributes:
        job: key of `JOBS`.
        slice: Cloud name.
        hbm_needed, hbm_usable: bytes of a device, by the compiler.
        key: where it stands in the results.
    """

    job: str
    slice: str
    hbm_needed: int
    hbm_usable: int
    key: str


class MeasuredRun(Record):
    """A training run that ran here.

    Attributes:
        job: what was trained.
        device: what it ran on.
        tokens_per_second: as given.
        first_step: seconds to the end of the first step, compiling included.
        when: ISO 8601.
        key: where it stands in the results.
    """

    job: str
    device: str
    tokens_per_second: float = Field(gt=0, allow_inf_nan=False)
    first_step: float | None = None
    when: str
    key: str


class Compiled(Record):
    """`compiled.json`.

    Attributes:
        when, commit, versions: of the compiled runs.
        efficiency: share of the roofline's speed that published training runs reached (bench_backtest).
        worst_factor: between such a run and its estimate.
        efficiency_when: of it.
        runs: compiled.
        refused: by the compiler.
        measured: on devices of this project.
    """

    kind: Literal["portlab-bench compiled"] = "portlab-bench compiled"
    when: str
    commit: str
    versions: dict[str, str]
    efficiency: float = Field(gt=0, le=1)
    worst_factor: float = Field(ge=1)
    efficiency_when: str
    runs: tuple[CompiledRun, ...] = Field(min_length=1)
    refused: tuple[RefusedRun, ...]
    measured: tuple[MeasuredRun, ...]


def collect(results: Path) -> Compiled:
    """What tables need of a folder of results.

    Raises:
        UserError: a file or a key of it is missing.
    """
    slices = read_json(results / "bench_slices.json", "compiled steps")
    backtest = read_json(results / "bench_backtest.json", "test of the estimates")
    try:
        return Compiled(
            when=slices["when"],
            commit=slices["commit"],
            versions=slices["versions"],
            efficiency=backtest["ratios"]["efficiency"],
            worst_factor=backtest["ratios"]["worst factor"],
            efficiency_when=backtest["when"],
            runs=tuple(_run(name, figures) for name, figures in slices["figures"].items() if figures["fits"]),
            refused=tuple(
                _refused(name, figures) for name, figures in slices["figures"].items() if not figures["fits"]
            ),
            measured=tuple(_measured(results)),
        )
    except KeyError as missing:
        raise UserError(
            f"the key {missing} is missing", where=str(results), fix="Run the bench session that writes it"
        ) from None


def write_collected(results: Path, path: Path) -> None:
    """Write what `collect` finds."""
    write_json(path, collect(results).model_dump(mode="json"))


@cache
def load_compiled() -> Compiled:
    """The data file that ships."""
    file = resources.files("portlab_bench") / "data" / "compiled.json"
    with resources.as_file(file) as path:
        return read_record(path, Compiled, "table of compiled runs", "Install portlab-bench again")


def _run(name: str, figures: dict[str, Any]) -> CompiledRun:
    job, _, part = name.partition(" on ")
    steps = sum(shape["steps"] for shape in figures["shapes"])

    def mean(what: str) -> float:
        return sum(shape["steps"] * _total(shape["program"][what]) for shape in figures["shapes"]) / steps

    modelled = figures["modelled"]
    return CompiledRun(
        job=job,
        slice=parse_slice(part).name,
        mesh=figures["mesh"],
        steps=steps,
        rows=round(modelled["examples_per_second"] * modelled["step_seconds"], 6),
        tokens=round(modelled["tokens_per_second"] * modelled["step_seconds"], 3),
        hbm_needed=figures["hbm_needed"],
        hbm_usable=figures["hbm_usable"],
        flops=mean("flops"),
        hbm_traffic=mean("bytes"),
        sent=mean("sent"),
        compile_seconds=sum(shape["program"]["compile_seconds"] for shape in figures["shapes"]),
        step_seconds=modelled["step_seconds"],
        key=f"bench/results/bench_slices.json#{name}",
    )


def _refused(name: str, figures: dict[str, Any]) -> RefusedRun:
    job, _, part = name.partition(" on ")
    return RefusedRun(
        job=job,
        slice=parse_slice(part).name,
        hbm_needed=figures["hbm_needed"],
        hbm_usable=figures["hbm_usable"],
        key=f"bench/results/bench_slices.json#{name}",
    )


def _total(value: Any) -> float:
    return float(sum(value.values()) if isinstance(value, dict) else value)


def _measured(results: Path) -> list[MeasuredRun]:
    """Runs of train-jax on this project's machines: on CPUs, and on a GPU where that was measured."""
    found = []
    for file, device, own in (("bench_train", "CPU", ": portlab"), ("gpu_train", "GPU", ": portlab")):
        path = results / f"{file}.json"
        if not path.exists():
            continue
        raw = read_json(path, "training runs")
        machine = raw["machine"]
        label = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
        for name, figures in raw["figures"].items():
            if name.endswith(own):
                found.append(
                    MeasuredRun(
                        job=name.removesuffix(own),
                        device=f"{device} ({label})",
                        tokens_per_second=figures["tokens_per_second"],
                        first_step=figures.get("seconds_to_first_step"),
                        when=raw["when"],
                        key=f"bench/results/{file}.json#{name}",
                    )
                )
    return found
