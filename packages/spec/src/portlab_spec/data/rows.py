"""Reading data sets: a built-in name, or rows of any shape in `portlab_spec.data.importers`.

`import_rows` keeps what can be used and says of the rest why not; `load_dataset` is for trainers, and refuses a data
set with a single row that cannot be used. Neither drops a row without a word.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from portlab_spec.conversation import Conversation, Tool
from portlab_spec.data import fitness, fitness_plus
from portlab_spec.data.importers import Importer, detect, importer_named
from portlab_spec.data.importers.context import CallsWithText, Context, RowError, ToolReader
from portlab_spec.data.importers.normalise import describe
from portlab_spec.data.sources import STDIN, SourceRow, read_rows
from portlab_spec.data.split import check_leakage
from portlab_spec.errors import UserError
from portlab_spec.tools import read_tools, validate_arguments

BUILT_IN: dict[str, Callable[[], list[Conversation]]] = {
    fitness.NAME: fitness.load,
    fitness_plus.NAME: fitness_plus.load,
    fitness_plus.FIXED: fitness_plus.load_fixed,
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reject:
    """A row that cannot be used.

    Attributes:
        file: that holds it, `-` for standard input.
        line: line in JSON Lines, else position of the row, from 1.
        id: of the row, if it has one.
        what: the fault.
        fix: how to mend it.
        raw: the row as it stands in the file; its text if it is not JSON.
    """

    file: str
    line: int
    id: str | None
    what: str
    fix: str
    raw: Any

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    @property
    def reason(self) -> str:
        """Fault and remedy in one line."""
        return " ".join(str(UserError(self.what, fix=self.fix)).split())

    def as_error(self) -> UserError:
        """The fault as an error of the user's."""
        return UserError(self.what, where=self.where, fix=self.fix)


@dataclass(frozen=True)
class Imported:
    """What came out of a source: every row is in `conversations` or in `rejects`.

    Attributes:
        conversations: in the order of the rows.
        rejects: in the order of the rows.
        repairs: how often each kind of repair was made in the conversations.
        shape_counts: rows per shape, among those whose shape was known.
    """

    conversations: list[Conversation] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    repairs: Counter[str] = field(default_factory=Counter)
    shape_counts: Counter[str] = field(default_factory=Counter)


def import_rows(
    path: str | Path,
    *,
    shape: str | None = None,
    tools: Sequence[Tool] | None = None,
    calls_with_text: CallsWithText = "reject",
) -> Imported:
    """Read every row of a file or folder (`portlab_spec.data.sources`), of any known shape, mixed or not.

    Args:
        path: the source; `-` is standard input.
        shape: name of the one shape of all rows; None to tell each row's shape by its marks.
        tools: on offer in rows without `tools`; None for those of a file `tools.json` beside the source, if any.
        calls_with_text: an assistant message with text and calls is rejected, loses the text, or becomes two.

    Raises:
        UserError: the source, the shape or the shared tools cannot be read. Faults of rows are rejects.
    """
    imported = Imported()
    for outcome in _read(path, imported, shape, tools, calls_with_text, mend_commas=True):
        if isinstance(outcome, Reject):
            imported.rejects.append(outcome)
        else:
            imported.conversations.append(outcome)
    return imported


def load_dataset(
    name_or_path: str | Path,
    *,
    shape: str | None = None,
    tools: Sequence[Tool] | None = None,
    calls_with_text: CallsWithText = "reject",
) -> list[Conversation]:
    """The conversations of a built-in data set, or of a source as for `import_rows`, in order.

    Raises:
        UserError: no such name or source, no rows, a row that cannot be used (the first one is named), or a question
            that occurs in two splits.
    """
    if str(name_or_path) in BUILT_IN:
        return BUILT_IN[str(name_or_path)]()
    path = source_named(name_or_path)
    imported = Imported()
    for outcome in _read(path, imported, shape, tools, calls_with_text, mend_commas=False):
        if isinstance(outcome, Reject):
            raise outcome.as_error()
        imported.conversations.append(outcome)
    if not imported.conversations:
        raise UserError("the data set is empty", where=str(path), fix="Write one JSON object per line")
    if imported.repairs:
        _log.warning("%s: mended %s", path, ", ".join(f"{what} ({n})" for what, n in imported.repairs.items()))
    check_leakage(imported.conversations, where=str(path))
    return imported.conversations


