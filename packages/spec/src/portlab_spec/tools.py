"""Tools as JSON Schema: derived from Python functions, and arguments checked against them.

The schema vocabulary is the part of JSON Schema that the Gemma chat templates can render: `type`,
`description`, `enum` of strings, `items` of a scalar type, `nullable`, `properties`, `required`. A function
that needs more is refused, because a template would drop the rest without a word.
"""

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, Literal, get_args, get_origin

from pydantic import JsonValue, ValidationError

from portlab_spec.conversation import Tool
from portlab_spec.errors import UserError

JSON_TYPE_OF_SCALAR: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}

_SECTION = re.compile(r"^(\w+):\s*$")
_ARGUMENT = re.compile(r"^(?P<name>\w+)\s*(\([^)]*\))?:\s*(?P<text>.*)$")


def tool_from_function(function: Callable[..., Any]) -> Tool:
    """The tool that a Python function offers.

    The name is the function's; the description is the first paragraph of its docstring; each parameter
    needs a type hint and an entry in a Google-style `Args:` section. Hints: `str`, `int`, `float`, `bool`,
    `list` of one of these or of an enumeration, `Literal` of strings, `Enum` with string values (the values
    are the enumeration), and `T | None` (`nullable`). A parameter with a default is not required; the
    default itself is not part of the declaration. The return annotation is not either.

    Raises:
        UserError: the signature or docstring cannot be expressed; names the function and the parameter.
    """
    name = getattr(function, "__name__", repr(function))
    description, documented = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise UserError("the function has no docstring", where=name, fix="Say in one sentence what it returns")
    try:
        hints = typing.get_type_hints(function)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise UserError(f"a type hint is unknown ({error})", where=name, fix="Import what it names") from None

    properties: dict[str, JsonValue] = {}
    required: list[JsonValue] = []
    for parameter in inspect.signature(function).parameters.values():
        where = f"{name}({parameter.name})"
        properties[parameter.name] = _parameter_schema(parameter, hints, documented, where)
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    for stray in documented.keys() - properties.keys():
        where = f"{name}({stray})"
        raise UserError("`Args:` describes a parameter that does not exist", where=where, fix="Remove it")

    parameters: dict[str, JsonValue] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    try:
        return Tool(name=name, description=description, parameters=parameters)
    except ValidationError:
        raise UserError("this is no name for a tool", where=name, fix="Give the function one") from None


def validate_arguments(tool: Tool, arguments: Mapping[str, Any]) -> list[str]:
    """What is wrong with the arguments of a call, one sentence each; an empty list if nothing is.

    Checked: unknown and missing arguments, JSON types, `enum`, `items`, `nullable` and nested `properties`.
    Other schema keywords are not checked. Types are strict: `true` is no number, `1.0` is no integer; an
    integer is a number. An argument that is not declared is a problem unless the schema has
    `additionalProperties`.
    """
    return _object_problems(tool.parameters, arguments, "")


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """First paragraph on one line, and the entries of the `Args:` section by parameter name."""
    lines = docstring.splitlines()
    paragraph = takewhile(lambda line: line.strip() and not _SECTION.match(line), lines)
    documented: dict[str, str] = {}
    in_args, name, indent = False, "", 0
    for line in filter(str.strip, lines):
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            in_args, name, indent = line.strip() in ("Args:", "Arguments:"), "", 0
        elif in_args:
            indent = indent or depth
            entry = _ARGUMENT.match(line.strip())
            if depth == indent and entry:
                name = entry["name"]
                documented[name] = entry["text"].strip()
            elif name:
                documented[name] = f"{documented[name]} {line.strip()}".strip()
    return " ".join(" ".join(paragraph).split()), documented


def _parameter_schema(
    parameter: inspect.Parameter, hints: Mapping[str, Any], documented: Mapping[str, str], where: str
) -> dict[str, JsonValue]:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise UserError("a tool cannot take *args or **kwargs", where=where, fix="Name each parameter")
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:  # a call names its arguments
        raise UserError("a tool's arguments are passed by name", where=where, fix="Remove the `/`")
    if parameter.name not in hints:
        raise UserError("the parameter has no type hint", where=where, fix="Add one, for example `: str`")
    if not documented.get(parameter.name):
        raise UserError("the parameter is not described", where=where, fix="Add it to `Args:` in the docstring")
    return {"description": documented[parameter.name], **_schema_of(hints[parameter.name], where)}


def _schema_of(hint: Any, where: str) -> dict[str, JsonValue]:
    if get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        if len(options) == 1:
            return {**_schema_of(options[0], where), "nullable": True}
    elif get_origin(hint) is list:
        (item,) = get_args(hint)
        if get_origin(item) in (None, Literal):  # an inner list or union has no rendering
            return {"type": "array", "items": _schema_of(item, where)}
    elif get_origin(hint) is Literal:
        return _enumeration(get_args(hint), where)
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enumeration([member.value for member in hint], where)
    elif hint in JSON_TYPE_OF_SCALAR:
        return {"type": JSON_TYPE_OF_SCALAR[hint]}
    raise UserError(
        f"the type {inspect.formatannotation(hint)} has no tool schema",
        where=where,
        fix="Use str, int, float, bool, list of these, Literal or Enum of strings, or one of these `| None`",
    )


def _enumeration(values: typing.Iterable[Any], where: str) -> dict[str, JsonValue]:
    choices = list(values)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise UserError("only strings can be enumerated", where=where, fix="Use strings, or plain int or float")
    return {"type": "string", "enum": [str(choice) for choice in choices]}


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
    if isinstance(value, Mapping) and "properties" in schema:
        return _object_problems(schema, value, f"{path}.")
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [p for i, item in enumerate(value) for p in _value_problems(schema["items"], item, f"{path}[{i}]")]
    return []


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
