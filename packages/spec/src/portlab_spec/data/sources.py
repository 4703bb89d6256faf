"""Rows out of files: JSON Lines, JSON, Parquet, a folder saved by `datasets`, a folder of such files, standard input.

JSON Lines and Arrow files are read row by row, so memory does not grow with the file; a JSON file is read whole.
Parquet and Arrow need pyarrow, the extra `parquet`; the `datasets` library is never imported.
"""

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from portlab_spec.conversation import Split
from portlab_spec.data.importers.context import RowError, split_named
from portlab_spec.data.importers.literals import read_json
from portlab_spec.errors import UserError

STDIN = "-"
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
_ANY_SUFFIX = re.compile(r"(\.(jsonl|ndjson|json|parquet|arrow|gz|txt))+$")
_BATCH_ROWS = 1024
_NOT_OURS = ("tools.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")
_LINES_FIX = "Write one JSON object per line, without a comma behind it"


@dataclass(frozen=True)
class Origin:
    """A file of rows.

    Attributes:
        file: its path, `-` for standard input.
        name: its name, `stdin` for standard input.
        stem: the start of the ids of rows that have none: the path within the source, without suffixes.
        split: what the name says, in a folder; None if nothing.
    """

    file: str
    name: str
    stem: str
    split: Split | None = None


@dataclass(frozen=True)
class SourceRow:
    """A row as it stands in its file.

    Attributes:
        origin: the file.
        number: line in JSON Lines, else position of the row, from 1.
        value: the row; if it could not be read, its text.
        error: why it could not be read.
        repair: what was mended to read it, "" for nothing.
    """

    origin: Origin
    number: int
    value: Any
    error: RowError | None = None
    repair: str = ""

    @property
    def where(self) -> str:
        """File and row, for messages."""
        return f"{self.origin.file}:{self.number}"


def read_rows(path: str | Path, *, mend_commas: bool = False) -> Iterator[SourceRow]:
    """The rows of a file or folder, in order; files of a folder in the order of their names.

    Args:
        path: a file, which may be compressed with gzip, a folder, or `-` for standard input.
        mend_commas: read a line of JSON Lines that ends with a comma as if it did not.

    Raises:
        UserError: no such file, no data in the folder, a file that is not of its kind, pyarrow missing.
    """
    if str(path) == STDIN:
        origin = Origin(STDIN, "stdin", "stdin")
        yield from _text_rows(_unzipped(sys.stdin.buffer), origin, may_be_whole=True, mend_commas=mend_commas)
        return
    path = Path(path)
    for file, split in _files(path):
        suffix = _suffix(file)
        within = file.relative_to(path).as_posix().replace("/", "-") if path.is_dir() else file.name
        origin = Origin(str(file), file.name, _ANY_SUFFIX.sub("", within), split)
        if suffix in (".parquet", ".arrow"):
            yield from _arrow_rows(file, suffix, origin)
        else:
            with file.open("rb") as stream:
                yield from _text_rows(
                    _unzipped(stream), origin, may_be_whole=suffix == ".json", mend_commas=mend_commas
                )


def _files(path: Path) -> list[tuple[Path, Split | None]]:
    """The data files of a path, with the splits that their names say."""
    if not path.is_dir():
        return [(path, None)]
    if (path / "dataset_dict.json").is_file():
        names = _saved_json(path / "dataset_dict.json").get("splits", [])
        return [(file, split_named(name)) for name in names for file in _saved_files(path / name)]
    if (path / "state.json").is_file():
        split = split_named(_saved_json(path / "state.json").get("_split"))
        return [(file, split) for file in _saved_files(path)]
    files = sorted(f for f in path.rglob("*") if _suffix(f) in _SUFFIXES and f.is_file() and _is_data(f, path))
    if not files:
        fix = f"Put files there that end in {', '.join(_SUFFIXES)}, or give one file"
        raise UserError("is a folder without data files", where=str(path), fix=fix)
    return [(file, _split_of_name(file, path)) for file in files]


def _is_data(file: Path, folder: Path) -> bool:
    parts = file.relative_to(folder).parts
    return file.name not in _NOT_OURS and not any(part.startswith(".") for part in parts)


def _split_of_name(file: Path, folder: Path) -> Split | None:
    """`train-00000-of-00002.parquet`, `data/test.jsonl`, `validation/rows.jsonl`: the last word that is a split."""
    words = re.split(r"[^a-zA-Z]+", str(file.relative_to(folder)))
    return next((split for word in reversed(words) if (split := split_named(word))), None)


def _suffix(file: Path) -> str:
    name = file.name.removesuffix(".gz")
    return Path(name).suffix.lower()


# ------------------------------------------------------------------------------------------------ text


def _text_rows(stream: BinaryIO, origin: Origin, *, may_be_whole: bool, mend_commas: bool) -> Iterator[SourceRow]:
    with _readable(origin.file):
        lines = enumerate(stream, start=1)
        if may_be_whole:
            # `.json` and standard input may hold either form: the first line tells.
            head, first = next(((n, line) for n, line in lines if line.strip()), (0, b""))
            if not _is_a_row(first):
                yield from _whole_rows(first + stream.read(), origin)
                return
            yield _line_row(first, origin, head, mend_commas)
        for number, line in lines:
            if line.strip():
                yield _line_row(line, origin, number, mend_commas)


