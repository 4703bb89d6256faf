"""Reading data sets: a built-in name, or a JSON Lines file checked row by row.

Two kinds of rows are read, and may be mixed in a file:

1. A `Conversation` record: `id`, `tools`, `messages`, `split`, `source`.
2. A question with its call: `user_query` and `function_call` {`name`, `arguments`}; `id`, `split` and `tools`
   are optional. The tools are OpenAI function objects, in the row or, for the whole file, as a list in
   `tools.json` beside it.

Blank lines hold no row; anything else that cannot be used is an error with its file and line.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, TypeAdapter, ValidationError

from portlab_spec.conversation import Conversation, Message, Record, Split, Tool, ToolCall
from portlab_spec.data import fitness
from portlab_spec.data.split import check_leakage
from portlab_spec.errors import UserError
from portlab_spec.tools import validate_arguments

BUILT_IN: dict[str, Callable[[], list[Conversation]]] = {fitness.NAME: fitness.load}


class FunctionObject(Record):
    """A tool in OpenAI's form."""

    type: Literal["function"] = "function"
    function: Tool


class QuestionRow(Record):
    """A question with the call that answers it."""

    user_query: str
    function_call: ToolCall
    id: str | None = None
    split: Split = "train"
    tools: tuple[FunctionObject, ...] | None = None


def load_dataset(name_or_path: str | Path) -> list[Conversation]:
    """The conversations of a built-in data set or of a JSON Lines file, in order.

    Raises:
        UserError: no such name or file, an empty file, or a row that is not JSON, has missing or unknown
        keys,
            does not end with an assistant message, calls a tool that it does not offer or with arguments that
            the tool does not take, repeats an id, or repeats a question of another split.
    """
    if str(name_or_path) in BUILT_IN:
        return BUILT_IN[str(name_or_path)]()
    path = Path(name_or_path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no data set of this name and no such file"
        raise UserError(what, where=str(path), fix=f"Give a JSON Lines file, or one of: {', '.join(BUILT_IN)}")

    shared = cache(lambda: _shared_tools(path.with_name("tools.json")))  # read only if a row needs it
    conversations: list[Conversation] = []
    line_of_id: dict[str, int] = {}
    for number, row in _read_rows(path):
        where = f"{path}:{number}"
        conversation = _conversation(row, shared, path, number)
        _check(conversation, where)
        first = line_of_id.setdefault(conversation.id, number)
        if first != number:
            what = f"the id {conversation.id!r} is already that of line {first}"
            raise UserError(what, where=where, fix="Give every row its own id")
        conversations.append(conversation)
    if not conversations:
        raise UserError("the data set is empty", where=str(path), fix="Write one JSON object per line")
    check_leakage(conversations, where=str(path))
    return conversations


def _read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers, from 1, and the JSON objects on them."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode(), parse_constant=_refuse, object_pairs_hook=_unique_keys)
            except UnicodeDecodeError as error:
                raise UserError(f"not UTF-8 ({error})", where=where, fix="Save the file as UTF-8") from None
            except (ValueError, RecursionError) as error:
                fix = "Write one JSON object per line, without a comma behind it"
                raise UserError(f"not JSON ({error})", where=where, fix=fix) from None
            if not isinstance(row, dict):
                raise UserError("the row is not an object", where=where, fix="Write one JSON object per line")
            yield number, row


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; JSON readers differ on which of two equal keys wins, so neither does."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return row


def _shared_tools(path: Path) -> tuple[FunctionObject, ...]:
    if not path.is_file():
        return ()
    try:
        return TypeAdapter(tuple[FunctionObject, ...]).validate_json(path.read_bytes())
    except ValidationError as error:
        _raise_first(error, str(path))


def _conversation(
    row: dict[str, Any], shared: Callable[[], tuple[FunctionObject, ...]], path: Path, number: int
) -> Conversation:
    where = f"{path}:{number}"
    if "messages" in row:
        return _validated(Conversation, row, where)
    if "user_query" not in row and "function_call" not in row:
        what = f"unknown kind of row, with the keys {', '.join(row) or '(none)'}"
        raise UserError(what, where=where, fix="Give `messages`, or `user_query` and `function_call`")
    question = _validated(QuestionRow, row, where)
    offered = shared() if question.tools is None else question.tools
    if not offered:
        fix = "Add the key `tools` to the row, or a file tools.json beside the data set"
        raise UserError("the row offers no tools", where=where, fix=fix)
    return Conversation(
        id=question.id or f"{path.stem}-{number}",
        split=question.split,
        source=path.name,
        tools=tuple(item.function for item in offered),
        messages=(
            Message(role="developer", content=fitness.DEVELOPER_PROMPT),
            Message(role="user", content=question.user_query),
            Message(role="assistant", tool_calls=(question.function_call,)),
        ),
    )


def _check(conversation: Conversation, where: str) -> None:
    """What the record types alone do not guarantee."""
    last = conversation.messages[-1].role
    if last != "assistant":
        fix = "End with the answer to learn"
        raise UserError(f"the last message is of role {last}, not assistant", where=where, fix=fix)
    offered = {tool.name: tool for tool in conversation.tools}
    if len(offered) < len(conversation.tools):
        raise UserError("two tools have the same name", where=where, fix="Offer each tool once")
    for call in (call for message in conversation.messages for call in message.tool_calls):
        if call.name not in offered:
            fix = f"Offer it, or call one of: {', '.join(offered) or '(none offered)'}"
            raise UserError(f"call to {call.name}, which is not offered", where=where, fix=fix)
        if problems := validate_arguments(offered[call.name], call.arguments):
            fix = "Correct the call or the tool's parameters"
            raise UserError(f"call to {call.name}: {'; '.join(problems)}", where=where, fix=fix)


def _validated[R: BaseModel](kind: type[R], row: dict[str, Any], where: str) -> R:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        _raise_first(error, where)


def _raise_first(error: ValidationError, where: str) -> NoReturn:
    fault = error.errors()[0]
    key = ".".join(map(str, fault["loc"]))
    match fault["type"]:
        case "extra_forbidden":
            raise UserError(f"unknown key {key}", where=where, fix="Remove it, or correct its spelling") from None
        case "missing":
            raise UserError(f"missing key {key}", where=where, fix="Add it") from None
    message = fault["msg"].removeprefix("Value error, ")
    raise UserError(f"{key}: {message}" if key else message, where=where, fix="Mend the value") from None