def source_named(name_or_path: str | Path) -> Path:
    """The path of a source that is there; `-` is standard input.

    Raises:
        UserError: there is none; names the built-in data sets too.
    """
    path = Path(name_or_path)
    if str(path) != STDIN and not path.exists():
        fix = f"Give a JSON Lines, JSON or Parquet file, a folder of these, or one of: {', '.join(BUILT_IN)}"
        raise UserError("no data set of this name and no such file", where=str(path), fix=fix)
    return path


def _read(
    path: str | Path,
    imported: Imported,
    shape: str | None,
    tools: Sequence[Tool] | None,
    calls_with_text: CallsWithText,
    *,
    mend_commas: bool,
) -> Iterator[Conversation | Reject]:
    """One outcome per row; repairs and shapes are counted in `imported`."""
    named = importer_named(shape) if shape else None
    tool_reader = ToolReader()
    shared = cache(lambda: _shared_tools(Path(path)) if tools is None else tuple(tools))  # read only if needed
    line_of_id: dict[str, str] = {}
    for row in read_rows(path, mend_commas=mend_commas):
        context = Context(
            stem=row.origin.stem,
            number=row.number,
            source=row.origin.name,
            split=row.origin.split or "train",
            read_tools=tool_reader,
            shared_tools=shared,
            calls_with_text=calls_with_text,
        )
        try:
            conversation = _conversation(row, context, named, imported.shape_counts)
            place = f"line {row.number}" if row.origin.file == str(path) else row.where
            first = line_of_id.setdefault(conversation.id, place)
            if first != place:
                what = f"the id {conversation.id!r} is already that of {first}"
                raise RowError(what, "Give every row its own id")
        except RowError as error:
            row_id = row.value.get("id") if isinstance(row.value, dict) else None
            yield Reject(
                row.origin.file, row.number, None if row_id is None else str(row_id), error.what, error.fix, row.value
            )
            continue
        imported.repairs.update(context.repairs)
        if row.repair:
            imported.repairs[row.repair] += 1
        yield conversation


def _conversation(row: SourceRow, context: Context, named: Importer | None, shapes: Counter[str]) -> Conversation:
    if row.error:
        raise row.error
    importer = named or detect(row.value)
    shapes[importer.name] += 1
    try:
        conversation = importer.read(row.value, context)
    except ValidationError as error:
        raise _row_error(error) from None
    _check(conversation)
    return conversation


def _shared_tools(path: Path) -> tuple[Tool, ...]:
    """The tools of `tools.json` beside a file or in a folder; none if there is no such file."""
    file = path / "tools.json" if path.is_dir() else path.with_name("tools.json")
    if str(path) == STDIN or not file.is_file():
        return ()
    try:
        return read_tools(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 ({error})", where=str(file), fix="Save the file as UTF-8") from None


def _check(conversation: Conversation) -> None:
    """What the record types alone do not guarantee."""
    last = conversation.messages[-1].role
    if last != "assistant":
        raise RowError(f"the last message is of role {last}, not assistant", "End with the answer to learn")
    if not any(message.supervised for message in conversation.messages if message.role == "assistant"):
        raise RowError("no assistant message is supervised", "Give one of them the weight 1, or remove the row")
    offered = {tool.name: tool for tool in conversation.tools}
    if len(offered) < len(conversation.tools):
        raise RowError("two tools have the same name", "Offer each tool once")
    for call in (call for message in conversation.messages for call in message.tool_calls):
        if call.name not in offered:
            fix = f"Offer it, or call one of: {', '.join(offered) or '(none offered)'}"
            raise RowError(f"call to {call.name}, which is not offered", fix)
        if problems := validate_arguments(offered[call.name], call.arguments):
            raise RowError(f"call to {call.name}: {'; '.join(problems)}", "Correct the call or the tool's parameters")


def _row_error(error: ValidationError) -> RowError:
    fault = error.errors()[0]
    key = ".".join(map(str, fault["loc"]))
    match fault["type"]:
        case "extra_forbidden":
            return RowError(f"unknown key {key}", "Remove it, or correct its spelling")
        case "missing":
            return RowError(f"missing key {key}", "Add it")
    return RowError(describe(error))
