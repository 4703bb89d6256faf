"""Right answers to a BFCL row and systematic departures from them, to put two checkers to the test."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from portlab_spec.conversation import Conversation, Tool, ToolCall
from portlab_spec.metrics import accepted_of

Calls = tuple[ToolCall, ...]


def answers(conversation: Conversation) -> Iterator[tuple[str, Calls]]:
    """(kind, calls) for a conversation with accepted answers: right ones first, then departures of every kind."""
    target = conversation.target.tool_calls
    yield "right", target
    yield from _of_number_and_order(target)
    tools = {tool.name: tool for tool in conversation.tools}
    for index, (call, expected) in enumerate(zip(target, accepted_of(conversation), strict=True)):
        (accepted,) = expected.values()
        for kind, changed in _of_one_call(call, tools, accepted):
            yield kind, (*target[:index], changed, *target[index + 1 :])


def _of_number_and_order(target: Calls) -> Iterator[tuple[str, Calls]]:
    yield "no call", ()
    yield "one call too many", (*target, target[-1])
    if len(target) > 1:
        yield "one call too few", target[:-1]
        yield "reordered", target[::-1]
        yield "one call twice", (target[0], *target[:-1])
        yield (
            "arguments swapped",
            (
                ToolCall(name=target[0].name, arguments=target[1].arguments),
                ToolCall(name=target[1].name, arguments=target[0].arguments),
                *target[2:],
            ),
        )


def _of_one_call(
    call: ToolCall, tools: Mapping[str, Tool], accepted: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, ToolCall]]:
    for name in (f"{call.name}_v2", call.name.swapcase(), *(other for other in tools if other != call.name)):
        yield "wrong name", ToolCall(name=name, arguments=call.arguments)
    yield "undeclared argument", _with(call, "zz_unknown", 1)
    properties: Any = tools[call.name].parameters.get("properties") or {}
    for name in properties:
        if name not in accepted:
            yield "declared argument without accepted values", _with(call, name, "x")
    for name, values in accepted.items():
        if name in call.arguments:
            rest = {key: value for key, value in call.arguments.items() if key != name}
            yield "argument left out", ToolCall(name=call.name, arguments=rest)
        for value in values:
            if not isinstance(value, Mapping) and not _holds_objects(value):
                yield "another accepted value", _with(call, name, value)
        yield "null", _with(call, name, None)
        yield "empty array", _with(call, name, [])
    for name, value in call.arguments.items():
        for kind, changed in _of_value(value):
            yield kind, _with(call, name, changed)


def _of_value(value: Any) -> Iterator[tuple[str, Any]]:
    """Departures of a value in its content, spelling and type, one level into arrays and objects."""
    yield "wrapped in an array", [value]
    match value:
        case bool():
            yield "wrong value", not value
            yield "wrong type", int(value)
            yield "wrong type", str(value).lower()
        case int() | float():
            yield "wrong value", value + 1
            yield "number type", int(value) if isinstance(value, float) else float(value)
            yield "wrong type", str(value)
            yield "wrong type", bool(value)
        case str():
            yield from _of_text(value)
        case list():
            yield "wrong value", [*value, *value[-1:], "x"]
            yield "wrong value", value[:-1]
            yield "items reordered", value[::-1]
            yield "wrong type", str(value)
            for index, item in enumerate(value[:3]):
                for kind, changed in _of_value(item):
                    yield f"item: {kind}", [*value[:index], changed, *value[index + 1 :]]
        case dict():
            yield "undeclared key", value | {"zz_unknown": 1}
            yield "wrong type", str(value)
            for key, item in value.items():
                yield "key left out", {k: v for k, v in value.items() if k != key}
                for kind, changed in _of_value(item):
                    yield f"key: {kind}", value | {key: changed}


def _of_text(text: str) -> Iterator[tuple[str, Any]]:
    yield "wrong value", f"{text} x"
    yield "wrong value", text[:-1]
    yield "wrong value", ""
    for spelt in (text.upper(), text.lower(), text.title(), f" {text} ", text.replace(" ", "")):
        yield "spelling", spelt
    for mark in ",./-_*^":
        yield "punctuation", f"{text}{mark}"
    yield "punctuation", text.replace(",", "").replace(".", "")
    yield "quotes", text.replace("'", '"')
    yield "wrong mark", f"{text}!"
    yield "wrong type", int(text) if text.isdecimal() else 5
    yield "wrong type", True


def _with(call: ToolCall, name: str, value: Any) -> ToolCall:
    return ToolCall(name=call.name, arguments={**call.arguments, name: value})


def _holds_objects(value: Any) -> bool:
    """Accepted arrays of objects hold alternatives inside, and are no value themselves."""
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)
