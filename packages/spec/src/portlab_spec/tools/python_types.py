"""Python type expressions, as data sets spell the types of parameters, as JSON Schema.

xLAM and sets made like it say `str, optional`, `List[int]`, `Dict[str, Any]`, `Union[int, float]`. The expressions
are read as syntax, never evaluated.
"""

import ast
import re
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.tools.lower import TYPE_NAMES, Schema

_REMARK = re.compile(r"\s*,\s*(optional|required|default\b.*)\s*$", re.IGNORECASE)
# What a data set passes as text: a function is given by its source, a date in its usual spelling.
_AS_TEXT = ("callable", "time", "timedelta", "bytes", "decimal", "uuid", "path")
_LISTS = ("list", "tuple", "set", "frozenset", "sequence", "iterable", "collection")
_MAPS = ("dict", "mapping", "defaultdict")
_FIX = "Use str, int, float, bool, List[...], Dict[...], Optional[...], Union[...] or a JSON Schema type"


def schema_of_python_type(text: str, where: str) -> tuple[Schema, bool]:
    """Schema of a type expression, not lowered, and whether it is marked as optional.

    `Optional[T]` makes a value nullable and a parameter optional, as annotators of such sets use it.

    Raises:
        UserError: not a type expression, or an unknown name in it.
    """
    optional = False
    bare = text.strip()
    while match := _REMARK.search(bare):
        optional |= match[1].lower() != "required"
        bare = bare[: match.start()]
    try:
        tree = ast.parse(bare.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"the type {text!r} cannot be read", where=where, fix=_FIX) from None
    schema = _schema(tree, text, where)
    return schema, optional or _is_optional(tree)


def _schema(node: ast.expr, text: str, where: str) -> Schema:
    match node:
        case ast.Constant(value=None):
            return {"type": "null"}
        case ast.Name() | ast.Attribute():
            return _named(_name(node), text, where)
        case ast.Subscript(value=ast.Name() | ast.Attribute() as base, slice=inner):
            arguments = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _generic(_name(base), arguments, text, where)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return {"anyOf": [_schema(left, text, where), _schema(right, text, where)]}
    raise UserError(f"the type {text!r} cannot be read", where=where, fix=_FIX)


def _named(name: str, text: str, where: str) -> Schema:
    if name in _AS_TEXT:
        return {"type": "string"}
    if name in _LISTS:
        return {"type": "array"}
    if name in _MAPS:
        return {"type": "object"}
    if name == "any":
        return {}
    if name not in TYPE_NAMES:
        raise UserError(f"the type {text!r} is unknown", where=where, fix=_FIX)
    return {"type": TYPE_NAMES[name]}


def _generic(name: str, arguments: list[ast.expr], text: str, where: str) -> Schema:
    if name == "callable":
        return {"type": "string"}
    if name == "literal":
        choices: list[Any] = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
        return {"enum": choices}
    if name in ("union", "optional"):
        options = [_schema(argument, text, where) for argument in arguments]
        return {"anyOf": options + ([{"type": "null"}] if name == "optional" else [])}
    if name in _MAPS or TYPE_NAMES.get(name) == "object":
        values = _schema(arguments[-1], text, where) if len(arguments) == 2 else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if name in _LISTS or TYPE_NAMES.get(name) == "array":
        items = [_schema(argument, text, where) for argument in arguments if not _is_ellipsis(argument)]
        if all(item == items[0] for item in items):  # Tuple[float, float] is a list of floats to a model
            return {"type": "array", **({"items": items[0]} if items[0] else {})}
        return {"type": "array", "prefixItems": items}
    raise UserError(f"the type {text!r} is unknown", where=where, fix=_FIX)


def _name(node: ast.Name | ast.Attribute) -> str:
    return (node.id if isinstance(node, ast.Name) else node.attr).lower()


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _is_optional(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Optional"
