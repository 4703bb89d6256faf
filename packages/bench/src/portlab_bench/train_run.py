"""Run trainers on one recipe, one after the other, each as a process in an environment of its own.

A trainer leaves report.json and metrics.jsonl in its run folder; what they lack, the time to the first loss, is seen
from outside. Nothing of the trainers is changed or imported.
"""

import datetime
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from portlab_bench.records import read_record
from portlab_bench.train_figures import compare, run_findings, same_rows, steady, step_times
from portlab_bench.train_schema import BackendName, BackendRun, TrainRun
from portlab_bench.train_trl import RUNNER, Work, counts, read_work, require_able, write_work
from portlab_spec.assets import resolve_model
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.files import sha256_json, write_json, write_text
from portlab_spec.packing import BatchOrder
from portlab_spec.recipe import Recipe
from portlab_spec.report import Report, versions
from portlab_spec.run.child import child_process, last_words
from portlab_spec.run.data import load_run_data, tokenize_run
from portlab_spec.run.trackers import METRICS_FILE
from portlab_spec.tokenizer import Tokenizer

PROGRAMS: dict[BackendName, str] = {"jax": "train-jax", "xla": "train-xla", "torchax": "train-torchax"}
# Behind the name of a nox environment: the build for a device, tried before the one for any.
BUILDS = {"tpu": ("_tpu",), "cuda": ("_cuda12", "_cuda13"), "cpu": (), "auto": ()}
RECIPE = "recipe.yaml"
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Trainer:
    """A backend's command.

    Attributes:
        backend: its name.
        command: program and the arguments that choose the device.
        environment: variables that it needs beside ours.
        device: of TRL, which is told in its work folder: "cpu" or "cuda".
    """

    backend: BackendName
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    device: str = ""


def find_trainer(
    backend: BackendName, *, python: Path | None = None, device: str = "auto", root: Path | None = None
) -> Trainer:
    """Where a trainer is: beside the given interpreter, else in the repository's environments, beside ours, on PATH.

    Args:
        backend: the trainer.
        python: interpreter of the environment in which it is installed.
        device: "cpu", "cuda", "tpu", or "auto": what it finds.
        root: of the repository with `.nox`; by default the working folder.

    Raises:
        UserError: it is in none of them.
    """
    if backend == "trl":
        return _find_trl(python, device, root or Path())
    program = PROGRAMS[backend]
    options: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    if backend == "xla":
        # PyTorch/XLA is what drives a TPU; on the others PyTorch as it is.
        options = () if device == "auto" else ("--device", {"tpu": "xla"}.get(device, device))
    elif device != "auto":
        environment["JAX_PLATFORMS"] = device
    if python is not None:
        script = python.absolute().parent / program
        if not python.exists():
            raise UserError(
                "no such interpreter", where=f"--python {backend}={python}", fix=f"Give one that has {program}"
            )
        command = (str(script),) if script.exists() else (str(python), "-m", f"portlab_{backend}")
        return Trainer(backend, (*command, *options), environment)
    nox = (root or Path()).absolute() / ".nox"
    folders = [nox / f"train_{backend}{build}" / "bin" for build in (*BUILDS[device], "")]
    for folder in (*folders, Path(sys.executable).parent):
        if (script := folder / program).exists():
            return Trainer(backend, (str(script), *options), environment)
    if found := shutil.which(program):
        return Trainer(backend, (found, *options), environment)
    raise UserError(
        f"{program} is not installed: not in .nox/train_{backend}, not beside this interpreter, not on PATH",
        where=f"--backends {backend}",
        fix=f"Make its environment: nox -s train_{backend} --install-only, or give --python {backend}=PATH",
    )


def _find_trl(python: Path | None, device: str, root: Path) -> Trainer:
    if device == "tpu":
        raise UserError("TRL as it is does not run on TPUs", where="--backends trl", fix="Take xla, which is TRL's")
    runner = (root / RUNNER).absolute()
    if not runner.exists():
        raise UserError(
            "TRL's runner is in the repository alone", where=str(RUNNER), fix="Run this in a checkout of Portlab"
        )
    # The environment of train-xla holds TRL and PEFT.
    interpreter = python or root.absolute() / ".nox/train_xla/bin/python"
    if not interpreter.exists():
        raise UserError(
            "no interpreter for TRL", where=str(interpreter), fix="Make it: nox -s train_xla, or give --python trl=PATH"
        )
    # Where torch_xla can be imported, transformers would train there.
    environment = {"USE_TORCH_XLA": "0", "JAX_PLATFORMS": "cpu"}
    chosen = device if device != "auto" else "cuda" if shutil.which("nvidia-smi") else "cpu"
    return Trainer("trl", (str(interpreter.absolute()), str(runner)), environment, chosen)


