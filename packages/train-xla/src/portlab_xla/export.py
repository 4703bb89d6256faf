"""The trained adapter as a folder that plain PEFT loads, and the proof that it does."""

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from portlab_spec.data.tokens import Row
from portlab_spec.errors import CheckFailed
from portlab_spec.files import new_folder, write_json, write_text
from portlab_spec.packing import pack_batch
from portlab_spec.report import Evaluation
from portlab_spec.run.export import run_merge_ckpt
from portlab_xla.checkpoint import adapter_tensors, write_adapter
from portlab_xla.inputs import MicroBatch, micro_batches
from portlab_xla.loss import head_logits, supervised_hidden
from portlab_xla.model import load_base
from portlab_xla.setup import Setup

RECORD = "portlab.json"
CARD = "README.md"
TOP_K = 8

# Largest difference of a logit between the device that trained and PEFT on the CPU, by the type of the weights.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 1.0}


def probe(setup: Setup, row: Row) -> dict[str, Any]:
    """Golden logits of base plus adapter at the supervised positions of one row, for verification after export."""
    top, values = _top_logits(setup, row)
    return {
        "token_ids": [int(i) for i in row.ids],
        "positions": [i - 1 for i, held in enumerate(row.loss) if held],
        "topk_ids": top.tolist(),
        "topk_logits": [[round(float(v), 6) for v in line] for line in values],
    }


def _top_logits(setup: Setup, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    layout = setup.plan([[row] * setup.device.groups]).layout(0)
    tensors = micro_batches(pack_batch([row] * setup.device.groups, layout))[0]
    held = tensors["weights"][0] > 0
    order = tensors["slots"][0][held].argsort()
    setup.adapted.eval()
    with torch.no_grad():
        batch = MicroBatch(**setup.device.put_rows(tensors))
        logits = head_logits(setup.base, supervised_hidden(setup.base, setup.config, batch))
        values, top = logits.topk(min(TOP_K, logits.shape[-1]), -1)
        setup.device.sync()
    return top[0].cpu()[held][order], values[0].cpu()[held][order]


def export_adapter(setup: Setup, folder: Path, metadata: dict[str, Any], found: dict[str, Any], card: str) -> None:
    """Write the adapter; the folder appears whole or not at all.

    Args:
        setup: the run.
        folder: to make; an older one is replaced.
        metadata: of the run, kept beside the adapter.
        found: golden logits, by `probe`.
        card: README.md of the folder.
    """
    tensors = adapter_tensors(setup.adapted, setup.device.to_host)
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    with new_folder(fresh) as staging:
        write_text(staging / CARD, card)
        write_json(staging / RECORD, metadata | {"probe": found})
        write_adapter(setup.adapted, tensors, staging)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def verify_adapter(base: Path, folder: Path, found: dict[str, Any], dtype: torch.dtype) -> float:
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
    model = PeftModel.from_pretrained(load_base(base, torch.float32), folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([found["token_ids"]]), use_cache=False).logits[0].float()
    golden = torch.tensor(found["topk_logits"])
    again = logits[torch.tensor(found["positions"])].gather(-1, torch.tensor(found["topk_ids"]))
    worst = float((again - golden).abs().max())
    if not worst <= TOLERANCE[dtype]:
        raise CheckFailed(
            f"logits of the exported adapter differ by {worst:.3g} from those of the trained model",
            where=str(folder),
            fix="Load it beside the base that it was trained with; if it was, this is a fault of train-xla",
        )
    return worst


def export_merged(base: Path, adapter: Path, merged: Path) -> None:
    """Merge the adapter into the base with merge-ckpt, and verify the result against both."""
    common = ("--base", str(base), "--ckpt", str(adapter))
    fresh = merged.with_name(f"{merged.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    run_merge_ckpt("merge", *common, "--out", str(fresh))
    shutil.rmtree(merged, ignore_errors=True)
    fresh.rename(merged)
    run_merge_ckpt("verify", *common, "--merged", str(merged))


def model_card(setup: Setup, after: Evaluation, versions: dict[str, str]) -> str:
    """README.md of the adapter, in the form that model hubs read."""
    recipe, lora = setup.recipe, setup.recipe.lora
    device = setup.device.describe()
    scores = "\n".join(
        f"| {name} | {metric.value:.1%} ({metric.hits}/{metric.count}) | {metric.low:.1%} to {metric.high:.1%} |"
        for name, metric in after.metrics.items()
    )
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"""---
base_model: {setup.model.id}
library_name: peft
license: gemma
tags: [lora, trl, sft, portlab]
---

# {recipe.name}

A LoRA adapter for `{setup.model.id}`, rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}, trained on
`{recipe.data}` with TRL for {recipe.steps} steps of {recipe.batch_size} examples on {device["count"]} {device["kind"]}
device(s) ({device["platform"]}).

| {after.examples} examples of the {after.split} split | measured | 95 % interval |
|---|---|---|
{scores}

`portlab.json` holds the recipe, digests of the base's files and golden logits. Versions: {libraries}.
"""
