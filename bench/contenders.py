"""Run the same training job with several trainers, each in a process and an environment of its own."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.exchange import Job, write_job
from portlab_spec.errors import CheckFailed, UserError

PEERS = Path(__file__).parent / "peers"
CONTENDERS = ("portlab", "tunix", "trl")
# The script of each in peers/, and its arguments behind the work folder and `--name NAME`; without any, the script has
# a name of its own.
RUNNERS: dict[str, tuple[str, ...]] = {
    **{name: (f"{name}_runner.py",) for name in CONTENDERS},
    "train-xla cuda": ("train_xla_runner.py", "--device", "cuda"),
    "train-xla cpu": ("train_xla_runner.py", "--device", "cpu"),
    "train-xla xla, 1 device": ("train_xla_runner.py", "--device", "xla", "--devices", "1"),
    "train-xla xla, 4 devices": ("train_xla_runner.py", "--device", "xla", "--devices", "4"),
    "padded to one length": ("train_xla_runner.py", "--device", "xla", "--devices", "4", "--shapes", "one"),
    "train-jax": ("portlab_runner.py", "--rows", "packed"),
    "train-jax, padded rows": ("portlab_runner.py", "--rows", "padded"),
    "train-torchax": ("train_torchax_runner.py", "--rows", "packed"),
    "train-torchax, padded rows": ("train_torchax_runner.py", "--rows", "padded"),
    "torchax's loop": ("torchax_loop_runner.py", "--no-jit"),
    "torchax's loop, jitted": ("torchax_loop_runner.py", "--jit"),
    "padded to each batch's length": ("train_xla_runner.py", "--device", "xla", "--devices", "4", "--shapes", "each"),
}
# Losses of one step must agree within this share; float32 sums differ in their order.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def run_all(job: Job, names: Sequence[str], interpreters: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Every named contender's figures, in that order.

    Args:
        job: what all of them do.
        names: some of RUNNERS; a name may come again.
        interpreters: Python of the contenders that do not run in this environment.

    Raises:
        UserError: a contender fails.
    """
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_job(Path(folder), job)
        for name in names:
            title = name if name not in figures else f"{name}, again"
            figures[title] = _run(job, name, Path(folder), interpreters.get(name, Path(sys.executable)))
    return figures


def _run(job: Job, name: str, folder: Path, python: Path) -> dict[str, Any]:
    print(f"{name} ...", file=sys.stderr, flush=True)
    if not python.exists():
        raise UserError(
            f"no interpreter for {name}", where=str(python), fix=f"Make it: nox -s bench_{name} (see noxfile)"
        )
    environment = os.environ | {
        "JAX_PLATFORMS": job.settings.device,
        "TOKENIZERS_PARALLELISM": "false",
        "USE_TORCH_XLA": "0",  # where it can be imported, transformers would train there; train-xla says so itself
    }
    script, *arguments = RUNNERS[name]
    if arguments:
        arguments = ["--name", name, *arguments]
    started = time.time()
    done = subprocess.run([python, PEERS / script, folder, *arguments], env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise UserError(f"the contender {name!r} could not run (exit code {done.returncode})")
    return summary(json.loads((folder / f"{name}.json").read_text()), job, started)


def summary(measured: dict[str, Any], job: Job, started: float) -> dict[str, Any]:
    """A contender's figures and the rates that follow from them; the first step compiles and is left out of the rates.

    Tokens are those of the rows as given, whatever a contender makes of them.
    """
    seconds, batch = measured["step_seconds"], job.batches[-1]
    step = statistics.median(seconds[1:] or seconds)
    return {
        "steps_per_second": 1 / step,
        "examples_per_second": len(batch) / step,
        "tokens_per_second": sum(len(row.ids) for row in batch) / step,
        "seconds_to_first_step": measured.pop("first_step_at") - started,
        **measured,
    }


def require_equal_losses(figures: Mapping[str, Mapping[str, Any]], dtype: str) -> float:
    """The largest relative difference between the losses of any step.

    Raises:
        CheckFailed: it is more than rounding explains: the contenders did not do the same.
    """
    by_step = zip(*(figure["losses"] for figure in figures.values()), strict=True)
    worst = max((max(losses) - min(losses)) / max(losses) for losses in by_step)
    if worst > TOLERANCE[dtype]:
        listed = "; ".join(f"{name} {figure['losses']}" for name, figure in figures.items())
        raise CheckFailed(
            f"losses differ by {worst:.1e}: {listed}", fix="The comparison means nothing until they agree"
        )
    return worst


def print_table(figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Markdown, one line a contender."""
    print("| contender | examples/s | tokens/s | step, s | to first step, s | peak memory, GiB | last loss | MFU |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, f in figures.items():
        cells = [
            name,
            f"{f['examples_per_second']:.2f}",
            f"{f['tokens_per_second']:.0f}",
            f"{1 / f['steps_per_second']:.3f}",
            f"{f['seconds_to_first_step']:.1f}",
            f"{f['peak_memory_bytes'] / 2**30:.2f}",
            f"{f['losses'][-1]:.5f}",
            f"{f['model_flops_utilisation']:.1%}" if "model_flops_utilisation" in f else "",
        ]
        print("| " + " | ".join(cells) + " |")


def ratios(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """How many times faster ours is and what share of the memory it takes; of two runs of ours the worse counts."""
    ours = [figure for name, figure in figures.items() if name.startswith("portlab")]
    if not ours:
        return {}
    speed = min(figure["examples_per_second"] for figure in ours)
    memory = max(figure["peak_memory_bytes"] for figure in ours)
    others = {name: figure for name, figure in figures.items() if not name.startswith("portlab")}
    return {f"speed: portlab / {name}": speed / figure["examples_per_second"] for name, figure in others.items()} | {
        f"memory: portlab / {name}": memory / figure["peak_memory_bytes"] for name, figure in others.items()
    }
