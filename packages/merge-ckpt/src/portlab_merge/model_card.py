"""README.md of an output: what it is, of what it was made and how well it did, in the form that model hubs read."""

import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any, Literal

from portlab_merge.location import LocalPath
from portlab_merge.plan import Plan
from portlab_spec.files import parse_json

CARD = "README.md"
Kind = Literal["merged", "adapter"]

# What of a recipe the card shows; the manifest and the run have all of it.
_RECIPE_KEYS = ("name", "data", "format", "steps", "batch_size", "max_length", "optimizer", "seed")
_LICENSE = re.compile(r"^(license(?:_name|_link)?:.*)$", re.MULTILINE)


def model_card(plan: Plan, kind: Kind, changes: Mapping[str, Mapping[str, float]] | None = None) -> str:
    """The card of a merged model or of an adapter.

    Args:
        plan: what was written.
        kind: which of the two.
        changes: of each tensor, as in the manifest of a merge.
    """
    adapter = plan.checkpoint.adapter
    base = adapter.base.id or plan.base.folder.name
    sections = [_front_matter(plan, kind, base), f"# {base}, fine-tuned\n\n{_summary(plan, kind, base)}"]
    if recipe := "\n".join(_recipe_rows(adapter.record)):
        sections.append(f"## Training\n\n| setting | value |\n|---|---|\n{recipe}")
    if not plan.is_part and (metrics := _metrics(plan)):
        sections.append(f"## Metrics\n\nMeasured by the training run.\n\n{metrics}")
    if changes:
        sections.append(f"## What changed\n\n{_change(plan, changes)}")
    return "\n\n".join(sections) + "\n"


def _front_matter(plan: Plan, kind: Kind, base: str) -> str:
    card = plan.base.folder / CARD
    license_lines = _LICENSE.findall(_head(card.read_text("utf-8", "replace"))) if card.is_file() else []
    library, relation = ("transformers", "finetune") if kind == "merged" else ("peft", "adapter")
    lines = [
        f"base_model: {json.dumps(base)}",
        f"base_model_relation: {relation}",
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        *license_lines,
        f"tags: [{plan.base.config.get('model_type', 'gemma')}, lora, merge-ckpt]",
    ]
    return "\n".join(["---", *lines, "---"])


def _head(text: str) -> str:
    """The front matter of a card, "" if it has none."""
    return text.split("\n---", 1)[0] if text.startswith("---") else ""


def _summary(plan: Plan, kind: Kind, base: str) -> str:
    adapter, lora = plan.checkpoint.adapter, plan.checkpoint.adapter.lora
    revision = f" at revision `{adapter.base.revision}`" if adapter.base.revision else ""
    what = "merged into the weights" if kind == "merged" else "as a PEFT adapter"
    patterns = " (common; some modules differ)" if lora.rank_pattern or lora.alpha_pattern else ""
    rows = f", {len(plan.rows.ids)} token rows" if plan.rows else ""
    part = " A part of what was trained: token rows and adapter lie in two folders." if plan.is_part else ""
    return (
        f"LoRA of `{base}`{revision}, {what}: {plan.checkpoint.title} of a `{adapter.origin}` checkpoint, "
        f"rank {lora.rank}, alpha {lora.alpha:g}{', rsLoRA' if lora.use_rslora else ''}{patterns}, "
        f"{len(plan.targets)} modules{rows}. Adapter sha256 `{adapter.digest}`. "
        f"Written by merge-ckpt {version('portlab-merge-ckpt')}.{part}"
    )


def _recipe_rows(record: Mapping[str, Any]) -> Iterator[str]:
    recipe = record.get("recipe")
    recipe = recipe if isinstance(recipe, Mapping) else {}
    for key in _RECIPE_KEYS:
        value = recipe.get(key)
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {entry}" for name, entry in value.items() if entry is not None)
        if value is not None:
            yield f"| {key} | {value} |"


def _metrics(plan: Plan) -> str:
    try:
        return "\n".join(_metric_rows(plan))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # a card without figures is better than no output


def _metric_rows(plan: Plan) -> Iterator[str]:
    scores = _scores(plan)
    if scores is None:
        return
    before, after = scores
    yield f"| metric, {after.get('split', '')} split | base | fine-tuned |\n|---|---:|---:|"
    for name, metric in after.get("metrics", {}).items():
        old = before.get("metrics", {}).get(name)
        yield f"| {name} | {_score(old)} | {_score(metric)} |"


def _score(metric: Any) -> str:
    if not isinstance(metric, Mapping):
        return ""
    return f"{metric['value']:.3f} ({metric['hits']}/{metric['count']})"


def _scores(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The evaluations before and after training, if the run has them and they are of this step.

    Raises:
        OSError: there are none.
        ValueError, KeyError, TypeError: or none that can be read.
    """
    folder = plan.checkpoint.folder
    if not isinstance(folder, LocalPath):
        return None
    run = next((path for path in folder.path.parents if path.name != "checkpoints"), folder.path)
    if (run / "report.json").is_file():
        report = parse_json((run / "report.json").read_bytes())
        if report["exported_step"] not in (None, plan.checkpoint.step):
            return None
        return report["before"], report["after"]
    # The run that calls merge-ckpt has scored the step and not yet written its report.
    before, after = (parse_json((run / f"{name}.json").read_bytes()) for name in ("before", "after"))
    return before["evaluation"], after["evaluation"]


def _change(plan: Plan, changes: Mapping[str, Mapping[str, float]]) -> str:
    survival = [change["survival"] for change in changes.values()]
    return (
        f"{len(changes)} of {len(plan.base.tensors)} tensors; every other byte is the base's. "
        f"Of the update, the stored dtype holds {min(survival):.1%} to {max(survival):.1%} by tensor. "
        "`merge_manifest.json` has the norms and the sha256 of every file."
    )
