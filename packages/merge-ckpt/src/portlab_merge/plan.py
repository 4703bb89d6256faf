"""Match every update of an adapter with a tensor of the base, exactly once, before anything is written."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from portlab_merge.adapter import ModuleUpdate, TokenRows
from portlab_merge.base_model import BaseModel
from portlab_merge.checkpoint import Checkpoint
from portlab_merge.location import LocalPath
from portlab_merge.sources.peft import base_copy_problems
from portlab_spec.errors import UserError

FLOATS = ("F32", "BF16", "F16")
# Largest magnitude over the median one, beyond which a leaf looks damaged: a flipped bit of an exponent.
OUTLIER = 1e6
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class LoraTarget:
    """One tensor of the base that gets a low-rank update."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    update: ModuleUpdate

    @property
    def module(self) -> str:
        return self.update.module

    @property
    def leaf(self) -> str:
        return self.update.leaf

    @property
    def rank(self) -> int:
        return self.update.rank

    @property
    def scaling(self) -> float:
        return self.update.scaling


@dataclass(frozen=True)
class RowsTarget:
    """The embedding whose rows `ids` are replaced."""

    tensor: str
    ids: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Plan:
    """What a merge does: each tensor that changes, and what changes it.

    Attributes:
        base: the model.
        checkpoint: the adapter.
        targets: tensors with a low-rank update, in the adapter's order.
        rows: the embedding, if rows of it are replaced.
        warnings: what is odd and may be right.
    """

    base: BaseModel
    checkpoint: Checkpoint
    targets: tuple[LoraTarget, ...]
    rows: RowsTarget | None
    warnings: tuple[str, ...] = ()

    @property
    def is_part(self) -> bool:
        """Does it leave out some of what was trained?"""
        adapter = self.checkpoint.adapter
        return len(self.targets) < len(adapter.updates) or (self.rows is None) != (adapter.rows is None)

    def split(self) -> tuple["Plan", "Plan"]:
        """The trained rows alone, and the low-rank updates alone: one is for the base, the other for its adapter.

        Raises:
            UserError: one of the two is empty.
        """
        for found, what in ((self.rows, "no token rows"), (self.targets, "nothing but token rows")):
            if not found:
                fix = "Leave out --rows-into" if self.rows is None else "Run merge-ckpt merge"
                raise UserError(f"the checkpoint holds {what}", where=str(self.checkpoint.folder), fix=fix)
        return replace(self, targets=()), replace(self, rows=None)

    def factors(self, target: LoraTarget) -> tuple[np.ndarray, np.ndarray]:
        """The f32 factors a (in, r) and b (r, out) of a target; the update is scaling * (a @ b).T.

        For experts (E, in, r) and (E, r, out), one product for each.
        """
        return target.update.a, target.update.b

    def token_rows(self) -> np.ndarray:
        """The f32 values (n, D) that replace the rows of the embedding."""
        assert self.checkpoint.adapter.rows is not None
        return self.checkpoint.adapter.rows.values

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


def make_plan(base: BaseModel, checkpoint: Checkpoint, *, accept_unquantized: bool = False) -> Plan:
    """Match updates and tensors and check all that can be checked without reading a weight.

    Args:
        base: the model.
        checkpoint: the adapter.
        accept_unquantized: take an adapter that was trained beside a quantised copy of the base all the same.

    Raises:
        PlanRefused: with every problem found.
    """
    adapter = checkpoint.adapter
    problems = [*adapter.problems, *_base_problems(base, checkpoint), *base_copy_problems(adapter, base)]
    if (quantized := _quantization(checkpoint)) and not accept_unquantized:
        problems.append(
            f"the adapter was trained beside a base in {quantized}, whose error it has learnt to mend; "
            "--accept-unquantized takes the base as it is"
        )
    targets = tuple(t for update in adapter.updates for t in _target(base, update, problems))
    rows = _rows_target(base, adapter.rows, problems) if adapter.rows else None
    if not (adapter.updates or adapter.rows or problems):
        problems.append("the adapter holds nothing")
    hits = Counter([t.tensor for t in targets] + ([rows.tensor] if rows else []))
    problems += [f"{tensor} gets {count} updates" for tensor, count in hits.items() if count > 1]
    if _config_ties(base):
        heads = [target.tensor for target in targets if target.tensor.endswith("lm_head.weight")]
        # transformers 4 and servers go by the config, transformers 5 by the weights.
        problems += [
            f"{head} gets an update and the config ties it to the embedding: it would be lost" for head in heads
        ]
    if problems:
        raise PlanRefused(problems, str(checkpoint.folder))
    return Plan(base, checkpoint, targets, rows, tuple(_warnings(base, targets, checkpoint)))


