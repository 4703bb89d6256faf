"""Arguments of a call checked against the tool's schema.

The vocabulary is that of lowered schemas (`portlab_spec.tools.lower`) with the keywords of JSON Schema
(draft 2020-12) that limit values. It is stricter than JSON Schema in three points, because a model that gets them
wrong has got the call wrong: `1.0` is no integer, an argument that is not declared is a problem unless the schema
has `additionalProperties`, and `format` is checked.
"""

import datetime
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from portlab_spec.conversation import Tool

_TIME = r"\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|[+-]\d{2}:\d{2})?"
_FORMATS: dict[str, tuple[re.Pattern[str], Callable[[str], object]]] = {
    "date": (re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII), datetime.date.fromisoformat),
    "time": (re.compile(_TIME, re.ASCII), datetime.time.fromisoformat),
    "date-time": (re.compile(rf"\d{{4}}-\d{{2}}-\d{{2}}T{_TIME}", re.ASCII), datetime.datetime.fromisoformat),
}


def validate_arguments(tool: Tool, arguments: Mapping[str, Any]) -> list[str]:
    """What is wrong with the arguments of a call, one sentence each; an empty list if nothing is.

    Checked: unknown and missing arguments, JSON types, `nullable`, `enum`, nested `properties`, `items`,
    `prefixItems`, `anyOf`, `minimum`, `maximum` and their exclusive forms, `multipleOf`, `minLength`, `maxLength`,
    `pattern` (a Python expression that ECMAScript reads alike; one that does not compile is not checked),
    `minItems`, `maxItems`, `uniqueItems`, and `format` `date`, `time` and `date-time`: ISO 8601 in the extended form
    with seconds, the offset from UTC optional. Other keywords are not checked. Types are strict: `true` is no
    number, `1.0` is no integer; an integer is a number. An argument that is not declared is a problem unless the
    schema has `additionalProperties`.
    """
    return _object_problems(tool.parameters, arguments, "")


def _object_problems(schema: Mapping[str, Any], value: Mapping[str, Any], path: str) -> list[str]:
    properties = schema.get("properties") or {}
    additional = schema.get("additionalProperties", False)
    problems = [f"missing argument {path}{name}" for name in schema.get("required") or () if name not in value]
    for name, item in value.items():
        if name in properties:
            problems += _value_problems(properties[name], item, f"{path}{name}")
        elif isinstance(additional, Mapping):
            problems += _value_problems(additional, item, f"{path}{name}")
        elif not additional:
            problems.append(f"unknown argument {path}{name}")
    return problems


def _value_problems(schema: Mapping[str, Any], value: Any, path: str) -> list[str]:
    if value is None and schema.get("nullable"):
        return []
    declared = schema.get("type")
    accepted = [declared] if isinstance(declared, str) else list(declared or ())
    got = json_type(value)
    if accepted and got not in accepted and not (got == "integer" and "number" in accepted):
        return [f"{path} is {_with_article(got)}, not {_with_article(' or '.join(accepted))}"]
    if "enum" in schema and not any(same_json(value, choice) for choice in schema["enum"]):
        return [f"{path} is {value!r}, not one of {', '.join(map(repr, schema['enum']))}"]
    options = schema.get("anyOf")
    if options and all(_value_problems(option, value, path) for option in options):
        return [f"{path} is {value!r}, which none of the {len(options)} alternatives accepts"]
    match value:
        case Mapping() if "properties" in schema or "additionalProperties" in schema:
            return _object_problems(schema, value, f"{path}.")
        case list():
            return _array_problems(schema, value, path)
        case str():
            return _string_problems(schema, value, path)
        case int() | float() if not isinstance(value, bool):
            return _number_problems(schema, value, path)
    return []


def _array_problems(schema: Mapping[str, Any], value: list[Any], path: str) -> list[str]:
    problems = _count_problems(schema, len(value), "Items", f"{path} has", "items")
    if schema.get("uniqueItems") and any(same_json(a, b) for i, a in enumerate(value) for b in value[:i]):
        problems.append(f"{path} holds the same item twice")
    prefix, items = schema.get("prefixItems") or [], schema.get("items")
    for i, item in enumerate(value):
        expected = prefix[i] if i < len(prefix) else items
        if isinstance(expected, Mapping):
            problems += _value_problems(expected, item, f"{path}[{i}]")
    return problems


def _string_problems(schema: Mapping[str, Any], value: str, path: str) -> list[str]:
    problems = _count_problems(schema, len(value), "Length", f"{path} has", "characters")
    pattern = compiled(schema["pattern"]) if isinstance(schema.get("pattern"), str) else None
    if pattern and not pattern.search(value):
        problems.append(f"{path} is {value!r}, which does not match {schema['pattern']}")
    if not _has_format(value, schema.get("format")):
        problems.append(f"{path} is {value!r}, not a {schema['format']} (ISO 8601)")
    return problems


def _number_problems(schema: Mapping[str, Any], value: float, path: str) -> list[str]:
    limits: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
        ("minimum", "below", lambda limit: value >= limit),
        ("maximum", "above", lambda limit: value <= limit),
        ("exclusiveMinimum", "not above", lambda limit: value > limit),
        ("exclusiveMaximum", "not below", lambda limit: value < limit),
    )
    problems = []
    for keyword, relation, holds in limits:
        limit = schema.get(keyword)
        if isinstance(limit, int | float) and not isinstance(limit, bool) and not holds(limit):
            problems.append(f"{path} is {value!r}, {relation} {limit!r}")
    step = schema.get("multipleOf")
    if step and not (math.isfinite(value) and Fraction(repr(value)) % Fraction(repr(step)) == 0):
        problems.append(f"{path} is {value!r}, not a multiple of {step!r}")
    return problems


def _count_problems(schema: Mapping[str, Any], count: int, noun: str, subject: str, unit: str) -> list[str]:
    low, high = schema.get(f"min{noun}"), schema.get(f"max{noun}")
    if low is not None and count < low:
        return [f"{subject} {count} {unit}, fewer than {low}"]
    if high is not None and count > high:
        return [f"{subject} {count} {unit}, more than {high}"]
    return []


def _has_format(value: str, name: Any) -> bool:
    if name not in _FORMATS:
        return True
    shape, read = _FORMATS[name]
    if not shape.fullmatch(value):
        return False
    try:
        read(value)
    except ValueError:
        return False
    return True


@cache
def compiled(pattern: str) -> re.Pattern[str] | None:
    """The regular expression, with ECMAScript's ASCII classes; None if Python cannot read it."""
    try:
        return re.compile(pattern, re.ASCII)
    except (re.error, OverflowError, RecursionError):
        return None


def json_type(value: Any) -> str:
    """The JSON Schema type of a decoded JSON value; numbers written with a point or exponent are `number`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case _:
            return "object"


def same_json(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1, 1.0 and true all differ; the order of an object's keys does not matter."""
    if json_type(left) != json_type(right):
        return False
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)


def _with_article(noun: str) -> str:
    return noun if noun == "null" else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