def _is_a_row(line: bytes) -> bool:
    """Is this line an object by itself, and no wrapper around a list of rows?"""
    try:
        value = json.loads(line.strip().removeprefix(b"\xef\xbb\xbf").rstrip(b","))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not isinstance(value.get("data"), list)


def _line_row(line: bytes, origin: Origin, number: int, mend_commas: bool) -> SourceRow:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n")
    except UnicodeDecodeError as error:
        fault = RowError(f"not UTF-8 ({error})", "Save the file as UTF-8")
        return SourceRow(origin, number, line.decode(errors="replace"), fault)
    repair = ""
    try:
        try:
            value = read_json(text)
        except ValueError:
            if not (mend_commas and text.rstrip().endswith(",")):
                raise
            value, repair = read_json(text.rstrip()[:-1]), "comma behind the row"
    except ValueError as error:
        return SourceRow(origin, number, text, RowError(f"not JSON ({error})", _LINES_FIX))
    return _checked(SourceRow(origin, number, value, repair=repair), "Write one JSON object per line")


def _whole_rows(data: bytes, origin: Origin) -> Iterator[SourceRow]:
    try:
        value = read_json(data.decode("utf-8-sig")) if data.strip() else []
    except ValueError as error:
        raise UserError(f"not JSON ({error})", where=origin.file, fix="Write a JSON array, or JSON Lines") from None
    rows = value.get("data") if isinstance(value, dict) and isinstance(value.get("data"), list) else value
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        raise UserError(
            "neither a list nor an object with `data`", where=origin.file, fix="Write a JSON array of objects"
        )
    for number, row in enumerate(rows, start=1):
        yield _checked(SourceRow(origin, number, row), "Make every element an object")


def _checked(row: SourceRow, fix: str) -> SourceRow:
    if isinstance(row.value, dict):
        return row
    return SourceRow(row.origin, row.number, row.value, RowError("the row is not an object", fix))


def _unzipped(stream: BinaryIO) -> BinaryIO:
    """The stream, through gzip if it starts with gzip's mark, whatever its name."""
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)  # type: ignore[type-var]
    return gzip.open(buffered) if buffered.peek(2)[:2] == b"\x1f\x8b" else buffered  # type: ignore[return-value]


@contextmanager
def _readable(file: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"not a whole gzip file ({error})", where=file, fix="Fetch the file again") from None


# ------------------------------------------------------------------------------------------------ Arrow


def _arrow_rows(file: Path, suffix: str, origin: Origin) -> Iterator[SourceRow]:
    pa = require_pyarrow(str(file))
    number = 0
    try:
        for batch in _batches(file, suffix):
            for row in _as_text(batch).to_pylist(maps_as_pydicts="strict"):
                number += 1
                yield SourceRow(origin, number, row)
    except pa.ArrowException as error:
        raise UserError(f"not a {suffix[1:]} file ({error})", where=str(file), fix="Fetch the file again") from None


def _batches(file: Path, suffix: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if suffix == ".parquet":
        with pq.ParquetFile(file) as parquet:
            yield from parquet.iter_batches(batch_size=_BATCH_ROWS)
        return
    with pa.memory_map(str(file)) as source:
        try:
            reader = pa.ipc.open_stream(source)  # what `datasets` writes
        except pa.ArrowInvalid:
            whole = pa.ipc.open_file(source)
            reader = (whole.get_batch(i) for i in range(whole.num_record_batches))
        for batch in reader:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(start, _BATCH_ROWS)


def _as_text(batch: Any) -> Any:
    """The batch with dates, times and decimals as text: JSON has no such values."""
    import pyarrow as pa

    for i, column in enumerate(batch.schema):
        if pa.types.is_temporal(column.type) or pa.types.is_decimal(column.type):
            batch = batch.set_column(i, column.name, batch.column(i).cast(pa.string()))
    return batch


def require_pyarrow(where: str) -> Any:
    """The module pyarrow.

    Raises:
        UserError: not installed; names the extra.
    """
    try:
        import pyarrow
    except ImportError:
        fix = 'Install the extra: pip install "portlab-spec[parquet]"'
        raise UserError("Parquet and Arrow files need pyarrow", where=where, fix=fix) from None
    return pyarrow


def _saved_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"not JSON ({error})", where=str(file), fix="Save the data set again") from None
    return value if isinstance(value, dict) else {}


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files that `save_to_disk` lists, inside their folder."""
    listed = _saved_json(folder / "state.json").get("_data_files") or []
    names = [item.get("filename", "") if isinstance(item, dict) else "" for item in listed]
    if not names or any(Path(name).name != name or not name for name in names):
        raise UserError("lists no data files", where=str(folder / "state.json"), fix="Save the data set again")
    return [folder / name for name in names]
