"""What a merged folder holds, against base + update in float64."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from merge_fixture import ALPHA, RANK, Fixture
from portlab_spec.safetensors_file import TensorView, open_tensors

F64_EXPONENT = np.uint64(0x7FF << 52)
# A fifty-thousandth of a weight. Where base and update cancel to less, no f32 sum has a relative error to speak of.
SMALLEST = 2.0**-21
BLOCK_ELEMENTS = 1 << 16  # whose float64 arrays stay in a core's cache


@dataclass
class Errors:
    """In units in the last place of the exact value in bfloat16; at most half of one is the rounded exact value.

    Exact values smaller than SMALLEST count as of its size.
    """

    elements: int = 0
    total: float = 0.0
    largest: float = 0.0
    misrounded: int = 0

    def add(self, stored: np.ndarray, exact: np.ndarray) -> None:
        """Count a block: float64 arrays."""
        powers = (exact.view(np.uint64) & F64_EXPONENT).view(np.float64)  # of two, at most |exact|
        errors = np.abs(stored - exact) / (np.maximum(powers, SMALLEST) * 2.0**-7)
        self.elements += errors.size
        self.total += float(errors.sum())
        self.largest = max(self.largest, float(errors.max()))
        self.misrounded += int(np.count_nonzero(errors > 0.5))


def accuracy(fixture: Fixture, merged: Path) -> dict[str, Any]:
    """Errors of the updated tensors, and which of the others came through unchanged."""
    base, found = open_tensors(fixture.base), open_tensors(merged)
    updates = {tensor: (a, b) for tensor, a, b in fixture.factors()}
    errors = Errors()
    for tensor, (a, b) in updates.items():
        if tensor in found:
            _compare(errors, base[tensor], found[tensor], a.astype(np.float64), b.astype(np.float64))
    others = [name for name in base if name not in updates]
    return {
        "largest_error_ulp": errors.largest,
        "mean_error_ulp": errors.total / max(1, errors.elements),
        "misrounded_share": errors.misrounded / max(1, errors.elements),
        "compared_elements": errors.elements,
        "missing_tensors": len(base.keys() - found.keys()),
        "extra_tensors": len(found.keys() - base.keys()),
        "other_tensors": len(others),
        "other_tensors_identical": sum(_same(base[name], found) for name in others),
        "dtypes": sorted({str(view.dtype) for view in found.values()}),
    }


def _compare(errors: Errors, base: TensorView, merged: TensorView, a: np.ndarray, b: np.ndarray) -> None:
    step = max(1, BLOCK_ELEMENTS // base.shape[1])
    for first in range(0, base.shape[0], step):
        rows = slice(first, first + step)
        # Not "@", whose own threads would be in the way of so small a product.
        exact = base.numpy()[rows].astype(np.float64) + ALPHA / RANK * np.einsum("or,ri->oi", b[rows], a)
        errors.add(merged.numpy()[rows].astype(np.float64), exact)
    for view in (base, merged):
        view.release()


def _same(base: TensorView, found: Mapping[str, TensorView]) -> bool:
    other = found.get(base.name)
    if other is None or (other.dtype, other.shape) != (base.dtype, base.shape):
        return False
    flat = [view.numpy().reshape(-1).view(np.uint8) for view in (base, other)]
    same = all(
        np.array_equal(flat[0][at : at + BLOCK_ELEMENTS], flat[1][at : at + BLOCK_ELEMENTS])
        for at in range(0, math.prod(flat[0].shape), BLOCK_ELEMENTS)
    )
    for view in (base, other):
        view.release()
    return same
