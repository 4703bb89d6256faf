"""Checkpoints: what a run needs to go on, and what merge-ckpt needs to trust it.

    <run>/checkpoints/<step>/adapter    the adapter's leaves, read by merge-ckpt
                            /state      optimiser state, step, PRNG key
                            /log        loss curve and seconds up to this step
                            /_CHECKPOINT_METADATA   `custom_metadata` holds the contract below

Orbax writes asynchronously into a temporary folder and renames it: a killed run leaves whole checkpoints only.
The base model is never stored, only named and hashed.
"""

import contextlib
import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from portlab_jax.lora import Adapter
from portlab_jax.step import TrainState
from portlab_spec.assets import ModelFolder
from portlab_spec.errors import UserError
from portlab_spec.files import sha256_file
from portlab_spec.models import GemmaConfig, config_sha256, match_targets, param_table
from portlab_spec.recipe import Recipe
from portlab_spec.report import versions
from portlab_spec.safetensors_file import model_files

FORMAT = "portlab-lora/1"


@dataclasses.dataclass(frozen=True)
class TrainLog:
    """What a run has seen so far.

    Attributes:
        losses: of every step from the first.
        seconds: spent on these steps, over all the processes that took part.
    """

    losses: list[float]
    seconds: float


class Checkpoints:
    """The checkpoints of one run, a context manager that waits for pending writes."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._folder = folder.absolute()
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=("adapter", "state", "log"))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with _one_line(self._folder):
                self._manager.close()
        finally:
            # Of a save that failed or was interrupted; a complete one has been renamed by now.
            for partial in self._folder.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(partial, ignore_errors=True)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, log: TrainLog, metadata: dict[str, Any]) -> None:
        """Save a step; the write itself goes on in the background."""
        with _one_line(self._folder):
            self._manager.save(
                int(state.step),
                args=ocp.args.Composite(
                    adapter=ocp.args.StandardSave(state.adapter),
                    state=ocp.args.StandardSave({"opt": state.opt, "step": state.step, "key": state.key}),
                    log=ocp.args.JsonSave({"loss": log.losses, "seconds": log.seconds}),
                ),
                custom_metadata=metadata,
            )

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, TrainLog]:
        """The state and log at a step, placed as `like` is."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                adapter=ocp.args.StandardRestore(target.adapter),
                state=ocp.args.StandardRestore({"opt": target.opt, "step": target.step, "key": target.key}),
                log=ocp.args.JsonRestore(),
            ),
        )
        rest = restored.state
        state = TrainState(restored.adapter, rest["opt"], rest["step"], rest["key"])
        return state, TrainLog(list(restored.log["loss"]), restored.log["seconds"])


@contextlib.contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Turn Orbax's report of a full disk, a ValueError of TensorStore raised by a later call, into a user's error."""
    try:
        yield
    except ValueError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "No space left" not in str(error):
            raise
        raise UserError(
            "the disk is full, the checkpoint could not be written",
            where=str(folder),
            fix="Free some space and run the same command again: it goes on from the last complete checkpoint",
        ) from error


def run_metadata(recipe: Recipe, model: ModelFolder, config: GemmaConfig, token_ids: tuple[int, ...]) -> dict[str, Any]:
    """The part of the contract that is the same for every save of a run. Hashes the base's files."""
    lora = recipe.lora
    targets = match_targets(param_table(config), lora.targets)
    layers = range(config.num_hidden_layers)
    embedding = next(p for p in param_table(config) if p.name == "embed_tokens")
    return {
        "format": FORMAT,
        "lora": {
            "rank": lora.rank,
            "alpha": lora.alpha,
            "use_rslora": lora.use_rslora,
            "scaling": lora.scaling,
            "dropout": lora.dropout,
            "targets": [p.name.rpartition(".")[2] for p in targets],
            "rank_pattern": {},
            "alpha_pattern": {},
            "leaves": [{"target": p.name, "modules": [p.module(i) for i in layers]} for p in targets],
            "token_rows": {"parameter": embedding.hf, "ids": list(token_ids)} if token_ids else None,
        },
        "base": {
            "id": model.id,
            "revision": model.revision,
            "path": str(model.path),
            "files_sha256": {f.name: sha256_file(f) for f in model_files(model.path)},
        },
        "model": {"family": config.family, "config_sha256": config_sha256(model.path)},
        "recipe": recipe.model_dump(mode="json"),
        "versions": versions("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy", "portlab-train-jax"),
    }


def leaf_digests(adapter: Adapter) -> dict[str, str]:
    """sha256 of each leaf's C-order little-endian float32 bytes, by slash-joined path."""
    digests = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(adapter)[0]:
        name = "/".join(str(key.key) for key in path)
        data = np.ascontiguousarray(np.asarray(leaf), dtype="<f4")
        digests[name] = hashlib.sha256(data.tobytes()).hexdigest()
    return digests
