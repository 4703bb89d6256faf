"""Adapter: the leaves as a PEFT folder that plain `PeftModel.from_pretrained(base, folder)` loads.

Names, config keys and the form of trained token rows are those of peft 0.21.2 (tuners/lora/config.py,
utils/save_and_load.py, tuners/trainable_tokens): keys are `base_model.model.<module>.lora_{A,B}.weight`, and the
rows, full values in spite of their name, are `<embedding>.token_adapter.trainable_tokens_delta`. Experts are
`target_parameters` (tuners/lora/layer.py, ParamWrapper): all of a layer in one pair of matrices, lora_A (E * r, in)
with the ranks of an expert side by side, lora_B (out, r * E) with the experts of a rank side by side. Of two parameters
of one module, PEFT wraps the first, in the order of the module, and then the wrapper.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from portlab_merge.base_model import BaseModel, check_base_weights
from portlab_merge.plan import LoraTarget, Plan, refuse_overlap
from portlab_spec.files import new_folder, require_free_space, write_json
from portlab_spec.safetensors_header import encode_header, lay_out

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
EXPERTS = ("gate_up_proj", "down_proj")  # parameters of a module of experts, in its order


def export_adapter(plan: Plan, out: Path) -> dict[str, Any]:
    """Write `adapter_config.json` and `adapter_model.safetensors` (f32); the folder appears whole or not at all.

    Returns:
        The content of `adapter_config.json`.

    Raises:
        UserError: the base is not the one that was trained, `out` overlaps an input, the disk is too small.
    """
    refuse_overlap(out, plan.base.folder, plan.checkpoint)
    check_base_weights(plan.base, plan.checkpoint.adapter.base)
    config = adapter_config(plan)
    tensors = dict(adapter_tensors(plan))
    layout = lay_out((name, "F32", array.shape) for name, array in tensors.items())
    require_free_space(out.parent, layout[-1].end + (1 << 20), "the adapter")
    with new_folder(out) as staging:
        with (staging / WEIGHTS).open("xb") as stream:
            stream.write(encode_header(layout, {"format": "pt"}))
            for array in tensors.values():
                stream.write(np.ascontiguousarray(array, dtype="<f4").data)
        # Last: without its config no library takes the folder of a killed run for an adapter.
        write_json(staging / CONFIG, config)
    return config


def adapter_tensors(plan: Plan) -> Iterator[tuple[str, np.ndarray]]:
    """Name and f32 value of every tensor of the adapter: lora_A (r, in), lora_B (out, r), token rows (n, D)."""
    adapted = {target.tensor for target in plan.targets}
    for target in plan.targets:
        a, b = plan.factors(target)
        module = module_path(target.tensor)
        if _is_expert(target):
            module, _, parameter = module.rpartition(".")
            if parameter == EXPERTS[0] and target.tensor.removesuffix(parameter) + EXPERTS[1] in adapted:
                module += ".base_layer"
            a = a.swapaxes(0, 1).reshape(a.shape[1], -1)  # (E, in, r) -> (in, E * r)
            b = b.swapaxes(0, 1).reshape(-1, b.shape[2])  # (E, r, out) -> (r * E, out)
        yield f"base_model.model.{module}.lora_A.weight", a.T
        yield f"base_model.model.{module}.lora_B.weight", b.T
    if plan.rows:
        embedding = module_path(plan.rows.tensor)
        yield f"base_model.model.{embedding}.token_adapter.trainable_tokens_delta", plan.token_rows()


def adapter_config(plan: Plan) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    base, lora = plan.checkpoint.adapter.base, plan.checkpoint.adapter.lora
    modules = [module_path(target.tensor) for target in plan.targets if not _is_expert(target)]
    parameters = [module_path(target.tensor) for target in plan.targets if _is_expert(target)]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.id or base.path or str(plan.base.folder),
        "revision": base.revision,
        "r": lora.rank,
        "lora_alpha": _plain(lora.alpha),
        "use_rslora": lora.use_rslora,
        # Acts in training only; PEFT refuses it beside experts.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": {key: _plain(alpha) for key, alpha in lora.alpha_pattern.items()},
        "target_modules": target_regex(modules, plan.base) if modules else [],
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


def module_path(tensor: str) -> str:
    """Path of the module in transformers >= 4.52 that holds a tensor of the base.

    Multimodal Gemma 3 is published as `language_model.model.*` and loaded as `model.language_model.*`
    (transformers/conversion_mapping.py); the other names are module paths already.
    """
    module = tensor.removesuffix(".weight")
    old = "language_model.model."
    return f"model.language_model.{module.removeprefix(old)}" if module.startswith(old) else module


def target_regex(modules: list[str], base: BaseModel) -> str:
    """A regex that matches exactly these modules of the base.

    PEFT matches a list of names by suffix, which takes in vision and audio towers as well; a string is a regex
    for the whole path. Layers are written `\\d+` if that says the same as their numbers.
    """
    layers_of: dict[tuple[str, str], set[int]] = defaultdict(set)
    plain = []
    for module in modules:
        if match := re.fullmatch(r"(.*\.layers)\.(\d+)\.(.+)", module):
            layers_of[match[1], match[3]].add(int(match[2]))
        else:
            plain.append(re.escape(module))
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (prefix, name), layers in layers_of.items():
        groups[prefix, tuple(sorted(layers))].append(re.escape(name))
    have = {module_path(name) for name in base.tensors}
    branches = []
    for (prefix, numbers), names in groups.items():
        tail = rf"\.({'|'.join(sorted(names))})"
        every = re.escape(prefix) + r"\.\d+" + tail
        listed = re.escape(prefix) + rf"\.({'|'.join(map(str, numbers))})" + tail
        reached = {module for module in have if re.fullmatch(every, module)}
        branches.append(every if reached <= set(modules) else listed)
    return "|".join(branches + sorted(plain))


def _plain(number: float) -> float | int:
    """16 rather than 16.0: PEFT declares alpha as an integer, and some servers insist."""
    return int(number) if number == int(number) else number
