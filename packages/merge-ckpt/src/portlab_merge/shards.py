"""How the output is cut into files: as the base is, or anew."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from portlab_merge.base_model import BaseModel
from portlab_merge.plan import FLOATS
from portlab_spec.errors import UserError
from portlab_spec.safetensors_file import SINGLE_FILE
from portlab_spec.safetensors_header import DTYPES, Header, TensorInfo, encode_header, lay_out

Dtype = Literal["keep", "float32", "bfloat16"]

OUTPUT_DTYPES: dict[str, str] = {"float32": "F32", "bfloat16": "BF16"}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "5GB" or "500MiB"; powers of ten unless there is an i, as on the model hubs.

    Raises:
        UserError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", text.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if not size:
        raise UserError(f"--max-shard-size {text!r} is not a size", fix="Pass, for example, 5GB or 500MiB")
    return size


def output_headers(base: BaseModel, dtype: Dtype, max_shard_size: int | None) -> dict[str, Header]:
    """Header of each file of the output, by its name.

    Tensors stay in the order of the base.

    Args:
        base: the model.
        dtype: of the float tensors of the output; "keep" leaves each as it is in the base.
        max_shard_size: most bytes of data in a file, unless a single tensor is larger; None keeps the base's files.
    """
    if max_shard_size is None:
        return {name: _header(header.tensors, dtype, header.metadata) for name, header in base.shards.items()}
    metadata = next(iter(base.shards.values())).metadata
    shards = list(_cut((t for header in base.shards.values() for t in header.tensors), dtype, max_shard_size))
    if len(shards) == 1:
        return {SINGLE_FILE: _header(shards[0], dtype, metadata)}
    names = (f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1))
    return {name: _header(shard, dtype, metadata) for name, shard in zip(names, shards, strict=True)}


def index_bytes(headers: dict[str, Header], base_index: dict[str, Any] | None) -> bytes | None:
    """The index that goes with the files, with the size of the data in bytes; None for a single file."""
    if set(headers) == {SINGLE_FILE}:
        return None
    index = base_index or {}
    total = sum(header.data_bytes for header in headers.values())
    weight_map = {tensor.name: name for name, header in headers.items() for tensor in header.tensors}
    # The base's order, where it has one, so that nothing but the size changes in a copy.
    order = [name for name in index.get("weight_map", {}) if name in weight_map] or sorted(weight_map)
    metadata = {**(index.get("metadata") or {}), "total_size": total}
    whole = {**index, "metadata": metadata, "weight_map": {name: weight_map[name] for name in order}}
    return (json.dumps(whole, indent=2) + "\n").encode()


def _cut(tensors: Iterable[TensorInfo], dtype: Dtype, limit: int) -> Iterator[list[TensorInfo]]:
    shard: list[TensorInfo] = []
    size = 0
    for tensor in tensors:
        count = tensor.nbytes // DTYPES[tensor.dtype].itemsize * DTYPES[_target(tensor, dtype)].itemsize
        if shard and size + count > limit:
            yield shard
            shard, size = [], 0
        shard, size = [*shard, tensor], size + count
    if shard:
        yield shard


def _target(tensor: TensorInfo, dtype: Dtype) -> str:
    wanted = OUTPUT_DTYPES.get(dtype)
    return wanted if wanted and tensor.dtype in FLOATS else tensor.dtype


def _header(tensors: Iterable[TensorInfo], dtype: Dtype, metadata: dict[str, str]) -> Header:
    placed = lay_out((t.name, _target(t, dtype), t.shape) for t in tensors)
    # transformers 4.x refuses weights whose metadata does not name a framework.
    metadata = {**metadata, "format": "pt"}
    return Header(placed, metadata, len(encode_header(placed, metadata)))
