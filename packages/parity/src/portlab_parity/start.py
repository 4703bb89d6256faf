"""The adapter that every backend starts from, drawn here and written as PEFT writes one.

A fresh adapter's B is zero: it changes nothing, and half of all gradients are zero. So that a wrong scale or a layer
left out shows at once, B is drawn too, small enough that the model stays the one that it is.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from portlab_spec.files import write_json
from portlab_spec.models import PREFIXES, GemmaConfig
from portlab_spec.models.targets import module_regex, plan_adapter
from portlab_spec.recipe import Recipe
from portlab_spec.safetensors_file import Writer, open_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPERTS = ("gate_up_proj", "down_proj")  # of two adapted parameters of a module, PEFT wraps the first and then that
NOISE = 0.1  # of B: its standard deviation times the root of the rank


def write_start(recipe: Recipe, model: Path, token_ids: tuple[int, ...], folder: Path) -> None:
    """Draw the recipe's adapter from its seed and write PEFT's two files.

    Args:
        recipe: whose `lora` says what is adapted.
        model: folder of the base.
        token_ids: rows of the embedding that are trained; they start at the base's, slightly moved.
        folder: to make.

    Raises:
        UserError: a target matches nothing.
    """
    config, lora, base = GemmaConfig.load(model), recipe.lora, open_tensors(model)
    # How transformers names the modules of the model that it makes of such a file.
    prefix = PREFIXES[1] if any(name.startswith(PREFIXES[1:]) for name in base) else PREFIXES[0]
    rng = np.random.default_rng(recipe.seed)
    leaves = plan_adapter(config, lora)
    adapted = {leaf.param.name for leaf in leaves if leaf.experts}
    tensors: dict[str, np.ndarray] = {}
    for leaf in leaves:
        many = math.prod(dim.size for dim in leaf.experts)
        for module in leaf.modules(prefix):
            a = rng.uniform(-1, 1, (many * leaf.rank, leaf.into.size)) / math.sqrt(leaf.into.size)
            b = rng.normal(0, NOISE / math.sqrt(leaf.rank), (leaf.out.size, many * leaf.rank))
            owner = _owner(module, adapted) if leaf.experts else module
            tensors |= {f"{owner}.lora_A.weight": a, f"{owner}.lora_B.weight": b}
    if token_ids:
        name = next(name for name in base if name.endswith("embed_tokens.weight"))
        rows = base[name].numpy()[list(token_ids)].astype(np.float32)
        tensors[f"{prefix}embed_tokens.token_adapter.trainable_tokens_delta"] = rows * rng.uniform(0.9, 1.1, rows.shape)
    folder.mkdir(parents=True)
    write_tensors({f"base_model.model.{name}": x.astype(np.float32) for name, x in tensors.items()}, folder / WEIGHTS)
    modules = [m for leaf in leaves if not leaf.experts for m in leaf.modules(prefix)]
    parameters = [m for leaf in leaves if leaf.experts for m in leaf.modules(prefix)]
    write_json(folder / CONFIG, _config(recipe, str(model), modules, parameters, token_ids))


def write_tensors(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file."""
    with Writer(path, {name: (x.dtype, x.shape) for name, x in tensors.items()}) as writer:
        for name, x in tensors.items():
            writer.write(name, x)


def _owner(module: str, adapted: set[str]) -> str:
    owner, _, parameter = module.rpartition(".")
    inner = parameter == EXPERTS[0] and f"experts.{EXPERTS[1]}" in adapted
    return f"{owner}.base_layer" if inner else owner


def _config(
    recipe: Recipe, model: str, modules: list[str], parameters: list[str], token_ids: tuple[int, ...]
) -> dict[str, Any]:
    lora = recipe.lora
    # Modules of the text model alone: their exact paths, whatever else the model holds.
    others = [re.sub(r"\.\d+\.", f".{10**6}.", module) for module in modules]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "use_rslora": lora.use_rslora,
        "lora_dropout": lora.dropout,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "target_modules": module_regex(modules, modules + others) if modules else [],
        "bias": "none",
        "inference_mode": True,
    }
    if parameters:
        config["target_parameters"] = parameters
    if token_ids:
        config["trainable_token_indices"] = {"embed_tokens": list(token_ids)}
    return config
