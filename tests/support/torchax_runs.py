"""Short runs of train-torchax on the tiny model."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tiny_run import Interrupted, TinyRuns

from portlab_spec.assets import resolve_model
from portlab_spec.packing import BatchOrder
from portlab_spec.recipe import load_recipe
from portlab_spec.run.data import control_token_ids, load_run_data, tokenize_run
from portlab_spec.run.folder import STAMP, write_stamp
from portlab_spec.tokenizer import Tokenizer

if TYPE_CHECKING:
    from portlab_spec.run.job import Trained
    from portlab_torchax.session import TorchaxSession


class Lab(TinyRuns):
    """The tiny model, and train-torchax."""

    def train(self, out: Path, *, stop_after: int | None = None, **changes: Any) -> "tuple[TorchaxSession, Trained]":
        """The training of a run alone, in this process.

        Args:
            out: run folder; a second run in it goes on from the first one's checkpoints.
            stop_after: interrupt the run as soon as this step is saved.
            changes: of the recipe.

        Raises:
            Interrupted: by `stop_after`.
        """
        from portlab_torchax import BACKEND
        from portlab_torchax.checkpoint import Checkpoints
        from portlab_torchax.session import TorchaxSession
        from portlab_torchax.setup import set_up

        class Interrupting(Checkpoints):
            def save_state(self, state: Any, log: Any) -> None:
                super().save_state(state, log)
                if int(state.step) == stop_after:
                    raise Interrupted

        recipe = load_recipe(str(self.recipe_file(**changes)))
        model, data = resolve_model(recipe.model, None, lambda what, done: None), load_run_data(recipe)
        tokenizer = Tokenizer.load(model.path)
        rows = tokenize_run(recipe, data, tokenizer)
        session = TorchaxSession(set_up(recipe, model, control_token_ids(recipe, data.fmt, tokenizer)))
        order = BatchOrder(rows.train, recipe.batch_size, recipe.steps, recipe.seed)
        if not (out / STAMP).exists():
            write_stamp(out, recipe, BACKEND)
        with mock.patch("portlab_torchax.session.Checkpoints", Interrupting):
            return session, session.train(rows, order, out, lambda line: None)

    def arguments(self, out: Path, *extra: str, **changes: Any) -> list[str]:
        """What to call train-torchax with."""
        return ["--recipe", str(self.recipe_file(**changes)), "--out", str(out), *extra]

    def start(self, arguments: Sequence[str], *, devices: int = 1) -> "subprocess.Popen[str]":
        """Start train-torchax on a CPU that plays so many devices; the lab keeps what it compiles."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "portlab_torchax", *arguments]
        cache = {"PORTLAB_CACHE": str(self.folder / "cache")}
        return subprocess.Popen(command, text=True, env=environment(devices) | cache, **pipes)

    def run(self, arguments: Sequence[str], *, devices: int = 1) -> "subprocess.CompletedProcess[str]":
        """Run train-torchax to its end."""
        process = self.start(arguments, devices=devices)
        stdout, stderr = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def environment(devices: int) -> dict[str, str]:
    """Of a process that sees so many devices of JAX."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"}
