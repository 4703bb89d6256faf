"""Shapes that carry `messages`: they share one reader, and differ in the marks by which they are known."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from portlab_spec.conversation import Conversation, Message, Split, Tool
from portlab_spec.data.importers.context import Context, RowError
from portlab_spec.data.importers.literals import read_json
from portlab_spec.data.importers.normalise import conversation

_RECORD_KEYS = set(Conversation.model_fields)
_MESSAGE_KEYS = set(Message.model_fields)
_STORED_AS_TEXT = ("messages", "tools", "meta")


def is_chat(kind: str) -> Callable[[Mapping[str, Any]], bool]:
    """Does a row carry `messages` with the marks of this shape? At most one shape's marks are found."""
    return lambda row: "messages" in row and not _is_pair(row) and chat_kind(row) == kind


def chat_kind(row: Mapping[str, Any]) -> str:
    """The shape of a row that carries `messages`, by the first mark that decides."""
    messages, tools = row["messages"], row.get("tools")
    if isinstance(messages, str):
        return "record" if row.keys() >= {"id", "split", "source", "meta"} else "fitness-coach"
    if row.get("metadata") in ("train", "eval"):
        return "mobile-actions"
    if not isinstance(messages, list):
        return "messages"
    turns = [turn for turn in messages if isinstance(turn, Mapping)]
    listed = [turn["tool_calls"] for turn in turns if isinstance(turn.get("tool_calls"), list)]
    calls = [call for calls in listed for call in calls if isinstance(call, Mapping)]
    nested = [call["function"] for call in calls if isinstance(call.get("function"), Mapping)]
    if row.get("functions") is not None or any(
        turn.get("function_call") is not None or turn.get("role") == "function" for turn in turns
    ):
        return "openai-functions"
    if (
        row.get("parallel_tool_calls") is not None
        or any(turn.get("weight") is not None or turn.get("tool_call_id") is not None for turn in turns)
        or any(isinstance(function.get("arguments"), str) for function in nested)
    ):
        return "openai"
    if nested or isinstance(tools, str) or row.get("chat_template_kwargs") is not None:
        return "trl"
    if "id" in row and (_is_flat(calls) or _is_flat(tools) or _has_only_record_keys(row, turns)):
        return "record"
    return "trl" if tools else "messages"


def parse_record(row: Mapping[str, Any]) -> Conversation:
    """Our own record, as it is: an unknown key is an error. In Parquet, nested columns hold JSON text.

    Raises:
        RowError: a text column that is not JSON.
        ValidationError: not a record.
    """
    fields = _decoded(row)
    if isinstance(fields.get("tools"), list):
        # A tool that is none is left as it is: the validation of the whole record says best what is wrong.
        fields["tools"] = [_tool_of_text(json.dumps(entry)) or entry for entry in fields["tools"]]
    return Conversation.model_validate(fields)


def read_record(row: Mapping[str, Any], context: Context) -> Conversation:
    """A record, its tools lowered if somebody wrote them by hand in full JSON Schema."""
    fields = _decoded(row)
    record = parse_record(fields)
    lowered = context.read_tools(fields.get("tools") or [])
    if lowered == record.tools:
        return record
    context.mended("tools lowered")
    return record.model_copy(update={"tools": lowered})


def _decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(row)
    for key in _STORED_AS_TEXT:
        if isinstance(fields.get(key), str):
            try:
                fields[key] = read_json(fields[key])
            except ValueError as error:
                raise RowError(f"{key} is not JSON ({error})") from None
    return fields


@lru_cache(maxsize=4096)
def _tool_of_text(text: str) -> Tool | None:
    """The tool of a JSON text, None if it is none. Most rows offer tools that others have offered before."""
    try:
        return Tool.model_validate_json(text)
    except ValidationError:
        return None


def read_messages(row: Mapping[str, Any], context: Context) -> Conversation:
    """`messages` and, if the row offers any, `tools`; other keys go to `meta`."""
    return conversation(row, _required(row, "messages"), context)


