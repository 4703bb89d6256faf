"""Calls as Gemma 3 writes them: JSON objects, or a Python list of calls. Writing and reading, no turns.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}     one call in JSON; a JSON list holds several
    [get_weather(city="Oslo"), get_time()]                      Python

Both forms are those of ai.google.dev/gemma/docs/capabilities/function-calling. Nothing is ever evaluated: JSON goes
through `json`, Python through the small reader below, whose time is linear in its input.
"""

import json
import keyword
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn

from portlab_spec.conversation import ToolCall
from portlab_spec.errors import UserError

Style = Literal["json", "python"]

MAX_DEPTH = 64
"""Deepest nesting of lists and objects in arguments, so that no reader's stack is at the mercy of its input."""


class CallSyntaxError(Exception):
    """Text that is no call, with the reason."""


# ------------------------------------------------------------------------------------------------ writing


def write_calls(calls: Sequence[ToolCall], style: Style, control_tokens: Sequence[str], where: str) -> str:
    """The text of calls, arguments in the order of the data.

    Raises:
        UserError: a value, a name or the name of an argument cannot be written; `where` and its path are named.
    """
    for i, call in enumerate(calls):
        _check_writable(call, style, control_tokens, f"{where}[{i}]")
    if style == "python":
        return f"[{', '.join(map(_python_call, calls))}]"
    objects = [{"name": call.name, "parameters": call.arguments} for call in calls]
    return json.dumps(objects if len(objects) > 1 else objects[0], ensure_ascii=False)