def load_work(recipe: Recipe) -> Work:
    """The rows of every step of a recipe, by the code that the trainers use.

    Raises:
        UserError: the data or the model's tokenizer cannot be read.
    """
    model = resolve_model(recipe.model, recipe.revision).path
    rows = tokenize_run(recipe, load_run_data(recipe), Tokenizer.load(model)).train
    return Work(model, rows, order(recipe, rows))


def order(recipe: Recipe, rows: Sequence[Row]) -> BatchOrder:
    """Which rows each step takes."""
    return BatchOrder(rows, recipe.batch_size, recipe.steps, recipe.seed, group_by_prefix=recipe.group_by_prefix)


def run_all(
    recipe: Recipe,
    trainers: Sequence[Trainer],
    out: Path,
    *,
    warm_up: int,
    timeout: float | None,
    say: Callable[[str], None],
    load: Callable[[Recipe], Work] = load_work,
    trl_rows: int = 2,
    finished: Mapping[BackendName, Path] | None = None,
) -> TrainRun:
    """Run every trainer and write `train.json`. One that fails is in the record as failed; the others go on.

    Args:
        recipe: every trainer is given it as a file with all values, so that no option can be read in two ways.
        trainers: in the order of running.
        out: new folder; each trainer's run is in one of its name.
        warm_up: steps from the first that count in no rate.
        timeout: seconds that a trainer may take; None for no limit.
        say: told of each as it ends.
        load: reads the recipe's rows.
        trl_rows: rows that TRL computes at a time.
        finished: run folders that are read instead of running their trainer: from another machine, say.

    Raises:
        UserError: the folder is not empty, the data cannot be read, or the warm-up leaves no step.
    """
    if recipe.steps <= warm_up:
        raise UserError(
            f"{recipe.steps} steps are all warm-up ({warm_up})", where="--steps", fix="Take more steps, or --warm-up 1"
        )
    if out.exists() and any(out.iterdir()):
        # A trainer goes on in a folder of its own and would report the steps of another day.
        raise UserError("is not empty", where=str(out), fix="Choose another --out")
    if any(trainer.backend == "trl" for trainer in trainers):
        require_able(recipe)
    work = load(recipe)
    write_text(out / RECIPE, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    runs: list[BackendRun] = []
    for name, folder in (finished or {}).items():
        runs.append(_finished(BackendRun(backend=name), folder, recipe, work, warm_up))
    for trainer in trainers:
        say(f"{trainer.backend} ...")
        if trainer.backend == "trl":
            write_work(out / "trl", recipe, work, trainer.device, trl_rows)
        run = run_one(trainer, recipe, work, out, warm_up=warm_up, timeout=timeout)
        say(f"{trainer.backend}: {run.failure or 'done'} in {run.wall_seconds:.1f} s")
        runs.append(run)
        _write(out, recipe, work, warm_up, runs)  # after each: what is measured stays
    return _write(out, recipe, work, warm_up, runs)


def _write(out: Path, recipe: Recipe, work: Work, warm_up: int, runs: Sequence[BackendRun]) -> TrainRun:
    digest = order(recipe, work.rows).digest()
    record = _record(recipe, digest, warm_up, runs)
    write_json(out / "train.json", record.model_dump(mode="json"))
    return record


def _finished(base: BackendRun, folder: Path, recipe: Recipe, work: Work, warm_up: int) -> BackendRun:
    try:
        return read_run(base, folder, recipe, work, None, warm_up)
    except UserError as error:
        return base.model_copy(update={"failure": " ".join(str(error).split())})


def _record(recipe: Recipe, rows: str, warm_up: int, runs: Sequence[BackendRun]) -> TrainRun:
    resolved = recipe.model_dump(mode="json")
    return TrainRun(
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        recipe=resolved,
        recipe_digest=sha256_json(resolved),
        rows_digest=rows,
        warm_up=warm_up,
        client={"system": platform.platform(), "cores": os.cpu_count(), "versions": versions("portlab-bench")},
        runs=tuple(runs),
        findings=compare(runs, recipe.dtype, same_start=recipe.lora.start_from is not None),
    )


def run_one(
    trainer: Trainer, recipe: Recipe, work: Work, out: Path, *, warm_up: int, timeout: float | None
) -> BackendRun:
    """Run one trainer on `<out>/recipe.yaml` and read what it left; a failure is in the record, not raised."""
    folder, log = out / trainer.backend, out / f"{trainer.backend}.log"
    started, at = time.monotonic(), time.time()
    options = [str(folder)] if trainer.backend == "trl" else ["--recipe", str(out / RECIPE), "--out", str(folder)]
    command = [*trainer.command, *options]
    code, first = _watch(command, trainer.environment, log, folder / METRICS_FILE, timeout)
    wall = time.monotonic() - started
    base = BackendRun(backend=trainer.backend, wall_seconds=wall, log=log.name)
    if code is None:
        return base.model_copy(update={"failure": f"ended after {timeout:g} s, its --timeout"})
    if code:
        return base.model_copy(update={"failure": f"exit code {code}: {last_words(log)}"})
    try:
        if trainer.backend == "trl":
            return read_work(base, folder, recipe, work, at, warm_up)
        return read_run(base, folder, recipe, work, first, warm_up)
    except UserError as error:
        return base.model_copy(update={"failure": " ".join(str(error).split())})


def read_run(
    base: BackendRun, folder: Path, recipe: Recipe, work: Work, first: float | None, warm_up: int
) -> BackendRun:
    """Fill a record from a run folder.

    Args:
        base: what is known of the run.
        folder: with report.json and metrics.jsonl.
        recipe: that it should have trained.
        work: its rows.
        first: seconds from the process's start to its first line of metrics.
        warm_up: steps that count in no rate.

    Raises:
        UserError: a file is missing or is not what trainers write, or the report is of another recipe or backend.
    """
    file = folder / "report.json"
    report = read_record(file, Report, "report of a run", "Repeat the run")
    if report.backend != base.backend:
        raise UserError(f"is of the backend {report.backend}", where=str(file), fix="Check --python")
    digest = sha256_json(report.recipe)
    if report.recipe != recipe.model_dump(mode="json"):
        raise UserError("is of another recipe", where=str(file), fix="Install the same version of Portlab everywhere")
    metrics = folder / METRICS_FILE
    if not metrics.exists():
        raise UserError("has no step times", where=str(metrics), fix="Repeat the run")
    times = step_times(metrics.read_text(encoding="utf-8").splitlines(), str(metrics))
    rates = steady(times, warm_up)
    stages = report.seconds.model_dump()
    expected = counts(work)
    found = {name: report.tokens.get(name, 0) for name in expected}
    to_first = None if first is None else first - stages["prepare"] - stages["before"]
    return base.model_copy(
        update={
            "device": report.device,
            "versions": report.versions,
            "recipe_digest": digest,
            "counts": found,
            "first_step_seconds": to_first if to_first is not None and to_first > 0 else None,
            "steady": rates,
            "loss": report.loss,
            "stages": stages,
            "peak_rss_bytes": report.peak_rss_bytes,
            "findings": (
                *run_findings(rates, times, recipe.steps, report.loss, warm_up),
                same_rows(found, expected),
            ),
        }
    )


def _watch(
    command: Sequence[str], environment: Mapping[str, str], log: Path, metrics: Path, timeout: float | None
) -> tuple[int | None, float | None]:
    """Run a command; its exit code (None if it had to be ended), and seconds until its first line of metrics."""
    first = None
    with log.open("wb") as stream, child_process(command, environment, stream) as process:
        started = time.monotonic()
        while process.poll() is None:
            now = time.monotonic() - started
            if first is None and metrics.exists() and metrics.stat().st_size:
                first = now
            if timeout is not None and now > timeout:
                return None, first
            time.sleep(POLL_SECONDS)
        return process.returncode, first


def load_train_run(path: Path) -> TrainRun:
    """Read `train.json`.

    Raises:
        UserError: missing, not JSON, or not of this schema.
    """
    return read_record(path, TrainRun, "comparison of trainers", "Write it with: portlab-bench train")
