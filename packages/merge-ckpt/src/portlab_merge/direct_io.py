"""Weights files read and written past the page cache, as far as the system can.

A merge touches every byte once. Cached, its files push out what others read again, take a fresh page for every
4 KiB, and keep the disk idle until the kernel starts to write back.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Buffer
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from portlab_spec.errors import UserError

WRITE_BYTES = 4 << 20
PAGE = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux and some BSDs
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


class InputFile:
    """A file read at any place, by any number of threads: from the page cache what that holds, else past it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDONLY)
        self._direct = self._second_handle = _open_direct(path)

    def read(self, offset: int, size: int) -> np.ndarray:
        """`size` bytes from `offset`, uint8 (size,).

        Raises:
            UserError: the file ends before.
        """
        if self._direct is None:
            return self._fill(self._handle, np.empty(size, np.uint8), offset, size)
        data = np.empty(size, np.uint8)
        if self._take_cached(data, offset):
            return data
        # Direct reads want whole pages.
        start, end = offset & -PAGE, -(-(offset + size) // PAGE) * PAGE
        try:
            data = self._fill(self._direct, _whole_pages(end - start), start, offset + size - start)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._direct = None
            return self.read(offset, size)
        return data[offset - start :][:size]

    def _take_cached(self, data: np.ndarray, offset: int) -> bool:
        """Fill `data` if the cache holds all of it."""
        try:
            return os.preadv(self._handle, [data], offset, os.RWF_NOWAIT) == len(data)
        except OSError as error:
            if error.errno not in (*_UNSUPPORTED, errno.EAGAIN):
                raise
            return False

    def _fill(self, handle: int, data: np.ndarray, offset: int, size: int) -> np.ndarray:
        """Read into `data` at least the first `size` bytes."""
        done = 0
        while done < size:
            count = os.preadv(handle, [data[done:]], offset + done)
            if not count:
                fix = "Run again on a base at rest"
                raise UserError("became shorter while it was read", where=str(self.path), fix=fix)
            done += count
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._handle)
        if self._second_handle is not None:
            os.close(self._second_handle)


class OutputFile:
    """A new file, written from front to back; once closed it is on disk.

    O_DIRECT wants whole sectors from aligned memory, so bytes gather in a buffer of whole pages. The rest of the
    last one goes through the cache, and so does everything where a file system has no direct writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = _create(path)
        self._buffer = memoryview(mmap.mmap(-1, WRITE_BYTES))  # aligned to a page
        self._filled = 0

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            part = rest[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        pending = self._buffer[: self._filled]
        try:
            while pending:
                try:
                    pending = pending[os.write(self._handle, pending) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not _stop_direct(self._handle):
                        raise
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise
        self._filled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                _stop_direct(self._handle)
                self._flush()
                os.fsync(self._handle)
        finally:
            os.close(self._handle)


def _open_direct(path: Path) -> int | None:
    """A handle for reads past the cache; None where the system has none, or cannot tell what the cache holds."""
    if not (_DIRECT and hasattr(os, "RWF_NOWAIT")):
        return None
    try:
        return os.open(path, os.O_RDONLY | _DIRECT)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return None


def _whole_pages(size: int) -> np.ndarray:
    """Uninitialised bytes that begin at a page."""
    data = np.empty(size + PAGE, np.uint8)
    first = -data.ctypes.data % PAGE
    return data[first : first + size]


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    path.unlink(missing_ok=True)  # some file systems refuse the flag after they made the file
    return os.open(path, flags, 0o666)


def _stop_direct(handle: int) -> bool:
    """Let writes go through the cache from here on; whether they did not before."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~_DIRECT)
    return True
