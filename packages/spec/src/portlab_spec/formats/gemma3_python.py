"""The Python spelling of Gemma 3's calls: `[get_weather(city="Oslo"), clock.now()]`.

Nothing is ever evaluated. The reader takes calls with literal arguments and nothing else, in linear time.
"""

import json
import keyword
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from portlab_spec.conversation import ToolCall
from portlab_spec.formats.call_values import CallSyntaxError, checked_call, finite, integer
from portlab_spec.formats.values import MAX_DEPTH


def is_identifier(text: str) -> bool:
    """Whether Python reads `text` as a name and keeps it as it is: it folds compatibility characters (PEP 3131)."""
    return text.isidentifier() and not keyword.iskeyword(text) and unicodedata.normalize("NFKC", text) == text


def write_call(call: ToolCall) -> str:
    """A call with keyword arguments, in their order."""
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


# Possessive throughout: a quote that is never closed costs one pass, not one per character.
_LEXEME = re.compile(
    r"""(?:
        (?P<string>"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+" | '[^'\\\n]*+(?:\\.[^'\\\n]*+)*+')
      | (?P<mark>[\[\](){},:=])
      | (?P<word>[^\s\[\](){},:="']++)
      | (?P<quote>["'])
    )""",
    re.VERBOSE,
)
_SPACE = re.compile(r"\s*+")
_UNCLOSED = {quote: re.compile(rf"(?:[^{quote}\\\n]|\\.)*+") for quote in "\"'"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]+)?")
_LOOSE_NAME = re.compile(r"[^\W\d][\w.-]*")
_CONSTANTS = {"True": True, "False": False, "None": None}
_LOOSE_CONSTANTS = {**_CONSTANTS, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_SIMPLE = {"\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def lexemes(text: str) -> Iterator[tuple[str, str]]:
    """Kind (`string` with its quotes, `mark`, `word`, or a `quote` that nothing closes) and text of each lexeme."""
    at = 0
    unclosed = {'"': 0, "'": 0}
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches anything
        if at < unclosed.get(text[at : at + 1], 0):
            # Where a quote is never closed, those that it skipped as escaped are not either: do not look again.
            yield "quote", text[at]
            at += 1
            continue
        if not (match := _LEXEME.match(text, at)):
            return
        kind = match.lastgroup or ""
        yield kind, match[kind]
        at = match.end()
        if kind == "quote":
            unclosed[match[kind]] = _UNCLOSED[match[kind]].match(text, at).end()  # type: ignore[union-attr]


def read_calls(text: str, *, loose: bool) -> tuple[ToolCall, ...]:
    """The calls that a text, as a whole, is: a list of calls, or with `loose` a call alone.

    Raises:
        CallSyntaxError: it is anything else.
    """
    reader = _Reader(text, loose=loose)
    calls = [reader.call()] if loose and not text.startswith("[") else reader.calls()
    reader.end()
    return tuple(calls)


def read_value(text: str) -> Any:
    """The literal that a text, as a whole, is in Python's or JSON's spelling.

    Raises:
        CallSyntaxError: it is anything else.
    """
    reader = _Reader(text, loose=True)
    value = reader.value()
    reader.end()
    return value


class _Reader:
    """Recursive descent over calls with literal arguments.

    Strict is the part of Python that the writer uses, with either quote; `loose` adds JSON's constants, names
    with dashes, numbers such as `.5`, and escapes that Python would keep with a warning.
    """

    def __init__(self, text: str, *, loose: bool) -> None:
        self._lexemes = lexemes(text)
        self._loose = loose
        self._depth = 0
        self._next()

    def calls(self) -> list[ToolCall]:
        self._expect("[")
        calls = []
        while not self._have("]"):
            calls.append(self.call())
            self._comma_before("]")
        if not calls:
            raise CallSyntaxError("a list without calls")
        return calls

    def call(self) -> ToolCall:
        name = self._word("the name of a tool")
        if not (self._loose and _LOOSE_NAME.fullmatch(name)) and not all(map(is_identifier, name.split("."))):
            raise CallSyntaxError(f"{name[:40]!a} is no name of a function")
        self._expect("(")
        arguments: dict[str, Any] = {}
        while not self._have(")"):
            key = self._word("the name of an argument")
            if not is_identifier(key):
                raise CallSyntaxError(f"{key[:40]!a} is no name of an argument")
            self._expect("=")
            self._add(arguments, key)
            self._comma_before(")")
        return checked_call(name, arguments)

    def value(self) -> Any:
        kind, text = self._kind, self._text
        self._next()
        if kind == "string":
            return _string(text, self._loose)
        if kind == "word":
            return self._number_or_constant(text)
        if text not in ("[", "{"):
            raise CallSyntaxError(f"a value was expected, not {text[:40]!a}" if kind else "cut off before a value")
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:
            raise CallSyntaxError(f"lists and objects are nested more than {MAX_DEPTH} deep")
        value = self._list() if text == "[" else self._dict()
        self._depth -= 1
        return value

    def end(self) -> None:
        if self._kind:
            raise CallSyntaxError(f"{self._text[:40]!a} after the calls")

    def _list(self) -> list[Any]:
        out = []
        while not self._have("]"):
            out.append(self.value())
            self._comma_before("]")
        return out

    def _dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while not self._have("}"):
            if self._kind != "string":
                raise CallSyntaxError("the key of an object is a string")
            key = _string(self._text, self._loose)
            self._next()
            self._expect(":")
            self._add(out, key)
            self._comma_before("}")
        return out

    def _add(self, out: dict[str, Any], key: str) -> None:
        if key in out:
            raise CallSyntaxError(f"{key[:40]!a} stands twice")
        out[key] = self.value()

    def _number_or_constant(self, word: str) -> Any:
        constants = _LOOSE_CONSTANTS if self._loose else _CONSTANTS
        if word in constants:
            return constants[word]
        if match := (_LOOSE_NUMBER if self._loose else _NUMBER).fullmatch(word):
            return finite(word) if any(match.groups()) else integer(word)
        raise CallSyntaxError(f"{word[:40]!a} is no value")

    def _next(self) -> None:
        self._kind, self._text = next(self._lexemes, ("", ""))

    def _word(self, what: str) -> str:
        word = self._text
        if self._kind != "word":
            raise CallSyntaxError(f"{what} was expected, not {word[:40]!a}")
        self._next()
        return word

    def _have(self, mark: str) -> bool:
        if self._kind != "mark" or self._text != mark:
            return False
        self._next()
        return True

    def _expect(self, mark: str) -> None:
        if not self._have(mark):
            raise CallSyntaxError(f"{mark} was expected, not {self._text[:40]!a}")

    def _comma_before(self, closer: str) -> None:
        if not self._have(",") and (self._kind, self._text) != ("mark", closer):
            raise CallSyntaxError(f", or {closer} was expected, not {self._text[:40]!a}")


def _string(lexeme: str, loose: bool) -> str:
    def decode(match: re.Match[str]) -> str:
        octal, *codes, simple = match.groups()
        if octal:
            return chr(int(octal, 8))
        if simple is None:
            code = int(next(filter(None, codes)), 16)
            if code > 0x10FFFF:
                raise CallSyntaxError(f"{match[0]} is no character")
            return chr(code)
        if simple in _SIMPLE:
            return _SIMPLE[simple]
        # To JSON `\/` is a slash, to Python it is two characters; `\x`, `\u` and `\N` need more than stands here.
        if not loose or simple in "/xuUN":
            raise CallSyntaxError(f"the escape {match[0]!a} is unknown")
        return match[0]

    text = lexeme[1:-1]
    if "\\" not in text:
        return text
    # A pair of surrogate escapes is one character to JSON; a half is found when the call is checked.
    return _PAIR.sub(lambda m: m[0].encode("utf-16", "surrogatepass").decode("utf-16"), _ESCAPE.sub(decode, text))
