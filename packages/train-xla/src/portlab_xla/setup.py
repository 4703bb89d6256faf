"""A run's parts, made from its recipe: device, model with adapter, static shapes of its batches."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from portlab_hf.adapter_files import start_from
from portlab_hf.experts import use_dense_experts
from portlab_hf.model import add_adapter, decoder_layers, load_base, parameter_specs
from portlab_hf.recompute import recompute_layers
from portlab_hf.token_rows import use_rows_alone
from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.models import AdapterLeaf, GemmaConfig, param_table
from portlab_spec.models.flops import ModelSize, model_size
from portlab_spec.models.targets import plan_adapter
from portlab_spec.packing import Packing, Plan, plan
from portlab_spec.recipe import Recipe
from portlab_xla.devices import Name, open_device
from portlab_xla.devices.device import Device
from portlab_xla.support import require_supported_adapter

# Attention here writes its mask and scores out, T x T for each packed row: longer rows cost more than they save.
MAX_ROW_LENGTH = 2048


@dataclass(frozen=True)
class Setup:
    """A run, ready to train.

    Attributes:
        recipe: the run.
        model: the base on disk.
        config: of it.
        device: where it computes.
        adapted: the base with the adapter in it, on the device.
        leaves: what is adapted.
        token_ids: rows of the embedding that are trained.
    """

    recipe: Recipe
    model: ModelFolder
    config: GemmaConfig
    device: Device
    adapted: PeftModel
    leaves: tuple[AdapterLeaf, ...]
    token_ids: tuple[int, ...]

    @property
    def base(self) -> PreTrainedModel:
        """transformers' model, adapter included."""
        found: Any = self.adapted.get_base_model()
        return found

    def plan(self, batches: Sequence[Sequence[Row]], *, accumulate: int = 1, max_shapes: int = 1) -> Plan:
        """Layouts for some steps' rows, as the recipe and the device want them."""
        recipe, accelerated = self.recipe, self.device.dtype != torch.float32
        longest = max(len(row.ids) for batch in batches for row in batch)
        block = 128 if accelerated else 32
        packing = Packing(
            groups=self.device.groups,
            accumulate=accumulate,
            window=self.config.window,
            share_prefix=recipe.share_prefix,
            pack=recipe.pack,
            max_row_length=max(MAX_ROW_LENGTH, -(-longest // 128) * 128),
        )
        chunk = recipe.chunk or (512 if accelerated else 128)
        return plan(batches, packing, max_shapes=max_shapes, min_block=block, max_chunk=chunk)

    @functools.cached_property
    def size(self) -> ModelSize:
        """Weights that one token meets."""
        return model_size(self.config, self.leaves)


def open_recipe_device(recipe: Recipe, config: GemmaConfig, name: Name) -> Device:
    """The device of a run, with its mesh laid out for the model."""
    parameters = sum(math.prod(p.shape) * p.count for p in param_table(config))
    rows = recipe.batch_size // recipe.accumulate
    return open_device(name, recipe.mesh, parameters=parameters, rows=rows)


def set_up(recipe: Recipe, model: ModelFolder, token_ids: tuple[int, ...], name: Name) -> Setup:
    """Open the device, load the base, put the adapter around it and move both.

    Raises:
        UserError: no such device, a target that matches nothing, rows longer than the model knows positions for, a
            model that is no Gemma.
    """
    config = GemmaConfig.load(model.path)
    if not config.is_gemma:
        raise UserError(
            f"train-xla trains Gemma alone, this is a model of the family {config.family}",
            where="model",
            fix="Run the recipe with train-torchax, which takes other families",
        )
    if recipe.max_length > config.max_position_embeddings:
        raise UserError(
            f"max_length {recipe.max_length} is more than the {config.max_position_embeddings} positions of the model",
            where="max_length",
            fix="Set it lower; too_long says what becomes of longer rows",
        )
    leaves = plan_adapter(config, recipe.lora)
    require_supported_adapter(recipe, leaves)
    device = open_recipe_device(recipe, config, name)  # before any tensor exists
    base = load_base(model.path, dtype_of(recipe, device))
    if config.experts and device.where.type == "xla":
        use_dense_experts(base)
    adapted = add_adapter(recipe, config, base, model, token_ids)
    if recipe.lora.start_from:
        start_from(adapted, recipe.lora, Path(recipe.lora.start_from))
    device.place(adapted, parameter_specs(adapted, config, device.shape), decoder_layers(base))
    use_rows_alone(adapted)
    if recipe.remat == "block":
        recompute_layers(base, device.checkpoint)
    return Setup(recipe, model, config, device, adapted, leaves, token_ids)


def dtype_of(recipe: Recipe, device: Device) -> torch.dtype:
    """Type of frozen weights and activations."""
    named: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return named.get(recipe.dtype) or device.dtype


def batch_line(recipe: Recipe, device: Device) -> str:
    """How the examples of a step are shared out, in words."""
    per_device = recipe.batch_size / recipe.accumulate / device.groups
    share = f"{per_device:.0f}" if per_device.is_integer() else f"about {per_device:.1f}"
    return (
        f"{recipe.batch_size} examples a step, over all devices: {recipe.accumulate} micro-batch(es) x "
        f"{device.groups} group(s) of devices x {share}"
    )
