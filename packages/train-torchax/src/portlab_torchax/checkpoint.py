"""Checkpoints in safetensors and JSON: what a run needs to go on, and an adapter that PEFT loads as it is.

    <run>/checkpoints/<step>/adapter_config.json, adapter_model.safetensors   as PEFT saves them, or
                            /weights.safetensors     all weights of full fine-tuning, float32
                            /optimizer.safetensors   optax's state, by path
                            /state.json              see portlab_spec.run.step_folders

torchax takes no part in any of it. Arrays are restored to the shardings that the run has now.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import torch
from peft import PeftModel
from safetensors.torch import load_file

from portlab_hf.adapter_files import WEIGHTS, Tensors, peft_name, write_adapter, write_tensors
from portlab_spec.errors import UserError
from portlab_spec.run.step_folders import StepFolders
from portlab_spec.run.train_log import TrainLog
from portlab_torchax import TRAINER
from portlab_torchax.functional import Values, plain_torch
from portlab_torchax.mesh import to_numpy, to_torch
from portlab_torchax.setup import Setup
from portlab_torchax.step import TrainState

ALL_WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"


class Checkpoints(StepFolders):
    """The checkpoints of a run.

    Args:
        folder: `<run>/checkpoints`.
        metadata: of the run, see `portlab_spec.run.metadata`.
        setup: the run.
    """

    def __init__(self, folder: Path, metadata: Mapping[str, Any], setup: Setup) -> None:
        recipe = setup.recipe
        super().__init__(folder, metadata, trainer=TRAINER, keep=recipe.keep, keep_best=recipe.keep_best)
        self._setup = setup

    def save_state(self, state: TrainState, log: TrainLog) -> None:
        """Save a step, and remove what need not be kept."""

        def write(folder: Path) -> None:
            with plain_torch():
                write_trained(self._setup, state.trained, folder)
                write_tensors({name: to_torch(leaf) for name, leaf in _by_path(state.opt).items()}, folder / OPTIMIZER)

        self.save(int(state.step), log, write)

    def resume(self, state: TrainState) -> tuple[TrainState, TrainLog]:
        """The newest checkpoint, or the given state and an empty log.

        Args:
            state: step 0, whose placement is kept.

        Raises:
            UserError: it is damaged, or of another run.
        """
        if (saved := self.latest()) is None:
            return state, TrainLog()
        with plain_torch():
            trained = read_trained(self._setup, state.trained, saved.folder)
            opt = _placed(state.opt, load_file(saved.folder / OPTIMIZER), str(saved.folder))
        step = jax.device_put(jax.numpy.int32(saved.step), state.step.sharding)
        return TrainState(trained, opt, step), saved.log

    def load(self, trained: Values, step: int) -> Values:
        """The trained leaves of a step, placed as these are.

        Raises:
            UserError: a file is not what was written.
        """
        with plain_torch():
            return read_trained(self._setup, trained, self.read(step).folder)


def peft_tensors(trained: Values) -> Tensors:
    """A trained adapter under the names of PEFT's files, on the CPU."""
    return {peft_name(name): to_torch(value) for name, value in trained.items()}


def write_trained(setup: Setup, trained: Values, folder: Path) -> None:
    """Write what is trained: PEFT's two files, or all weights."""
    module = setup.program.model.module
    if isinstance(module, PeftModel):
        write_adapter(module, peft_tensors(trained), folder)
    else:
        write_tensors({name: to_torch(value) for name, value in trained.items()}, folder / ALL_WEIGHTS)


def read_trained(setup: Setup, trained: Values, folder: Path) -> Values:
    """Read what `write_trained` wrote, placed as the given leaves are."""
    if setup.full:
        return _placed(trained, load_file(folder / ALL_WEIGHTS), str(folder))
    files = {peft_name(name): name for name in trained}
    tensors = {files.get(name, name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    return _placed(trained, tensors, str(folder))


def _placed(like: Any, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """A tree of saved values, with the shapes and placements of the given one.

    Raises:
        UserError: other leaves, or other shapes.
    """
    known = _by_path(like)
    shapes = {name: tuple(leaf.shape) for name, leaf in known.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != shapes:
        differing = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
        raise UserError(
            f"{differing[0]} is {found.get(differing[0])} and the run's {shapes.get(differing[0])}",
            where=where,
            fix="Choose another --out",
        )
    leaves = [jax.device_put(to_numpy(tensors[name]), leaf.sharding) for name, leaf in known.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _by_path(tree: Any) -> dict[str, jax.Array]:
    """Leaves by path, in the tree's order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
