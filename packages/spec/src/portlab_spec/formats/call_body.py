"""The grammar between the call markers: `call:NAME{key:value,...}`.

Source: the lexer and parser grammar of LiteRT-LM's function-call parser, with the number forms of JSON. Strict is
that grammar. Lenient also reads what Gemma models are known to write instead, where one reading is possible:
`None`, `True` and `False`; values and keys in plain quotes; bare words as strings; a trailing comma; keys with
spaces; a missing `call` or colon; `=` for the colon of a key; parentheses for the outer braces. What could mean two
things (`007`, a key that stands twice) stays an error. Linear in the length of the input.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from portlab_spec.conversation import ToolCall
from portlab_spec.formats.values import MAX_DEPTH, NAME


class MalformedError(Exception):
    """Output that the grammar refuses, with the reason."""


@dataclass(frozen=True)
class Lexeme:
    """`kind` is mark, bare (text between marks), string (in the dialect's delimiters) or quoted (in plain quotes)."""

    kind: str
    text: str


LENIENT_KEY = re.compile(r"[^{}\[\]:,\"'<>\s](?:[^{}\[\]:,\"'<>]*[^{}\[\]:,\"'<>\s])?")

_NAME = re.compile(NAME)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LITERALS = {"true": True, "false": False, "null": None}
_PYTHON_LITERALS = {"True": True, "False": False, "None": None}
# Bare words that are no strings: numbers without a JSON form, or another language's null.
_NO_WORDS = {"nan", "inf", "infinity", "undefined", "nil", "none", "true", "false", "null"}
_STRICT = re.compile(r"(?P<mark>[{}\[\]:,])|(?P<bare>[^{}\[\]:,]+)")
_PARENTHESIS = re.compile(rf"\s*+(?:call\b\s*+)?:?\s*+{NAME}\s*+\(")
_LENIENT = re.compile(
    r"""(?P<mark>[{}\[\]:,])|(?P<quoted>"(?:[^"\\]|\\.)*+"|'[^'\\]*+')|(?P<bare>[^{}\[\]:,"']+)|(?P<stray>["'])""",
    re.DOTALL,
)


def parse_body(pieces: Sequence[tuple[str, bool]], key: re.Pattern[str], *, lenient: bool) -> ToolCall:
    """The call in the pieces of a body.

    Args:
        pieces: (text, is a string): plain text, and the contents of delimited strings.
        key: what a bare key must match under the strict grammar.
        lenient: read known deviations too.

    Raises:
        MalformedError: the body is not a call.
    """
    if lenient:
        pieces = _braced(pieces)
    return _Body(list(_lex(pieces, lenient)), key, lenient).call()


def name_of(pieces: Sequence[tuple[str, bool]]) -> str | None:
    """The name in call position of a body, however malformed the rest is."""
    head = pieces[0][0] if pieces and not pieces[0][1] else ""
    match = re.match(rf"\s*+(?:call(?![\w.-]))?+\s*+:?\s*+({NAME})", head)
    return match[1] if match else None


def _braced(pieces: Sequence[tuple[str, bool]]) -> Sequence[tuple[str, bool]]:
    """`call:f(a:1)` as `call:f{a:1}`; other bodies as they are."""
    if not pieces or pieces[0][1] or pieces[-1][1] or not pieces[-1][0].rstrip().endswith(")"):
        return pieces
    out = list(pieces)
    head = _PARENTHESIS.match(out[0][0])
    if head:
        out[0] = (head[0][:-1] + "{" + out[0][0][head.end() :], False)
        out[-1] = (out[-1][0].rstrip()[:-1] + "}", False)
    return out


def _lex(pieces: Sequence[tuple[str, bool]], lenient: bool) -> Iterator[Lexeme]:
    pattern = _LENIENT if lenient else _STRICT
    for text, is_string in pieces:
        if is_string:
            yield Lexeme("string", text)
            continue
        for match in pattern.finditer(text):
            kind, lexeme = match.lastgroup or "", match[0]
            if kind == "bare":
                lexeme = lexeme.strip()
            if kind == "stray":
                raise MalformedError("a quote is not closed")
            if lexeme:
                yield Lexeme(kind, lexeme)


class _Body:
    """Recursive descent over the lexemes; the depth is bounded."""

    def __init__(self, lexemes: Sequence[Lexeme], key: re.Pattern[str], lenient: bool) -> None:
        self._lexemes, self._key, self._lenient = lexemes, LENIENT_KEY if lenient else key, lenient
        self._at = 0

    def call(self) -> ToolCall:
        name = self._name()
        arguments = self._object(1) if self._is("{") else {}
        if self._peek() is not None:
            raise MalformedError("more text after the call")
        return ToolCall.model_construct(name=name, arguments=arguments)

    def _name(self) -> str:
        first = self._next()
        if first.kind == "bare" and first.text == "call" and self._is(":"):
            self._at += 1
            name = self._next()
        elif self._lenient and first == Lexeme("mark", ":"):
            name = self._next()
        elif self._lenient and first.kind == "bare" and first.text != "call":
            name = Lexeme("bare", re.sub(r"^call\s+", "", first.text))
        else:
            raise MalformedError(f"'call:' was expected, not {first.text!r}")
        if name.kind != "bare" or not _NAME.fullmatch(name.text):
            raise MalformedError(f"{name.text!r} is not a tool name")
        return name.text

    def _object(self, depth: int) -> dict[str, Any]:
        self._expect("{")
        out: dict[str, Any] = {}
        while not self._ends("}", bool(out)):
            key, value = self._field(depth)
            if key in out:
                raise MalformedError(f"the key {_short(key)} stands twice")
            out[key] = value
        return out

    def _field(self, depth: int) -> tuple[str, Any]:
        lexeme = self._next()
        text, equals, word = lexeme.text, "", ""
        if self._lenient and lexeme.kind == "bare" and "=" in text and not self._is(":"):
            text, equals, word = (part.strip() for part in text.partition("="))
        match lexeme.kind:
            case "quoted":
                text = _unquote(text)
            case "string" if self._lenient:
                pass
            case "bare" if self._key.fullmatch(text):
                pass
            case _:
                raise MalformedError(f"a key was expected, not {_short(text)}")
        if not equals:
            self._expect(":")
        return text, self._bare(word) if word else self._value(depth)

    def _array(self, depth: int) -> list[Any]:
        self._expect("[")
        out: list[Any] = []
        while not self._ends("]", bool(out)):
            out.append(self._value(depth))
        return out

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise MalformedError(f"nested deeper than {MAX_DEPTH} levels")
        if self._is("{"):
            return self._object(depth + 1)
        if self._is("["):
            return self._array(depth + 1)
        lexeme = self._next()
        match lexeme.kind:
            case "string":
                return lexeme.text
            case "quoted":
                return _unquote(lexeme.text)
            case "bare":
                return self._bare(lexeme.text)
        raise MalformedError(f"a value was expected, not {lexeme.text!r}")

    def _bare(self, text: str) -> Any:
        if text in _LITERALS:
            return _LITERALS[text]
        if _NUMBER.fullmatch(text):
            return _number(text)
        if self._lenient and text in _PYTHON_LITERALS:
            return _PYTHON_LITERALS[text]
        if self._lenient and text[0].isalpha() and text.lower() not in _NO_WORDS and not {*text} & {*"<>()="}:
            return text
        raise MalformedError(f"{_short(text)} is no value")

    def _ends(self, mark: str, has_items: bool) -> bool:
        """Whether the object or array ends here; otherwise its next item is at hand."""
        if has_items and not self._is(mark):
            self._expect(",")
            if self._is(mark) and not self._lenient:
                raise MalformedError("a comma stands last")
        if not self._is(mark):
            return False
        self._at += 1
        return True

    def _peek(self) -> Lexeme | None:
        return self._lexemes[self._at] if self._at < len(self._lexemes) else None

    def _is(self, mark: str) -> bool:
        lexeme = self._peek()
        return lexeme is not None and lexeme.kind == "mark" and lexeme.text == mark

    def _next(self) -> Lexeme:
        lexeme = self._peek()
        if lexeme is None:
            raise MalformedError("the call ends too early")
        self._at += 1
        return lexeme

    def _expect(self, mark: str) -> None:
        if not self._is(mark):
            lexeme = self._peek()
            raise MalformedError(f"{mark!r} was expected, not {_short(lexeme.text) if lexeme else 'the end'}")
        self._at += 1


def _number(text: str) -> int | float:
    try:
        value: int | float = json.loads(text)
    except ValueError:  # Python's limit on the digits of an integer
        _refuse_number()
    return value if math.isfinite(value) else _refuse_number()


def _refuse_number() -> NoReturn:
    raise MalformedError("a number is too large")


def _unquote(text: str) -> str:
    if text[0] == "'":
        return text[1:-1]
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        raise MalformedError(f"{_short(text)} is no string") from None


def _short(text: str) -> str:
    return repr(text if len(text) <= 24 else text[:24] + "…")
