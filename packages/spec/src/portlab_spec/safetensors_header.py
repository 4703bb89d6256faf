"""The safetensors header: read strictly, lay tensors out, encode.

Format (huggingface/safetensors, README and `safetensors/src/tensor.rs`): a little-endian u64 with the length
of the header, the header as a JSON object, then the data. Offsets are relative to the data, tensors cover the
data without holes or overlaps, and the header is at most 100 MB. Everything is checked when a file is opened,
so a truncated download fails before any work is done.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from portlab_spec.errors import UserError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the reference implementation refuses more
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
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a header; `start` and `end` are byte offsets relative to the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """What a safetensors file holds. `tensors` are in the order of their data, `data_start` is in bytes."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    data_start: int

    @property
    def data_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return self.tensors[-1].end if self.tensors else 0


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        UserError: the file is missing, or is not a whole, valid safetensors file.
    """
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            # Never trust a length from a file with an allocation.
            raw = stream.read(min(length, MAX_HEADER_BYTES, size))
    except FileNotFoundError:
        raise UserError("safetensors file not found", where=str(path), fix="Check the path") from None
    return parse_header(length, raw, size, str(path))


def parse_header(length: int, raw: bytes, file_size: int, where: str) -> Header:
    """Parse the JSON of a header and check that its tensors cover the file exactly.

    Args:
        length: header length as the file states it.
        raw: the header's bytes.
        file_size: size of the whole file in bytes.
        where: file name for messages.

    Raises:
        UserError: anything that the format forbids.
    """
    data_start = LENGTH_BYTES + length
    try:
        if not 2 <= length <= MAX_HEADER_BYTES or len(raw) < length or data_start > file_size:
            raise ValueError(f"a header of {length} bytes does not fit a file of {file_size} bytes")
        entries = _json_object(raw[:length])
        metadata = entries.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("__metadata__ is not a map of strings")
        tensors = sorted((_parse_tensor(*entry) for entry in entries.items()), key=lambda t: (t.start, t.end))
        position = 0
        for tensor in tensors:
            if tensor.start != position:
                raise ValueError(f"tensor {tensor.name!r} starts at byte {tensor.start}, expected {position}")
            position = tensor.end
        if data_start + position != file_size:
            raise ValueError(f"the header describes {data_start + position} bytes and the file has {file_size}")
    except ValueError as error:
        fix = "Download or write it again"
        raise UserError(f"not a valid safetensors file: {error}", where=where, fix=fix) from None
    return Header(tuple(tensors), metadata, data_start)


def lay_out(entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorInfo, ...]:
    """Place tensors given as (name, dtype, shape) one after the other."""
    tensors, position = [], 0
    for name, dtype, shape in entries:
        end = position + math.prod(shape) * DTYPES[dtype].itemsize
        tensors.append(TensorInfo(name, dtype, shape, position, end))
        position = end
    return tuple(tensors)


def encode_header(tensors: Iterable[TensorInfo], metadata: dict[str, str]) -> bytes:
    """The bytes before the data: length and JSON, padded with spaces so that the data is 8-byte aligned."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for t in tensors:
        entries[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(raw.decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header is not JSON ({error})") from None
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object")
    return entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    # JSON can escape half of a surrogate pair; such a string is not text and could not be written again.
    "".join(text for pair in pairs for text in pair if isinstance(text, str)).encode()
    return result


def _parse_tensor(name: str, entry: Any) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r}: an entry holds dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r}: dtype {dtype!r} is not supported")
    if not _is_sizes(shape):
        raise ValueError(f"tensor {name!r}: shape {shape!r} is not a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: data_offsets {offsets!r} is not a pair of offsets")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"tensor {name!r}: {dtype} {shape} does not fill the bytes {offsets[0]} to {offsets[1]}")
    return TensorInfo(name, dtype, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
