"""Checkpoints in safetensors and JSON: what a run needs to go on, and an adapter that PEFT loads as it is.

    <run>/checkpoints/<step>/adapter_config.json, adapter_model.safetensors   as PEFT saves them
                            /optimizer.safetensors   `<parameter>/<moment>`, float32
                            /state.json              see portlab_spec.run.step_folders

transformers would save pickles, one of them of the random number generators; here what is drawn in a step is a function
of the seed and the step's number, so that there is no generator to save.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from portlab_hf.adapter_files import (
    WEIGHTS,
    Tensors,
    ToHost,
    adapter_tensors,
    load_adapter,
    on_host,
    write_adapter,
    write_tensors,
)
from portlab_hf.model import trained_parameters
from portlab_spec.run.step_folders import StepFolders
from portlab_spec.run.train_log import TrainLog

OPTIMIZER = "optimizer.safetensors"


class Checkpoints(StepFolders):
    """The checkpoints of a run.

    Args:
        folder: `<run>/checkpoints`.
        metadata: of the run, see `portlab_spec.run.metadata`.
        keep: newest ones that stay.
        keep_best: also keep the one of the lowest monitored loss.
        to_host: copies tensors to the CPU; of the device.
    """

    def __init__(
        self, folder: Path, metadata: Mapping[str, Any], *, keep: int, keep_best: bool, to_host: ToHost = on_host
    ) -> None:
        super().__init__(folder, metadata, trainer="train-xla", keep=keep, keep_best=keep_best)
        self._to_host = to_host

    def save_step(self, model: PeftModel, optimizer: Optimizer, step: int, log: TrainLog) -> None:
        """Save a step, and remove what need not be kept."""
        tensors = adapter_tensors(model, self._to_host)
        moments = optimizer_tensors(model, optimizer, self._to_host)

        def write(folder: Path) -> None:
            write_adapter(model, tensors, folder)
            write_tensors(moments, folder / OPTIMIZER)

        self.save(step, log, write)

    def resume(self, model: PeftModel, optimizer: Optimizer) -> tuple[int, TrainLog]:
        """Load the newest checkpoint, if there is one; step 0 and an empty log otherwise.

        Raises:
            UserError: it is damaged, or of another run.
        """
        if (saved := self.latest()) is None:
            return 0, TrainLog()
        load_adapter(model, load_file(saved.folder / WEIGHTS), str(saved.folder))
        load_optimizer(model, optimizer, load_file(saved.folder / OPTIMIZER))
        for group in optimizer.param_groups:
            group["steps"] = saved.step
        return saved.step, saved.log

    def load(self, model: PeftModel, step: int) -> None:
        """Load the adapter of a step.

        Raises:
            UserError: a file is not what was written.
        """
        folder = self.read(step).folder
        load_adapter(model, load_file(folder / WEIGHTS), str(folder))


def optimizer_tensors(model: nn.Module, optimizer: Optimizer, to_host: ToHost = on_host) -> Tensors:
    """The optimiser's state by parameter, on the CPU."""
    state = {
        f"{name}/{key}": value
        for name, parameter in trained_parameters(model).items()
        for key, value in optimizer.state[parameter].items()
    }
    return to_host(state)


def load_optimizer(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put saved moments back into those of a fresh optimiser, wherever they lie."""
    by_name = trained_parameters(model)
    for full, value in tensors.items():
        name, _, key = full.rpartition("/")
        optimizer.state[by_name[name]][key].copy_(value)
