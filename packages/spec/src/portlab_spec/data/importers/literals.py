"""Strict readers of the value texts that data sets carry: JSON, Python literals, Python-style call lists.

Nothing here evaluates code. Python literals are read from the syntax tree, node by node, and only nodes that have a
JSON value are accepted; `ast.literal_eval` would be as safe, but it lets bytes, sets and complex numbers through and
refuses the `true` and `null` that such texts mix in.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

_OPEN, _CLOSE = "([{", ")]}"
_CALL_NAME = re.compile(r"\s*([A-Za-z_][^()\[\]{},='\"]*?)\s*\(")
_KEYWORD = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*=(?!=)")
_NAMES = {"true": True, "false": False, "null": None}


def read_json(text: str) -> Any:
    """The value of a JSON text; JSON readers differ on repeated keys, NaN and overflow, so these are refused.

    Raises:
        ValueError: not JSON in this sense.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json_objects(text: str) -> list[dict[str, Any]]:
    """JSON objects written one after the other, or in a list; text around them ends the reading.

    Raises:
        ValueError: what starts like JSON is not.
    """
    found: list[dict[str, Any]] = []
    at = 0
    while (start := re.compile(r"[\s,]*(?=[\[{])").match(text, at)) is not None:
        value, at = _DECODER.raw_decode(text, start.end())
        found += value if isinstance(value, list) else [value]
    if not all(isinstance(value, dict) for value in found):
        raise ValueError("a list of objects holds something else")
    return found


def read_literal(text: str) -> Any:
    """The value of a JSON text or of a Python literal that has a JSON equivalent (tuples are arrays).

    Raises:
        ValueError: neither.
    """
    try:
        return read_json(text)
    except ValueError:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unknown escape such as "\d" keeps its backslash
            return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"neither JSON nor a Python literal ({error})") from None


def read_call_list(text: str) -> list[dict[str, Any]]:
    """Calls written as `[f(a=1), g.h(b="x")]`, as objects with `name` and `arguments`.

    Names may hold spaces and argument names may be Python keywords, as in the ToolACE data.

    Raises:
        ValueError: not a list of such calls, an argument without a name, or one given twice.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError("a list of calls stands in square brackets")
    return [_read_call(item) for item in _split(text[1:-1])]


def _read_call(text: str) -> dict[str, Any]:
    head = _CALL_NAME.match(text)
    if head is None or not text.rstrip().endswith(")"):
        raise ValueError(f"{text.strip()[:60]!r} is not a call")
    arguments: dict[str, Any] = {}
    for item in _split(text.rstrip()[head.end() : -1]):
        keyword = _KEYWORD.match(item)
        if keyword is None:
            raise ValueError(f"an argument of {head[1]} has no name")
        if keyword[1] in arguments:
            raise ValueError(f"{head[1]} gets the argument {keyword[1]} twice")
        arguments[keyword[1]] = read_literal(item[keyword.end() :])
    return {"name": head[1], "arguments": arguments}


def _split(text: str) -> Iterator[str]:
    """The parts between commas that stand outside quotes and brackets; no parts in a blank text."""
    if not text.strip():
        return
    start, depth, quote, at = 0, 0, "", 0
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
            if depth < 0:
                raise ValueError("brackets do not match")
        elif char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
        at += 1
    if quote or depth:
        raise ValueError("a quote or a bracket is not closed")
    yield text[start:]


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | None):
            return node.value
        case ast.Constant(value=float(number)):
            return _finite(number)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            if not isinstance(number, bool):
                return -_finite(number)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = []
            for key, value in zip(keys, values, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    raise ValueError("a key is not a string")
                pairs.append((key.value, _value(value)))
            return _unique_keys(pairs)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
    raise ValueError(f"{type(node).__name__} has no JSON value")


def _finite[N: (int, float)](number: N) -> N:
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; JSON readers differ on which of two equal keys wins, so neither does."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return row


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_refuse, parse_float=lambda text: _finite(float(text))
)
