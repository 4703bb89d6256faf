"""A run as the job sees it: a model that answers, trains and is exported."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from portlab_jax.checkpoint import Checkpoints
from portlab_jax.decode import Decoder
from portlab_jax.export_full import export_full
from portlab_jax.setup import Setup, initial_state, set_up
from portlab_jax.step import TrainState
from portlab_jax.trainer import MonitoredLoss, train
from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.models import param_table
from portlab_spec.models.targets import describe
from portlab_spec.packing import BatchOrder
from portlab_spec.recipe import Recipe
from portlab_spec.report import Evaluation
from portlab_spec.run.data import RunRows
from portlab_spec.run.export import run_merge_ckpt
from portlab_spec.run.job import Advance, Say, Trained


class JaxSession:
    """`portlab_spec.run.job.Session` of this trainer. Whatever computes does so under the run's mesh."""

    def __init__(self, setup: Setup, state: TrainState) -> None:
        """Begin with step 0, which training is given and takes apart."""
        self._setup, self._state = setup, state
        self._adapter, self._step = state.adapter, 0
        # Kept, because each compiles.
        self._decoder: Decoder | None = None
        self._loss: MonitoredLoss | None = None

    @staticmethod
    def open(recipe: Recipe, model: ModelFolder, token_ids: tuple[int, ...]) -> "JaxSession":
        """Load a run's model and make its step 0.

        Raises:
            UserError: whatever of the recipe does not fit the model or the devices.
        """
        setup = set_up(recipe, model, token_ids)
        with jax.set_mesh(setup.mesh.mesh):
            return JaxSession(setup, initial_state(setup))

    def introduce(self) -> list[str]:
        """What is trained and where, a line each."""
        setup, config, adapter = self._setup, self._setup.config, self._setup.options.adapter
        lines = [f"{config.family}, {config.num_hidden_layers} layers; {setup.loaded.describe()}"]
        if setup.options.full:
            lines.append("training all weights")
        else:
            rows = f", {len(adapter.token_ids)} token rows" if adapter.token_ids else ""
            lines.append(f"training adapters of {describe(adapter.leaves)}{rows}")
        if jax.device_count() > 1:
            lines += [f"mesh {setup.mesh.describe()}", *setup.mesh.replications(param_table(config))]
        return lines

    def device(self) -> dict[str, Any]:
        """The devices that JAX uses."""
        devices = jax.devices()
        return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}

    def disk_needed(self) -> int:
        """Bytes of a run: the merged model, and the checkpoints that are kept, each of trained leaves and optimiser."""
        recipe = self._setup.recipe
        merged = sum(file.stat().st_size for file in self._setup.model.path.iterdir() if file.is_file())
        one = sum(leaf.nbytes for leaf in jax.tree.leaves((self._state.adapter, self._state.opt)))
        # The newest is written before the oldest goes; the adapter is also exported.
        return merged + (recipe.keep + recipe.keep_best + 2) * one

    def generate(self, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], advance: Advance) -> list[list[int]]:
        """Greedy continuation of each prompt; the first call fixes where answers stop."""
        setup, options = self._setup, self._setup.options
        if self._decoder is None:
            new = setup.recipe.max_new_tokens
            self._decoder = Decoder(setup.config, options.adapter, stop_ids, new, setup.mesh, dtype=options.dtype)
        with jax.set_mesh(setup.mesh.mesh):
            return self._decoder(options.weights(self._adapter, setup.frozen), prompts, advance=advance)

    def loss(self, rows: Sequence[Row]) -> float:
        """Mean cross-entropy over the supervised tokens of rows."""
        with jax.set_mesh(self._setup.mesh.mesh):
            if self._loss is None or self._loss.rows is not rows:
                self._loss = MonitoredLoss(self._setup, rows)
            return self._loss(self._adapter)

    def train(self, rows: RunRows, order: BatchOrder, folder: Path, say: Say) -> Trained:
        """Train, from the newest checkpoint if there is one; see `portlab_jax.trainer.train`."""
        setup, recipe = self._setup, self._setup.recipe
        with (
            jax.set_mesh(setup.mesh.mesh),
            Checkpoints(folder / "checkpoints", keep=recipe.keep, keep_best=recipe.keep_best) as checkpoints,
        ):
            trained = train(setup, self._state, order, checkpoints, monitored=rows.monitored, folder=folder, say=say)
        self._adapter, self._step = trained.adapter, trained.step
        return trained

    def export(self, rows: RunRows, after: Evaluation, folder: Path, say: Say) -> dict[str, str]:
        """Write the model and, of LoRA, the adapter; read both back. It ends the session, whose model is let go.

        Raises:
            UserError: merge-ckpt refused its input.
            CheckFailed: what was written is not what was trained.
        """
        setup = self._setup
        base, quantized = setup.model.path, setup.recipe.lora.quantize
        if setup.options.full:
            merged = folder / "merged"
            with jax.set_mesh(setup.mesh.mesh):
                tensors = export_full(base, setup.config, self._adapter, merged)
            say(f"exported {merged}: {tensors} trained tensors, read back and equal")
            return {"merged": str(merged)}
        # merge-ckpt runs in its own process: the base must not be held here meanwhile.
        del setup, self._setup, self._state, self._adapter, self._loss
        return _export_lora(folder, base, say, step=self._step, quantized=quantized)


def _export_lora(folder: Path, base: Path, say: Say, *, step: int, quantized: str) -> dict[str, str]:
    """Run `merge-ckpt` to a merged folder and a PEFT adapter, and verify both from disk.

    Args:
        folder: of the run.
        base: model folder.
        say: told of each step.
        step: to export.
        quantized: how the frozen weights were held. The recipe asked for it, so that the base as it is may be exported.
    """
    merged, adapter = folder / "merged", folder / "adapter"
    common = ["--base", str(base), "--ckpt", str(folder), "--step", str(step)]
    if quantized != "none":
        common.append("--accept-unquantized")
        say(f"exporting from the base as it is: training held it in {quantized}, and scored it so")
    verify = ("verify", *common, "--merged", str(merged), "--adapter", str(adapter))
    paths = {"merged": str(merged), "adapter": str(adapter)}
    if merged.exists() and adapter.exists():
        # Left by an earlier run: good if they verify, else of an older checkpoint or damaged, and made again.
        with contextlib.suppress(UserError):
            run_merge_ckpt(*verify)
            say(f"verified {merged} and {adapter} (cached)")
            return paths
    for command, target in (("merge", merged), ("adapter", adapter)):
        # The old folder goes only once it is replaced.
        fresh = target.with_name(f"{target.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        run_merge_ckpt(command, *common, "--out", str(fresh))
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        say(f"exported {target}")
    run_merge_ckpt(*verify)
    say("verified both against the checkpoint")
    return paths
