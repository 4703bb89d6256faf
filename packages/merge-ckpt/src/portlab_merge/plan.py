"""Match every leaf of an adapter with the tensors of a base, exactly once, before anything is written."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from portlab_merge.base_model import BaseModel
from portlab_merge.checkpoint import Checkpoint
from portlab_merge.contract import LeafModules, scaling
from portlab_spec.errors import UserError

FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class LoraTarget:
    """One tensor that gets a low-rank update: module `row` of the leaves `lora/<leaf>/{a,b}`."""

    tensor: str
    module: str
    leaf: str
    row: int
    shape: tuple[int, ...]
    dtype: str
    rank: int
    scaling: float


@dataclass(frozen=True)
class RowsTarget:
    """The embedding whose rows `ids` are replaced."""

    tensor: str
    ids: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Plan:
    """What a merge does: each tensor that changes, and the leaves that change it."""

    base: BaseModel
    checkpoint: Checkpoint
    targets: tuple[LoraTarget, ...]
    rows: RowsTarget | None

    def factors(self, target: LoraTarget) -> tuple[np.ndarray, np.ndarray]:
        """The f32 factors a (in, r) and b (r, out) of a target; the update is scaling * (a @ b).T.

        For experts (E, in, r) and (E, r, out), one product for each.
        """
        leaves = self.checkpoint.leaves
        return leaves[f"lora/{target.leaf}/a"][target.row], leaves[f"lora/{target.leaf}/b"][target.row]

    def token_rows(self) -> np.ndarray:
        """The f32 values (n, D) that replace the rows of the embedding."""
        return self.checkpoint.leaves["token_rows"]

    def delta_norm(self, target: LoraTarget) -> float:
        """Frobenius norm of a target's update, from its r x r Gram matrices in float64.

        |s (a b)^T|^2 = s^2 trace((a^T a)(b b^T)): no (out, in) matrix is formed.
        """
        a, b = (factor.astype(np.float64) for factor in self.factors(target))
        return abs(target.scaling) * math.sqrt(max(0.0, float(np.sum((a.mT @ a) * (b @ b.mT)))))


class PlanRefused(UserError):
    """The adapter does not fit; `problems` holds every reason, one line each."""

    def __init__(self, problems: list[str], where: str) -> None:
        self.problems = tuple(problems)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}", where=where, fix="Nothing was written")


def make_plan(base: BaseModel, checkpoint: Checkpoint) -> Plan:
    """Match leaves and tensors and check all that can be checked without reading a weight.

    Raises:
        PlanRefused: with every problem found.
    """
    problems: list[str] = [f"leaf {name} {fault}" for name, fault in sorted(checkpoint.faults.items())]
    problems += _base_problems(base, checkpoint)
    problems += _metadata_problems(checkpoint)
    targets = [t for leaf in checkpoint.metadata.lora.leaves for t in _leaf_targets(base, checkpoint, leaf, problems)]
    rows = _rows_target(base, checkpoint, problems)
    tensors = [t.tensor for t in targets] + ([rows.tensor] if rows else [])
    problems += [f"tensor {name} gets {n} updates" for name, n in Counter(tensors).items() if n > 1]
    if problems:
        raise PlanRefused(problems, str(checkpoint.step.folder))
    return Plan(base, checkpoint, tuple(targets), rows)


def refuse_overlap(out: Path, base: Path, run: Path) -> None:
    """Refuse an output that exists, or is, holds or lies in one of the inputs, symlinks resolved.

    Raises:
        UserError: naming the two paths.
    """
    where = out.resolve()
    for name, path in (("--base", base.resolve()), ("--ckpt", run.resolve())):
        if where == path or path in where.parents or where in path.parents:
            raise UserError(f"overlaps {name} {path}", where=f"--out {out}", fix="Choose a folder outside of it")
    if out.exists() or out.is_symlink():
        raise UserError("already exists", where=f"--out {out}", fix="Choose another --out, or remove it")


def _base_problems(base: BaseModel, checkpoint: Checkpoint) -> list[str]:
    problems, metadata = [], checkpoint.metadata
    if base.config_sha256 != metadata.model.config_sha256:
        problems.append(
            f"wrong base: config.json in {base.folder} is not the one that was trained "
            f"({metadata.base.id}, revision {metadata.base.revision or 'not recorded'})"
        )
    if set(base.shards) != set(metadata.base.files_sha256):
        problems.append(
            f"wrong base: {base.folder} holds {', '.join(base.shards)}, "
            f"the run was trained on {', '.join(sorted(metadata.base.files_sha256))}"
        )
    return problems


def _metadata_problems(checkpoint: Checkpoint) -> list[str]:
    """Disagreements between the metadata and the set of leaves, and inside the metadata."""
    lora, recorded = checkpoint.metadata.lora, checkpoint.metadata.leaf_sha256
    problems = []
    stored = set(checkpoint.leaves) | set(checkpoint.faults)
    expected = {f"lora/{leaf.target}/{side}" for leaf in lora.leaves for side in "ab"}
    if lora.token_rows:
        expected.add("token_rows")
    problems += [f"leaf {name} is stored but no module uses it" for name in sorted(stored - expected)]
    problems += [f"leaf {name} is in the metadata but not stored" for name in sorted(expected - stored)]
    problems += [f"leaf {name} has no sha256 in the metadata" for name in sorted((expected & stored) - set(recorded))]
    common = scaling(lora.alpha, lora.rank, lora.use_rslora)
    if not math.isclose(lora.scaling, common, rel_tol=1e-6):
        rule = "alpha / sqrt(rank)" if lora.use_rslora else "alpha / rank"
        problems.append(f"scaling {lora.scaling:g} is not {rule} = {common:g}")
    modules = [module for leaf in lora.leaves for module in leaf.modules]
    for target in lora.targets:
        if not any(module == target or module.endswith(f".{target}") for module in modules):
            problems.append(f"target {target} was trained in no module")
    return problems


def _leaf_targets(base: BaseModel, checkpoint: Checkpoint, leaf: LeafModules, problems: list[str]) -> list[LoraTarget]:
    a, b = (checkpoint.leaves.get(f"lora/{leaf.target}/{side}") for side in "ab")
    if a is None or b is None:
        return []  # reported already
    count = len(leaf.modules)
    experts, rank = a.shape[1:-2], a.shape[-1]
    if a.ndim not in (3, 4) or a.shape[0] != count or b.shape[:-1] != (count, *experts, rank):
        problems.append(
            f"leaf lora/{leaf.target} has a {a.shape} and b {b.shape} for {count} modules, "
            f"expected ({count}, in, r) and ({count}, r, out), with experts' number behind the first"
        )
        return []
    shape = (*experts, b.shape[-1], a.shape[-2])
    if not b.any():
        problems.append(f"leaf lora/{leaf.target}/b is all zero: the adapter is still at its initialisation")
    lora = checkpoint.metadata.lora
    targets = []
    for row, module in enumerate(leaf.modules):
        try:
            name = base.resolve(module)
        except UserError as error:
            problems.append(error.what)
            continue
        tensor, told = base.tensors[name][1], lora.rank_of(module)
        if not any(module == t or module.endswith(f".{t}") for t in lora.targets):
            problems.append(f"module {module} is none of the targets {', '.join(lora.targets)}")
        if tensor.shape != shape:
            problems.append(f"{name} is {tensor.shape}, the update is {shape}")
        if rank != told:
            problems.append(f"module {module} has rank {rank}, the metadata says {told}")
        if tensor.dtype not in FLOATS:
            problems.append(f"{name} is {tensor.dtype}: a quantised base cannot be merged into")
        targets.append(
            LoraTarget(name, module, leaf.target, row, tensor.shape, tensor.dtype, rank, lora.scaling_of(module))
        )
    return targets


def _rows_target(base: BaseModel, checkpoint: Checkpoint, problems: list[str]) -> RowsTarget | None:
    rows, values = checkpoint.metadata.lora.token_rows, checkpoint.leaves.get("token_rows")
    if rows is None or values is None:
        return None
    try:
        name = base.resolve(rows.parameter.removesuffix(".weight"))
    except UserError as error:
        problems.append(error.what)
        return None
    tensor = base.tensors[name][1]
    if len(tensor.shape) != 2 or values.shape != (len(rows.ids), tensor.shape[-1]):
        problems.append(f"token_rows is {values.shape} for {len(rows.ids)} rows of {name} {tensor.shape}")
    elif not 0 <= min(rows.ids) <= max(rows.ids) < tensor.shape[0]:
        problems.append(f"token ids {min(rows.ids)} to {max(rows.ids)} do not lie in {name} {tensor.shape}")
    if len(set(rows.ids)) != len(rows.ids):
        problems.append("token_rows lists a token id twice")
    if tensor.dtype not in FLOATS:
        problems.append(f"{name} is {tensor.dtype}: a quantised base cannot be merged into")
    heads = [head for head in base.tensors if head.endswith("lm_head.weight")]
    if heads or base.config.get("tie_word_embeddings") is False:
        # Rows are trained as input and output at once; an own output matrix would keep its old rows.
        problems.append("token_rows were trained with tied embeddings and the base has an output matrix of its own")
    return RowsTarget(name, rows.ids, tensor.shape, tensor.dtype)
