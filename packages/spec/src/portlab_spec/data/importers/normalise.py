"""The one place where foreign messages become `Message` records.

Every importer hands its messages over in one of the usual chat forms; roles, calls, results, content parts, nulls,
weights and reasoning are brought into the record's form here. What was mended is counted by name in the context.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from portlab_spec.conversation import Conversation, Message, Role, Tool, ToolCall
from portlab_spec.data.importers.context import Context, RowError
from portlab_spec.data.importers.literals import read_json
from portlab_spec.data.importers.results import PendingCalls, Result

ROLES: dict[str, Role] = {
    "developer": "developer",
    "system": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_REASONING = ("reasoning", "reasoning_content", "thinking")
_KNOWN_KEYS = {
    "role", "content", "name", "tool_calls", "function_call", "tool_call_id", "tool_responses", "weight", "response",
    "supervised", *_REASONING,
}  # fmt: skip


def conversation(
    row: Mapping[str, Any],
    messages: Any,
    context: Context,
    *,
    tools: Sequence[Tool] | None = None,
    used: Sequence[str] = ("messages", "tools"),
) -> Conversation:
    """The record of a row.

    Args:
        row: its `id` and `split` are taken if it has them; keys outside `used` go to `meta`.
        messages: a list of messages, or that list as JSON text.
        context: of the row.
        tools: on offer; None for those of the row or, if it has no `tools`, the shared ones.
        used: keys of the row that the caller has dealt with.

    Raises:
        RowError: the row cannot be used.
    """
    offered = tuple(context.tools_of(row) if tools is None else tools)
    meta = {
        key: value for key, value in row.items() if value is not None and key not in used and key not in ("id", "split")
    }
    return Conversation(
        id=context.id_of(row),
        tools=offered,
        messages=tuple(read_messages(messages, offered, context)),
        split=context.split_of(row),
        source=context.source,
        meta=meta,
    )


def read_messages(messages: Any, tools: Sequence[Tool], context: Context) -> list[Message]:
    """Messages in the record's form.

    Args:
        messages: a list of objects, or that list as JSON text.
        tools: on offer; their parameters decide which null arguments are real.
        context: of the row.

    Raises:
        RowError: names the message, as `messages.2`.
    """
    if isinstance(messages, str):
        messages = _json(messages, "messages")
    if not isinstance(messages, list):
        raise RowError("messages is not a list")
    by_name = {tool.name: tool for tool in tools}
    read: list[Message] = []
    pending = PendingCalls(context)
    for number, raw in enumerate(messages):
        try:
            if not isinstance(raw, Mapping):
                raise RowError("not an object")
            message = _present(raw)
            if message["role"] == "tool":
                pending.answer(_results(message))
                continue
            read += pending.settle()
            for item in _assistant(message, by_name, context, pending) if message["role"] == "assistant" else [message]:
                read += pending.settle()
                read.append(_message(item))
        except (RowError, ValidationError) as error:
            raise _located(error, f"messages.{number}") from None
    return read + pending.settle()


def arguments_object(value: Any, tool: Tool | None, context: Context) -> dict[str, Any]:
    """The arguments of a call as an object, without the nulls that Arrow adds.

    Args:
        value: an object, or one as JSON text; None and blank text are no arguments.
        tool: that is called, None if it is not offered.
        context: of the row.

    Raises:
        RowError: neither.
    """
    if isinstance(value, str):
        if value.strip():
            value = _json(value, "arguments")
        else:
            context.mended("blank arguments read as none")
            value = None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError("arguments is not an object")
    return dict(value) if tool is None else _without_foreign_nulls(value, tool.parameters, context)


def _present(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The message without null keys, its role in the record's terms."""
    message = {key: value for key, value in raw.items() if value is not None}
    if "role" not in message:
        raise RowError("missing key role", "Add it")
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"unknown role {role!r}", f"Use one of: {', '.join(ROLES)}")
    message["role"] = ROLES[role]
    if unknown := message.keys() - _KNOWN_KEYS:
        raise RowError(f"unknown key {min(unknown)}", "Remove it, or correct its spelling")
    return message


def _message(item: Mapping[str, Any]) -> Message:
    """A developer, user or assistant message from its prepared keys."""
    fields: dict[str, Any] = {"role": item["role"]}
    if "content" in item:
        fields["content"] = text_of(item["content"])
    if calls := item.get("tool_calls"):
        fields["tool_calls"] = calls
    if "name" in item:
        fields["name"] = item["name"]
    if item["role"] == "assistant":
        if reasoning := next((item[key] for key in _REASONING if item.get(key)), None):
            fields["reasoning"] = reasoning
        if not _supervised(item):
            fields["supervised"] = False
    elif any(item.get(key) for key in ("tool_calls", "function_call", "tool_responses")):
        raise RowError(f"a {item['role']} message cannot hold calls")
    return Message(**fields)


def _supervised(item: Mapping[str, Any]) -> bool:
    weight, supervised = item.get("weight", 1), item.get("supervised", True)
    if weight not in (0, 1):
        raise RowError(f"weight is {weight!r}, and only 0 and 1 are possible", "Use 0 or 1")
    return bool(weight) and bool(supervised)


