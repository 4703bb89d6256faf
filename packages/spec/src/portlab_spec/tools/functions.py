"""Tools from Python: a function's signature and docstring, or a pydantic model, become a declaration.

Everything comes out in the lowered vocabulary (`portlab_spec.tools.lower`). A type that it cannot express is refused
with what to use instead, because a chat template would drop or mangle it without a word.
"""

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Annotated, Any, Literal, get_args, get_origin

import docstring_parser
from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.fields import FieldInfo

from portlab_spec.conversation import Tool
from portlab_spec.errors import UserError

JSON_TYPE_OF_SCALAR: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}

_SECTION = re.compile(r"^(\w+):\s*$")
_ANNOTATIONS = ("title", "type", "items", "description", "default", "examples")  # not limits

Schema = dict[str, JsonValue]


def tool_from_function(function: Callable[..., Any]) -> Tool:
    """The tool that a Python function or method offers, `async` or not.

    The name is the function's; the description is the first paragraph of its docstring. Each parameter needs a type
    hint and a description: in the docstring (Google, NumPy or Sphinx style), or as `Annotated[T, "text"]` or
    `Annotated[T, Field(description="text")]`, which wins. A parameter with a default is not required; the default
    itself is not part of the declaration. The return annotation is not either.

    Hints: `str`, `int`, `float`, `bool`; `Literal` and `Enum` of strings (an enumeration), or of integers (a plain
    integer whose description names the choices, because the templates drop such an enumeration); dataclasses,
    `TypedDict` and pydantic models (objects, described by their own docstrings); `list` of one of these; and
    `T | None` (`nullable`). The limits of a `Field` become JSON Schema keywords.

    Raises:
        UserError: the signature or docstring cannot be expressed; names the function and the parameter.
    """
    name = getattr(function, "__name__", repr(function))
    description, documented = _read_docstring(inspect.getdoc(function) or "", name)
    if not description:
        raise UserError("the function has no docstring", where=name, fix="Say in one sentence what it returns")
    hints = _hints(function, name)

    properties: Schema = {}
    required: list[JsonValue] = []
    for parameter in _parameters(function):
        where = f"{name}({parameter.name})"
        _check_kind(parameter, where)
        if parameter.name not in hints:
            raise UserError("the parameter has no type hint", where=where, fix="Add one, for example `: str`")
        schema = _field_schema(hints[parameter.name], documented.get(parameter.name, ""), where, ())
        if not schema.get("description"):
            raise UserError("the parameter is not described", where=where, fix="Add it to `Args:` in the docstring")
        properties[parameter.name] = schema
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    for stray in documented.keys() - properties.keys():
        where = f"{name}({stray})"
        raise UserError("`Args:` describes a parameter that does not exist", where=where, fix="Remove it")
    return _tool(name, description, _object(properties, required))


def tool_from_model(model: type[BaseModel], *, name: str = "", description: str = "") -> Tool:
    """The tool whose arguments are the fields of a pydantic model.

    Args:
        model: its fields are described by `Field(description=...)` or under `Attributes:` in its docstring.
        name: of the tool; the class's name if empty.
        description: of the tool; the first paragraph of the class's docstring if empty.

    Raises:
        UserError: a field cannot be expressed, or nothing describes the tool.
    """
    name = name or model.__name__
    description = description or _read_docstring(inspect.cleandoc(model.__doc__ or ""), name)[0]
    if not description:
        raise UserError("the model has no docstring", where=name, fix="Say in one sentence what the tool does")
    return _tool(name, description, _record_schema(model, name, ()))


def _tool(name: str, description: str, parameters: Schema) -> Tool:
    try:
        return Tool(name=name, description=description, parameters=parameters)
    except ValidationError:
        raise UserError("this is no name for a tool", where=name, fix="Give the function one") from None


def _object(properties: Schema, required: list[JsonValue]) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


# ---------------------------------------------------------------------------------------------- signature


