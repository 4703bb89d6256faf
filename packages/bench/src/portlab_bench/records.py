"""Records of JSON files, and what is wrong with one that does not fit its schema."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from portlab_spec.errors import UserError
from portlab_spec.files import read_json


def read_record[T: BaseModel](path: Path, shape: type[T], what: str, fix: str) -> T:
    """A file's record.

    Args:
        path: of a JSON file.
        shape: of the record.
        what: the record is, named in messages.
        fix: how one comes by a right one.

    Raises:
        UserError: missing, not JSON, or not of this shape.
    """
    return as_record(read_json(path, what), shape, what, path, fix)


def as_record[T: BaseModel](raw: Any, shape: type[T], what: str, path: Path, fix: str) -> T:
    """The record of what a file held.

    Raises:
        UserError: not of this shape.
    """
    try:
        return shape.model_validate(raw)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise UserError(f"is no {what}: {key}: {fault['msg']}", where=str(path), fix=fix) from None
