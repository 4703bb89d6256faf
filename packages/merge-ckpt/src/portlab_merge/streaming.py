"""Weights files through a merge: read once, updated, written once.

In the order of their bytes: threads read and compute blocks, the writer appends them, and the digests of all files
are taken on the way. Nothing but the adapter and a few blocks is ever in memory. Where the output begins a new file is
its own affair: the tensors of all files are one sequence.
"""

import hashlib
import math
from collections.abc import Buffer, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from portlab_merge.arithmetic import ChangeStats, Scratch, Update, convert, rows_per_block, update_block
from portlab_merge.direct_io import InputFile, OutputFile
from portlab_merge.pipeline import Behind, in_order
from portlab_spec.errors import UserError
from portlab_spec.safetensors_header import Header, TensorInfo, encode_header

Progress = Callable[[int], None]  # called with the number of base bytes that are done

COPY_BYTES = 1 << 20


class WeightsFile(NamedTuple):
    """A safetensors file that is there, or is to be made."""

    path: Path
    header: Header


@dataclass(frozen=True)
class Written:
    """A file that was made.

    Attributes:
        sha256: of its bytes.
        base_sha256: of all that was read of the base until it was complete.
        stats: what changed in it, by tensor.
    """

    sha256: str
    base_sha256: str
    stats: dict[str, ChangeStats]


class OtherBase(Exception):
    """A file that is done was made of another base."""


@dataclass(frozen=True)
class _Block:
    """A range of a base file's data in one tensor: whole rows of a matrix if it is updated, else any whole elements.

    `source` and `output` are the numbers of the two files.
    """

    source: int
    output: int
    tensor: TensorInfo
    target: str
    start: int
    end: int
    first_row: int
    update: Update | None


class _Result(NamedTuple):
    block: _Block
    raw: np.ndarray
    data: Buffer | None  # None where the output has it already
    change: ChangeStats | None


def merge_files(
    base: Sequence[WeightsFile],
    outputs: Sequence[WeightsFile],
    updates: dict[str, Update],
    threads: int,
    *,
    done: Mapping[Path, Written] | None = None,
    on_read: Callable[[Path, str], None],
    on_written: Callable[[Path, Written], None],
    progress: Progress = lambda done: None,
) -> None:
    """Write the weights files of the output.

    Args:
        base: the base's files.
        outputs: files to create; one after the other they hold the base's tensors in the base's order.
        updates: by tensor name; other tensors are copied, or converted if the output has another dtype.
        threads: workers.
        done: outputs that exist already; what they come from is still read, for the digests.
        on_read: told of the sha256 of each base file.
        on_written: told of each output once it is on disk.
        progress: told of the base's bytes that are done.

    Raises:
        UserError: the base became shorter meanwhile, or a merged value is not finite.
        OtherBase: an output in `done` is not of this base.
    """
    done = done or {}
    scratch, seen = Scratch(), set(done)
    with ExitStack() as stack:
        inputs = [stack.enter_context(InputFile(file.path)) for file in base]

        def work(block: _Block) -> _Result:
            at = base[block.source].header.data_start + block.start
            raw = inputs[block.source].read(at, block.end - block.start)
            if outputs[block.output].path in done:
                return _Result(block, raw, None, None)
            return _Result(block, raw, *_compute(block, raw, scratch))

        digests = stack.enter_context(_BaseDigests(base, inputs, on_read))
        results = stack.enter_context(closing(in_order(work, _blocks(base, outputs, updates), threads)))
        for number, group in groupby(results, key=lambda result: result.block.output):
            file = outputs[number]
            with _NewFile(file) if file.path not in done else _Skipped(done[file.path]) as new:
                for result in group:
                    digests.add(result)
                    new.add(result)
                    progress(len(result.raw))
            written = new.written(digests.so_far())
            if file.path not in done:
                on_written(file.path, written)
            elif written != done[file.path]:
                raise OtherBase
            seen.add(file.path)
        for file in outputs:
            if file.path not in seen:  # it holds no bytes but its header's
                with _NewFile(file) as new:
                    pass
                on_written(file.path, new.written(digests.so_far()))


