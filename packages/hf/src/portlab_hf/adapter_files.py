"""PEFT's two files of an adapter: written, read back, and checked against the recipe that goes on from them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from portlab_hf.model import trained_parameters
from portlab_spec.errors import UserError
from portlab_spec.files import read_json, write_json
from portlab_spec.recipe import Lora

Tensors = dict[str, torch.Tensor]
ToHost = Callable[[Tensors], Tensors]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def on_host(tensors: Tensors) -> Tensors:
    """Copies of whole tensors on the CPU."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


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
