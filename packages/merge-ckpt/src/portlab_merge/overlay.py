"""Merge: the base's files again, with the planned tensors updated and every other byte unchanged."""

import os
import shutil
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from portlab_merge.arithmetic import LowRankUpdate, RowReplacement, Update
from portlab_merge.base_model import check_base_file, index_bytes
from portlab_merge.model_card import CARD, model_card
from portlab_merge.plan import FLOATS, Plan, refuse_overlap
from portlab_merge.streaming import MergedFile, Progress, merge_file
from portlab_spec.errors import UserError
from portlab_spec.files import new_folder, require_free_space, write_bytes, write_json, write_text
from portlab_spec.safetensors_file import INDEX_FILE
from portlab_spec.safetensors_header import Header, encode_header, lay_out

Dtype = Literal["keep", "float32", "bfloat16"]

MANIFEST = "merge_manifest.json"
OUTPUT_DTYPES: dict[str, str] = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True)
class MergeOptions:
    """How to merge.

    Attributes:
        dtype: of the float tensors of the output; "keep" leaves each as it is in the base.
        scale: factor on the whole update.
        threads: workers; the output does not depend on it.
    """

    dtype: Dtype = "keep"
    scale: float = 1.0
    threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))


def merge(plan: Plan, out: Path, options: MergeOptions, progress: Progress = lambda done: None) -> dict[str, Any]:
    """Write the merged model folder; it appears whole or not at all.

    Returns:
        The content of its `merge_manifest.json`.

    Raises:
        UserError: the base is not the one that was trained, the disk is too small, `out` overlaps an input, or
            a merged value is not finite.
    """
    if not (np.isfinite(options.scale) and options.scale != 0):
        raise UserError(f"--scale {options.scale} must be a finite number other than 0", fix="Pass --scale 1.0")
    if options.threads < 1:
        raise UserError(f"--threads {options.threads} must be at least 1", fix="Pass --threads 1")
    base, checkpoint = plan.base, plan.checkpoint
    refuse_overlap(out, base.folder, checkpoint)
    layouts = {name: output_layout(header, options.dtype) for name, header in base.shards.items()}
    side_files = base.side_files()
    data_bytes = sum(header.data_bytes for header in layouts.values())
    overhead = sum((base.folder / file).stat().st_size for file in side_files)
    overhead += sum(header.data_start for header in layouts.values()) + (1 << 20)
    require_free_space(out.parent, data_bytes + overhead, "the merged model")

    updates = planned_updates(plan, options.scale)
    shards, report = {}, {}
    with new_folder(out) as staging:
        for name, header in base.shards.items():
            source = base.folder / name
            shard = merge_file(source, header, staging / name, layouts[name], updates, options.threads, progress)
            check_base_file(checkpoint.adapter.base, source, shard.base_sha256)
            shards[name] = shard
            report.update({tensor: stats.report() for tensor, stats in shard.stats.items()})
        if base.index is not None:
            write_bytes(staging / INDEX_FILE, index_bytes(base.index, data_bytes))
        manifest = _manifest(plan, options, shards, report)
        write_json(staging / MANIFEST, manifest)
        write_text(staging / CARD, model_card(plan, "merged", report))
        # config.json comes last: without it no library takes the folder of a killed run for a model.
        for file in sorted(set(side_files) - {Path(CARD)}, key=lambda file: file.name == "config.json"):
            (staging / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base.folder / file, staging / file)
        if options.dtype != "keep":
            write_json(staging / "config.json", config_with_dtype(base.config, options.dtype))
    return manifest


def output_layout(header: Header, dtype: Dtype) -> Header:
    """Header of the output of a base file: same tensors in the same order, float tensors in the wanted dtype."""
    wanted = OUTPUT_DTYPES.get(dtype)
    tensors = lay_out((t.name, wanted if wanted and t.dtype in FLOATS else t.dtype, t.shape) for t in header.tensors)
    # transformers 4.x refuses weights whose metadata does not name a framework.
    metadata = {**header.metadata, "format": "pt"}
    return Header(tensors, metadata, len(encode_header(tensors, metadata)))


def config_with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config with the output's dtype: loaders round to what it says ("dtype" since transformers 5)."""
    text = config.get("text_config")
    changed = {**config, ("torch_dtype" if "torch_dtype" in config else "dtype"): dtype}
    if isinstance(text, dict) and {"dtype", "torch_dtype"} & set(text):
        changed["text_config"] = config_with_dtype(text, dtype)
    return changed


def planned_updates(plan: Plan, scale: float) -> dict[str, Update]:
    """The update of each tensor that changes, by tensor name."""
    updates: dict[str, Update] = {t.tensor: LowRankUpdate.of(*plan.factors(t), t.scaling * scale) for t in plan.targets}
    if plan.rows:
        updates[plan.rows.tensor] = RowReplacement(np.array(plan.rows.ids), plan.token_rows(), scale)
    return updates


def _manifest(
    plan: Plan, options: MergeOptions, shards: dict[str, MergedFile], report: dict[str, dict[str, float]]
) -> dict[str, Any]:
    adapter = plan.checkpoint.adapter
    lora = adapter.lora
    return {
        "format": "portlab-merge/1",
        "tool": {"portlab-merge-ckpt": version("portlab-merge-ckpt"), "numpy": np.__version__},
        "base": {
            "id": adapter.base.id,
            "revision": adapter.base.revision,
            "files_sha256": {name: shard.base_sha256 for name, shard in shards.items()},
            "config_sha256": plan.base.config_sha256,
        },
        "checkpoint": {"format": adapter.origin, "step": plan.checkpoint.step, "adapter_sha256": adapter.digest},
        "lora": {
            "rank": lora.rank,
            "alpha": lora.alpha,
            "use_rslora": lora.use_rslora,
            "rank_pattern": dict(lora.rank_pattern),
            "alpha_pattern": dict(lora.alpha_pattern),
            "token_rows": list(plan.rows.ids) if plan.rows else [],
        },
        "dtype": options.dtype,
        "scale": options.scale,
        "files_sha256": {name: shard.sha256 for name, shard in shards.items()},
        "tensors": report,
    }
