"""Writing argument values in the native dialects: unquoted keys, delimited strings, bare numbers and literals."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.formats.markers import Markers
from portlab_spec.formats.segments import Segment, plain

NAME = r"[a-zA-Z_][a-zA-Z0-9_.-]*"
MAX_DEPTH = 64  # objects and lists inside one another; deeper output is refused, so that no stack overflows


def fixed_point(value: float) -> str:
    """A float without exponent: LiteRT-LM's lexer takes a fraction or an exponent, not both."""
    text = format(Decimal(repr(value)), "f")
    return text if "." in text else text + ".0"


@dataclass(frozen=True)
class ValueWriter:
    """Writes JSON values as segments.

    Attributes:
        markers: the dialect's tokens.
        key: what a key must match; it is written bare.
        number: text of a finite float.
        null: text of a null, or "" where the dialect has none that its parsers read back.
    """

    markers: Markers
    key: re.Pattern[str]
    number: Callable[[float], str] = repr
    null: str = "null"

    def string(self, text: str, where: str, *, loss: bool = False) -> list[Segment]:
        """A string between its delimiters; refused if it holds a control token."""
        quote = Segment(self.markers.quote, loss=loss, control=True)
        body = plain(text, where, self.markers.refused, loss=loss)
        return [quote, body, quote] if text else [quote, quote]

    def strings(self, texts: list[str], where: str) -> list[Segment]:
        """A list of strings."""
        out = [Segment("[")]
        for n, text in enumerate(texts):
            out += [Segment(","), *self.string(text, where)] if n else self.string(text, where)
        return [*out, Segment("]")]

    def fields(self, value: dict[str, Any], where: str, *, loss: bool = False, depth: int = 0) -> list[Segment]:
        """An object: keys sorted without regard to case, as Jinja's `dictsort` does, at every level."""
        out = [Segment("{", loss=loss)]
        for n, key in enumerate(sorted(value, key=str.lower)):
            if not self.key.fullmatch(key):
                raise UserError(f"the key {key!r} cannot be written", where=where, fix="Use letters, digits, _ . -")
            out.append(plain(f"{',' if n else ''}{key}:", where, self.markers.refused, loss=loss))
            out += self.value(value[key], f"{where}.{key}", loss=loss, depth=depth)
        return [*out, Segment("}", loss=loss)]

    def value(self, value: Any, where: str, *, loss: bool = False, depth: int = 0) -> list[Segment]:
        """Any JSON value.

        Raises:
            UserError: not a finite JSON value, nested too deep, a key or string that cannot be written.
        """
        if isinstance(value, str):
            return self.string(value, where, loss=loss)
        if isinstance(value, dict | list | tuple) and depth >= MAX_DEPTH:
            raise UserError(f"nested deeper than {MAX_DEPTH} levels", where=where, fix="Flatten the value")
        if isinstance(value, dict):
            return self.fields(value, where, loss=loss, depth=depth + 1)
        if isinstance(value, list | tuple):
            out = [Segment("[", loss=loss)]
            for n, item in enumerate(value):
                out.append(Segment("," if n else "", loss=loss))
                out += self.value(item, f"{where}[{n}]", loss=loss, depth=depth + 1)
            return [*out, Segment("]", loss=loss)]
        return [Segment(self._scalar(value, where), loss=loss)]

    def _scalar(self, value: Any, where: str) -> str:
        if value is None:
            if not self.null:
                raise UserError(
                    "this revision of the format has no null", where=where, fix="Leave it out, or use a later revision"
                )
            return self.null
        if isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, float) and math.isfinite(value):
            return self.number(value)
        try:
            if isinstance(value, int):
                return str(value)
        except ValueError:  # beyond Python's limit on digits, which the parsers share
            raise UserError("the number has too many digits", where=where, fix="Write it as a string") from None
        raise UserError(f"{value!r} cannot be written as an argument", where=where, fix="Use finite JSON values")
