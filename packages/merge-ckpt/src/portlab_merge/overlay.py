"""Merge: the base's files again, with the planned tensors updated and every other byte unchanged."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from portlab_merge.arithmetic import LowRankUpdate, RowReplacement, Update
from portlab_merge.base_model import BaseModel, check_base_file
from portlab_merge.journal import Journal
from portlab_merge.model_card import CARD, model_card
from portlab_merge.plan import Plan, refuse_overlap
from portlab_merge.shards import Dtype, index_bytes, output_headers
from portlab_merge.streaming import OtherBase, Progress, WeightsFile, Written, merge_files
from portlab_spec.errors import UserError
from portlab_spec.files import new_folder, require_free_space, staged_bytes, write_bytes, write_json, write_text
from portlab_spec.safetensors_file import INDEX_FILE

MANIFEST, CONFIG = "merge_manifest.json", "config.json"


@dataclass(frozen=True)
class MergeOptions:
    """How to merge.

    Attributes:
        dtype: of the float tensors of the output; "keep" leaves each as it is in the base.
        scale: factor on the whole update.
        max_shard_size: bytes of data in a weights file; None keeps the files of the base.
        threads: workers; the output does not depend on it.
        resume: go on where a killed merge of the same inputs stopped, and leave what is finished on failure.
    """

    dtype: Dtype = "keep"
    scale: float = 1.0
    max_shard_size: int | None = None
    threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))
    resume: bool = False


def merge(plan: Plan, out: Path, options: MergeOptions, progress: Progress = lambda done: None) -> dict[str, Any]:
    """Write the merged model folder; it appears whole or not at all.

    Args:
        plan: what to do.
        out: folder to make.
        options: how.
        progress: told of the base's bytes that are done.

    Returns:
        The content of its `merge_manifest.json`.

    Raises:
        UserError: the base is not the one that was trained, the disk is too small, `out` overlaps an input, or
            a merged value is not finite.
    """
    if not (np.isfinite(options.scale) and options.scale != 0):
        raise UserError(f"--scale {options.scale} must be a finite number other than 0", fix="Pass --scale 1.0")
    if options.max_shard_size is not None and options.max_shard_size < 1:
        raise UserError(f"--max-shard-size {options.max_shard_size} must be at least 1 byte", fix="Pass 5GB")
    if options.threads < 1:
        raise UserError(f"--threads {options.threads} must be at least 1", fix="Pass --threads 1")
    base, checkpoint = plan.base, plan.checkpoint
    refuse_overlap(out, base.folder, checkpoint)
    headers = output_headers(base, options.dtype, options.max_shard_size)
    side_files = [file for file in base.side_files() if str(file) not in (CARD, CONFIG)]
    overhead = sum((base.folder / file).stat().st_size for file in side_files)
    overhead += sum(header.data_start for header in headers.values()) + (1 << 20)
    data_bytes = sum(header.data_bytes for header in headers.values())
    require_free_space(out.parent, data_bytes + overhead - staged_bytes(out), "the merged model")

    job = _job(plan, options)
    with new_folder(out, resume=options.resume) as staging:
        journal = Journal(staging, job)
        outputs = [WeightsFile(staging / name, header) for name, header in headers.items()]
        try:
            read, written = _write_weights(plan, outputs, options, journal, journal.finished(headers), progress)
        except OtherBase:
            journal.forget()
            read, written = _write_weights(plan, outputs, options, journal, {}, progress)
        if index := index_bytes(headers, base.index):
            write_bytes(staging / INDEX_FILE, index)
        manifest = _manifest(plan, job, read, {name: written[staging / name] for name in headers})
        write_json(staging / MANIFEST, manifest)
        write_text(staging / CARD, model_card(plan, "merged", manifest["tensors"]))
        journal.remove()
        for file in side_files:
            (staging / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base.folder / file, staging / file)
        # Comes last, and whole: without it no library takes the folder of a killed run for a model.
        write_bytes(staging / CONFIG, _config_bytes(base, options.dtype))
    return manifest


def _write_weights(
    plan: Plan,
    outputs: Sequence[WeightsFile],
    options: MergeOptions,
    journal: Journal,
    done: dict[Path, Written],
    progress: Progress,
) -> tuple[dict[str, str], dict[Path, Written]]:
    """Write the outputs that are not `done`; returns the sha256 of the base's files by name, and all outputs."""
    base, trained = plan.base, plan.checkpoint.adapter.base
    read: dict[str, str] = {}
    written = dict(done)

    def on_read(path: Path, digest: str) -> None:
        check_base_file(trained, path, digest)
        read[path.name] = digest

    def on_written(path: Path, file: Written) -> None:
        journal.add(path, file)
        written[path] = file

    merge_files(
        [WeightsFile(base.folder / name, header) for name, header in base.shards.items()],
        outputs,
        planned_updates(plan, options.scale),
        options.threads,
        done=done,
        on_read=on_read,
        on_written=on_written,
        progress=progress,
    )
    return {name: read[name] for name in base.shards}, written


def _config_bytes(base: BaseModel, dtype: Dtype) -> bytes:
    """The config of the output: the base's own bytes, unless the dtype is another."""
    if dtype == "keep":
        return (base.folder / CONFIG).read_bytes()
    return (json.dumps(config_with_dtype(base.config, dtype), indent=2, ensure_ascii=False) + "\n").encode()


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


def _job(plan: Plan, options: MergeOptions) -> dict[str, Any]:
    """All that decides the bytes of the output, but the base's weights."""
    adapter = plan.checkpoint.adapter
    lora = adapter.lora
    return {
        "format": "portlab-merge/1",
        "tool": {"portlab-merge-ckpt": version("portlab-merge-ckpt"), "numpy": np.__version__},
        "base": {
            "id": adapter.base.id,
            "revision": adapter.base.revision,
            "config_sha256": plan.base.config_sha256,
        },
        "checkpoint": {"format": adapter.origin, "step": plan.checkpoint.step, "adapter_sha256": adapter.digest},
        "lora": {
            "rank": lora.rank,
            "alpha": lora.alpha,
            "use_rslora": lora.use_rslora,
            "rank_pattern": dict(lora.rank_pattern),
            "alpha_pattern": dict(lora.alpha_pattern),
            "modules": len(plan.targets),
            "token_rows": list(plan.rows.ids) if plan.rows else [],
        },
        "dtype": options.dtype,
        "scale": options.scale,
        "max_shard_size": options.max_shard_size,
    }


def _manifest(
    plan: Plan, job: dict[str, Any], base_sha256: dict[str, str], written: dict[str, Written]
) -> dict[str, Any]:
    recipe = plan.checkpoint.adapter.record.get("recipe")
    trained = recipe.get("format") if isinstance(recipe, Mapping) else None
    return {
        **job,
        # By which a server picks parser and template: a Gemma 3's tokens do not tell JSON from Python.
        "tool_format": trained if isinstance(trained, str) else None,
        "base": {**job["base"], "files_sha256": base_sha256},
        "files_sha256": {name: file.sha256 for name, file in written.items()},
        "tensors": {name: change.report() for file in written.values() for name, change in file.stats.items()},
    }