def refuse_overlap(out: Path, base: Path, checkpoint: Checkpoint) -> None:
    """Refuse an output that exists, or is, holds or lies in one of the inputs, symlinks resolved.

    Raises:
        UserError: naming the two paths.
    """
    where = out.resolve()
    inputs = [("--base", base.resolve())]
    if isinstance(checkpoint.folder, LocalPath):
        inputs.append(("--ckpt", checkpoint.folder.path))
    for name, path in inputs:
        if where == path or path in where.parents or where in path.parents:
            raise UserError(f"overlaps {name} {path}", where=f"--out {out}", fix="Choose a folder outside of it")
    if out.exists() or out.is_symlink():
        raise UserError("already exists", where=f"--out {out}", fix="Choose another --out, or remove it")


def _base_problems(base: BaseModel, checkpoint: Checkpoint) -> list[str]:
    problems, record = [], checkpoint.adapter.base
    if record.config_sha256 not in (None, base.config_sha256):
        problems.append(
            f"wrong base: config.json in {base.folder} is not the one that was trained "
            f"({record.id}, revision {record.revision or 'not recorded'})"
        )
    if record.files_sha256 and set(base.shards) != set(record.files_sha256):
        problems.append(
            f"wrong base: {base.folder} holds {', '.join(base.shards)}, "
            f"the run was trained on {', '.join(sorted(record.files_sha256))}"
        )
    return problems


def _target(base: BaseModel, update: ModuleUpdate, problems: list[str]) -> Iterator[LoraTarget]:
    try:
        name = base.resolve(update.module)
    except UserError as error:
        problems.append(error.what)
        return
    tensor = base.tensors[name][1]
    if tensor.shape != update.shape:
        problems.append(f"{name} is {tensor.shape}, the update is {update.shape}")
    if tensor.dtype not in FLOATS:
        problems.append(f"{name} is {tensor.dtype}: a quantised base cannot be merged into")
    yield LoraTarget(name, tensor.shape, tensor.dtype, update)


def is_tied(base: BaseModel) -> bool:
    """Does one matrix serve as input embedding and as output? Gemma's rule, unless its config says otherwise."""
    return _config_ties(base) and not any(name.endswith("lm_head.weight") for name in base.tensors)


def _config_ties(base: BaseModel) -> bool:
    return base.config.get("tie_word_embeddings") is not False


def _quantization(checkpoint: Checkpoint) -> str:
    """How the frozen weights were held in training; "" for as they are."""
    recipe = checkpoint.adapter.record.get("recipe")
    lora = recipe.get("lora") if isinstance(recipe, Mapping) else None
    quantize = lora.get("quantize") if isinstance(lora, Mapping) else None
    return "" if quantize in (None, "none") else str(quantize)


def _rows_target(base: BaseModel, rows: TokenRows, problems: list[str]) -> RowsTarget | None:
    try:
        name = base.resolve(rows.parameter.removesuffix(".weight"))
    except UserError as error:
        problems.append(error.what)
        return None
    tensor, values = base.tensors[name][1], rows.values
    if len(tensor.shape) != 2 or values.shape != (len(rows.ids), tensor.shape[-1]):
        problems.append(f"token_rows is {values.shape} for {len(rows.ids)} rows of {name} {tensor.shape}")
    elif not 0 <= min(rows.ids) <= max(rows.ids) < tensor.shape[0]:
        problems.append(f"token ids {min(rows.ids)} to {max(rows.ids)} do not lie in {name} {tensor.shape}")
    if len(set(rows.ids)) != len(rows.ids):
        problems.append("token_rows lists a token id twice")
    if tensor.dtype not in FLOATS:
        problems.append(f"{name} is {tensor.dtype}: a quantised base cannot be merged into")
    if not is_tied(base):
        # Rows are trained as input and output at once; an own output matrix would keep its old rows.
        problems.append("token_rows were trained with tied embeddings and the base has an output matrix of its own")
    return RowsTarget(name, rows.ids, tensor.shape, tensor.dtype)


def _warnings(base: BaseModel, targets: tuple[LoraTarget, ...], checkpoint: Checkpoint) -> Iterator[str]:
    if not checkpoint.adapter.base.files_sha256:
        yield "the checkpoint does not say which base it was trained on: only shapes were compared"
    folder = checkpoint.folder
    if isinstance(folder, LocalPath) and (folder.path / _TEMPLATE).is_file():
        theirs = base.folder / _TEMPLATE
        if not theirs.is_file() or theirs.read_bytes() != (folder.path / _TEMPLATE).read_bytes():
            yield f"the adapter has a {_TEMPLATE} of its own: a merged model gets the base's, copy it if you want it"
    for target in targets:
        for side, values in (("a", target.update.a), ("b", target.update.b)):
            sizes = np.abs(values)
            largest, median = float(sizes.max()), float(np.median(sizes))
            if largest > OUTLIER * median > 0:
                yield (
                    f"leaf {target.leaf} {side} holds {largest:.3g}, {largest / median:.0e} times its median: "
                    "a damaged checkpoint has such values, as nothing protects what Orbax writes"
                )
