"""One weights file through a merge: read once, updated, written once.

In the order of its bytes: threads read and compute blocks, the writer appends them, and the digests of both files
are taken on the way. Nothing but the adapter and a few blocks is ever in memory.
"""

import hashlib
import math
from collections.abc import Buffer, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from portlab_merge.arithmetic import ChangeStats, Scratch, Update, convert, rows_per_block, update_block
from portlab_merge.direct_io import InputFile, OutputFile
from portlab_merge.pipeline import Behind, in_order
from portlab_spec.errors import UserError
from portlab_spec.safetensors_header import Header, TensorInfo, encode_header

Progress = Callable[[int], None]  # called with the number of base bytes that are done

COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class MergedFile:
    """Digests of a base file and of what was made of it, and what changed by tensor."""

    base_sha256: str
    sha256: str
    stats: dict[str, ChangeStats]


@dataclass(frozen=True)
class _Block:
    """A range of the base's data in one tensor: whole rows of a matrix if it is updated, else any whole elements."""

    tensor: TensorInfo
    target: str
    start: int
    end: int
    first_row: int
    update: Update | None


def _blocks(header: Header, layout: Header, updates: dict[str, Update]) -> Iterator[_Block]:
    for tensor, output in zip(header.tensors, layout.tensors, strict=True):
        update = updates.get(tensor.name)
        if update is None:
            for start in range(tensor.start, tensor.end, COPY_BYTES):
                yield _Block(tensor, output.dtype, start, min(start + COPY_BYTES, tensor.end), 0, None)
            continue
        rows, columns = tensor.shape[-2:]
        row_bytes = tensor.nbytes // math.prod(tensor.shape[:-1])
        size = row_bytes * rows_per_block(columns)
        for matrix in range(tensor.start, tensor.end, row_bytes * rows):
            end = matrix + row_bytes * rows
            for start in range(matrix, end, size):
                first_row = (start - tensor.start) // row_bytes
                yield _Block(tensor, output.dtype, start, min(start + size, end), first_row, update)


def merge_file(
    source: Path,
    header: Header,
    destination: Path,
    layout: Header,
    updates: dict[str, Update],
    threads: int,
    progress: Progress,
) -> MergedFile:
    """Write one weights file of the output.

    Args:
        source: the base's file.
        header: its header.
        destination: file to create.
        layout: its header: the same tensors in the same order.
        updates: by tensor name; other tensors are copied, or converted if the layout has another dtype.
        threads: workers.
        progress: told of the base's bytes that are done.

    Raises:
        UserError: the base became shorter meanwhile, or a merged value is not finite.
    """
    stats: dict[str, ChangeStats] = {}
    base_sha256, sha256, scratch = hashlib.sha256(), hashlib.sha256(), Scratch()
    with (
        InputFile(source) as base,
        OutputFile(destination) as output,
        Behind(base_sha256.update) as hash_base,
        Behind(sha256.update) as hash_output,
        Behind(output.write) as append,
    ):

        def work(block: _Block) -> tuple[_Block, Buffer, Buffer, ChangeStats | None]:
            raw = base.read(header.data_start + block.start, block.end - block.start)
            return block, raw, *_compute(block, raw, scratch)

        def write(data: Buffer) -> None:
            hash_output(data)
            append(data)

        hash_base(base.read(0, header.data_start))
        write(encode_header(layout.tensors, layout.metadata))
        with closing(in_order(work, _blocks(header, layout, updates), threads)) as results:
            for block, raw, data, change in results:
                hash_base(raw)
                write(data)
                if change is not None:
                    stats[block.tensor.name] = stats.get(block.tensor.name, ChangeStats()) + change
                progress(block.end - block.start)
    return MergedFile(base_sha256.hexdigest(), sha256.hexdigest(), stats)


def _compute(block: _Block, raw: np.ndarray, scratch: Scratch) -> tuple[Buffer, ChangeStats | None]:
    source, target, columns = block.tensor.dtype, block.target, block.tensor.shape[-1:]
    if block.update is None:
        return convert(raw, source, target), None
    try:
        return update_block(raw, columns[0], block.first_row, block.update, source, target, scratch)
    except FloatingPointError as error:
        raise UserError(
            f"{block.tensor.name} is {error}",
            where=f"rows from {block.first_row}",
            fix="Try --dtype float32, or another step",
        ) from None
