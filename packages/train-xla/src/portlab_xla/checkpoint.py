"""Checkpoints in safetensors and JSON: what a run needs to go on, and an adapter that PEFT loads as it is.

    <run>/checkpoints/<step>/adapter_config.json, adapter_model.safetensors   as PEFT saves them
                            /optimizer.safetensors   `<parameter>/<moment>`, float32
                            /state.json              step, losses, metadata of the run, digests of all of it

A folder appears whole or not at all, and goes likewise. transformers would save pickles, one of them of the random
number generators; here what is drawn in a step is a function of the seed and the step's number, so that there is no
generator to save. Nothing in here waits for other processes.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn
from torch.optim import Optimizer

from portlab_spec.errors import UserError
from portlab_spec.files import new_folder, read_json, sha256_file, sha256_json, write_json
from portlab_spec.recipe import Lora
from portlab_spec.run.metadata import require_same_run
from portlab_xla.devices.device import Tensors, on_host
from portlab_xla.model import trained_parameters

ToHost = Callable[[Tensors], Tensors]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OPTIMIZER, STATE = "optimizer.safetensors", "state.json"
GOING = ".removed"  # a checkpoint that is being removed


@dataclass
class TrainLog:
    """What a run has seen so far.

    Attributes:
        losses: of every step from the first.
        seconds: spent on these steps, over all the processes that took part.
        evals: (steps taken, monitored loss) of every measurement.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    evals: list[tuple[int, float]] = field(default_factory=list)


def adapter_tensors(model: PeftModel, to_host: ToHost = on_host) -> Tensors:
    """The adapter under the names of PEFT's files, float32 on the CPU."""
    # Of a model on the CPU, PEFT would add the whole embedding to an adapter that trains rows of it.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return to_host(state)


