"""Checkpoints of train-jax: leaves stacked over layers, and metadata that says all there is to know."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from portlab_merge.adapter import Adapter, BaseRecord, LoraSettings, ModuleUpdate, TokenRows, check_values, leaf_digest
from portlab_merge.contract import FORMAT, AdapterMetadata, LeafModules, Lora, parse_metadata
from portlab_merge.orbax_store import KeyPath
from portlab_merge.sources import Given, Tree
from portlab_spec.errors import UserError
from portlab_spec.models.targets import scaling

PREFIX, ROWS = "portlab-", "token_rows"


class PortlabSource:
    """`{"lora": {<target>: {"a": f32 (L, in, r), "b": f32 (L, r, out)}}, "token_rows": f32 (n, D)}`."""

    name = FORMAT

    def recognises(self, paths: Sequence[KeyPath], metadata: Mapping[str, Any]) -> bool:
        return str(metadata.get("format", "")).startswith(PREFIX)

    def wants(self, path: KeyPath) -> bool:
        return True

    def read(self, tree: Tree, given: Given) -> Adapter:
        leaves, faults, metadata = tree
        if given.alpha is not None or given.use_rslora:
            raise UserError(
                "the checkpoint carries its own alpha", where=given.where, fix="Leave out --alpha, --rslora"
            )
        record = parse_metadata(metadata, given.where)
        arrays = {"/".join(path): array for path, array in leaves.items()}
        broken = {"/".join(path): f"cannot be read ({reason})" for path, reason in faults.items()}
        broken |= {name: fault for name, array in arrays.items() if (fault := _fault(name, array, record))}
        problems = [f"leaf {name} {fault}" for name, fault in sorted(broken.items())]
        problems += _accounting(record, set(arrays) | set(broken))
        updates = [u for leaf in record.lora.leaves for u in _updates(record.lora, leaf, arrays, problems)]
        return Adapter(
            origin=record.format,
            lora=_settings(record.lora),
            updates=tuple(updates),
            rows=_rows(record.lora, arrays),
            base=BaseRecord(**record.base.model_dump(), config_sha256=record.model.config_sha256),
            leaf_sha256=record.leaf_sha256,
            problems=tuple(problems),
            record=metadata,
        )


def _settings(lora: Lora) -> LoraSettings:
    patterns = dict(lora.rank_pattern), dict(lora.alpha_pattern)
    return LoraSettings(lora.rank, lora.alpha, lora.use_rslora, lora.dropout, *patterns)


def _fault(name: str, array: np.ndarray, record: AdapterMetadata) -> str:
    if array.dtype != np.float32:
        return f"is {array.dtype}, expected float32"
    if line := next(check_values({name: array}), ""):
        return line.removeprefix(f"leaf {name} ")
    # Orbax compresses without a checksum, so a flipped bit reads as other numbers and no error.
    expected = record.leaf_sha256.get(name)
    return "differs from what the trainer saved (sha256)" if expected and leaf_digest(array) != expected else ""


def _accounting(record: AdapterMetadata, stored: set[str]) -> Iterator[str]:
    """Disagreements between the metadata and the set of leaves, and inside the metadata."""
    lora, recorded = record.lora, record.leaf_sha256
    expected = {f"lora/{leaf.target}/{side}" for leaf in lora.leaves for side in "ab"}
    if lora.token_rows:
        expected.add(ROWS)
    yield from (f"leaf {name} is stored but no module uses it" for name in sorted(stored - expected))
    yield from (f"leaf {name} is in the metadata but not stored" for name in sorted(expected - stored))
    yield from (f"leaf {name} has no sha256 in the metadata" for name in sorted((expected & stored) - set(recorded)))
    common = scaling(lora.alpha, lora.rank, lora.use_rslora)
    if not math.isclose(lora.scaling, common, rel_tol=1e-6):
        rule = "alpha / sqrt(rank)" if lora.use_rslora else "alpha / rank"
        yield f"scaling {lora.scaling:g} is not {rule} = {common:g}"
    modules = [module for leaf in lora.leaves for module in leaf.modules]
    for target in lora.targets:
        if not any(_is_target(module, target) for module in modules):
            yield f"target {target} was trained in no module"
    for module in modules:
        if not any(_is_target(module, target) for target in lora.targets):
            yield f"module {module} is none of the targets {', '.join(lora.targets)}"


def _updates(
    lora: Lora, leaf: LeafModules, arrays: Mapping[str, np.ndarray], problems: list[str]
) -> Iterator[ModuleUpdate]:
    name, count = f"lora/{leaf.target}", len(leaf.modules)
    a, b = (arrays.get(f"{name}/{side}") for side in "ab")
    if a is None or b is None:
        return  # reported already
    experts, rank = a.shape[1:-2], a.shape[-1]
    if a.ndim not in (3, 4) or a.shape[0] != count or b.shape[:-1] != (count, *experts, rank):
        problems.append(
            f"leaf {name} has a {a.shape} and b {b.shape} for {count} modules, "
            f"expected ({count}, in, r) and ({count}, r, out), with experts' number behind the first"
        )
        return
    if not b.any():
        problems.append(f"leaf {name}/b is all zero: the adapter is still at its initialisation")
    for row, module in enumerate(leaf.modules):
        if rank != lora.rank_of(module):
            problems.append(f"module {module} has rank {rank}, the metadata says {lora.rank_of(module)}")
        yield ModuleUpdate(module, f"{name}[{row}]", a[row], b[row], lora.scaling_of(module))


def _rows(lora: Lora, arrays: Mapping[str, np.ndarray]) -> TokenRows | None:
    rows, values = lora.token_rows, arrays.get(ROWS)
    return None if rows is None or values is None else TokenRows(rows.parameter, rows.ids, values)


def _is_target(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")