def read_openai_functions(row: Mapping[str, Any], context: Context) -> Conversation:
    """The older OpenAI form: `functions` on offer, `function_call` in the answer, results of role `function`."""
    key = "tools" if row.get("functions") is None else "functions"
    if key == "functions" and row.get("tools") is not None:
        raise RowError("the row has both functions and tools", "Keep one of them")
    tools = context.tools_of(row, key)
    return conversation(row, _required(row, "messages"), context, tools=tools, used=("messages", "tools", "functions"))


def read_mobile_actions(row: Mapping[str, Any], context: Context) -> Conversation:
    """google/mobile-actions: `metadata` is `train` or `eval`, and the latter is the test split."""
    splits: dict[str, Split] = {"train": "train", "eval": "test"}
    metadata = row.get("metadata")
    if not isinstance(metadata, str) or metadata not in splits:
        raise RowError(f"metadata is {metadata!r}, neither train nor eval")
    messages = _required(row, "messages")
    return conversation({**row, "split": splits[metadata]}, messages, context, used=("messages", "tools", "metadata"))


def read_fitness_coach(row: Mapping[str, Any], context: Context) -> Conversation:
    """The fitness coach's two variants: `messages` and `tools` as JSON text, or one column per part."""
    if row.get("messages") is not None:
        return read_messages(row, context)
    messages: list[dict[str, Any]] = []
    if row.get("system"):
        messages.append({"role": "system", "content": row["system"]})
    messages.append({"role": "user", "content": _required(row, "user")})
    answer: dict[str, Any] = {"role": "assistant", "content": row.get("assistant")}
    used = ["system", "user", "tools", "function_name", "function_arguments"]
    if row.get("function_name"):
        # `assistant` repeats the call as text of some format then, so it is kept aside.
        call = {"name": row["function_name"], "arguments": row.get("function_arguments")}
        answer = {"role": "assistant", "tool_calls": [call]}
    else:
        used.append("assistant")
    return conversation(row, [*messages, answer], context, used=used)


def is_fitness_columns(row: Mapping[str, Any]) -> bool:
    """One column per part of the conversation?"""
    return "messages" not in row and row.keys() >= {"user", "function_name"}


def is_prompt_completion(row: Mapping[str, Any]) -> bool:
    """TRL's second form?"""
    return _is_pair(row)


def read_prompt_completion(row: Mapping[str, Any], context: Context) -> Conversation:
    """TRL's `prompt` and `completion`, as texts or as messages; only the completion is learned."""
    prompt, completion = (_required(row, key) for key in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        messages: list[Any] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    elif isinstance(prompt, list) and isinstance(completion, list):
        messages = [*map(_as_context, prompt), *completion]
    else:
        raise RowError("prompt and completion are neither both text nor both messages")
    return conversation(row, messages, context, used=("prompt", "completion", "tools"))


def _as_context(message: Any) -> Any:
    is_answer = isinstance(message, Mapping) and message.get("role") in ("assistant", "model")
    return {**message, "weight": 0} if is_answer else message


def _is_pair(row: Mapping[str, Any]) -> bool:
    return "prompt" in row and "completion" in row


def _is_flat(items: Any) -> bool:
    """Tools or calls in the record's form: nothing around name, description, parameters or arguments."""
    known = {"name", "description", "parameters", "arguments"}
    return (
        isinstance(items, list)
        and bool(items)
        and all(isinstance(item, Mapping) and "name" in item and item.keys() <= known for item in items)
    )


def _has_only_record_keys(row: Mapping[str, Any], turns: list[Mapping[str, Any]]) -> bool:
    roles = ("developer", "user", "assistant", "tool")
    return row.keys() <= _RECORD_KEYS and all(
        turn.keys() <= _MESSAGE_KEYS and turn.get("role") in roles for turn in turns
    )


def _required(row: Mapping[str, Any], key: str) -> Any:
    if row.get(key) is None:
        raise RowError(f"missing key {key}", "Add it")
    return row[key]
