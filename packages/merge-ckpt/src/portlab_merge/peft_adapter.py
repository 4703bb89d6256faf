"""Adapter: the updates as a PEFT folder that plain `PeftModel.from_pretrained(base, folder)` loads."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from portlab_merge.adapter import LoraSettings
from portlab_merge.base_model import BaseModel, check_base_weights
from portlab_merge.model_card import CARD, model_card
from portlab_merge.peft_format import (
    CONFIG,
    EXPERTS,
    WEIGHTS,
    KeyStyle,
    embedding_keys,
    lora_keys,
    module_path,
    pack_experts,
    rows_key,
)
from portlab_merge.plan import LoraTarget, Plan, refuse_overlap
from portlab_spec.files import new_folder, require_free_space, write_json, write_text
from portlab_spec.models.targets import module_regex, pattern_value, scaling
from portlab_spec.safetensors_header import encode_header, lay_out


def export_adapter(plan: Plan, out: Path, key_style: KeyStyle = "new", base: Path | None = None) -> dict[str, Any]:
    """Write `adapter_config.json` and `adapter_model.safetensors` (f32); the folder appears whole or not at all.

    Args:
        plan: what was trained.
        out: folder to make.
        key_style: names of modules inside multimodal models: of transformers since 4.52, or before.
        base: model folder that the adapter names as its own, if not the one that was trained.

    Returns:
        The content of `adapter_config.json`.

    Raises:
        UserError: the base is not the one that was trained, `out` overlaps an input, the disk is too small.
    """
    refuse_overlap(out, plan.base.folder, plan.checkpoint)
    check_base_weights(plan.base, plan.checkpoint.adapter.base)
    config = adapter_config(plan, key_style, base)
    tensors = dict(adapter_tensors(plan, key_style))
    layout = lay_out((name, "F32", array.shape) for name, array in tensors.items())
    require_free_space(out.parent, layout[-1].end + (1 << 20), "the adapter")
    with new_folder(out) as staging:
        with (staging / WEIGHTS).open("xb") as stream:
            stream.write(encode_header(layout, {"format": "pt"}))
            for array in tensors.values():
                stream.write(np.ascontiguousarray(array, dtype="<f4").data)
        write_text(staging / CARD, model_card(plan, "adapter"))
        # Last: without its config no library takes the folder of a killed run for an adapter.
        write_json(staging / CONFIG, config)
    return config


def adapter_tensors(plan: Plan, key_style: KeyStyle = "new") -> Iterator[tuple[str, np.ndarray]]:
    """Name and f32 value of every tensor of the adapter: lora_A (r, in), lora_B (out, r), token rows (n, D)."""
    adapted = {target.tensor for target in plan.targets}
    for target in plan.targets:
        a, b = plan.factors(target)
        module = module_path(target.tensor, key_style)
        if _is_embedding(target):
            yield from zip(embedding_keys(module), (b, a), strict=True)
            continue
        lora_a, lora_b = a.mT, b.mT
        if _is_expert(target):
            module, _, parameter = module.rpartition(".")
            if parameter == EXPERTS[0] and target.tensor.removesuffix(parameter) + EXPERTS[1] in adapted:
                module += ".base_layer"
            lora_a, lora_b = pack_experts(a, b)
        yield from zip(lora_keys(module), (lora_a, lora_b), strict=True)
    if plan.rows:
        yield rows_key(module_path(plan.rows.tensor, key_style)), plan.token_rows()


def adapter_config(plan: Plan, key_style: KeyStyle = "new", base: Path | None = None) -> dict[str, Any]:
    """The content of `adapter_config.json`, see `export_adapter`."""
    trained, lora = plan.checkpoint.adapter.base, plan.checkpoint.adapter.lora
    targets = {module_path(target.tensor, key_style): target for target in plan.targets}
    modules = [path for path, target in targets.items() if not _is_expert(target)]
    parameters = [path for path, target in targets.items() if _is_expert(target)]
    rank_pattern, alpha_pattern = _patterns(targets, lora)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base) if base else trained.id or trained.path or str(plan.base.folder),
        "revision": None if base else trained.revision,
        "r": lora.rank,
        "lora_alpha": _plain(lora.alpha),
        "use_rslora": lora.use_rslora,
        # Acts in training only; PEFT refuses it beside experts.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "rank_pattern": rank_pattern,
        "alpha_pattern": {key: _plain(alpha) for key, alpha in alpha_pattern.items()},
        "target_modules": target_regex(modules, plan.base, key_style) if modules else [],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
    }
    if parameters:
        config["target_parameters"] = parameters
    if plan.rows:
        config["trainable_token_indices"] = {"embed_tokens": list(plan.rows.ids)}
    return config


def _is_expert(target: LoraTarget) -> bool:
    return len(target.shape) == 3


def _is_embedding(target: LoraTarget) -> bool:
    return target.tensor.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight"))


def _patterns(targets: Mapping[str, LoraTarget], lora: LoraSettings) -> tuple[dict[str, int], dict[str, float]]:
    """Rank and alpha patterns under which PEFT gives every path its target's rank and scaling.

    The trainer's own, unless they name modules by a prefix that the exported ones do not have.
    """

    def fits(path: str, target: LoraTarget) -> bool:
        rank = pattern_value(lora.rank_pattern, path, lora.rank)
        alpha = pattern_value(lora.alpha_pattern, path, lora.alpha)
        return rank == target.rank and math.isclose(scaling(alpha, rank, lora.use_rslora), target.scaling)

    if all(fits(path, target) for path, target in targets.items()):
        return dict(lora.rank_pattern), dict(lora.alpha_pattern)
    ranks = {re.escape(path): t.rank for path, t in targets.items() if t.rank != lora.rank}
    alphas = {re.escape(path): t.scaling / scaling(1, t.rank, lora.use_rslora) for path, t in targets.items()}
    return ranks, {path: alpha for path, alpha in alphas.items() if not math.isclose(alpha, lora.alpha)}


def target_regex(modules: list[str], base: BaseModel, key_style: KeyStyle = "new") -> str:
    """A regex that matches exactly these modules of the base."""
    return module_regex(modules, [module_path(name, key_style) for name in base.tensors])


def _plain(number: float) -> float | int:
    """16 rather than 16.0: PEFT declares alpha as an integer, and some servers insist."""
    return int(number) if number == int(number) else number