def _assistant(
    message: dict[str, Any], tools: Mapping[str, Tool], context: Context, pending: PendingCalls
) -> Iterator[dict[str, Any]]:
    """The one or more assistant messages that an assistant message stands for."""
    raw_calls = message.pop("tool_calls", None) or []
    if not isinstance(raw_calls, list):
        raise RowError("tool_calls is not a list")
    if old := message.pop("function_call", None):
        raw_calls = [*raw_calls, old]
    results = message.pop("tool_responses", None)
    if not raw_calls:
        if results:
            raise RowError("tool_responses without tool_calls", "Add the calls that they answer")
        yield message
        return

    calls, ids = zip(*(_call(raw, tools, context) for raw in raw_calls), strict=True)
    text = text_of(message.pop("content", ""))
    answer = text if results else ""  # text beside calls and their results is what follows the results
    if text.strip() and not results:
        if context.calls_with_text == "reject":
            raise RowError(
                "the assistant message holds text and calls", "Choose calls_with_text=drop or split, or split it"
            )
        context.mended(f"text beside calls: {context.calls_with_text}")
        if context.calls_with_text == "split":
            yield message | {"content": text}
            message = {key: value for key, value in message.items() if key not in _REASONING}
    yield message | {"tool_calls": calls}
    pending.expect(calls, ids)
    if results:
        context.mended("tool_responses unfolded")
        pending.answer(_results({"content": results}))
        if answer.strip():
            yield {key: value for key, value in message.items() if key not in _REASONING} | {"content": answer}


def _call(raw: Any, tools: Mapping[str, Tool], context: Context) -> tuple[ToolCall, str | None]:
    """A call and its id, from `{"function": {...}}` or the flat form."""
    if not isinstance(raw, Mapping):
        raise RowError("a call is not an object")
    if raw.get("type") not in (None, "function"):
        raise RowError(f"a call of type {raw['type']!r}", "Only calls of functions can be used")
    function = raw.get("function", raw)
    if not isinstance(function, Mapping):
        raise RowError("function of a call is not an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError("a call has no name", "Add it")
    call_id = raw.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise RowError("the id of a call is not text")
    arguments = arguments_object(function.get("arguments"), tools.get(name), context)
    return ToolCall(name=name, arguments=arguments), call_id


def _results(message: Mapping[str, Any]) -> Iterator[Result]:
    """The results in a tool message: text, parts, an object, `{name, response}` or a list of these."""
    content, name, call_id = message.get("content"), message.get("name"), message.get("tool_call_id")
    if "response" in message:
        if content is not None:
            raise RowError("a tool message holds content and response", "Give one of them")
        yield Result(name, call_id, response=message["response"])
    elif isinstance(content, Mapping) and _is_named(content):
        yield _named_result(content, name, call_id)
    elif isinstance(content, list) and content and all(map(_is_named, content)):
        yield from (_named_result(item, name, call_id) for item in content)
    elif isinstance(content, Mapping):
        yield Result(name, call_id, response=dict(content))
    elif content is None:
        raise RowError("a tool message needs content")
    else:
        yield Result(name, call_id, content=_result_text(content))


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and {key for key in value if value[key] is not None} == {"name", "response"}


def _named_result(item: Mapping[str, Any], name: str | None, call_id: str | None) -> Result:
    if name not in (None, item["name"]):
        raise RowError(f"the result is named {name} outside and {item['name']} inside")
    response = item["response"]
    if isinstance(response, Mapping):
        return Result(item["name"], call_id, response=dict(response))
    return Result(item["name"], call_id, content=_result_text(response))


def _result_text(value: Any) -> str:
    """A result that is no object, as text: JSON, unless it is text or text parts already."""
    if isinstance(value, str) or _is_parts(value):
        return text_of(value)
    return json.dumps(value, ensure_ascii=False)


def _is_parts(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(isinstance(p, Mapping) and "type" in p for p in content)


def text_of(content: Any) -> str:
    """Text, or the text of content parts, joined without a separator as the Gemma templates do.

    Raises:
        RowError: something else than text is in it.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("content is neither text nor a list of parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise RowError(f"content holds a part of type {kind!r}", "Only text can be used: remove the part")
        texts.append(text)
    return "".join(texts)


def _without_foreign_nulls(value: Mapping[str, Any], schema: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """An object without the nulls that its schema does not allow.

    A column of structs has one set of keys in Arrow, so each call holds the arguments of all tools, as nulls.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or schema.get("additionalProperties"):
        return dict(value)
    kept = {}
    for key, item in value.items():
        if item is None:
            if key not in properties:
                context.mended("null argument of another tool dropped")
                continue
            if not _takes_null(properties[key]):
                context.mended("null argument dropped")
                continue
        kept[key] = _nested(item, properties.get(key), context)
    return kept


def _nested(value: Any, schema: Any, context: Context) -> Any:
    if isinstance(schema, Mapping):
        if isinstance(value, Mapping):
            return _without_foreign_nulls(value, schema, context)
        if isinstance(value, list):
            return [_nested(item, schema.get("items"), context) for item in value]
    return value


def _takes_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return True
    kind = schema.get("type")
    return bool(schema.get("nullable")) or kind is None or kind == "null" or (isinstance(kind, list) and "null" in kind)


def _json(text: str, what: str) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        raise RowError(f"{what} is not JSON ({error})") from None


def _located(error: RowError | ValidationError, where: str) -> RowError:
    if isinstance(error, RowError):
        return RowError(f"{where}: {error.what}", error.fix)
    return RowError(f"{where}: {describe(error)}")


def describe(error: ValidationError) -> str:
    """The first fault that pydantic found, with the key that holds it."""
    fault = error.errors()[0]
    key = ".".join(map(str, fault["loc"]))
    message = fault["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message
