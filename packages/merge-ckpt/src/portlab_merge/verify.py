"""Verify: compare what lies on disk with base and checkpoint, by another path than the one that wrote it.

Merged tensors are probed with random signs in float64 (Freivalds): x W_merged^T against x W_base^T +
scaling * (x a) b. The update is never formed, so an error in forming, slicing, ordering or scaling it shows.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from portlab_merge.base_model import BaseModel, open_base
from portlab_merge.model_card import CARD
from portlab_merge.overlay import MANIFEST, config_with_dtype
from portlab_merge.peft_adapter import adapter_config, adapter_tensors
from portlab_merge.peft_format import CONFIG, WEIGHTS, key_style_of
from portlab_merge.plan import FLOATS, LoraTarget, Plan, RowsTarget
from portlab_merge.shards import OUTPUT_DTYPES, output_headers
from portlab_merge.stored import PRECISION, StoredTensor
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.files import read_json, sha256_file
from portlab_spec.safetensors_header import read_header

PROBES = 8
# Unit roundoff: half the gap between 1 and the next number.
UNIT_ROUNDOFF = {name: 2.0**-bits for name, bits in PRECISION.items()}
SUBNORMAL_STEP = {"F32": 2.0**-149, "F16": 2.0**-24, "BF16": 2.0**-133}

Progress = Callable[[int], None]


def verify_merged(plan: Plan, folder: Path, progress: Progress = lambda done: None) -> list[str]:
    """Check a merged folder; returns one line per fault, none if it is what it should be.

    Raises:
        CheckFailed: the folder has no manifest or no readable model, so that nothing more can be said.
    """
    try:
        manifest = read_json(folder / MANIFEST, "manifest of the merge")
        merged = open_base(folder)
        dtype, scale, files = manifest["dtype"], float(manifest["scale"]), dict(manifest["files_sha256"])
        adapter = manifest["checkpoint"]["adapter_sha256"]
        shards = set(output_headers(plan.base, dtype, manifest.get("max_shard_size")))
    except (UserError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckFailed(f"not a merged model: {error}", where=str(folder), fix="Run merge-ckpt merge again") from None
    faults = _structure_faults(plan, merged, dtype, shards)
    if adapter != plan.checkpoint.adapter.digest:
        faults.append("the manifest names another adapter than this checkpoint's")
    faults += [
        f"{name} differs from its sha256 in the manifest"
        for name in merged.shards
        if sha256_file(folder / name) != files.get(name)
    ]
    if set(merged.tensors) != set(plan.base.tensors):
        return faults
    targets = {t.tensor: t for t in plan.targets}
    for name, (_, tensor) in plan.base.tensors.items():
        wanted = OUTPUT_DTYPES.get(dtype, tensor.dtype) if tensor.dtype in FLOATS else tensor.dtype
        found = merged.tensors[name][1]
        if (found.dtype, found.shape) != (wanted, tensor.shape):
            faults.append(f"tensor {name} is {found.dtype} {found.shape}, expected {wanted} {tensor.shape}")
        elif name in targets:
            faults += _probe_faults(plan, merged, targets[name], scale)
        elif plan.rows and name == plan.rows.tensor:
            faults += _rows_faults(plan, merged, plan.rows, scale)
        else:
            faults += _copy_faults(plan.base, merged, name)
        progress(tensor.nbytes)
    return faults


def verify_adapter(plan: Plan, folder: Path, base: Path | None = None) -> list[str]:
    """Check a PEFT folder against the leaves; returns one line per fault. `base` as for `export_adapter`.

    Raises:
        CheckFailed: the folder cannot be read.
    """
    try:
        config = read_json(folder / CONFIG, "config of the adapter")
        header = read_header(folder / WEIGHTS)
        if not isinstance(config, dict):
            raise UserError("is not a JSON object", where=CONFIG)
    except UserError as error:
        raise CheckFailed(f"not an adapter: {error}", where=str(folder), fix="Run merge-ckpt adapter again") from None
    found = {tensor.name: tensor for tensor in header.tensors}
    style = key_style_of(found)
    wanted_config = json.loads(json.dumps(adapter_config(plan, style, base)))
    faults = [
        f"{CONFIG}: {key} is {config.get(key)!r}, expected {value!r}"
        for key, value in wanted_config.items()
        if config.get(key) != value
    ]
    wanted = dict(adapter_tensors(plan, style))
    faults += [f"tensor {name} should not be there" for name in sorted(set(found) - set(wanted))]
    for name, value in wanted.items():
        if name not in found:
            faults.append(f"tensor {name} is missing")
        elif (found[name].dtype, found[name].shape) != ("F32", value.shape):
            faults.append(f"tensor {name} is {found[name].dtype} {found[name].shape}, expected F32 {value.shape}")
        elif not np.array_equal(StoredTensor.of(folder / WEIGHTS, header, found[name]).rows(0, value.shape[0]), value):
            faults.append(f"tensor {name} differs from the checkpoint")
    return faults


def _structure_faults(plan: Plan, merged: BaseModel, dtype: str, shards: set[str]) -> list[str]:
    """Faults of the folder as a whole: set of tensors, files, config, index."""
    base = plan.base
    faults = [f"tensor {name} is missing" for name in sorted(set(base.tensors) - set(merged.tensors))]
    faults += [f"tensor {name} should not be there" for name in sorted(set(merged.tensors) - set(base.tensors))]
    if shards != set(merged.shards):
        faults.append(f"weights files are {sorted(merged.shards)}, expected {sorted(shards)}")
    for name, header in merged.shards.items():
        if header.metadata.get("format") != "pt":
            faults.append(f"{name} does not name its format in __metadata__")
    wanted = base.config if dtype == "keep" else config_with_dtype(base.config, dtype)
    if merged.config != wanted:
        faults.append("config.json differs from the base's")
    for file in base.side_files():
        here, there = merged.folder / file, base.folder / file
        if str(file) in ("config.json", CARD):
            continue
        if not here.is_file():
            faults.append(f"file {file} is missing")
        elif here.read_bytes() != there.read_bytes():
            faults.append(f"file {file} differs from the base's")
    if merged.index is not None:
        size = sum(header.data_bytes for header in merged.shards.values())
        if (merged.index.get("metadata") or {}).get("total_size") != size:
            faults.append(f"total_size of the index is not {size} bytes")
    return faults


def _probe_faults(plan: Plan, merged: BaseModel, target: LoraTarget, scale: float) -> Iterator[str]:
    factors = [factor.astype(np.float64) for factor in plan.factors(target)]
    stored = [StoredTensor.in_model(model, target.tensor).matrices() for model in (plan.base, merged)]
    dtype = merged.tensors[target.tensor][1].dtype
    per_matrix = zip(*(factor.reshape(-1, *factor.shape[-2:]) for factor in factors), *stored, strict=True)
    for number, (a, b, old, new) in enumerate(per_matrix):
        row = _wrong_row(target.scaling * scale, a, b, old, new, dtype)
        if row is not None:
            expert = f"expert {number}, " if len(target.shape) > 2 else ""
            yield f"tensor {target.tensor} is not base + update ({expert}row {row})"
            return


def _wrong_row(
    scaling: float, a: np.ndarray, b: np.ndarray, old: StoredTensor, new: StoredTensor, dtype: str
) -> int | None:
    """The first row of a matrix that is not base + update, if there is one."""
    generator = np.random.default_rng(0)
    probes = generator.choice([-1.0, 1.0], size=(PROBES, len(a)))
    update = scaling * ((probes @ a) @ b)  # (PROBES, out)
    # Bounds the f32 sum of rank products and of the two terms, element by element, whatever the order.
    size = abs(scaling) * (np.abs(a).sum(0) @ np.abs(b))  # (out,)
    roundoff, step = UNIT_ROUNDOFF[dtype], SUBNORMAL_STEP[dtype]
    for first, last in old.blocks():
        part = slice(first, last)
        before, after = (tensor.rows(first, last).astype(np.float64) for tensor in (old, new))
        error = np.abs(probes @ after.T - (probes @ before.T + update[:, part])).max(0)
        # Signs are independent of the roundings, so their sum exceeds 8 standard deviations with
        # probability < 3e-14 (Hoeffding); the f32 arithmetic is bounded outright.
        arithmetic = UNIT_ROUNDOFF["F32"] * ((a.shape[1] + 4) * size[part] + 2 * np.abs(before).sum(1))
        tolerance = 8 * np.sqrt(((roundoff * np.abs(after) + step) ** 2).sum(1)) + arithmetic
        if not (error <= tolerance).all():
            return first + int(np.argmax(~(error <= tolerance)))
    return None


def _rows_faults(plan: Plan, merged: BaseModel, rows: RowsTarget, scale: float) -> Iterator[str]:
    old, new = StoredTensor.in_model(plan.base, rows.tensor), StoredTensor.in_model(merged, rows.tensor)
    roundoff = UNIT_ROUNDOFF[merged.tensors[rows.tensor][1].dtype]
    for row, value in zip(rows.ids, plan.token_rows(), strict=True):
        before, after = (tensor.rows(row, row + 1)[0] for tensor in (old, new))
        if scale == 1.0:
            right = np.array_equal(after, value.astype(new.dtype))
        else:
            start = before.astype(np.float64)
            exact = start + scale * (value - start)
            allowed = (roundoff + 2.0**-20) * (np.abs(exact) + np.abs(start))
            right = bool((np.abs(after - exact) <= allowed).all())
        if not right:
            yield f"tensor {rows.tensor}: row {row} is not the trained one"
            break
    trained = np.zeros(rows.shape[0], bool)
    trained[list(rows.ids)] = True
    for first, last in old.blocks():
        keep = ~trained[first:last]
        before, after = old.rows(first, last)[keep], new.rows(first, last)[keep]
        if before.astype(new.dtype, copy=False).tobytes() != after.tobytes():
            yield f"tensor {rows.tensor}: rows that were not trained differ from the base (from row {first})"
            return


def _copy_faults(base: BaseModel, merged: BaseModel, name: str) -> Iterator[str]:
    old, new = StoredTensor.in_model(base, name), StoredTensor.in_model(merged, name)
    for first, last in old.blocks():
        same = old.rows(first, last).astype(new.dtype, copy=False)
        if same.tobytes() != new.rows(first, last).tobytes():
            yield f"tensor {name} differs from the base and no update touches it"
            return
