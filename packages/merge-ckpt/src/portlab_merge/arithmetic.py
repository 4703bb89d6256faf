"""The arithmetic of a merge, one row block of one tensor at a time.

A block is read as f32, updated in f32 and rounded once, to nearest even. How a tensor is cut into blocks
depends on its shape only, so the bytes do not depend on how many threads work. (They may depend on the CPU:
the BLAS picks its summation order by it.)
"""

import math
from dataclasses import dataclass

import numpy as np

from portlab_spec.safetensors_header import DTYPES

# 1 MiB of f32: block, update and rounded block stay in a core's cache.
BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class ChangeStats:
    """What an update did to (a part of) a tensor; sums of squares in f64.

    Attributes:
        elements: how many elements.
        changed: how many differ from the base after rounding.
        base_square: of the base's values.
        delta_square: of the update before rounding.
        loss_square: of what rounding took from the update: (merged - base) - delta.
    """

    elements: int = 0
    changed: int = 0
    base_square: float = 0.0
    delta_square: float = 0.0
    loss_square: float = 0.0

    def __add__(self, other: "ChangeStats") -> "ChangeStats":
        return ChangeStats(
            self.elements + other.elements,
            self.changed + other.changed,
            self.base_square + other.base_square,
            self.delta_square + other.delta_square,
            self.loss_square + other.loss_square,
        )

    def report(self) -> dict[str, float]:
        """Norms and shares for the manifest.

        `survival` is 1 - |(merged - base) - delta| / |delta|, at least 0: 1 says that all of the update is
        in the stored weights, 0 that rounding left nothing recognisable.
        """
        delta = math.sqrt(self.delta_square)
        base = math.sqrt(self.base_square)
        return {
            "delta_norm": delta,
            "relative_norm": delta / base if base else 0.0,
            "changed": self.changed / self.elements if self.elements else 0.0,
            "survival": max(0.0, 1.0 - math.sqrt(self.loss_square) / delta) if delta else 1.0,
        }


@dataclass(frozen=True)
class LowRankUpdate:
    """W + scaling * (a @ b).T for M matrices (out, in), one behind the other: one, or one for each expert."""

    a_rows: np.ndarray  # (M, r, in), C order
    b_rows: np.ndarray  # (M, out, r), C order, scaled

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray, scaling: float) -> "LowRankUpdate":
        """Transpose and scale the f32 factors (in, r) and (r, out), or (M, in, r) and (M, r, out), for all blocks."""
        a_rows, b_rows = (np.ascontiguousarray(factor.mT) for factor in (a, b))
        b_rows = b_rows * np.float32(scaling)
        return cls(a_rows.reshape(-1, *a_rows.shape[-2:]), b_rows.reshape(-1, *b_rows.shape[-2:]))

    def rows(self, first: int, count: int) -> np.ndarray:
        """What is added to rows first..first+count of all M * out, which must lie in one matrix."""
        matrix, row = divmod(first, self.b_rows.shape[1])
        return self.b_rows[matrix, row : row + count] @ self.a_rows[matrix]


@dataclass(frozen=True)
class RowReplacement:
    """Rows of an embedding replaced by trained values, or moved by `scale` of the way there.

    Only these rows count in the statistics of the change.
    """

    ids: np.ndarray  # (n,) int64
    values: np.ndarray  # (n, D) f32
    scale: float = 1.0


Update = LowRankUpdate | RowReplacement


def rows_per_block(columns: int) -> int:
    """Rows of a block, at least one."""
    return max(1, BLOCK_ELEMENTS // max(1, columns))


def convert(raw: bytes, source: str, target: str) -> bytes:
    """Bytes of an array in another float dtype, rounded to nearest even; `raw` itself if it is that already."""
    if source == target:
        return raw
    return _round(_as_f32(np.frombuffer(raw, DTYPES[source])), target).tobytes()


def update_block(
    raw: bytes, columns: int, first_row: int, update: Update, source: str, target: str
) -> tuple[bytes, ChangeStats]:
    """Apply an update to a block of rows.

    Args:
        raw: the block in the base's dtype, C order.
        columns: length of a row.
        first_row: index of the block's first row in the tensor, whose leading dimensions count as one.
        update: what to do.
        source: safetensors dtype of `raw`.
        target: safetensors dtype of the result.

    Returns:
        The block in the target dtype, and what changed.

    Raises:
        FloatingPointError: the result is not finite (an f16 overflow, or a base that was not finite).
    """
    stored = np.frombuffer(raw, DTYPES[source]).reshape(-1, columns)
    if isinstance(update, RowReplacement):
        return _replace_rows(raw, stored, first_row, update, source, target)
    weight = _as_f32(stored)
    delta = update.rows(first_row, len(weight))
    rounded = _round(weight + delta, target)
    return rounded.tobytes(), _change(weight, delta, rounded)


def _replace_rows(
    raw: bytes, stored: np.ndarray, first_row: int, update: RowReplacement, source: str, target: str
) -> tuple[bytes, ChangeStats]:
    inside = (update.ids >= first_row) & (update.ids < first_row + len(stored))
    if not inside.any():
        return convert(raw, source, target), ChangeStats()
    local, values = update.ids[inside] - first_row, update.values[inside]
    old = _as_f32(stored[local])
    # With scale 1 the trained values themselves, free of the rounding of old + (values - old).
    new = values if update.scale == 1.0 else old + (values - old) * np.float32(update.scale)
    rounded = _round(new, target)
    block = np.frombuffer(bytearray(convert(raw, source, target)), DTYPES[target]).reshape(stored.shape)
    block[local] = rounded
    return block.tobytes(), _change(old, new - old, rounded)


def _change(weight: np.ndarray, delta: np.ndarray, rounded: np.ndarray) -> ChangeStats:
    kept = _as_f32(rounded)
    if not np.isfinite(np.vdot(kept, kept)) and not np.isfinite(kept).all():
        raise FloatingPointError("not finite after the update")
    kept -= weight
    changed = int(np.count_nonzero(kept))
    kept -= delta
    squares = (float(np.vdot(x, x)) for x in (weight, delta, kept))
    return ChangeStats(weight.size, changed, *squares)


def _as_f32(array: np.ndarray) -> np.ndarray:
    if array.dtype == DTYPES["BF16"]:
        # bfloat16 is the upper half of f32. The shift runs without the interpreter lock, a cast with it.
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _round(array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # reported by the caller, with the tensor's name
        return array.astype(DTYPES[dtype])
