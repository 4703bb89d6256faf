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
from portlab_spec.formats.gemma3_values import (
    CallSyntaxError,
    checked_call,
    faults,
    finite,
    integer,
    is_unicode,
    no_number,
)
from portlab_spec.formats.values import MAX_DEPTH

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
    for path, what in faults(call.arguments):
        raise UserError(what, where=f"{where}.arguments{path}".encode(errors="replace").decode(), fix="Mend the data")
    for path, text in (("name", call.name), *_strings(call.arguments, "arguments")):
        for token in control_tokens:
            if token in text:
                what = f"the text holds the control token {token!r}, which the format cannot escape"
                raise UserError(what, where=f"{where}.{path}", fix="Remove or rewrite it in the data")
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


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield path, key
            yield from _strings(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _strings(item, f"{path}[{i}]")


# ------------------------------------------------------------------------------------------------ reading


def read_calls(text: str, style: Style) -> tuple[ToolCall, ...]:
    """The calls that a text, as a whole, is in the strict grammar of a style.

    Raises:
        CallSyntaxError: it is anything else.
    """
    if style == "python":
        return python.read_calls(text, loose=False)
    return _calls_of_json(_json(text), ("parameters",))


def read_calls_leniently(text: str) -> tuple[ToolCall, ...] | None:
    """The calls that a text, as a whole, is in any spelling with one reading only; None if it is no call.

    Beyond the strict grammars of both styles: `arguments` for `parameters`; either quote, `True` or `true` and
    trailing commas in either style; escapes that Python would keep with a warning; a bare call without a list.
    """
    readers: list[Callable[[], tuple[ToolCall, ...]]] = [lambda: python.read_calls(text, loose=True)]
    if text.startswith(("[", "{")):
        # JSON first: where both read a string, an escaped slash means different things to them.
        readers = [
            lambda: _calls_of_json(_json(text), _ARGUMENT_KEYS),
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
    calls = []
    for item in objects:
        keys = set(item) if isinstance(item, dict) else set()
        if not any(keys == {"name", key} for key in argument_keys):
            raise CallSyntaxError(f"a call is an object with the keys name and {argument_keys[0]}")
        name, arguments = item["name"], next(item[key] for key in argument_keys if key in item)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise CallSyntaxError("a call's name is text and its parameters are an object")
        calls.append(checked_call(name, arguments))
    return tuple(calls)


def _json(text: str) -> Any:
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=no_number, parse_float=finite, parse_int=integer
        )
    except RecursionError:
        raise CallSyntaxError(f"lists and objects are nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise CallSyntaxError(f"no JSON at character {error.pos}: {error.msg}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise CallSyntaxError("a key stands twice in one object")
    return out
