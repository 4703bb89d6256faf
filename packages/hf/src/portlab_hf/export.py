"""The trained adapter as a folder that plain PEFT loads, and the proof that it does."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from portlab_hf.adapter_files import Tensors, write_adapter
from portlab_hf.model import load_base
from portlab_spec.errors import CheckFailed
from portlab_spec.files import new_folder, write_json, write_text
from portlab_spec.recipe import Recipe
from portlab_spec.report import Evaluation

RECORD = "portlab.json"
CARD = "README.md"
TOP_K = 8

# Largest difference of a logit between the device that trained and PEFT on the CPU, by the type of the weights.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 1.0}


def export_adapter(
    model: PeftModel, tensors: Tensors, folder: Path, metadata: Mapping[str, Any], found: Mapping[str, Any], card: str
) -> None:
    """Write the adapter; the folder appears whole or not at all.

    Args:
        model: with the adapter in it.
        tensors: of the adapter, under the names of PEFT's files.
        folder: to make; an older one is replaced.
        metadata: of the run, kept beside the adapter.
        found: golden logits, by `probe`.
        card: README.md of the folder.
    """
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    with new_folder(fresh) as staging:
        write_text(staging / CARD, card)
        write_json(staging / RECORD, {**metadata, "probe": found})
        write_adapter(model, tensors, staging)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def verify_adapter(base: Path, folder: Path, found: Mapping[str, Any], dtype: torch.dtype) -> float:
    """Load the folder as anybody would, with transformers and PEFT on the CPU, and compare logits.

    Args:
        base: the model's folder.
        folder: the adapter's.
        found: golden logits of the device that trained.
        dtype: of the weights there.

    Returns:
        The largest difference of a logit.

    Raises:
        CheckFailed: it is more than rounding.
    """
    return _held_to(PeftModel.from_pretrained(load_base(base, torch.float32), folder), folder, found, dtype)


def verify_model(folder: Path, found: Mapping[str, Any], dtype: torch.dtype) -> float:
    """Load a whole model as anybody would, and compare logits; see `verify_adapter`.

    Raises:
        CheckFailed: the difference is more than rounding.
    """
    return _held_to(load_base(folder, torch.float32), folder, found, dtype)


def _held_to(model: Any, folder: Path, found: Mapping[str, Any], dtype: torch.dtype) -> float:
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([found["token_ids"]]), use_cache=False).logits[0].float()
    golden = torch.tensor(found["topk_logits"])
    again = logits[torch.tensor(found["positions"])].gather(-1, torch.tensor(found["topk_ids"]))
    worst = float((again - golden).abs().max())
    if not worst <= TOLERANCE[dtype]:
        raise CheckFailed(
            f"logits of what was exported differ by {worst:.3g} from those of the trained model",
            where=str(folder),
            fix="An adapter goes with the base that it was trained with; if it did, this is a fault of the trainer",
        )
    return worst


def model_card(
    recipe: Recipe,
    base: str,
    device: Mapping[str, Any],
    after: Evaluation,
    versions: Mapping[str, str],
    *,
    trainer: str,
) -> str:
    """README.md of the adapter, in the form that model hubs read.

    Args:
        recipe: the run.
        base: name of the model that was adapted.
        device: `platform`, `kind` and `count`.
        after: how the adapted model scores.
        versions: of the libraries that trained.
        trainer: what trained, in words.
    """
    lora = recipe.lora
    scores = "\n".join(
        f"| {name} | {metric.value:.1%} ({metric.hits}/{metric.count}) | {metric.low:.1%} to {metric.high:.1%} |"
        for name, metric in after.metrics.items()
    )
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"""---
base_model: {base}
library_name: peft
license: gemma
tags: [lora, sft, portlab]
---

# {recipe.name}

A LoRA adapter for `{base}`, rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}, trained on
`{recipe.data}` with {trainer} for {recipe.steps} steps of {recipe.batch_size} examples on {device["count"]}
{device["kind"]} device(s) ({device["platform"]}).

| {after.examples} examples of the {after.split} split | measured | 95 % interval |
|---|---|---|
{scores}

`portlab.json` holds the recipe, digests of the base's files and golden logits. Versions: {libraries}.
"""
