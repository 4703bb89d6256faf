"""The safetensors file format: read a header strictly, write a file from its layout.

Format (huggingface/safetensors, README and `safetensors/src/tensor.rs`): a little-endian u64 with the length
of the header, the header as a JSON object, then the data. Offsets are relative to the data, tensors cover the
data without holes or overlaps, and the header is at most 100 MB.

Own code rather than the library: the library's writer wants all tensors of a file in memory, and release 0.8.0
writes numpy arrays that are not C-contiguous as garbage (huggingface/safetensors#825).
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portlab_spec.errors import UserError

MAX_HEADER_BYTES = 100_000_000
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


@dataclass(frozen=True)
class Tensor:
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

    tensors: tuple[Tensor, ...]
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
            length = int.from_bytes(stream.read(8), "little")
            # Never trust a length from a file with an allocation.
            raw = stream.read(min(length, MAX_HEADER_BYTES, size))
    except FileNotFoundError:
        raise UserError("weights file not found", where=str(path), fix="Check the path") from None
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

    def bad(what: str) -> UserError:
        return UserError(f"not a valid safetensors file: {what}", where=where, fix="Download or copy it again")

    if file_size < 8 or not 2 <= length <= MAX_HEADER_BYTES or len(raw) < length or 8 + length > file_size:
        raise bad(f"a header of {length} bytes does not fit a file of {file_size} bytes")
    try:
        entries = json.loads(raw[:length].decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise bad(f"the header is not JSON ({error})") from None
    if not isinstance(entries, dict):
        raise bad("the header is not a JSON object")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise bad("__metadata__ is not a map of strings")
    tensors = []
    for name, entry in entries.items():
        try:
            tensors.append(_parse_tensor(name, entry))
        except ValueError as error:
            raise bad(f"tensor {name!r}: {error}") from None
    tensors.sort(key=lambda t: (t.start, t.end))
    position = 0
    for tensor in tensors:
        if tensor.start != position:
            raise bad(f"tensor {tensor.name!r} starts at byte {tensor.start}, expected {position}")
        position = tensor.end
    if 8 + length + position != file_size:
        raise bad(f"the header describes {8 + length + position} bytes and the file has {file_size}")
    return Header(tuple(tensors), metadata, 8 + length)


def lay_out(entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[Tensor, ...]:
    """Place tensors given as (name, dtype, shape) one after the other."""
    tensors, position = [], 0
    for name, dtype, shape in entries:
        end = position + math.prod(shape) * DTYPE_BYTES[dtype]
        tensors.append(Tensor(name, dtype, shape, position, end))
        position = end
    return tuple(tensors)


def encode_header(tensors: Iterable[Tensor], metadata: dict[str, str]) -> bytes:
    """The bytes before the data: length and JSON, padded with spaces so that the data is 8-byte aligned."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for t in tensors:
        entries[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parse_tensor(name: str, entry: Any) -> Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("an entry holds dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not supported")
    if not _is_sizes(shape):
        raise ValueError(f"shape {shape!r} is not a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets {offsets!r} is not a pair of offsets")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{dtype} {shape} does not fill the bytes {offsets[0]} to {offsets[1]}")
    return Tensor(name, dtype, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result
