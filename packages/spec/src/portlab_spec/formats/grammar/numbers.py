"""Numbers as regular expressions: what every reader of the formats takes back, and ranges of integers.

Digits are bounded so that each number is a finite double: 308 of them before the point, 324 behind it. Nothing that
Python writes for a number below 1e308 in magnitude is longer.
"""

import math
from collections.abc import Mapping
from typing import Any

MAX_DIGITS = 308
INTEGER = rf"0|-?[1-9][0-9]{{0,{MAX_DIGITS - 1}}}"

_POINT = rf"-?(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})(\.[0-9]{{1,324}})?"
_EXPONENT = r"[eE](-[0-9]{1,3}|\+?([0-2]?[0-9]{1,2}|30[0-7]))"

# Fraction or exponent, not both: LiteRT-LM's lexer has no number with the two.
NUMBER_WITHOUT_BOTH = rf"{_POINT}|-?[0-9]{_EXPONENT}"
NUMBER = rf"{_POINT}|-?[0-9](\.[0-9]{{1,17}})?{_EXPONENT}"


def integer_pattern(schema: Mapping[str, Any]) -> str:
    """A regular expression of the integers that a schema's limits admit; "" if there are none."""
    lows = [math.ceil(schema["minimum"])] if _is_number(schema.get("minimum")) else []
    highs = [math.floor(schema["maximum"])] if _is_number(schema.get("maximum")) else []
    if _is_number(schema.get("exclusiveMinimum")):
        lows.append(math.floor(schema["exclusiveMinimum"]) + 1)
    if _is_number(schema.get("exclusiveMaximum")):
        highs.append(math.ceil(schema["exclusiveMaximum"]) - 1)
    if not lows and not highs:
        return INTEGER
    bound = 10**MAX_DIGITS - 1
    return integer_range(max([-bound, *lows]), min([bound, *highs]))


def integer_range(low: int, high: int) -> str:
    """A regular expression of the integers from `low` to `high`, both included; "" if there are none."""
    parts = []
    if low < 0 and low <= high:
        parts += [f"-{part}" for part in _natural(max(1, -high), -low)]
    if high >= 0 and low <= high:
        parts += _natural(max(0, low), high)
    return "|".join(parts)


def _natural(low: int, high: int) -> list[str]:
    """Alternatives for 0 <= low <= high, by length: the first, the last, and all that lie between."""
    first, last = str(low), str(high)
    if len(first) == len(last):
        return [_same_length(first, last)]
    out = [_same_length(first, "9" * len(first))]
    between = (len(first), len(last) - 2)  # digits behind the first one
    if between[0] <= between[1]:
        span = f"{between[0]},{between[1]}" if between[0] < between[1] else str(between[0])
        out.append(f"[1-9][0-9]{{{span}}}")
    return [*out, _same_length("1" + "0" * (len(last) - 1), last)]


def _same_length(low: str, high: str) -> str:
    """The numerals between two of equal length: a shared prefix, then three bands by the first digit that differs."""
    shared = next((i for i, (a, b) in enumerate(zip(low, high, strict=True)) if a != b), len(low))
    prefix, low, high = low[:shared], low[shared:], high[shared:]
    if not low:
        return prefix
    rest, first, last = len(low) - 1, int(low[0]), int(high[0])
    bands = []
    if low[1:].strip("0"):
        bands.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        bands.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        head = f"[{first}-{last}]" if first < last else str(first)
        bands.append(head + (f"[0-9]{{{rest}}}" if rest > 1 else "[0-9]" * rest))
    return prefix + (bands[0] if len(bands) == 1 else f"({'|'.join(bands)})")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
