"""Tools in the shapes in which data sets and APIs hold them.

    {"type": "function", "function": {...}}     OpenAI; Hugging Face adds `return`, which no template reads
    {"function": {...}} with STRING, OBJECT     google/mobile-actions
    {"name", "description", "parameters"}       flat: BFCL, Gemini, OpenAI Responses
    {"name", "description", "input_schema"}     Anthropic; `inputSchema` in MCP
    {"function_declarations": [...]}            Gemini
    {"name", "parameters": {"city": {"type": "str, optional", "default": ""}}}     xLAM: a map of parameters

Everything is lowered (`portlab_spec.tools.lower`). Keys that say nothing about how to call the tool (`return`,
`strict`, `cache_control`, ...) are dropped.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from portlab_spec.conversation import Tool
from portlab_spec.errors import UserError
from portlab_spec.tools.lower import Schema, lower_schema
from portlab_spec.tools.python_types import schema_of_python_type

_SCHEMA_KEYS = ("parameters", "input_schema", "inputSchema", "parameters_json_schema", "parametersJsonSchema")
_WRAPPERS = ("function_declarations", "functionDeclarations", "tools")
_NOT_A_MAP = ("$ref", "anyOf", "oneOf", "allOf")


def read_tools(value: Any, where: str, *, lower: bool = True) -> tuple[Tool, ...]:
    """The tools that a value holds, in order, lowered.

    Args:
        value: a list of tools in any of the shapes above, mixed or not, one such tool, or JSON text of either; None
            is no tools. Nulls that Arrow put where a struct lacks a key are undone.
        where: file and row, for messages.
        lower: False keeps each schema as it stands, for the linter.

    Raises:
        UserError: not JSON, no known shape, a tool without name or description, a schema that cannot be lowered;
            names the tool and the parameter.
    """
    try:
        return tuple(_tool(entry, at, lower) for entry, at in _entries(_decoded(value, where), where))
    except RecursionError:
        raise UserError("the tools are nested too deep", where=where, fix="Flatten the parameters") from None


def to_openai(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """The tools as OpenAI function objects, which chat templates take."""
    return [tool.to_openai() for tool in tools]


def _decoded(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"the tools are not JSON ({error})", where=where, fix="Write a JSON list of tools") from None


def _entries(value: Any, where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Each tool, still in its shape, with its place in the list."""
    if value is None:
        return
    if isinstance(value, Mapping):
        inner = next((value[key] for key in _WRAPPERS if isinstance(value.get(key), list | tuple)), None)
        if inner is None:
            yield value, where
        else:
            yield from _entries(inner, where)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            at = f"{where}: tools[{i}]"
            entry = _decoded(entry, at)
            if not isinstance(entry, Mapping):
                raise UserError(f"{entry!r} is no tool", where=at, fix="Write an object with name and parameters")
            yield from _entries(entry, at)
    else:
        fix = "Give a list of tools, or JSON text of one"
        raise UserError(f"the tools are of type {type(value).__name__}", where=where, fix=fix)


def _tool(entry: Mapping[str, Any], where: str, lower: bool) -> Tool:
    entry = _without_nulls(entry)
    body = entry.get("function", entry)
    if isinstance(body, str):  # OpenAI Responses and some data sets: {"type": "function", "name": ...}
        body = entry
    if not isinstance(body, Mapping):
        raise UserError("`function` is no object", where=where, fix="Give it name, description and parameters")
    if "function" in entry and entry.get("type", "function") != "function":
        raise UserError(f"a tool of type {entry['type']!r} cannot be called", where=where, fix="Remove the tool")
    name, description = body.get("name"), body.get("description")
    if not isinstance(name, str) or not name:
        keys = ", ".join(map(str, body)) or "none"
        raise UserError(f"the tool has no name (its keys: {keys})", where=where, fix="Give it a name")
    where = f"{where}: tool {name}"
    if not isinstance(description, str) or not description.strip():
        raise UserError("the tool has no description", where=where, fix="Say in one sentence what it does")
    parameters = _parameters(body, where, lower)
    try:
        return Tool(name=name, description=description, parameters=parameters)
    except ValidationError as error:
        if any(fault["loc"][0] == "name" for fault in error.errors()):
            fix = "Start with a letter or _, go on with letters, digits, _ . -"
            raise UserError("this is no name for a tool", where=where, fix=fix) from None
        raise UserError(f"not JSON values ({error.errors()[0]['msg']})", where=where, fix="Use JSON values") from None


def _parameters(body: Mapping[str, Any], where: str, lower: bool) -> Schema:
    found: Any = next((body[key] for key in _SCHEMA_KEYS if key in body), None)
    given = _decoded(found, f"{where}.parameters") or {}
    if not isinstance(given, Mapping):
        raise UserError("the parameters are no object", where=where, fix="Give a JSON Schema of type object")
    if _is_map(given):
        given = _schema_of_map(given, where)
    if isinstance(body.get("required"), list) and "required" not in given:  # beside the schema in some data sets
        given = {**given, "required": body["required"]}
    if not lower:
        return dict(given)
    lowered = lower_schema(given, where)
    lowered.setdefault("type", "object")
    if lowered["type"] != "object" or lowered.get("nullable"):
        fix = "Give a JSON Schema of type object"
        raise UserError(f"the parameters are of type {lowered['type']}", where=where, fix=fix)
    lowered.setdefault("properties", {})
    return {key: lowered[key] for key in sorted(lowered, key=_top_level_rank)}


def _top_level_rank(key: str) -> int:
    order = ("type", "properties", "required")
    return order.index(key) if key in order else len(order)


# ---------------------------------------------------------------------------------------------- maps of parameters


def _is_map(given: Mapping[str, Any]) -> bool:
    """Whether this maps parameters to what is said of them: every value is an object that is no list of properties.

    A parameter may be called `type` or `properties`; as a schema's key, the one is text and the other holds objects.
    """
    if not given or not all(isinstance(value, Mapping) for value in given.values()):
        return False
    if any(key in given for key in _NOT_A_MAP):
        return False
    properties = given.get("properties")
    return properties is None or not all(isinstance(value, Mapping) for value in properties.values())


def _schema_of_map(given: Mapping[str, Any], where: str) -> Schema:
    properties: Schema = {}
    required = []
    for name, value in given.items():
        kind, optional = value.get("type"), False
        body = {key: inner for key, inner in value.items() if key not in ("type", "required")}
        if isinstance(kind, str):
            schema, optional = schema_of_python_type(kind, f"{where}.{name}")
            body = {**schema, **body}
        elif kind is not None:
            body["type"] = kind
        properties[name] = body
        needed = value.get("required")
        if needed if isinstance(needed, bool) else not optional and "default" not in value:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def _without_nulls(value: Any) -> Any:
    """Undo Arrow's union of structs, which gives every object every key: no key of a tool is null by itself.

    The values of lists stay: null can be a choice of an `enum`.
    """
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(inner) for inner in value]
    return value
