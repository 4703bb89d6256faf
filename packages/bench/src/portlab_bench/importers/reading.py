"""Strict reading of other tools' JSON, and what the importers have in common."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from portlab_bench.schema import Distribution, Finding, Quantile, RequestRecord, ServeRun
from portlab_spec.errors import UserError

FAULTS_NAMED = 3  # of a file with many faults a message names the first few
# How far a tool's own mean may lie from the mean of its own arrays: floats are printed in full, some tools round.
SAME = 1e-3


class Imported(NamedTuple):
    """A run of another tool in our terms.

    Attributes:
        run: as `serve.json`.
        records: by the name of the cell; empty where the tool kept no single requests.
    """

    run: ServeRun
    records: Mapping[str, tuple[RequestRecord, ...]]


class Loose(BaseModel):
    """Base of the shapes that are read: what is named must have its type and be finite; there may be more."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)


def read_documents(path: Path) -> list[Any]:
    """The JSON values in a file: one, or several with white space between them.

    Raises:
        UserError: missing, empty, not UTF-8, cut off, or a number in it is not finite.
    """
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise UserError("file not found", where=str(path), fix="Check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"is not text ({error.reason})", where=str(path), fix="Give the tool's JSON file") from None
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
    documents, at = [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"is not whole, valid JSON ({error})", where=str(path), fix="Copy the file again, or repeat the run"
            ) from None
        documents.append(value)
    if not documents:
        raise UserError("is empty", where=str(path), fix="Repeat the run")
    return documents


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large")
    return value


def validated[T: Loose](shape: type[T], raw: Any, where: str, tool: str) -> T:
    """A value in the shape that a tool writes.

    Raises:
        UserError: it is not; names the first keys that are wrong.
    """
    try:
        return shape.model_validate(raw)
    except ValidationError as error:
        faults = error.errors()
        lines = [f"{'.'.join(map(str, f['loc'])) or 'the document'}: {f['msg']}" for f in faults[:FAULTS_NAMED]]
        more = f" and {len(faults) - FAULTS_NAMED} more" if len(faults) > FAULTS_NAMED else ""
        raise UserError(
            f"is not what {tool} writes: {'; '.join(lines)}{more}",
            where=where,
            fix="See docs/bench-import.md for the versions that are read",
        ) from None


def require_same_lengths(arrays: Mapping[str, Sequence[Any]], where: str) -> int:
    """The length that all arrays have.

    Raises:
        UserError: they have different ones.
    """
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"its arrays have different lengths ({listed})", where=where, fix="Repeat the run")
    return next(iter(lengths.values()))


def require_same_mean(name: str, said: float | None, ours: Distribution | None, where: str) -> None:
    """Hold a tool's own mean against that of its raw data, in seconds: a file that was edited or mixed shows here.

    Raises:
        UserError: they differ.
    """
    if said is None or ours is None:
        return
    if abs(said - ours.mean) > SAME * max(abs(said), abs(ours.mean)) + 1e-6:
        raise UserError(
            f"contradicts itself: its mean {name} is {said * 1e3:.4g} ms, "
            f"that of its requests {ours.mean * 1e3:.4g} ms",
            where=where,
            fix="Import the file as the tool wrote it",
        )


def summary(
    *,
    mean: float | None,
    quantiles: Mapping[str, float | None],
    scale: float,
    count: int | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Distribution | None:
    """A distribution of which only a summary is left: without intervals; None without a mean.

    Args:
        mean, quantiles, minimum, maximum: in the tool's unit; quantiles by our names.
        scale: seconds in the tool's unit.
        count: values behind it, if the tool says so.
    """
    if mean is None:
        return None
    return Distribution(
        count=count,
        mean=mean * scale,
        minimum=None if minimum is None else minimum * scale,
        maximum=None if maximum is None else maximum * scale,
        quantiles={name: Quantile(value=q * scale) for name, q in quantiles.items() if q is not None},
    )


def definitions(notes: Iterable[str]) -> Finding:
    """What differs from our definitions, for the reader of the cell; it does not keep the cell out of tables."""
    return Finding(guard="definitions", ok=True, what="; ".join(notes) or "as ours")


def unique(name: str, taken: Iterable[str]) -> str:
    """A cell's name that no other has."""
    used, number = set(taken), 2
    new = name
    while new in used:
        new, number = f"{name} ({number})", number + 1
    return new


def one_line(text: str, limit: int = 200) -> str:
    """The last line of an error, which in a traceback is the one that says what."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return last if len(last) <= limit else last[:limit] + "..."