def faults(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Path and reason of every part of a value that is outside what both forms can carry."""
    if depth > MAX_DEPTH:
        yield path, f"lists and objects are nested more than {MAX_DEPTH} deep"
    elif isinstance(value, str):
        if not _is_unicode(value):
            yield path, "a string holds half of a surrogate pair, which no tokenizer can encode"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield path, f"{value!r} is no JSON number"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from faults(key, f"{path}.{key!a}", depth + 1)
            yield from faults(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from faults(item, f"{path}[{i}]", depth + 1)
    elif isinstance(value, int):
        try:
            str(value)
        except ValueError:  # sys.get_int_max_str_digits(), which readers have too
            yield path, "an integer has too many digits"


def _check_writable(call: ToolCall, style: Style, control_tokens: Sequence[str], where: str) -> None:
    for path, what in faults(call.arguments):
        raise UserError(what, where=f"{where}.arguments{path}".encode(errors="replace").decode(), fix="Mend the data")
    for path, text in (("name", call.name), *_strings(call.arguments, "arguments")):
        for token in control_tokens:
            if token in text:
                what = f"the text holds the control token {token!r}, which the format cannot escape"
                raise UserError(what, where=f"{where}.{path}", fix="Remove or rewrite it in the data")
    if not call.name or not _is_unicode(call.name):
        raise UserError("a call needs a name", where=where, fix="Name the tool")
    if style == "json":
        return
    if not all(map(_is_identifier, call.name.split("."))):
        what = f"the tool name {call.name!r} cannot be written as a Python call"
        raise UserError(what, where=where, fix="Rename the tool, or use the format gemma3-json")
    for key in call.arguments:
        if not _is_identifier(key):
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


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_identifier(text: str) -> bool:
    """Whether Python reads `text` as a name and keeps it as it is: it folds compatibility characters (PEP 3131)."""
    return text.isidentifier() and not keyword.iskeyword(text) and unicodedata.normalize("NFKC", text) == text


def _python_call(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{key}={_literal(value)}' for key, value in call.arguments.items())})"


def _literal(value: Any) -> str:
    """A Python literal; strings in JSON's spelling, every escape of which Python reads alike."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(value)


# ------------------------------------------------------------------------------------------------ reading


def read_calls(text: str, style: Style) -> tuple[ToolCall, ...]:
    """The calls that a text, as a whole, is in the strict grammar of a style.

    Raises:
        CallSyntaxError: it is anything else.
    """
    if style == "python":
        return _whole(_Reader(text).call_list, text)
    return _calls_of_json(_json(text), ("parameters",))


def read_calls_leniently(text: str, style: Style) -> tuple[ToolCall, ...] | None:
    """The calls that a bracketed block, or a bare `f(a=1)`, is in any spelling that has one reading only.

    Beyond the strict grammar: the other style; `arguments` for `parameters`; single quotes, `True`/`true` and
    trailing commas in either style; unknown escapes, kept as written. None if the text is no call.
    """
    readers = {
        "json": lambda: _calls_of_json(_json(text), ("parameters", "arguments")),
        "loose json": lambda: _calls_of_json(_whole(_Reader(text, loose=True).value, text), ("parameters", "arguments")),
        "python": lambda: _whole(_Reader(text, loose=True).call_list, text),
        "one call": lambda: (_whole(_Reader(text, loose=True).call, text),),
    }
    order = ("json", "loose json", "python") if text[:1] in ("[", "{") else ("one call",)
    for reader in order:
        try:
            return readers[reader]()
        except CallSyntaxError:
            continue
    return None


def names_in(text: str) -> Iterator[str]:
    """Names in call position in what starts as a block of calls, however malformed the rest is.

    In Python that is a word before `(`; in JSON the value of `name` in an outermost object or beside
    `parameters` or `arguments`, since an argument may be called `name` too.
    """
    lexemes = list(_lexemes(text))
    opened = next((i for i, (_, mark) in enumerate(lexemes) if mark not in ("[", "(")), 0) + 1
    depth = 0
    for i, (kind, lexeme) in enumerate(lexemes):
        following = [t for _, t in lexemes[i + 1 : i + 5]]
        if kind == "mark":
            depth += (lexeme in "[{(") - (lexeme in ")}]")
        elif kind == "word" and following[:1] == ["("]:
            yield lexeme
        elif lexeme.strip("\"'") == "name" and following[:1] == [":"] and len(following) > 1:
            beside = len(following) > 3 and following[3].strip("\"'") in ("parameters", "arguments")
            if (depth <= opened or beside) and following[1] not in tuple("[]{}(),:="):
                yield following[1].strip("\"'")


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
        calls.append(_call(name, arguments))
    return tuple(calls)


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    for path, what in (*faults(name), *faults(arguments)):
        raise CallSyntaxError(f"{ascii(path)[1:-1]}: {what}")
    return ToolCall(name=name, arguments=arguments)


def _json(text: str) -> Any:
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_float, parse_int=_integer
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


def _no_number(text: str) -> NoReturn:
    raise CallSyntaxError(f"{text} is no number")


def _float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise CallSyntaxError("an integer has too many digits") from None


# Possessive throughout: a quote or backslash that is never closed costs one pass, not one per character.
_LEXEME = re.compile(
    r"""\s*+(?:
        (?P<string>"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+" | '[^'\\\n]*+(?:\\.[^'\\\n]*+)*+')
      | (?P<mark>[\[\](){},:=])
      | (?P<word>[^\s\[\](){},:="']++)
      | (?P<quote>["'])
    )""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]+)?")
_LOOSE_NAME = re.compile(r"[^\W\d][\w.-]*")
_WORDS = {"True": True, "False": False, "None": None}
_LOOSE_WORDS = {**_WORDS, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_SIMPLE = {"\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def _lexemes(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while match := _LEXEME.match(text, at):
        kind = match.lastgroup or ""
        yield kind, match[kind]
        at = match.end()


def _whole[T](read: Any, text: str) -> T:
    raise NotImplementedError


class _Reader:
    """Recursive descent over calls with literal arguments; deeper than `MAX_DEPTH` is an error.

    Strict is the part of Python that the writer uses, with either quote; `loose` adds JSON's constants, names
    with dashes, numbers such as `.5`, and escapes that Python would keep with a warning.
    """

    def __init__(self, text: str, *, loose: bool = False) -> None:
        self._lexemes = _lexemes(text)
        self._loose = loose
        self._depth = 0
        self._next()
