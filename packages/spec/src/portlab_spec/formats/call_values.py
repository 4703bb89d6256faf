"""What an argument of a call may be, the same for every spelling."""

import math
from collections.abc import Iterator
from typing import Any, NoReturn

from portlab_spec.conversation import ToolCall
from portlab_spec.formats.values import MAX_DEPTH


class CallSyntaxError(Exception):
    """Text that is no call, with the reason."""


def faults(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Path and reason of every part of a value that is outside what both forms can carry."""
    if depth > MAX_DEPTH:
        yield path, f"lists and objects are nested more than {MAX_DEPTH} deep"
    elif isinstance(value, str):
        if not is_unicode(value):
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


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: a Python string may hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    """A call that was read.

    Raises:
        CallSyntaxError: it holds what no call may.
    """
    for path, what in (*faults(name), *faults(arguments)):
        raise CallSyntaxError(f"{ascii(path)[1:-1]}: {what}")
    return ToolCall(name=name, arguments=arguments)


def no_number(text: str) -> NoReturn:
    """Refuse `NaN` and its like.

    Raises:
        CallSyntaxError: always.
    """
    raise CallSyntaxError(f"{text} is no number")


def finite(text: str) -> float:
    """A number with a fraction or an exponent.

    Raises:
        CallSyntaxError: it is beyond a double's range.
    """
    number = float(text)
    return number if math.isfinite(number) else no_number(text[:40])


def integer(text: str) -> int:
    """A whole number.

    Raises:
        CallSyntaxError: it is longer than Python converts (4300 digits, against quadratic time).
    """
    try:
        return int(text)
    except ValueError:
        raise CallSyntaxError("an integer has too many digits") from None