def _hints(owner: Any, where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise UserError(f"a type hint is unknown ({error})", where=where, fix="Import what it names") from None


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters, without the `self` or `cls` of a method that is not bound."""
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls") and parameters[0].annotation is inspect.Parameter.empty:
        return parameters[1:]
    return parameters


def _check_kind(parameter: inspect.Parameter, where: str) -> None:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise UserError("a tool cannot take *args or **kwargs", where=where, fix="Name each parameter")
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:  # a call names its arguments
        raise UserError("a tool's arguments are passed by name", where=where, fix="Remove the `/`")


def _read_docstring(docstring: str, where: str) -> tuple[str, dict[str, str]]:
    """First paragraph on one line, and the descriptions of parameters or attributes by name."""
    try:
        parsed = docstring_parser.parse(docstring)
    except docstring_parser.ParseError as error:
        raise UserError(f"the docstring cannot be read ({error})", where=where, fix="Mend its sections") from None
    lines = (parsed.description or "").splitlines()
    paragraph = takewhile(lambda line: line.strip() and not _SECTION.match(line), lines)
    documented = {
        name.strip().lstrip("*"): " ".join((entry.description or "").split())
        for entry in parsed.params
        for name in entry.arg_name.split(",")  # NumPy style: `x, y : int`
    }
    return " ".join(" ".join(paragraph).split()), documented


# ---------------------------------------------------------------------------------------------- types


def _field_schema(hint: Any, description: str, where: str, outer: tuple[type, ...]) -> Schema:
    """Schema of a parameter or field, its description first."""
    metadata: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        metadata = tuple(extras)
    for extra in metadata:
        said = extra if isinstance(extra, str) else extra.description if isinstance(extra, FieldInfo) else None
        description = " ".join((said or "").split()) or description
    schema = {**_schema_of(hint, where, outer), **_limits(hint, metadata)}
    hinted = schema.pop("description", "")
    if choices := schema.pop("choices", ""):
        description = f"{description.rstrip('.')}. One of {choices}." if description else f"One of {choices}."
    text: JsonValue = description or hinted
    return {"description": text, **schema} if text else schema


def _schema_of(hint: Any, where: str, outer: tuple[type, ...]) -> Schema:
    """Schema of a type; `choices` is text for the description, `outer` the records that surround it."""
    origin = get_origin(hint)
    if origin in (typing.Required, typing.NotRequired):
        return _schema_of(get_args(hint)[0], where, outer)
    if origin is Annotated:
        return _field_schema(hint, "", where, outer)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        if len(options) == 1:
            return {**_schema_of(options[0], where, outer), "nullable": True}
    elif origin is list:
        return _list_schema(hint, where, outer)
    elif origin is Literal:
        return _enumeration(get_args(hint), where)
    elif _is_enum(hint):
        return _enumeration([member.value for member in hint], where)
    elif _is_record(hint):
        return _record_schema(hint, where, outer)
    elif _is_scalar(hint):
        return {"type": JSON_TYPE_OF_SCALAR[hint]}
    raise _no_schema(hint, where)


def _is_scalar(hint: Any) -> bool:
    return isinstance(hint, type) and hint in JSON_TYPE_OF_SCALAR


def _list_schema(hint: Any, where: str, outer: tuple[type, ...]) -> Schema:
    (item,) = get_args(hint)
    bare = get_args(item)[0] if get_origin(item) is Annotated else item
    # An inner list or union has no rendering.
    if not (get_origin(bare) is Literal or _is_scalar(bare) or _is_record(bare) or _is_enum(bare)):
        raise _no_schema(hint, where)
    return {"type": "array", "items": _field_schema(item, "", where, outer)}


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _enumeration(values: Iterable[Any], where: str) -> Schema:
    choices = list(values)
    if choices and all(isinstance(choice, str) for choice in choices):
        return {"type": "string", "enum": [str(choice) for choice in choices]}
    if choices and all(isinstance(choice, int) and not isinstance(choice, bool) for choice in choices):
        return {"type": "integer", "choices": ", ".join(str(int(choice)) for choice in choices)}
    fix = "Use strings or integers, not a mixture; for true and false, bool"
    raise UserError("only strings and integers can be enumerated", where=where, fix=fix)


def _no_schema(hint: Any, where: str) -> UserError:
    fix = "Use str, int, float, bool, Literal or Enum, a dataclass, TypedDict or pydantic model, list of one of these"
    fix += ", or one of these `| None`"
    if hint is dict or get_origin(hint) is dict:
        fix = "Name the keys in a TypedDict or dataclass, or use a list of objects with a key and a value"
    elif get_origin(hint) is list and get_args(hint):
        fix = "Use a list of str, int, float, bool, or of a dataclass whose fields hold the inner values"
    elif get_origin(hint) in (typing.Union, types.UnionType):
        fix = "Choose one of the types, or write one parameter for each"
    return UserError(f"the type {inspect.formatannotation(hint)} has no tool schema", where=where, fix=fix)


def _limits(hint: Any, metadata: tuple[Any, ...]) -> Schema:
    """The limits that `Field(ge=..., max_length=..., pattern=...)` puts on a type, as pydantic writes them."""
    if not any(not isinstance(extra, str) for extra in metadata):
        return {}
    try:
        schema = TypeAdapter(Annotated[hint, *metadata]).json_schema()
    except (PydanticSchemaGenerationError, TypeError):  # metadata of some other library
        return {}
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    schema = {**schema, **options[0]} if len(options) == 1 else schema
    scalar = schema.get("type") in ("string", "integer", "number", "boolean", "array")
    dropped = (*_ANNOTATIONS, "anyOf", "enum", "const", "$defs", "$ref")
    return {key: value for key, value in schema.items() if scalar and key not in dropped}


# ---------------------------------------------------------------------------------------------- records


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (
        dataclasses.is_dataclass(hint) or issubclass(hint, BaseModel) or typing.is_typeddict(hint)
    )


def _record_schema(record: type, where: str, outer: tuple[type, ...]) -> Schema:
    """Object schema of a dataclass, TypedDict or pydantic model."""
    if record in outer:
        fix = "Write out the levels that you need"
        raise UserError(f"{record.__name__} holds itself, which no template can write", where=where, fix=fix)
    _, documented = _read_docstring(_own_docstring(record), record.__name__)
    properties: Schema = {}
    required: list[JsonValue] = []
    for name, hint, needed in _fields(record):
        properties[name] = _field_schema(hint, documented.get(name, ""), f"{where}.{name}", (*outer, record))
        if needed:
            required.append(name)
    return _object(properties, required)


def _own_docstring(record: type) -> str:
    """The docstring that somebody wrote: dataclass makes one of the signature, BaseModel hands its own down."""
    text = inspect.cleandoc(record.__dict__.get("__doc__") or "")
    return "" if text.startswith(f"{record.__name__}(") else text


def _fields(record: type) -> Iterable[tuple[str, Any, bool]]:
    """Name, type and whether it is required, of each field in order."""
    if issubclass(record, BaseModel):
        for name, field in record.model_fields.items():
            hint: Any = Annotated[field.annotation, field]
            yield field.alias or name, hint, field.is_required()
        return
    hints = _hints(record, record.__name__)
    if dataclasses.is_dataclass(record):
        missing = dataclasses.MISSING
        for item in dataclasses.fields(record):
            if item.init:
                needed = item.default is missing and item.default_factory is missing
                yield item.name, hints[item.name], needed
        return
    needed_keys: frozenset[str] = getattr(record, "__required_keys__", frozenset())
    for name, hint in hints.items():
        yield name, hint, name in needed_keys
