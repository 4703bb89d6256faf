"""Short runs of train-xla on the tiny model. Nothing here imports torch: that is left until the device is known."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_run import Interrupted, TinyRuns

from portlab_spec.assets import resolve_model
from portlab_spec.packing import BatchOrder
from portlab_spec.recipe import load_recipe
from portlab_spec.run.data import control_token_ids, load_run_data, tokenize_run
from portlab_spec.run.folder import STAMP, write_stamp
from portlab_spec.tokenizer import Tokenizer

if TYPE_CHECKING:
    from portlab_spec.run.job import Trained
    from portlab_xla.setup import Setup


class Lab(TinyRuns):
    """The tiny model, and train-xla."""

    def train(self, out: Path, *, stop_after: int | None = None, **changes: Any) -> "tuple[Setup, Trained]":
        """The training of a run alone, in this process on its CPU.

        Args:
            out: run folder; a second run in it goes on from the first one's checkpoints.
            stop_after: interrupt the run as soon as this step is saved.
            changes: of the recipe.

        Raises:
            Interrupted: by `stop_after`.
        """
        from portlab_xla.checkpoint import Checkpoints
        from portlab_xla.session import BACKEND, describe_run
        from portlab_xla.setup import set_up
        from portlab_xla.steps import train

        class Interrupting(Checkpoints):
            def save_step(self, model: Any, optimizer: Any, step: int, log: Any) -> None:
                super().save_step(model, optimizer, step, log)
                if step == stop_after:
                    raise Interrupted

        recipe = load_recipe(str(self.recipe_file(**changes)))
        model, data = resolve_model(recipe.model, None, lambda what, done: None), load_run_data(recipe)
        tokenizer = Tokenizer.load(model.path)
        rows = tokenize_run(recipe, data, tokenizer)
        setup = set_up(recipe, model, control_token_ids(recipe, data.fmt, tokenizer), "cpu")
        order = BatchOrder(rows.train, recipe.batch_size, recipe.steps, recipe.seed)
        keep = {"keep": recipe.keep, "keep_best": recipe.keep_best}
        checkpoints = Interrupting(out / "checkpoints", describe_run(setup, order), **keep)
        if not (out / STAMP).exists():
            write_stamp(out, recipe, BACKEND)
        said: list[str] = []
        return setup, train(setup, rows.train, rows.monitored, checkpoints, order, folder=out, say=said.append)

    def arguments(self, out: Path, *extra: str, device: str = "cpu", **changes: Any) -> list[str]:
        """What to call train-xla with."""
        return ["--recipe", str(self.recipe_file(**changes)), "--out", str(out), "--device", device, *extra]

    def start(self, arguments: Sequence[str], *, devices: int = 1) -> "subprocess.Popen[str]":
        """Start train-xla; with --device xla, the CPU plays so many devices."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "portlab_xla", *arguments]
        return subprocess.Popen(command, text=True, env=environment(devices), **pipes)

    def run(self, arguments: Sequence[str], *, devices: int = 1) -> "subprocess.CompletedProcess[str]":
        """Run train-xla to its end."""
        process = self.start(arguments, devices=devices)
        stdout, stderr = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def environment(devices: int) -> dict[str, str]:
    """Of a process that sees so many XLA devices; one thread, so that sums have one order."""
    return os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "OMP_NUM_THREADS": "1"}
