"""The Berkeley Function Calling Leaderboard (BFCL v4) as conversations.

The data ship in the wheel of `bfcl-eval` (Apache-2.0): one JSON Lines file of questions per category under
`bfcl_eval/data`, and one of accepted answers under `bfcl_eval/data/possible_answer`. They are read from the wheel
or from a folder it was unpacked to; nothing of the package is installed or run.

    pip download bfcl-eval==2026.3.23 --no-deps

An accepted answer lists, per call and parameter, the values that are right; the empty string among them says that the
parameter may be left out. The target takes the first of them, and `meta["accepted"]` keeps all for
`portlab_spec.metrics.match_calls`. Java and JavaScript rows are given JSON values, where BFCL has source text.
"""

import json
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from portlab_spec.conversation import Conversation, Message, Role, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.metrics.ast_match import OMITTED, alternatives_of, refusal
from portlab_spec.tools import read_tools

REFUSAL = "None of the available functions can do that."
"""The target where no offered tool fits."""

CALLS = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
NO_CALL = ("irrelevance", "live_irrelevance")
ANY_CALL = ("live_relevance",)
CATEGORIES = (*CALLS, *NO_CALL, *ANY_CALL)
"""The categories with one answer to one question: those that are read."""

_FILE = re.compile(r"BFCL_v4_(\w+)\.json")
_ROLES: dict[str, Role] = {"system": "developer", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Rejected:
    """A row without a conversation.

    Attributes:
        category: of the row.
        line: in the file of questions, from 1.
        id: the row's, empty if it has none.
        reason: one line.
    """

    category: str
    line: int
    id: str
    reason: str


@dataclass
class BfclData:
    """What was read, and what was not.

    Attributes:
        conversations: in the order of the files; all of split "test".
        rejects: rows that cannot be converted.
        skipped: rows by category of those that are not single-turn (several turns, memory, web search) and of
            `format_sensitivity`, which repeats rows of the others under other prompts.
        rows: rows read by category; conversations and rejects add up to them.
    """

    conversations: list[Conversation] = field(default_factory=list)
    rejects: list[Rejected] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


def read_bfcl(wheel_or_folder: str | Path, categories: Collection[str] | None = None) -> BfclData:
    """The single-turn rows of BFCL v4.

    Args:
        wheel_or_folder: the `bfcl-eval` wheel, the folder it was unpacked to, or the data folder in it.
        categories: names from CATEGORIES; all of them by default.

    Raises:
        UserError: no such file, no BFCL data in it, or an unknown category.
    """
    folder = data_folder(Path(wheel_or_folder))
    files = {match[1]: file for file in folder.iterdir() if (match := _FILE.fullmatch(file.name))}
    wanted = CATEGORIES if categories is None else categories
    for category in wanted:
        if category not in CATEGORIES:
            fix = f"Choose from: {', '.join(CATEGORIES)}"
            raise UserError(f"{category!r} is no single-turn category of BFCL", where=str(wheel_or_folder), fix=fix)
    data = BfclData()
    for category in sorted(files.keys() - set(CATEGORIES)):
        data.skipped[category] = len(_lines(files[category]))
    for category in (name for name in CATEGORIES if name in wanted):
        if category not in files:
            raise UserError(
                f"the category {category} is missing", where=str(wheel_or_folder), fix="Get the whole wheel"
            )
        answers = _answers(folder / "possible_answer" / files[category].name) if category in CALLS else {}
        _read_category(category, _lines(files[category]), answers, data)
    return data


def data_folder(path: Path) -> Path | zipfile.Path:
    """The folder of BFCL's questions, in a wheel or on disk.

    Raises:
        UserError: there is none.
    """
    fix = "Give the wheel that `pip download bfcl-eval --no-deps` fetches, or a folder with its contents"
    if not path.exists():
        raise UserError("no such file or folder", where=str(path), fix=fix)
    root: Path | zipfile.Path = path
    if path.is_file():
        if not zipfile.is_zipfile(path):
            raise UserError("neither a wheel nor a folder", where=str(path), fix=fix)
        root = zipfile.Path(path)
    for folder in (root / "bfcl_eval" / "data", root / "data", root):
        if folder.is_dir() and any(_FILE.fullmatch(file.name) for file in folder.iterdir()):
            return folder
    raise UserError("no BFCL v4 data in it", where=str(path), fix=fix)


def _lines(file: Path | zipfile.Path) -> list[tuple[int, str]]:
    """Line numbers from 1, and the lines that hold a row."""
    lines = file.read_text(encoding="utf-8").split("\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _answers(file: Path | zipfile.Path) -> dict[str, Any]:
    if not file.exists():
        raise UserError("the accepted answers are missing", where=str(file), fix="Get the whole wheel")
    try:
        rows = [json.loads(line) for _, line in _lines(file)]
        return {row["id"]: row["ground_truth"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"not BFCL answers ({error!r})", where=str(file), fix="Get the wheel again") from None


def _read_category(category: str, lines: Sequence[tuple[int, str]], answers: Mapping[str, Any], data: BfclData) -> None:
    data.rows[category] = len(lines)
    seen: Counter[str] = Counter()
    for number, line in lines:
        row_id = ""
        try:
            row = json.loads(line)
            row_id = str(row["id"])
            seen[row_id] += 1
            if seen[row_id] > 1:
                raise UserError("the id occurs twice")
            data.conversations.append(_conversation(category, row, answers))
        except UserError as error:
            data.rejects.append(Rejected(category, number, row_id, str(error)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # not the shape of a BFCL row
            reason = f"not a BFCL row ({type(error).__name__}: {' '.join(str(error).split())})"
            data.rejects.append(Rejected(category, number, row_id, reason))


def _conversation(category: str, row: Mapping[str, Any], answers: Mapping[str, Any]) -> Conversation:
    turns = row["question"]
    if len(turns) != 1:
        raise UserError(f"{len(turns)} turns, where one is read")
    messages = [Message(role=_ROLES[message["role"]], content=message["content"]) for message in turns[0]]
    tools = _tools(json.dumps(row["function"]))
    meta: dict[str, JsonValue] = {"category": category}
    if category in NO_CALL:
        messages.append(Message(role="assistant", content=REFUSAL))
    elif category in ANY_CALL:
        meta["expects"] = "call"
    else:
        if row["id"] not in answers:
            raise UserError("no accepted answer")
        accepted = answers[row["id"]]
        messages.append(Message(role="assistant", tool_calls=tuple(_target(call, tools) for call in accepted)))
        meta["accepted"] = accepted
    return Conversation(id=row["id"], split="test", source="bfcl", tools=tools, messages=tuple(messages), meta=meta)


@lru_cache(maxsize=256)  # neighbouring rows of the live categories offer the same tools
def _tools(functions: str) -> tuple[Tool, ...]:
    return read_tools(functions, "function")


def _target(call: Mapping[str, Mapping[str, Sequence[Any]]], tools: Sequence[Tool]) -> ToolCall:
    if len(call) != 1:
        raise UserError(f"an accepted call with {len(call)} names")
    ((name, accepted),) = call.items()
    tool = _tool(name, tools)
    properties: Any = tool.parameters.get("properties") or {}
    first = _first_values(accepted, tool.parameters)
    for key in [key for key in first if key not in properties and OMITTED in accepted[key]]:
        del first[key]  # a few answers list parameters that the tool does not declare
    arguments = {key: _plain_value(value, properties.get(key, {})) for key, value in first.items()}
    if reason := refusal(tool, arguments, accepted):
        raise UserError(f"the accepted answer cannot be given: {name}: {reason}")
    return ToolCall(name=name, arguments=arguments)


def _first_values(accepted: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The first accepted value of each name; none where that is to leave it out.

    What is required is never left out: the first value that is one is taken.
    """
    required = schema.get("required") or []
    values = {}
    for name, alternatives in accepted.items():
        options = alternatives_of(alternatives)
        if not options or (options[0] == OMITTED and name not in required):
            continue
        first = next((option for option in options if option != OMITTED), OMITTED)
        values[name] = first
    return values


def _plain_value(value: Any, schema: Mapping[str, Any]) -> Any:
    """An accepted value of a parameter without the alternatives that objects hold per key; deeper ones hold none."""
    if isinstance(value, Mapping) and schema.get("type") == "object":
        return _first_values(value, schema)
    items = schema.get("items") or {}
    if isinstance(value, list) and items.get("type") == "object":
        return [_first_values(item, items) if isinstance(item, Mapping) else item for item in value]
    return value


def _tool(name: str, tools: Sequence[Tool]) -> Tool:
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        raise UserError(f"the accepted answer calls {name}, which is not offered")
    return tool
