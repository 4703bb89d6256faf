"""What the commands read: tools, conversations, texts, tokenizers."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portlab_spec.assets import resolve_model
from portlab_spec.conversation import Conversation, Tool
from portlab_spec.data.bfcl import read_bfcl
from portlab_spec.data.rows import BUILT_IN, Imported, Reject, import_rows, source_named
from portlab_spec.errors import UserError
from portlab_spec.formats import Format
from portlab_spec.tokenizer import Tokenizer
from portlab_spec.tools import read_tools

if TYPE_CHECKING:
    from portlab_spec.toolspec.cli import Reading

STDIN = "-"


def read_text(path: str) -> str:
    """A text file, or stdin for `-`.

    Raises:
        UserError: no such file, or not UTF-8.
    """
    if path == STDIN:
        return sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such file", where=path, fix="Check the path, or give - for stdin") from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 ({error})", where=path, fix="Save the file as UTF-8") from None


def rows_of(source: str, reading: "Reading") -> Imported:
    """The conversations of a built-in set, a source of any shape, or the bfcl-eval wheel, and the rejects."""
    if source in BUILT_IN:
        return Imported(BUILT_IN[source]())
    if reading.shape == "bfcl" or (source.endswith(".whl") and reading.shape is None):
        data = read_bfcl(source)
        rejects = [Reject(r.category, r.line, r.id, r.reason, "", None) for r in data.rejects]
        return Imported(data.conversations, rejects)
    tools = None
    if reading.tools is not None:
        tools = read_tools(json_value(str(reading.tools)), str(reading.tools))
    return import_rows(source_named(source), shape=reading.shape, tools=tools, calls_with_text=reading.calls_with_text)


def conversations_of(source: str, reading: "Reading") -> list[Conversation]:
    """As `rows_of`, where every row must be good.

    Raises:
        UserError: the first row that cannot be used, and how many there are; no rows.
    """
    rows = rows_of(source, reading)
    if rows.rejects:
        first, more = rows.rejects[0], len(rows.rejects) - 1
        what = f"{first.what} (and {more} more rows cannot be used)" if more else first.what
        raise UserError(what, where=first.where, fix=first.fix or "See them all with toolspec convert --rejects FILE")
    if not rows.conversations:
        raise UserError("there are no rows", where=source, fix="Check the file")
    return rows.conversations


def tools_of(source: str) -> tuple[Tool, ...]:
    """The tools in a JSON file of any shape, or all tools that a data set offers, lowered."""
    if source in BUILT_IN:
        return distinct_tools(BUILT_IN[source]())
    return read_tools(json_value(source), source)


def raw_tools_of(source: str) -> tuple[Tool, ...]:
    """As `tools_of`, with the schemas as they stand in the file."""
    if source in BUILT_IN:
        return distinct_tools(BUILT_IN[source]())
    return read_tools(json_value(source), source, lower=False)


def distinct_tools(conversations: list[Conversation]) -> tuple[Tool, ...]:
    """Every tool that is offered, once, in order of appearance."""
    seen: dict[str, Tool] = {}
    for conversation in conversations:
        for tool in conversation.tools:
            seen.setdefault(tool.name, tool)
    return tuple(seen.values())


def json_value(path: str) -> Any:
    """The JSON value in a file or on stdin.

    Raises:
        UserError: it is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON ({error})", where=path, fix="Give a JSON file") from None


def tokenizer_of(model: str, fmt: Format) -> Tokenizer:
    """The tokenizer of a model; a Gemma 3 one is given Gemma 4's names, which differ in nothing else."""
    return Tokenizer.load(resolve_model(model).path).with_names_for(fmt.control_tokens)
