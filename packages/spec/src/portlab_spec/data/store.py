"""Conversations to files and back: our own record in JSON Lines or Parquet, and the chat forms of other trainers.

In Parquet, `messages`, `tools` and `meta` are columns of JSON text: Arrow has no empty structs, and it gives every
struct the keys of all others. Reading back what was written gives equal records, and `load_dataset` reads it too.
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import batched
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from portlab_spec.conversation import Conversation, Message
from portlab_spec.data.importers.chats import parse_record
from portlab_spec.data.importers.context import RowError
from portlab_spec.data.importers.normalise import describe
from portlab_spec.data.sources import read_rows, require_pyarrow
from portlab_spec.errors import UserError
from portlab_spec.files import new_file

_ROWS_PER_GROUP = 1024
_COLUMNS = ("id", "split", "source", "tools", "messages", "meta")
_NESTED = ("tools", "messages", "meta")


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> int:
    """Write records, one after the other, and return how many; the file appears whole or not at all.

    Args:
        path: its suffix chooses the form: `.jsonl`, `.jsonl.gz` or `.parquet`. An existing file is replaced.
        conversations: read once; they need not fit in memory together.

    Raises:
        UserError: another suffix, pyarrow missing, or a number that JSON cannot hold.
    """
    write = {".jsonl": _write_lines, ".jsonl.gz": _write_gzip, ".parquet": _write_parquet}.get(_form(path))
    if write is None:
        raise UserError("unknown kind of file", where=str(path), fix="End the name in .jsonl, .jsonl.gz or .parquet")
    if write is _write_parquet:
        require_pyarrow(str(path))
    with new_file(path) as stream:
        return write(stream, (_record(conversation) for conversation in conversations))


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The records that `write_conversations` wrote, in order.

    Raises:
        UserError: the file cannot be read, or a row is not a record; names the row.
    """
    for row in read_rows(path):
        try:
            if row.error:
                raise row.error
            yield parse_record(row.value)
        except RowError as error:
            raise UserError(error.what, where=row.where, fix=error.fix) from None
        except ValidationError as error:
            raise UserError(describe(error), where=row.where, fix="Write the file again") from None


def to_openai(conversation: Conversation) -> dict[str, Any]:
    """The row of OpenAI's chat fine-tuning: `messages`, and `tools` if there are any.

    Arguments and object results are JSON text, results name their call by id, the developer is `system`, and messages
    that are context only have `weight` 0.
    """
    messages: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for message in conversation.messages:
        row = _base(message, developer_role="system")
        if message.tool_calls:
            unanswered = [f"call_{len(messages)}_{i}" for i in range(len(message.tool_calls))]
            row["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _json(call.arguments)},
                }
                for call_id, call in zip(unanswered, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            del row["name"]
            if unanswered:
                row["tool_call_id"] = unanswered.pop(0)
            if message.response is not None:
                row["content"] = _json(message.response)
        messages.append(row)
    return _with_tools(conversation, messages)


def to_trl(conversation: Conversation, *, developer_role: str = "developer") -> dict[str, Any]:
    """The row of TRL's conversational form: `messages`, and `tools` if there are any.

    Arguments are objects; an object result is the content `{"name", "response"}` that Gemma's templates take. TRL has
    no mark for messages that are context only, so `weight` 0 stands beside them as in OpenAI's form. A `datasets`
    column needs the two lists as JSON text.

    Args:
        conversation: the record.
        developer_role: what the chat template calls it; `system` for Gemma 3.
    """
    messages = []
    for message in conversation.messages:
        row = _base(message, developer_role=developer_role)
        if message.tool_calls:
            row["tool_calls"] = [{"type": "function", "function": call.model_dump()} for call in message.tool_calls]
        if message.response is not None:
            row["content"] = {"name": message.name, "response": message.response}
        messages.append(row)
    return _with_tools(conversation, messages)


def _base(message: Message, *, developer_role: str) -> dict[str, Any]:
    row: dict[str, Any] = {"role": developer_role if message.role == "developer" else message.role}
    if message.content is not None:
        row["content"] = message.content
    if message.name is not None:
        row["name"] = message.name
    if message.reasoning is not None:
        row["reasoning_content"] = message.reasoning
    if not message.supervised:
        row["weight"] = 0
    return row


def _with_tools(conversation: Conversation, messages: list[dict[str, Any]]) -> dict[str, Any]:
    tools = [tool.to_openai() for tool in conversation.tools]
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def _record(conversation: Conversation) -> dict[str, Any]:
    """The record as plain values; what a message or tool leaves at its default is left out."""
    plain = conversation.model_dump(include={"id", "split", "source", "meta"})
    plain["tools"] = [tool.model_dump() for tool in conversation.tools]
    plain["messages"] = [message.model_dump(exclude_defaults=True) for message in conversation.messages]
    return {key: plain[key] for key in _COLUMNS}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _record_json(record: dict[str, Any], value: Any) -> str:
    try:
        return _json(value)
    except ValueError as error:
        raise UserError(f"not JSON ({error})", where=record["id"], fix="Use finite numbers") from None


def _write_lines(stream: BinaryIO | gzip.GzipFile, records: Iterator[dict[str, Any]]) -> int:
    count = 0
    for record in records:
        stream.write(_record_json(record, record).encode() + b"\n")
        count += 1
    return count


def _write_gzip(stream: BinaryIO, records: Iterator[dict[str, Any]]) -> int:
    # No name and no time inside: the same records give the same bytes.
    with gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as packed:
        return _write_lines(packed, records)


def _write_parquet(stream: BinaryIO, records: Iterator[dict[str, Any]]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in _COLUMNS])
    count = 0
    with pq.ParquetWriter(stream, schema, compression="zstd") as writer:
        for group in batched(records, _ROWS_PER_GROUP):
            rows = [r | {key: _record_json(r, r[key]) for key in _NESTED} for r in group]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


def _form(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
