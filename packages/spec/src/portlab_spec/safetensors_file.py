"""Reading and writing safetensors with numpy alone.

Format: https://github.com/huggingface/safetensors#format: a little-endian u64 with the header's length, a
JSON header, then the tensors, which must cover the rest of the file without holes or overlaps. Everything is
checked when a file is opened, so a truncated download fails before any work is done.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np

from portlab_spec.errors import UserError
from portlab_spec.files import read_json

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # the reference implementation refuses more
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor; `start` and `end` are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A validated header: tensors in file order and the `__metadata__` strings."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Read and validate the header of one safetensors file.

    Raises:
        UserError: missing, truncated or inconsistent file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(_LENGTH_BYTES)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else _MAX_HEADER + 1
            if length > min(_MAX_HEADER, size - _LENGTH_BYTES):
                raise ValueError("its header passes the end of the file")
            fields = json.loads(stream.read(length))
        return _validated(fields, _LENGTH_BYTES + length, size)
    except FileNotFoundError:
        raise UserError("safetensors file not found", where=str(path), fix="Check the path") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"not a whole safetensors file ({error})", where=str(path), fix="Download or write it again"
        ) from None


def _validated(fields: dict[str, Any], data_start: int, file_size: int) -> Header:
    metadata = fields.pop("__metadata__", {})
    tensors = {}
    for name, field in fields.items():
        if field["dtype"] not in DTYPES:
            raise ValueError(f"{name} has dtype {field['dtype']}, which is not supported")
        begin, end = field["data_offsets"]
        shape = tuple(field["shape"])
        if end - begin != math.prod(shape) * DTYPES[field["dtype"]].itemsize:
            raise ValueError(f"{name} of shape {list(shape)} does not fill its {end - begin} bytes")
        tensors[name] = TensorInfo(field["dtype"], shape, data_start + begin, data_start + end)

    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    expected = data_start
    for name, info in tensors.items():
        if info.start != expected:
            raise ValueError(f"{name} starts at byte {info.start}, expected {expected}")
        expected = info.end
    if expected != file_size:
        raise ValueError(f"it has {file_size} bytes, its header asks for {expected}")
    return Header(tensors, metadata, data_start)


class _MappedFile:
    """One safetensors file, mapped into memory on first use."""

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, read_header(path)

    @cached_property
    def data(self) -> np.ndarray:
        return np.memmap(self.path, dtype=np.uint8, mode="r")


@dataclass(frozen=True)
class TensorView:
    """A tensor on disk; nothing is read until `numpy()` is used."""

    name: str
    info: TensorInfo
    _file: _MappedFile

    @property
    def path(self) -> Path:
        """The file that holds the tensor."""
        return self._file.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.info.dtype]

    def numpy(self) -> np.ndarray:
        """The tensor as a read-only array backed by the file: pages are read as they are touched."""
        stored = self._file.data[self.info.start : self.info.end]
        return stored.view(np.ndarray).view(self.dtype).reshape(self.shape)


def model_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: `model.safetensors`, or the shards its index names.

    Raises:
        UserError: neither is there, or a shard is missing.
    """
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not index.is_file():
        raise UserError(f"holds no {SINGLE_FILE}", where=str(folder), fix="Only safetensors weights are read")
    paths = [folder / name for name in sorted(set(_weight_map(index).values()))]
    for path in paths:
        if path.parent != folder or not path.is_file():
            raise UserError(f"shard {path.name} is missing", where=str(folder), fix="Download the model again")
    return paths


def open_tensors(folder: Path) -> Mapping[str, TensorView]:
    """All tensors of a model folder by name, single file or shards, every header validated.

    Raises:
        UserError: a file is missing or damaged, or the index and the shards disagree.
    """
    views: dict[str, TensorView] = {}
    for path in model_files(folder):
        mapped = _MappedFile(path)
        views |= {name: TensorView(name, info, mapped) for name, info in mapped.header.tensors.items()}
    if not (folder / SINGLE_FILE).is_file():
        index = folder / INDEX_FILE
        for name, file in _weight_map(index).items():
            if name not in views or views[name].path.name != file:
                raise UserError(f"{name} is not in {file}", where=str(index), fix="Download the model again")
    return views


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index, "safetensors index")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("has no weight_map", where=str(index), fix="Download the model again")
    return weight_map


class Writer:
    """Writes one safetensors file tensor by tensor, block by block, without holding a tensor in memory.

    The layout is known before the data, so the header goes first and every block has its place. Use as a
    context manager; leaving it normally checks that every tensor is complete.

    Args:
        path: file to create.
        layout: dtype and shape by name, in file order.
        metadata: header strings; transformers expects `{"format": "pt"}`.
    """

    def __init__(
        self,
        path: Path,
        layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        fields: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, shape) in layout.items():
            start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
            fields[name] = {
                "dtype": _DTYPE_NAMES[np.dtype(dtype)],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
            spans[name] = (start, end)
        header = json.dumps(fields, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _LENGTH_BYTES)  # keeps the data aligned
        self.layout, self._stream = layout, path.open("wb")
        data_start = _LENGTH_BYTES + len(header)
        self._cursors = {name: data_start + start for name, (start, _) in spans.items()}
        self._ends = {name: data_start + end for name, (_, end) in spans.items()}
        self._stream.write(struct.pack("<Q", len(header)) + header)

    def write(self, name: str, block: np.ndarray) -> None:
        """Append the next block (in row-major order) of a tensor.

        Raises:
            ValueError: another dtype than the layout's, or more data than it has room for.
        """
        if block.dtype != self.layout[name][0]:
            raise ValueError(f"{name} is laid out as {self.layout[name][0]}, got {block.dtype}")
        if self._cursors[name] + block.nbytes > self._ends[name]:
            raise ValueError(f"{name} gets more data than shape {self.layout[name][1]} holds")
        self._stream.seek(self._cursors[name])
        # Strided arrays must be copied: their memory is not in row-major order.
        self._stream.write(np.ascontiguousarray(block).view(np.uint8).data)
        self._cursors[name] += block.nbytes

    def close(self) -> None:
        """Sync and close the file.

        Raises:
            ValueError: a tensor is incomplete.
        """
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        short = [name for name, at in self._cursors.items() if at != self._ends[name]]
        if short:
            raise ValueError(f"not written to the end: {', '.join(short)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._stream.close()
