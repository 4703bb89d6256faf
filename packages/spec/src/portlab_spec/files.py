"""Files that are either absent or whole.

Every writer of Portlab writes to a temporary sibling, syncs it and renames it: a crash, a full disk or Ctrl-C
leaves the old state or the new one, never half of either.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from portlab_spec.errors import UserError

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically (UTF-8)."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: two-space indent, keys in the given order, a final newline, no NaN."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: temporary sibling, fsync, rename, fsync of the folder."""
    with new_file(path) as stream:
        stream.write(data)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose bytes become `path`, replacing it, on success, and vanish on any failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: Path, *, resume: bool = False) -> Iterator[Path]:
    """Yield a staging sibling that becomes `path` on success and vanishes on any failure.

    Stale stagings of killed runs (same name, dead process) are removed first.

    Args:
        path: the folder.
        resume: take the newest stale staging as it is, and leave it on failure, for the next to take, unless
            the failure is a UserError.

    Raises:
        UserError: `path` exists.
    """
    if path.exists():
        raise UserError("already exists", where=str(path), fix="Choose another --out, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.parent / f".{path.name}.partial-{os.getpid()}"
    stale = sorted(_stale(path), key=lambda folder: folder.stat().st_mtime)
    newest = stale.pop() if resume and stale else None
    # First these: in a container every process may have the same number, and so the same staging.
    for folder in stale:
        _remove(folder)
    if newest:
        newest.rename(staging)
    else:
        staging.mkdir()
    try:
        yield staging
        for file in staging.rglob("*"):
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        sync_folder(staging)
        os.rename(staging, path)
        sync_folder(path.parent)
    except BaseException as error:
        # Bad input stays bad; a full disk or Ctrl-C may pass.
        if not resume or isinstance(error, UserError):
            _remove(staging)
        raise


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable (a no-op where folders cannot be opened)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_json(path: Path, what: str = "JSON file") -> Any:
    """Read JSON, or say in one line what is wrong with the file.

    Raises:
        UserError: missing, unreadable or not JSON.
    """
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{what} not found", where=str(path), fix="Check the path") from None
    except ValueError as error:
        raise UserError(f"{what} is not valid JSON ({error})", where=str(path), fix="Restore the file") from None


def parse_json(data: bytes) -> Any:
    """Parse JSON from somewhere else.

    Raises:
        ValueError: not UTF-8, not JSON, too deep, or text in it could not be written again.
    """
    try:
        value = json.loads(data.decode())
    except RecursionError as error:
        raise ValueError(error) from None
    if _SURROGATE.search(data):  # pairs are fine, half of one is not text
        json.dumps(value, ensure_ascii=False).encode()
    return value


def require_free_space(
    folder: Path, needed: int, what: str, fix: str = "Free some space or choose another --out"
) -> None:
    """Refuse early if the disk cannot hold what is about to be written.

    Args:
        folder: where it will be written (an existing parent is used).
        needed: bytes.
        what: named in the message.
        fix: advice in the message.

    Raises:
        UserError: too little space.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{what} needs {needed / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free",
            where=str(folder),
            fix=fix,
        )


def staged_bytes(path: Path) -> int:
    """Bytes in what killed runs left of a folder: `new_folder` goes on with them, or frees them before it begins."""
    files = (file for staging in _stale(path) for file in staging.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _stale(path: Path) -> Iterator[Path]:
    """Stagings of processes that are gone."""
    for sibling in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        pid = sibling.name.rpartition("-")[2]
        if not (pid.isdigit() and int(pid) != os.getpid() and _is_running(int(pid))):
            yield sibling


def _remove(staging: Path) -> None:
    """Remove a staging; its JSON first, as without its config no library takes what is left for a model."""
    with contextlib.suppress(OSError):
        for file in staging.glob("*.json"):
            file.unlink()
    shutil.rmtree(staging, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
