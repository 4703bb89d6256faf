"""Diff: what two model folders differ in, and the rank of it.

An audit that trusts no manifest: the difference of a merged model and its base has the rank of the adapter, but for
rounding. Singular values come from a random projection (Halko, Martinsson and Tropp, arXiv 0909.4061): two passes over
the rows, and never a whole matrix in memory. A direction counts if it is above what rounding alone would leave.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from portlab_merge.base_model import BaseModel
from portlab_merge.overlay import MANIFEST
from portlab_merge.stored import StoredTensor
from portlab_spec.errors import UserError
from portlab_spec.files import read_json

State = Literal["same", "converted", "changed", "only in A", "only in B", "another shape"]
Progress = Callable[[int], None]

# Directions of the random projection beyond the ranks that are told apart.
OVERSAMPLING = 16
# How far above the rounding noise that theory expects a residual may lie.
NOISE_MARGIN = 1.5
# A tensor of which fewer rows differ is reported by its rows: trained tokens of an embedding.
FEW_ROWS = 64


@dataclass(frozen=True)
class Difference:
    """One tensor in A and B.

    Attributes:
        tensor: its name.
        state: "converted" is B = A in B's dtype.
        changed: share of elements that differ.
        relative_norm: |B - A| / |A|.
        rank: of B - A above rounding, for experts the largest; None if it is more than the limit, or no matrix.
        rows: how many rows differ.
    """

    tensor: str
    state: State
    changed: float = 0.0
    relative_norm: float = 0.0
    rank: int | None = None
    rows: int = 0

    @property
    def is_rows(self) -> bool:
        """Do so few rows of a matrix differ that they were replaced one by one?"""
        return self.rank is None and 0 < self.rows < FEW_ROWS


@dataclass(frozen=True)
class Claim:
    """What the manifest of a merged folder says: largest rank of its adapter, and the tensors it changed."""

    rank: int
    tensors: frozenset[str]


def read_claim(folder: Path) -> Claim | None:
    """The claim of a merged folder, if it has a manifest.

    Raises:
        UserError: the manifest is broken.
    """
    if not (folder / MANIFEST).is_file():
        return None
    manifest = read_json(folder / MANIFEST, "manifest of the merge")
    try:
        lora = manifest["lora"]
        ranks = [lora["rank"], *lora["rank_pattern"].values()]
        if not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise ValueError
        return Claim(max(ranks), frozenset(manifest["tensors"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        where = str(folder / MANIFEST)
        raise UserError("is not a manifest of merge-ckpt", where=where, fix="Merge again, or remove it") from None


def contradictions(differences: Iterable[Difference], claim: Claim) -> list[str]:
    """One line for each difference that the claim does not allow."""
    lines = []
    for d in differences:
        if d.state in ("only in A", "only in B", "another shape"):
            lines.append(f"{d.tensor} is {d.state}" if d.state != "another shape" else f"{d.tensor} has another shape")
        elif d.state == "changed" and d.tensor not in claim.tensors:
            lines.append(f"{d.tensor} differs and no update touches it")
        elif d.state == "changed" and not d.is_rows and (d.rank is None or d.rank > claim.rank):
            lines.append(f"{d.tensor} differs by more than rank {claim.rank}")
    return lines


def diff_models(a: BaseModel, b: BaseModel, limit: int, progress: Progress = lambda done: None) -> list[Difference]:
    """Compare two model folders tensor by tensor.

    Args:
        a: the base.
        b: what was made of it.
        limit: largest rank that is told from full rank.
        progress: told of A's bytes that are done.
    """
    differences = []
    for name in dict.fromkeys((*a.tensors, *b.tensors)):
        if name not in b.tensors:
            found = Difference(name, "only in A")
        elif name not in a.tensors:
            found = Difference(name, "only in B")
        elif a.tensors[name][1].shape != b.tensors[name][1].shape:
            found = Difference(name, "another shape")
        else:
            found = _compare(name, StoredTensor.in_model(a, name), StoredTensor.in_model(b, name), limit)
        differences.append(found)
        if name in a.tensors:
            progress(a.tensors[name][1].nbytes)
    return differences


def side_file_differences(a: BaseModel, b: BaseModel) -> list[str]:
    """One line for each file beside the weights that is not the same in both."""
    lines = []
    for file in sorted({*a.side_files(), *b.side_files()}):
        here, there = a.folder / file, b.folder / file
        if not (here.is_file() and there.is_file()):
            lines.append(f"{file} is only in {'A' if here.is_file() else 'B'}")
        elif here.read_bytes() != there.read_bytes():
            lines.append(f"{file} differs")
    return lines


def _compare(name: str, a: StoredTensor, b: StoredTensor, limit: int) -> Difference:
    # Equal bytes are the common case, and any dtype can be compared by them.
    if a.dtype == b.dtype and all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in _pairs(a, b)):
        return Difference(name, "same")
    if a.precision is None or b.precision is None:
        return Difference(name, "changed", 1.0)
    if all(np.array_equal(x.astype(b.dtype), y) for x, y in _pairs(a, b)):
        return Difference(name, "converted")
    elements = changed = rows = 0
    base = delta = 0.0
    for x, y in _pairs(a, b):
        x, y = x.astype(np.float64), y.astype(np.float64)
        differs = x.astype(b.dtype).astype(np.float64) != y
        elements, changed = elements + x.size, changed + int(np.count_nonzero(differs))
        rows += int(np.count_nonzero(differs.reshape(len(differs), -1).any(1)))
        base, delta = base + float(np.vdot(x, x)), delta + float(np.vdot(y - x, y - x))
    norm = math.sqrt(delta / base) if base else math.inf
    rank = None
    if len(a.shape) > 1 and not (len(a.shape) == 2 and rows < min(FEW_ROWS, a.shape[0])):
        ranks = [_rank(old, new, limit) for old, new in zip(a.matrices(), b.matrices(), strict=True)]
        rank = None if None in ranks else max(r for r in ranks if r is not None)
    return Difference(name, "changed", changed / elements, norm, rank, rows)


def _rank(a: StoredTensor, b: StoredTensor, limit: int) -> int | None:
    """Rank of b - a above rounding; None if it is more than `limit`."""
    rows, columns = a.shape
    size = min(limit + OVERSAMPLING, rows, columns)
    probes = np.random.default_rng(0).standard_normal((columns, size))
    total = noise = 0.0
    image = np.empty((rows, size))
    assert b.precision is not None
    for first, delta, stored in _deltas(a, b):
        total += float(np.vdot(delta, delta))
        if not math.isfinite(total):
            return None
        image[first : first + len(delta)] = delta @ probes
        noise += _rounding_energy(stored, b.precision)
    basis = np.linalg.qr(image)[0]
    inside = np.zeros((size, columns))
    for first, delta, _ in _deltas(a, b):
        inside += basis[first : first + len(delta)].T @ delta
    energies = np.linalg.svd(inside, compute_uv=False) ** 2
    # What is left of the difference after its first k directions, for k = 0, 1, ...
    residuals = np.maximum(0.0, total - np.concatenate([[0.0], np.cumsum(energies)]))
    floor = NOISE_MARGIN * noise + 1e-12 * total
    within = np.flatnonzero(residuals <= floor)
    return int(within[0]) if len(within) and within[0] <= limit else None


def _deltas(a: StoredTensor, b: StoredTensor) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """First row, b - a, and b, of block after block; in f64, or the rounding of float16 would drown in ours."""
    for first, last in a.blocks():
        new = b.rows(first, last).astype(np.float64)
        yield first, new - a.rows(first, last), new


def _rounding_energy(values: np.ndarray, precision: int) -> float:
    """Expected sum of squares of the rounding errors of values that were rounded to so many bits.

    An error is uniform in half a step to either side: a twelfth of the step's square (Widrow).
    """
    steps = np.ldexp(1.0, np.frexp(values)[1] - precision)
    return float(np.sum(steps**2, where=values != 0)) / 12


def _pairs(a: StoredTensor, b: StoredTensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return ((a.rows(first, last), b.rows(first, last)) for first, last in a.blocks())
