"""Safetensors files as numpy arrays: model folders read lazily, files written block by block.

Own code rather than the library: the library's writer wants all tensors of a file in memory, and release 0.8.0
writes numpy arrays that are not C-contiguous as garbage (huggingface/safetensors#825).
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.safetensors_header import DTYPES, TensorInfo, encode_header, lay_out, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _MappedFile:
    """One safetensors file; its data is mapped into memory on first use."""

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, read_header(path)

    @cached_property
    def data(self) -> np.ndarray:
        return np.frombuffer(self._map, np.uint8)[self.header.data_start :]

    @cached_property
    def _map(self) -> mmap.mmap:
        with self.path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def release(self) -> None:
        """Take the pages that were read out of this process's memory; they are read again when they are touched."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class TensorView:
    """A tensor on disk; nothing is read until `numpy()` is used."""

    info: TensorInfo
    _file: _MappedFile

    @property
    def name(self) -> str:
        return self.info.name

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
        return stored.view(self.dtype).reshape(self.shape)

    def release(self) -> None:
        """Give back the memory that reading tensors of this file took; they can be read again."""
        self._file.release()


def read_index(path: Path) -> dict[str, Any]:
    """Read the index of a sharded model; its `weight_map` names only files beside it.

    Raises:
        UserError: missing, not JSON, without a valid `weight_map`, or with metadata of another kind.
    """
    index = read_json(path, "safetensors index")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("has no weight_map", where=str(path), fix="Download the model again")
    if not isinstance(index.get("metadata") or {}, dict):
        raise UserError("metadata is not a JSON object", where=str(path), fix="Download the model again")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            what = f"weight_map names {name!r}, which is not a safetensors file beside it"
            raise UserError(what, where=str(path), fix="Download the model again")
    return index


def model_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: `model.safetensors`, or the shards its index names.

    Raises:
        UserError: neither is there, the index is broken, or a shard is missing.
    """
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not index.is_file():
        raise UserError(f"holds no {SINGLE_FILE}", where=str(folder), fix="Only safetensors weights are read")
    paths = [folder / name for name in sorted(set(read_index(index)["weight_map"].values()))]
    for path in paths:
        if not path.is_file():
            raise UserError(f"shard {path.name} is missing", where=str(folder), fix="Download the model again")
    return paths


def open_tensors(folder: Path) -> Mapping[str, TensorView]:
    """All tensors of a model folder by name, single file or shards, every header validated.

    Raises:
        UserError: a file is missing or damaged, or the index and the shards disagree.
    """
    views: dict[str, TensorView] = {}
    for path in model_files(folder):
        views |= open_file(path)
    if not (folder / SINGLE_FILE).is_file():
        index = folder / INDEX_FILE
        for name, file in read_index(index)["weight_map"].items():
            if name not in views or views[name].path.name != file:
                raise UserError(f"{name} is not in {file}", where=str(index), fix="Download the model again")
    return views


def open_file(path: Path) -> dict[str, TensorView]:
    """The tensors of one file by name, its header validated.

    Raises:
        UserError: the file is missing or damaged.
    """
    mapped = _MappedFile(path)
    return {info.name: TensorView(info, mapped) for info in mapped.header.tensors}


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
        tensors = lay_out((name, _DTYPE_NAMES[np.dtype(dtype)], shape) for name, (dtype, shape) in layout.items())
        header = encode_header(tensors, dict(metadata or {"format": "pt"}))
        self.layout, self._stream = layout, path.open("wb")
        self._cursors = {tensor.name: len(header) + tensor.start for tensor in tensors}
        self._ends = {tensor.name: len(header) + tensor.end for tensor in tensors}
        self._stream.write(header)

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