def write_adapter(model: PeftModel, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write PEFT's two files; the config last, without which no library takes the folder for an adapter."""
    write_tensors(tensors, folder / WEIGHTS)
    config = model.peft_config["default"].to_dict() | {"inference_mode": True}
    write_json(folder / CONFIG, {key: _plain(value) for key, value in config.items()})


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file; unlike the library's own writer, which hides it, a full disk is an OSError."""
    path.write_bytes(save(dict(tensors), {"format": "pt"}))


def _plain(value: Any) -> Any:
    """Sets as lists, enumerations as their values, 64 rather than 64.0: PEFT declares alpha as an integer."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, float) and value.is_integer() and value:
        return int(value)
    return getattr(value, "value", value)


class Checkpoints:
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
        self._folder, self._metadata, self._to_host = folder, dict(metadata), to_host
        self._keep, self._keep_best = keep, keep_best

    def steps(self) -> list[int]:
        """Steps that are saved, ascending."""
        names = (path.name for path in self._folder.glob("*") if (path / STATE).is_file())
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        """Folder of a step."""
        return self._folder / str(step)

    def save(self, model: PeftModel, optimizer: Optimizer, step: int, log: TrainLog) -> None:
        """Save a step, and remove what need not be kept."""
        tensors = adapter_tensors(model, self._to_host)
        moments = optimizer_tensors(model, optimizer, self._to_host)
        self._folder.mkdir(parents=True, exist_ok=True)
        if not (self.path(step) / STATE).exists():
            with new_folder(self.path(step)) as staging:
                write_adapter(model, tensors, staging)
                write_tensors(moments, staging / OPTIMIZER)
                digests = {name: sha256_file(staging / name) for name in (WEIGHTS, CONFIG, OPTIMIZER)}
                state = {"step": step, "log": asdict(log), "metadata": self._metadata, "sha256": digests}
                write_json(staging / STATE, state | {"state_sha256": sha256_json(state)})
        kept = set(self.steps()[-self._keep :])
        if self._keep_best and (best := best_step(log.evals, self.steps())) is not None:
            kept.add(best)
        for old in set(self.steps()) - kept:
            self.path(old).rename(self._folder / f"{old}{GOING}")
        for folder in self._folder.glob(f"*{GOING}"):  # also what a run that was killed here left
            shutil.rmtree(folder)

    def resume(self, model: PeftModel, optimizer: Optimizer) -> tuple[int, TrainLog]:
        """Load the newest checkpoint, if there is one; step 0 and an empty log otherwise.

        Raises:
            UserError: it is damaged, or of another run.
        """
        saved = self.steps()
        if not saved:
            return 0, TrainLog()
        folder = self.path(saved[-1])
        state = read_state(folder)
        require_same_run(state["metadata"], self._metadata, str(folder), "train-xla")
        self.load(model, saved[-1])
        load_optimizer(model, optimizer, load_file(folder / OPTIMIZER))
        for group in optimizer.param_groups:
            group["steps"] = state["step"]
        log = state["log"]
        return state["step"], TrainLog(log["losses"], log["seconds"], [(at, loss) for at, loss in log["evals"]])

    def load(self, model: PeftModel, step: int) -> None:
        """Load the adapter of a step.

        Raises:
            UserError: a file is not what was written.
        """
        folder = self.path(step)
        for name, digest in read_state(folder)["sha256"].items():
            if not (folder / name).is_file() or sha256_file(folder / name) != digest:
                raise _damaged(folder, name)
        load_adapter(model, load_file(folder / WEIGHTS), str(folder))


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        UserError: that is not what was written.
    """
    try:
        raw = read_json(folder / STATE, "state of the checkpoint")
    except UserError:
        raise _damaged(folder, STATE) from None
    if not isinstance(raw, dict) or raw.pop("state_sha256", None) != sha256_json(raw):
        raise _damaged(folder, STATE)
    return raw


def _damaged(folder: Path, name: str) -> UserError:
    return UserError(
        f"{name} is not what was written",
        where=str(folder),
        fix="Remove this folder: the run goes on from the one before",
    )


def best_step(evals: list[tuple[int, float]], saved: list[int]) -> int | None:
    """The saved step of the lowest monitored loss, the first of equals."""
    known = [(loss, step) for step, loss in evals if step in saved]
    return min(known)[1] if known else None


def load_adapter(model: PeftModel, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Write saved values into the adapter of a model, wherever that lies.

    Raises:
        UserError: other tensors than the adapter has.
    """
    own = {peft_name(name): parameter for name, parameter in trained_parameters(model).items()}
    if differing := sorted(own.keys() ^ tensors.keys()):
        raise UserError(
            f"is another adapter than the recipe's: {differing[0]} and {len(differing) - 1} more tensors are in one of "
            "the two alone",
            where=where,
            fix="Give the recipe the targets that it was trained with",
        )
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                f"{name} is {tuple(tensors[name].shape)} and the recipe's {tuple(parameter.shape)}",
                where=where,
                fix="Give the recipe the rank that it was trained with",
            )
        with torch.no_grad():
            parameter.copy_(tensors[name].to(parameter.dtype))


def start_from(model: PeftModel, lora: Lora, path: Path) -> None:
    """Load the adapter that a run goes on from.

    Args:
        model: with the recipe's adapter in it.
        lora: the recipe's section.
        path: a folder of PEFT's, or a run folder, whose exported adapter is taken.

    Raises:
        UserError: no adapter there, a damaged one, or one of other targets, ranks, scalings or token rows.
    """
    folder = next((f for f in (path, path / "adapter") if (f / CONFIG).is_file()), None)
    if folder is None or not (folder / WEIGHTS).is_file():
        raise UserError(
            f"holds no {CONFIG} and {WEIGHTS}",
            where=str(path),
            fix="Give lora.start_from a PEFT folder or a run folder",
        )
    config = read_json(folder / CONFIG, "adapter's config")
    wanted = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "trainable_token_indices": model.peft_config["default"].to_dict().get("trainable_token_indices") or {},
    }
    for key, value in wanted.items():
        if (config.get(key) or type(value)()) != value:
            raise UserError(
                f"was trained with {key} {config.get(key)}, and the recipe has {value}",
                where=str(folder),
                fix="Give the recipe what it was trained with",
            )
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise UserError(
            f"{WEIGHTS} cannot be read ({error})", where=str(folder), fix="Restore the file, or export the run again"
        ) from None
    load_adapter(model, tensors, str(folder))


def peft_name(parameter: str) -> str:
    """Name of a trained parameter in PEFT's files, which leave out the adapter's own name."""
    return parameter.replace(".default.weight", ".weight").removesuffix(".default")


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
