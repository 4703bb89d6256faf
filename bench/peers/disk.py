"""Files out of the page cache, files onto the disk: what stands before and after every timed run."""

import os
from pathlib import Path


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for handle in _open_files(folder):
        os.fsync(handle)  # pages that wait to be written would stay
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def put_on_disk(folder: Path) -> None:
    """Sync every file of a folder, and the folder."""
    for handle in [*_open_files(folder), os.open(folder, os.O_RDONLY)]:
        os.fsync(handle)
        os.close(handle)


def _open_files(folder: Path) -> list[int]:
    return [os.open(path, os.O_RDONLY) for path in folder.rglob("*") if path.is_file()]
