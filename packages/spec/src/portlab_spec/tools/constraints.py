"""Limits and defaults in words.

The chat templates drop every keyword that limits a parameter: the model never reads them. A sentence in the
description is read, so that is where they belong; the keywords stay beside it for `validate_arguments`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from portlab_spec.conversation import Tool
from portlab_spec.tools.lower import Schema

CONSTRAINTS = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern",
    "format", "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties",
)  # fmt: skip

_FORMATS = {
    "date": "A date such as 2026-01-31.",
    "time": "A time such as 13:45:00.",
    "date-time": "A date and time such as 2026-01-31T13:45:00.",
}


def describe_constraints(tool: Tool) -> Tool:
    """The tool with its limits and defaults also written into the descriptions of its parameters.

    "How many nights" with `default: 2`, `minimum: 1`, `maximum: 30` becomes "How many nights. Default 2. Between 1
    and 30." What a description says already is not repeated, so a second run changes nothing. The keywords stay,
    but for an `enum` of numbers, which the formats refuse.
    """
    return tool.model_copy(update={"parameters": _described_properties(tool.parameters)})


def sentences(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What a schema's keywords say, in a fixed order: the keywords, and their sentence."""
    if "enum" in schema and schema.get("type") in ("integer", "number"):
        yield ("enum",), f"One of {', '.join(map(_literal, schema['enum']))}."
    if "default" in schema:
        yield ("default",), f"Default {_literal(schema['default'])}."
    yield from _range(schema, "minimum", "maximum", "")
    if "exclusiveMinimum" in schema:
        yield ("exclusiveMinimum",), f"Greater than {_literal(schema['exclusiveMinimum'])}."
    if "exclusiveMaximum" in schema:
        yield ("exclusiveMaximum",), f"Less than {_literal(schema['exclusiveMaximum'])}."
    if "multipleOf" in schema:
        yield ("multipleOf",), f"A multiple of {_literal(schema['multipleOf'])}."
    yield from _range(schema, "minLength", "maxLength", " characters")
    if "pattern" in schema:
        yield ("pattern",), f"Matches the pattern {schema['pattern']}."
    if "format" in schema:
        yield ("format",), _FORMATS.get(str(schema["format"]), f"Format: {schema['format']}.")
    yield from _range(schema, "minItems", "maxItems", " items")
    if schema.get("uniqueItems"):
        yield ("uniqueItems",), "No item twice."
    yield from _range(schema, "minProperties", "maxProperties", " keys")


def _range(schema: Mapping[str, Any], low: str, high: str, unit: str) -> Iterator[tuple[tuple[str, ...], str]]:
    if low in schema and high in schema:
        yield (low, high), f"Between {_literal(schema[low])} and {_literal(schema[high])}{unit}."
    elif low in schema:
        yield (low,), f"At least {_literal(schema[low])}{unit}."
    elif high in schema:
        yield (high,), f"At most {_literal(schema[high])}{unit}."


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _described_properties(schema: Mapping[str, Any]) -> Schema:
    out = dict(schema)
    if isinstance(out.get("properties"), Mapping):
        out["properties"] = {name: _described(inner) for name, inner in out["properties"].items()}
    return out


def _described(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    text = str(schema.get("description") or "")
    for _, sentence in sentences(schema):
        if sentence not in text:
            text = f"{text.rstrip()}{'' if not text or text.rstrip()[-1:] in '.!?' else '.'} {sentence}".strip()
    out = _described_properties(schema)
    if out.get("type") in ("integer", "number"):
        out.pop("enum", None)
    if isinstance(out.get("items"), Mapping):  # the keywords of items are rendered; those below them are not
        out["items"] = _described_properties(out["items"])
    return {"description": text, **{key: value for key, value in out.items() if key != "description"}} if text else out
