"""The arithmetic of a merge, one row block of one tensor at a time.

A block is read as f32, updated in f32 and rounded once, to nearest even. How a tensor is cut into blocks
depends on its shape only, so the bytes do not depend on how many threads work. (They may depend on the CPU:
the BLAS picks its summation order by it.)
"""

import math
import threading
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
        loss_square: of what rounding to the stored dtype took away: merged - (base + delta).
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

    a: np.ndarray  # (M, in, r)
    b: np.ndarray  # (M, r, out)
    scaling: float

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray, scaling: float) -> "LowRankUpdate":
        """From f32 factors (in, r) and (r, out), or (M, in, r) and (M, r, out); they are not copied."""
        return cls(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), scaling)

    def rows(self, first: int, count: int, out: np.ndarray) -> None:
        """What is added to rows first..first+count of all M * out, which must lie in one matrix; f32 (count, in)."""
        matrix, row = divmod(first, self.b.shape[2])
        b = self.b[matrix, :, row : row + count] * np.float32(self.scaling)
        np.matmul(b.T, self.a[matrix].T, out=out)


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


class Scratch:
    """Arrays for the steps between a block and its result, made once for each thread.

    New ones for every block would cost more than the arithmetic: the system hands out memory page by page.
    """

    def __init__(self) -> None:
        self._own = threading.local()

    def array(self, slot: str, shape: tuple[int, ...]) -> np.ndarray:
        """This thread's f32 array of that name; what it held is lost."""
        arrays, count = vars(self._own), math.prod(shape)
        if slot not in arrays or arrays[slot].size < count:
            arrays[slot] = np.empty(max(count, BLOCK_ELEMENTS), np.float32)
        return arrays[slot][:count].reshape(shape)


def convert(raw: np.ndarray, source: str, target: str) -> np.ndarray:
    """Bytes (uint8) of an array in another float dtype, rounded to nearest even; `raw` itself if it is that already."""
    if source == target:
        return raw
    with np.errstate(over="ignore"):
        return raw.view(DTYPES[source]).astype(np.float32).astype(DTYPES[target]).view(np.uint8)


@np.errstate(over="ignore", invalid="ignore")  # reported by the caller, with the tensor's name
def update_block(
    raw: np.ndarray, columns: int, first_row: int, update: Update, source: str, target: str, scratch: Scratch
) -> tuple[np.ndarray, ChangeStats]:
    """Apply an update to a block of rows.

    Args:
        raw: the block's bytes, uint8, in the base's dtype and C order.
        columns: length of a row.
        first_row: index of the block's first row in the tensor, whose leading dimensions count as one.
        update: what to do.
        source: safetensors dtype of `raw`.
        target: safetensors dtype of the result.
        scratch: for the steps between.

    Returns:
        Bytes of the block in the target dtype, uint8, and what changed.

    Raises:
        FloatingPointError: the result is not finite (an f16 overflow, or a base that was not finite).
    """
    stored = raw.view(DTYPES[source]).reshape(-1, columns)
    if isinstance(update, RowReplacement):
        return _replace_rows(raw, stored, first_row, update, source, target, scratch)
    weight = _as_f32(stored, scratch)
    merged = scratch.array("merged", weight.shape)
    update.rows(first_row, len(weight), out=merged)
    delta_square = _square(merged)
    merged += weight
    rounded, kept = _store(merged, target, scratch)
    return rounded.reshape(-1).view(np.uint8), _change(weight, delta_square, merged, kept)


def _replace_rows(
    raw: np.ndarray,
    stored: np.ndarray,
    first_row: int,
    update: RowReplacement,
    source: str,
    target: str,
    scratch: Scratch,
) -> tuple[np.ndarray, ChangeStats]:
    block = convert(raw, source, target)
    inside = (update.ids >= first_row) & (update.ids < first_row + len(stored))
    if not inside.any():
        return block, ChangeStats()
    local, values = update.ids[inside] - first_row, update.values[inside]
    old = stored[local].astype(np.float32)
    # With scale 1 the trained values themselves, free of the rounding of old + (values - old).
    new = values if update.scale == 1.0 else old + (values - old) * np.float32(update.scale)
    rounded, kept = _store(new, target, scratch)
    block = block.copy()
    block.view(rounded.dtype).reshape(stored.shape)[local] = rounded
    return block, _change(old, _square(new - old), new, kept)


def _change(weight: np.ndarray, delta_square: float, merged: np.ndarray, kept: np.ndarray) -> ChangeStats:
    """Statistics of a block from f32 arrays, of which `kept`, the values as stored, is used up."""
    changed = int(np.count_nonzero(kept != weight))
    kept -= merged
    loss_square = _square(kept)
    if not math.isfinite(loss_square):
        raise FloatingPointError("not finite after the update")
    return ChangeStats(weight.size, changed, _square(weight), delta_square, loss_square)


def _square(array: np.ndarray) -> float:
    """Sum of squares of f32; finite if and only if all values are."""
    total = float(np.vdot(array, array))
    if math.isfinite(total):
        return total
    wide = array.astype(np.float64)
    return float(np.vdot(wide, wide))


def _as_f32(array: np.ndarray, scratch: Scratch) -> np.ndarray:
    """In scratch memory."""
    wide = scratch.array("weight", array.shape)
    np.copyto(wide, array)
    return wide


def _store(values: np.ndarray, dtype: str, scratch: Scratch) -> tuple[np.ndarray, np.ndarray]:
    """Round f32 to nearest even: an array of the dtype (bfloat16 as its bits), and its values as f32 in scratch memory.

    Values too large become infinite, and what becomes of NaN is open; callers find both in the difference.
    """
    kept = scratch.array("kept", values.shape)
    if dtype == "BF16":
        # bfloat16 is the upper half of f32, and half a unit of it carries into that half; just less than half where
        # that half is even. ml_dtypes' cast takes no longer, but holds the interpreter lock.
        bits, sums = values.view(np.uint32), kept.view(np.uint32)
        np.right_shift(bits, 16, out=sums)
        sums &= 1
        sums += 0x7FFF
        sums += bits
        stored = np.right_shift(sums, 16, out=np.empty(values.shape, np.uint16), casting="unsafe")
        sums &= 0xFFFF0000
    else:
        stored = values.astype(DTYPES[dtype])
        np.copyto(kept, stored)
    return stored, kept
