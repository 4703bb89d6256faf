"""Two backends' evidence compared, from the tokens to the answers, up to the first difference.

Errors are told in roundings: how many times the dtype's own rounding error, relative to the value and to the root mean
square of its tensor. One rounding is 2^-23 in float32 and 2^-8 in bfloat16.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from portlab_spec.errors import UserError
from portlab_spec.evidence import Evidence, probe_columns

ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-8}
CERTAIN = 2.0**-12  # relative difference of gradients up to which their updates are compared


class Tolerance(NamedTuple):
    """Roundings that a stage may be off.

    Attributes:
        float32, bfloat16: by the coarser dtype of the two backends.
        reason: why so many.
    """

    float32: float
    bfloat16: float
    reason: str


TOLERANCES = {
    "tokens": Tolerance(0, 0, "integers"),
    "adapter at the start": Tolerance(0, 2, "copied, not computed; bfloat16 where a backend rounds it"),
    "embedding": Tolerance(4, 2, "one product with a constant"),
    "layers": Tolerance(2048, 32, "sums of thousands of products in another order, and every layer adds its own"),
    "final norm": Tolerance(2048, 32, "as the last layer"),
    "logits": Tolerance(2048, 32, "one more product over the width"),
    "loss": Tolerance(4096, 32, "a mean of logarithms; later steps start from adapters that are a little apart"),
    "gradients": Tolerance(65536, 128, "in the mean square; backward through all layers, sums that nearly cancel"),
    "gradient norm": Tolerance(4096, 32, "dominated by the largest gradients, which are the most exact"),
    "learning rate": Tolerance(8, 8, "numbers from the recipe"),
    "adapter": Tolerance(8192, 128, "of the update, in the mean square, where gradients are the same beyond rounding"),
    "answers": Tolerance(0, 0, "tokens"),
}


@dataclass(frozen=True)
class Difference:
    """Where two backends part first.

    Attributes:
        stage: key of `TOLERANCES`.
        tensor: name in the evidence.
        where: row and token, element or step, in words.
        error: in roundings; infinite where shapes, tokens or names differ.
        tolerance: of the stage.
        values: of the two backends there.
        share: part of the tensor's elements that are beyond the tolerance.
        step: number of the step, 0 before the first.
    """

    stage: str
    tensor: str
    where: str
    error: float
    tolerance: float
    values: tuple[float, float] | None = None
    share: float = 1.0
    step: int = 0

    @property
    def layer(self) -> int | None:
        """The layer that the tensor belongs to."""
        parts = self.tensor.split(".")
        if parts[0] in ("hidden", "inner"):
            return next((int(part) for part in parts if part.isdecimal()), None)
        at = parts.index("layers") + 1 if "layers" in parts else None
        return int(parts[at]) if at else None


@dataclass(frozen=True)
class Comparison:
    """Up to where two backends agree.

    Attributes:
        backends: their names.
        dtype: whose rounding counts.
        errors: largest error of each stage that was compared to its end, in roundings, in order.
        difference: the first; None if there is none.
    """

    backends: tuple[str, str]
    dtype: str
    errors: Mapping[str, float] = field(default_factory=dict)
    difference: Difference | None = None


class Check(NamedTuple):
    """One tensor of both."""

    stage: str
    tensor: str
    a: np.ndarray
    b: np.ndarray
    step: int = 0


def compare(a: Evidence, b: Evidence) -> Comparison:
    """Compare two backends.

    Raises:
        UserError: they did not do the same work.
    """
    require_same_work(a, b)
    dtype = "bfloat16" if "bfloat16" in (a.about.dtype, b.about.dtype) else "float32"
    errors: dict[str, float] = {}
    backends = a.about.backend, b.about.backend
    for check in checks(a, b, dtype):
        tolerance = getattr(TOLERANCES[check.stage], dtype)
        found = measure(check, dtype, tolerance, a)
        if found.error > tolerance:
            errors.pop(check.stage, None)
            return Comparison(backends, dtype, errors, found)
        errors[check.stage] = max(errors.get(check.stage, 0.0), found.error)
    return Comparison(backends, dtype, errors)


def require_same_work(a: Evidence, b: Evidence) -> None:
    """Refuse evidence of different work.

    Raises:
        UserError: rows, recipe or base differ.
    """
    for name in ("rows", "recipe", "model"):
        if getattr(a.about, name) != getattr(b.about, name) or a.steps != b.steps:
            raise UserError(
                f"the backends had different work: their {name} differ",
                where=f"{a.about.backend} and {b.about.backend}",
                fix="Compare folders of one run of portlab-parity",
            )


def rows(evidence: Evidence) -> list[tuple[list[int], list[bool]]]:
    """Ids and flags of each row, without padding."""
    t = evidence.tensors
    return [
        (ids[real].tolist(), target[real].tolist())
        for ids, real, target in zip(t["ids"], t["real"], t["target"], strict=True)
    ]


def checks(a: Evidence, b: Evidence, dtype: str = "float32") -> Iterator[Check]:
    """Everything that is compared, in order; what follows from an earlier difference is never reached."""
    for number, (row_a, row_b) in enumerate(zip(rows(a), rows(b), strict=True)):
        for name, x, y in zip(("ids", "target"), row_a, row_b, strict=True):
            yield Check("tokens", f"{name}, row {number}", np.array(x), np.array(y))
    yield from together(a, b, "adapter at the start", "adapter.0.")
    yield pair(a, b, "embedding", "hidden.embedding")
    for number in range(sum(name.startswith("hidden.layer.") for name in a.tensors)):
        for part in ("value", "key", "query", "attended"):
            name = f"inner.{number:02}.{part}"
            if name in a.tensors and name in b.tensors:
                yield pair(a, b, "layers", name)
        yield pair(a, b, "layers", f"hidden.layer.{number:02}")
    yield pair(a, b, "final norm", "hidden.final")
    for name in ("logits", "log_likelihood"):
        yield pair(a, b, "logits", name)
    for step in range(1, a.steps + 1):
        for stage, name in (("loss", "supervised"), ("loss", "loss")):
            yield element(a, b, stage, name, step)
        yield from together(a, b, "gradients", f"gradient.{step}.", step)
        for stage, name in (("gradient norm", "grad_norm"), ("learning rate", "learning_rate")):
            yield element(a, b, stage, name, step)
        for check in together(a, b, "adapter", f"adapter.{step}.", step):
            # In bfloat16 hardly any gradient is the same; what Adam makes of that is within its tolerance.
            if check.a.shape == check.b.shape and check.a.size:
                name = check.tensor.removeprefix(f"adapter.{step}.")
                start = a.tensors[f"adapter.0.{name}"]
                known = certain(a, b, name, step) if dtype == "float32" else True
                check = check._replace(a=(check.a - start) * known, b=(check.b - start) * known)
            yield check
    longest = max((len(ids) for e in (a, b) for ids in e.about.generated), default=0)
    for number, (ids_a, ids_b) in enumerate(zip(a.about.generated, b.about.generated, strict=True)):
        x, y = (np.pad(np.array(ids, int), (0, longest - len(ids)), constant_values=-1) for ids in (ids_a, ids_b))
        yield Check("answers", f"answer {number}", x, y, a.steps)


def certain(a: Evidence, b: Evidence, name: str, step: int) -> np.ndarray:
    """Elements of an adapter's tensor whose gradients were the same in all steps so far, to more than rounding.

    Adam divides a gradient by its own size: of one that is rounding alone, the update is as large as any other's.
    """
    known = np.ones(a.tensors[f"adapter.0.{name}"].shape, bool)
    for s in range(1, step + 1):
        x, y = (e.tensors[f"gradient.{s}.{name}"] for e in (a, b))
        known &= np.abs(x - y) <= CERTAIN * np.maximum(np.abs(x), np.abs(y))
    return known


def pair(a: Evidence, b: Evidence, stage: str, name: str, step: int = 0) -> Check:
    """One tensor of both; an empty one where it is missing."""
    nothing = np.zeros(0)
    return Check(stage, name, a.tensors.get(name, nothing), b.tensors.get(name, nothing), step)


def element(a: Evidence, b: Evidence, stage: str, name: str, step: int) -> Check:
    """A number of one step."""
    one = slice(step - 1, step)
    return Check(stage, name, a.tensors[name][one], b.tensors[name][one], step)


def together(a: Evidence, b: Evidence, stage: str, prefix: str, step: int = 0) -> Iterator[Check]:
    """All tensors of either whose names begin so."""
    for name in dict.fromkeys(name for e in (a, b) for name in e.tensors if name.startswith(prefix)):
        yield pair(a, b, stage, name, step)


def measure(check: Check, dtype: str, tolerance: float, evidence: Evidence) -> Difference:
    """How far a tensor of both is apart, and where most."""
    a, b = check.a, check.b
    if a.shape != b.shape:
        where = f"shapes {a.shape} and {b.shape}" if a.size and b.size else "in one of the two alone"
        return Difference(check.stage, check.tensor, where, np.inf, tolerance, step=check.step)
    x, y = a.astype(np.float64), b.astype(np.float64)
    if check.stage in ("tokens", "answers"):
        unequal = np.flatnonzero(x != y)
        if not len(unequal):
            return Difference(check.stage, check.tensor, "", 0.0, tolerance)
        at = int(unequal[0])
        share = len(unequal) / x.size
        return Difference(
            check.stage, check.tensor, f"token {at}", np.inf, tolerance, (x[at], y[at]), share, check.step
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return Difference(check.stage, check.tensor, "a value that is no number", np.inf, tolerance, step=check.step)
    errors = roundings(x, y, dtype)
    worst = int(np.argmax(errors))
    error = float(errors.flat[worst])
    if check.stage in ("gradients", "adapter"):
        # Of millions of sums some cancel until little but their errors is left, and Adam keeps hardly more than the
        # sign of a gradient: single elements say less than their mean square.
        scale = max(rms(x), rms(y), 1e-30) * ROUNDING[dtype]
        error = rms(x - y) / scale
    return Difference(
        check.stage,
        check.tensor,
        where_is(check.tensor, np.unravel_index(worst, x.shape), evidence),
        error,
        tolerance,
        (float(x.flat[worst]), float(y.flat[worst])),
        float((errors > tolerance).mean()),
        check.step,
    )


def roundings(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """Distance of each element, in roundings of its size and of the tensor's."""
    scale = np.maximum(np.abs(a), np.abs(b)) + max(rms(a), rms(b))
    return np.asarray(np.abs(a - b) / (np.maximum(scale, 1e-30) * ROUNDING[dtype]))


def rms(x: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def where_is(tensor: str, index: tuple[np.intp, ...], evidence: Evidence) -> str:
    """The place of an element in words: row and token where there are any."""
    at = [int(i) for i in index]
    lengths = evidence.tensors["real"].sum(1)
    if tensor.startswith("hidden."):
        for row, length in enumerate(lengths):
            columns = probe_columns(int(length))
            if at[0] < len(columns):
                return f"row {row}, token {columns[at[0]]}, dimension {at[1]}"
            at[0] -= len(columns)
    if tensor.startswith("inner."):
        row = int(np.argmax(lengths))
        token = at[0] if tensor.endswith((".key", ".value")) else probe_columns(int(lengths[row]))[at[0]]
        return f"row {row}, token {token}, element {at[1:]}"
    if tensor == "logits":
        return f"supervised token {at[0]} of those kept, vocabulary entry {at[1]}"
    if tensor == "log_likelihood":
        return f"supervised token {at[0]}"
    return f"element {at}" if len(at) > 1 else "the step's number"
