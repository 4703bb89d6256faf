"""A folder on disk or in a bucket (`gs://bucket/path`), read and never written.

Buckets are read through TensorStore's own driver, which finds Google's default credentials by itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from portlab_spec.errors import UserError
from portlab_spec.files import parse_json, read_json

BUCKETS = "gs://"
# TensorStore's own 32 retries take many minutes to say that there is no network.
CONTEXT = {"gcs_request_retries": {"max_retries": 4, "initial_delay": "0.5s", "max_delay": "4s"}}


class Location(Protocol):
    """A path that may lead to a file, a folder or nothing."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        ...

    def parent(self) -> Self:
        """The folder that holds it."""
        ...

    def child(self, name: str) -> Self:
        """A path below it; `name` may hold slashes."""
        ...

    def exists(self) -> bool:
        """Is there a file or a folder?"""
        ...

    def folders(self) -> list[str]:
        """Names of the folders directly in it, sorted."""
        ...

    def read_json(self, what: str) -> Any:
        """Content of a JSON file; `what` it is, for messages.

        Raises:
            UserError: missing, or not JSON.
        """
        ...

    def kvstore(self) -> dict[str, Any]:
        """TensorStore's spec of the folder."""
        ...


@dataclass(frozen=True)
class LocalPath:
    """A path on this machine, symlinks resolved."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def parent(self) -> "LocalPath":
        return LocalPath(self.path.parent)

    def child(self, name: str) -> "LocalPath":
        return LocalPath(self.path / name)

    def exists(self) -> bool:
        return self.path.exists()

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir() if path.is_dir())

    def read_json(self, what: str) -> Any:
        return read_json(self.path, what)

    def kvstore(self) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self.path}/"}


@dataclass(frozen=True)
class BucketPath:
    """A path in a bucket. `keys` are the objects below the folder that was opened: a bucket has no folders."""

    bucket: str
    path: str
    keys: frozenset[str]

    def __str__(self) -> str:
        return f"{BUCKETS}{self.bucket}/{self.path}"

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def parent(self) -> "BucketPath":
        return BucketPath(self.bucket, self.path.rpartition("/")[0], self.keys)

    def child(self, name: str) -> "BucketPath":
        return BucketPath(self.bucket, f"{self.path}/{name}".strip("/"), self.keys)

    def exists(self) -> bool:
        return self.path in self.keys or any(key.startswith(f"{self.path}/") for key in self.keys)

    def folders(self) -> list[str]:
        start = f"{self.path}/" if self.path else ""
        below = (key.removeprefix(start) for key in self.keys if key.startswith(start))
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    def read_json(self, what: str) -> Any:
        if self.path not in self.keys:
            raise UserError(f"{what} not found", where=str(self), fix="Check the path")
        try:
            return parse_json(_bucket(self.bucket).read(self.path).result().value)
        except ValueError as error:  # what TensorStore raises too
            raise UserError(f"{what} cannot be read ({first_line(error)})", where=str(self)) from None

    def kvstore(self) -> dict[str, Any]:
        return {"driver": "gcs", "bucket": self.bucket, "path": f"{self.path}/" if self.path else ""}


def open_location(text: str) -> Location:
    """A location by what the user typed: a local path or `gs://bucket/path`.

    Raises:
        UserError: nothing is there, or the bucket cannot be listed.
    """
    if not text.startswith(BUCKETS):
        if "://" in text:
            raise UserError(f"cannot read {urlsplit(text).scheme}://", where=text, fix="Pass a local path or gs://")
        path = Path(text)
        if not path.is_dir():
            raise UserError("checkpoint folder not found", where=text, fix="Pass --ckpt RUN")
        return LocalPath(path.resolve())
    return _open_bucket(text)


def _open_bucket(text: str) -> BucketPath:
    import tensorstore  # 0.1 s that --help need not pay

    bucket, _, path = text.removeprefix(BUCKETS).strip("/").partition("/")
    start = f"{path}/" if path else ""
    try:
        keys = _bucket(bucket).list(tensorstore.KvStore.KeyRange(start, _after(start))).result()
    except ValueError as error:
        fix = "Check the name, and your access: gcloud auth application-default login"
        raise UserError(f"cannot list the bucket ({first_line(error)})", where=text, fix=fix) from None
    if not keys:
        raise UserError("checkpoint folder not found", where=text, fix="Pass --ckpt gs://bucket/run")
    return BucketPath(bucket, path, frozenset(key.decode() for key in keys))


def _bucket(name: str) -> Any:
    import tensorstore

    return tensorstore.KvStore.open({"driver": "gcs", "bucket": name}, context=tensorstore.Context(CONTEXT)).result()


def _after(prefix: str) -> str:
    """The first string behind all that start with `prefix`; "" is no bound."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""


def first_line(error: Exception) -> str:
    """What TensorStore says, without where in its code."""
    return next(iter(str(error).splitlines()), "").split(" [source locations")[0][:300]
