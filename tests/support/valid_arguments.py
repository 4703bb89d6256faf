"""Random tools in the whole vocabulary of lowered schemas, and random arguments that a schema accepts."""

import random
from collections.abc import Mapping
from typing import Any

from random_conversations import Taste, argument_value

from portlab_spec.conversation import Tool

# What a string may hold: the marks of every format, other scripts, whitespace, HTML that is one token to Gemma.
_PIECES = (
    "Oslo", "02134", "", " ", "  ", "\n", "\t", '"', "'", "\\", "{", "}", "[", "]", ",", ":", "y} {z:1", "true", "null",
    "call:f{a:1}", "f(a=1)", "<b>", "</h1>", "<table>", "<br>", "<", "<|", "<esc", "|>", "é", "日本語", "🦙", "👩‍💻",
    "\u2028", "\x00", "\x7f", "\x85", "e\u0301", "```", "https://example.org/?q=1&r=2", "a" * 40,
)  # fmt: skip
_NAMES = ("city", "Zone", "when", "unit", "a", "B", "b_2", "max-size", "x.y", "limit", "notes", "value", "name")
_DATES = ("2026-01-31", "2024-02-29", "1999-12-31", "2100-02-28")


def random_tools(rng: random.Random, *, identifiers: bool = False, open_objects: bool = True) -> list[Tool]:
    """One to four tools of different names.

    Args:
        rng: source of all chance.
        identifiers: every name is one of Python's.
        open_objects: some objects take keys that are not declared.
    """
    names = [name for name in _NAMES if name.isidentifier()] if identifiers else list(_NAMES)
    tools = []
    for i in range(rng.randint(1, 4)):
        name = rng.choice(("get_weather", "set", "Clock.now", "do_it" if identifiers else "do-it")) + str(i)
        tools.append(Tool(name=name, description="Do it.", parameters=_object(rng, names, 0 if open_objects else 10)))
    return tools


def random_schema(rng: random.Random, names: list[str], depth: int) -> dict[str, Any]:
    """A schema of any kind, with limits of every sort that a grammar enforces; from depth 10 on, no open objects."""
    kinds = ["string", "string", "integer", "integer", "number", "boolean", "enum", "any_of", "types", "null"]
    kinds += ["array", "array", "object", "tuple"] if depth % 10 < 2 else []
    kinds += ["map", "any"] if depth < 2 else []
    kind = rng.choice(kinds)
    out: dict[str, Any] = {"type": kind}
    match kind:
        case "string":
            out |= rng.choice(({}, {}, {}, {"minLength": 2}, {"maxLength": 5}, {"minLength": 1, "maxLength": 300}))
            out |= (
                rng.choice(({}, {}, {}, {"format": rng.choice(("date", "time", "date-time"))})) if len(out) == 1 else {}
            )
        case "integer":
            low = rng.choice((0, 1, -5, -120, 17, 10**12, rng.randint(-2000, 2000)))
            low_key, high_key = rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
            limits = {low_key: low, high_key: low + rng.choice((2, 9, 30, 999, 12345))}
            out |= {key: limits[key] for key in limits if rng.random() < 0.5}
        case "enum":
            choices = [_text(rng) for _ in range(3)] if rng.random() < 0.7 else [1, -2, 10**20, 0.5, True]
            out = {"enum": choices}
        case "any_of":
            out = {"anyOf": [random_schema(rng, names, depth + 1) for _ in range(2)]}
        case "types":
            out["type"] = rng.sample(("string", "integer", "boolean", "number"), 2)
        case "array":
            if rng.random() < 0.9 or depth >= 10:
                out["items"] = random_schema(rng, names, depth + 1)
            low = rng.randint(0, 2)
            out |= rng.choice(({}, {}, {"minItems": low}, {"maxItems": low}, {"minItems": low, "maxItems": low + 2}))
        case "tuple":
            items = [random_schema(rng, names, depth + 1) for _ in range(2)]
            out = {"type": "array", "prefixItems": items, "items": False, "minItems": rng.randint(0, 2), "maxItems": 2}
        case "object":
            out = _object(rng, names, depth + 1)
        case "map":
            out = {"type": "object", "additionalProperties": random_schema(rng, names, depth + 1)}
        case "any":
            out = {}
    if rng.random() < 0.15:
        out["nullable"] = True
    return out


def arguments_for(rng: random.Random, schema: Mapping[str, Any], taste: Taste) -> dict[str, Any]:
    """Arguments that a schema of type object accepts; keys in random order."""
    value = value_for(rng, {"properties": {}, **schema, "type": "object"}, taste)
    assert isinstance(value, dict)
    return value


def value_for(rng: random.Random, schema: Mapping[str, Any], taste: Taste) -> Any:
    """A value that a lowered schema accepts."""
    if schema.get("nullable") and taste.null and rng.random() < 0.3:
        return None
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return value_for(rng, rng.choice(schema["anyOf"]), taste)
    kinds = schema.get("type")
    kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
    match kind:
        case "string":
            return _string(rng, schema)
        case "integer":
            return _integer(rng, schema)
        case "number":
            return rng.choice(
                (0, -7, 10**30, 0.0, -0.0, 1.5, 1e-5, 1e21, 9.9e307, 5e-324, rng.gauss(0, 1e3), rng.random())
            )
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "array":
            heads, low = schema.get("prefixItems", []), schema.get("minItems", 0)
            count = rng.randint(low, min(schema.get("maxItems", low + 3), low + 3))
            items = [heads[i] if i < len(heads) else schema.get("items", {}) for i in range(count)]
            return [value_for(rng, item, taste) for item in items]
        case "object":
            return _fields(rng, schema, taste)
    while True:
        value = argument_value(rng, taste, depth=1)
        if "e+308" not in repr(value):  # beyond what grammars admit
            return value


def _fields(rng: random.Random, schema: Mapping[str, Any], taste: Taste) -> dict[str, Any]:
    if "properties" not in schema:
        extra = schema.get("additionalProperties", {})
        keys = rng.sample(("a", "key_1", "Zone", "x9", "b"), rng.randint(0, 3))
        return {key: value_for(rng, extra if isinstance(extra, Mapping) else {}, taste) for key in keys}
    names = [n for n in schema["properties"] if n in schema.get("required", ()) or rng.random() < 0.5]
    rng.shuffle(names)
    return {name: value_for(rng, schema["properties"][name], taste) for name in names}


def _object(rng: random.Random, names: list[str], depth: int) -> dict[str, Any]:
    chosen = rng.sample(names, rng.choice((0, 1, 2, 3, 5)))
    required = [name for name in chosen if rng.random() < 0.5]
    properties = {name: random_schema(rng, names, depth) for name in chosen}
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_PIECES) for _ in range(rng.randint(0, 4)))


def _string(rng: random.Random, schema: Mapping[str, Any]) -> str:
    match schema.get("format"):
        case "date":
            return rng.choice(_DATES)
        case "time":
            return rng.choice(("00:00:00", "23:59:59Z", "12:30:01.5+02:00"))
        case "date-time":
            return f"{rng.choice(_DATES)}T23:59:59Z"
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not low and high is None:
        return _text(rng)
    return "".join(rng.choice('abc é🦙"\\\n{}') for _ in range(rng.randint(low, min(high or low + 9, low + 9))))


def _integer(rng: random.Random, schema: Mapping[str, Any]) -> int:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -(10**40)) + 1)
    high = schema.get("maximum", schema.get("exclusiveMaximum", 10**40) - 1)
    return rng.choice((low, high, rng.randint(low, high), max(low, min(high, rng.randint(-99, 99)))))