class _BaseDigests:
    """The sha256 of the base's files, each reported once its last block is added."""

    def __init__(
        self, base: Sequence[WeightsFile], inputs: Sequence[InputFile], on_read: Callable[[Path, str], None]
    ) -> None:
        self._base, self._on_read = base, on_read
        self._digests = [hashlib.sha256(i.read(0, f.header.data_start)) for f, i in zip(base, inputs, strict=True)]
        self._left = [file.header.data_bytes for file in base]
        self._behind = Behind(self._update)

    def add(self, result: _Result) -> None:
        self._behind(result)

    def so_far(self) -> str:
        """The sha256 of the digests of all files, each up to where it was read."""
        self._behind.wait()
        return hashlib.sha256("".join(digest.hexdigest() for digest in self._digests).encode()).hexdigest()

    def _update(self, result: _Result) -> None:
        number = result.block.source
        self._digests[number].update(result.raw)
        self._left[number] -= len(result.raw)
        if not self._left[number]:
            self._on_read(self._base[number].path, self._digests[number].hexdigest())

    def __enter__(self) -> Self:
        for file, digest in zip(self._base, self._digests, strict=True):
            if not file.header.data_bytes:
                self._on_read(file.path, digest.hexdigest())
        self._behind.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._behind.__exit__(kind, error, tb)


class _NewFile:
    """A file of the output while it is written; its digest is taken, and the disk works, beside the caller."""

    def __init__(self, file: WeightsFile) -> None:
        self._file = file
        self._sha256, self._stats, self._stack = hashlib.sha256(), dict[str, ChangeStats](), ExitStack()

    def add(self, result: _Result) -> None:
        assert result.data is not None
        self._write(result.data)
        if result.change is not None:
            name = result.block.tensor.name
            self._stats[name] = self._stats.get(name, ChangeStats()) + result.change

    def written(self, base_sha256: str) -> Written:
        """What there is to say of the file once it is closed."""
        return Written(self._sha256.hexdigest(), base_sha256, self._stats)

    def _write(self, data: Buffer) -> None:
        self._hash(data)
        self._append(data)

    def __enter__(self) -> Self:
        output = self._stack.enter_context(OutputFile(self._file.path))
        self._hash = self._stack.enter_context(Behind(self._sha256.update))
        self._append = self._stack.enter_context(Behind(output.write))
        self._write(encode_header(self._file.header.tensors, self._file.header.metadata))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)


class _Skipped:
    """In the place of a file that exists already."""

    def __init__(self, done: Written) -> None:
        self._done = done

    def add(self, result: _Result) -> None:
        pass

    def written(self, base_sha256: str) -> Written:
        """The same as when it was made, if it was made of this base."""
        return replace(self._done, base_sha256=base_sha256)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


def _blocks(
    base: Sequence[WeightsFile], outputs: Sequence[WeightsFile], updates: dict[str, Update]
) -> Iterator[_Block]:
    places = ((number, tensor) for number, file in enumerate(outputs) for tensor in file.header.tensors)
    tensors = ((number, tensor) for number, file in enumerate(base) for tensor in file.header.tensors)
    for (source, tensor), (output, made) in zip(tensors, places, strict=True):
        assert tensor.name == made.name
        for start, end, first_row in _ranges(tensor, updates.get(tensor.name)):
            yield _Block(source, output, tensor, made.dtype, start, end, first_row, updates.get(tensor.name))


def _ranges(tensor: TensorInfo, update: Update | None) -> Iterator[tuple[int, int, int]]:
    """Start, end and first row of the blocks of a tensor."""
    if update is None:
        for start in range(tensor.start, tensor.end, COPY_BYTES):
            yield start, min(start + COPY_BYTES, tensor.end), 0
        return
    rows, columns = tensor.shape[-2:]
    row_bytes = tensor.nbytes // math.prod(tensor.shape[:-1])
    size = row_bytes * rows_per_block(columns)
    for matrix in range(tensor.start, tensor.end, row_bytes * rows):
        end = matrix + row_bytes * rows
        for start in range(matrix, end, size):
            yield start, min(start + size, end), (start - tensor.start) // row_bytes


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
