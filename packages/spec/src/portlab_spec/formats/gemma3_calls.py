"""Calls as Gemma 3 writes them: JSON objects, or a Python list of calls. Writing and reading, no turns.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}     one call in JSON; a JSON list holds several
    [get_weather(city="Oslo"), get_time()]                      Python

Both forms are those of ai.google.dev/gemma/docs/capabilities/function-calling. Nothing is ever evaluated: JSON goes
through `json`, Python through a reader of our own.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from portlab_spec.conversation import ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats import gemma3_python as python
from portlab_spec.formats.call_json import call_of, check_call, read_json
from portlab_spec.formats.call_values import CallSyntaxError, is_unicode

Style = Literal["json", "python"]

_ARGUMENT_KEYS = ("parameters", "arguments")  # the documented one, and OpenAI's

# ------------------------------------------------------------------------------------------------ writing


def write_calls(calls: Sequence[ToolCall], style: Style, control_tokens: Sequence[str], where: str) -> str:
    """The text of calls, arguments in the order of the data.

    Raises:
        UserError: a value, a name or the name of an argument cannot be written; `where` and its path are named.
    """
    for i, call in enumerate(calls):
        _check_writable(call, style, control_tokens, f"{where}[{i}]")
    if style == "python":
        return f"[{', '.join(map(python.write_call, calls))}]"
    objects = [{"name": call.name, "parameters": call.arguments} for call in calls]
    return json.dumps(objects if len(objects) > 1 else objects[0], ensure_ascii=False)


def _check_writable(call: ToolCall, style: Style, control_tokens: Sequence[str], where: str) -> None:
    check_call(call, where, control_tokens)
    if not call.name or not is_unicode(call.name):
        raise UserError("a call needs a name", where=where, fix="Name the tool")
    if style == "json":
        return
    if not all(map(python.is_identifier, call.name.split("."))):
        what = f"the tool name {call.name!r} cannot be written as a Python call"
        raise UserError(what, where=where, fix="Rename the tool, or use the format gemma3-json")
    for key in call.arguments:
        if not python.is_identifier(key):
            what = f"the argument name {key!r} cannot be written in a Python call"
            raise UserError(what, where=f"{where}.arguments", fix="Rename it, or use the format gemma3-json")


# ------------------------------------------------------------------------------------------------ reading


def read_calls(text: str, style: Style) -> tuple[ToolCall, ...]:
    """The calls that a text, as a whole, is in the strict grammar of a style.

    Raises:
        CallSyntaxError: it is anything else.
    """
    if style == "python":
        return python.read_calls(text, loose=False)
    return _calls_of_json(read_json(text), ("parameters",))


def read_calls_leniently(text: str) -> tuple[ToolCall, ...] | None:
    """The calls that a text, as a whole, is in any spelling with one reading only; None if it is no call.

    Beyond the strict grammars of both styles: `arguments` for `parameters`; either quote, `True` or `true` and
    trailing commas in either style; escapes that Python would keep with a warning; a bare call without a list.
    """
    readers: list[Callable[[], tuple[ToolCall, ...]]] = [lambda: python.read_calls(text, loose=True)]
    if text.startswith(("[", "{")):
        # JSON first: where both read a string, an escaped slash means different things to them.
        readers = [
            lambda: _calls_of_json(read_json(text), _ARGUMENT_KEYS),
            lambda: _calls_of_json(python.read_value(text), _ARGUMENT_KEYS),
            *readers,
        ]
    for reader in readers:
        try:
            return reader()
        except CallSyntaxError:
            continue
    return None


def names_in(text: str) -> Iterator[str]:
    """Names in call position in what starts as a block of calls, however malformed the rest is.

    In Python that is a word before `(`; in JSON the value of `name` in an outermost object or beside
    `parameters` or `arguments`, since an argument may be called `name` too.
    """
    lexemes = list(python.lexemes(text))
    outermost = next((i for i, (_, mark) in enumerate(lexemes) if mark not in ("[", "(")), 0) + 1
    depth = 0
    for i, (kind, lexeme) in enumerate(lexemes):
        after = lexemes[i + 1 : i + 5]
        if kind == "mark":
            depth += (lexeme in "[{(") - (lexeme in ")}]")
        elif kind == "word" and after[:1] == [("mark", "(")]:
            yield lexeme
        elif _unquoted(lexeme) == "name" and after[:1] == [("mark", ":")] and after[1:]:
            beside = len(after) > 3 and _unquoted(after[3][1]) in _ARGUMENT_KEYS
            if (depth <= outermost or beside) and after[1][0] in ("string", "word"):
                yield _unquoted(after[1][1])


def _unquoted(lexeme: str) -> str:
    return lexeme[1:-1] if lexeme[0] in "\"'" else lexeme


def _calls_of_json(value: Any, argument_keys: Sequence[str]) -> tuple[ToolCall, ...]:
    objects = value if isinstance(value, list) else [value]
    if not objects:
        raise CallSyntaxError("a list without calls")
    return tuple(call_of(item, argument_keys) for item in objects)
