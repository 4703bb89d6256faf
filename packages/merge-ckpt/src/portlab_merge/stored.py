"""A tensor in a safetensors file, read some rows at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from portlab_merge.base_model import BaseModel
from portlab_spec.safetensors_header import DTYPES, Header, TensorInfo

BLOCK_BYTES = 4 << 20
# Significant bits of a float, the hidden one included.
PRECISION = {"F32": 24, "F16": 11, "BF16": 8}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk, read some rows at a time; a scalar counts as one row."""

    path: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, header: Header, tensor: TensorInfo) -> "StoredTensor":
        return cls(path, header.data_start + tensor.start, DTYPES[tensor.dtype], tensor.shape or (1,))

    @classmethod
    def in_model(cls, model: BaseModel, name: str) -> "StoredTensor":
        file, tensor = model.tensors[name]
        return cls.of(model.folder / file, model.shards[file], tensor)

    @property
    def precision(self) -> int | None:
        """Significant bits of its numbers, the hidden one included; None if they are no floats."""
        return next((bits for name, bits in PRECISION.items() if DTYPES[name] == self.dtype), None)

    def matrices(self) -> Iterator["StoredTensor"]:
        """The matrices of which it is a stack; itself if it is one."""
        size = math.prod(self.shape[-2:]) * self.dtype.itemsize
        for i in range(math.prod(self.shape[:-2])):
            yield replace(self, offset=self.offset + i * size, shape=self.shape[-2:])

    def rows(self, first: int, last: int) -> np.ndarray:
        """Rows `first` up to `last`, or to the end."""
        count, width = min(last, self.shape[0]) - first, math.prod(self.shape[1:])
        offset = self.offset + first * width * self.dtype.itemsize
        return np.fromfile(self.path, self.dtype, count * width, offset=offset).reshape(count, *self.shape[1:])

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First and last row of blocks of about `BLOCK_BYTES` in float64."""
        step = max(1, BLOCK_BYTES // (8 * max(1, math.prod(self.shape[1:]))))
        return ((first, first + step) for first in range(0, self.shape[0], step))
