"""Lowering: any JSON Schema of a tool's parameters, rewritten in the vocabulary that the chat templates render.

The vocabulary: one `type` in lower case, `description`, `enum`, `items`, `properties`, `required`, `nullable`.
Lowering changes the spelling of a schema, never what it accepts, but for one simplification: `oneOf` is read as
`anyOf`. What has no such spelling (a union, a default, a limit) stays as it is for `portlab_spec.tools.lint` to report.
"""

import math
from collections.abc import Mapping
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.tools.validate import compiled, json_type, same_json

# What generators call the types: JSON Schema in capitals (Google), Python, Java and JavaScript names (BFCL).
# "any" is a schema without a type.
TYPE_NAMES: dict[str, str] = {
    **{name: name for name in ("string", "integer", "number", "boolean", "array", "object", "null", "any")},
    **dict.fromkeys(("str", "char", "date", "datetime"), "string"),
    **dict.fromkeys(("int", "long", "short", "byte", "bigint"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("bool",), "boolean"),
    **dict.fromkeys(("list", "tuple", "set", "arraylist"), "array"),
    **dict.fromkeys(("dict", "map", "hashmap", "struct"), "object"),
    **dict.fromkeys(("none", "nonetype"), "null"),
    "": "any",
}

_DROPPED = ("title", "$schema", "$id", "$comment", "$defs", "definitions", "strict")
_ORDER = ("description", "type", "enum", "items", "properties", "required", "nullable")  # anything else follows

_SIGNED = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LIMITS = (*_SIGNED, "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

Schema = dict[str, Any]


def lower_schema(schema: Any, where: str) -> Schema:
    """The schema in lowered form; the input is not changed.

    - `$ref` is replaced by what it names; keys beside it win.
    - `anyOf`/`oneOf` of one schema and null, and `type: [T, "null"]`, become `nullable: true`; alternatives that
      only list constants or strings become one `enum`; integer beside number is number.
    - `allOf` of one schema is that schema; `const` is an `enum` of one; a null in an `enum` is `nullable`.
    - Types are spelt as in JSON Schema, and inferred from `enum`, `properties` and `items` where left out.
    - `required: true` inside a property moves to the object's list.
    - Titles, `$schema`, `$defs`, `additionalProperties: false` and `default: null` are dropped.
    - Keys come in a fixed order; properties keep theirs.

    Args:
        schema: a JSON Schema, decoded.
        where: the tool, for messages; the path of the parameter is added to it.

    Raises:
        UserError: not a schema, an unknown type, a reference that leads nowhere or into itself.
    """
    return _Lowering(schema).lower(schema, where, ())


class _Lowering:
    """One run over a schema; `root` is what references are resolved against."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def lower(self, schema: Any, where: str, open_refs: tuple[str, ...]) -> Schema:
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise UserError(f"{schema!r} is no schema", where=where, fix='Write an object such as {"type": "string"}')
        out, open_refs = self._resolve(dict(schema), where, open_refs)
        for key in _DROPPED:
            out.pop(key, None)
        out, open_refs = self._unwrap_all_of(out, where, open_refs)
        if "const" in out:
            out["enum"] = [out.pop("const")]
        _lower_type(out, where)
        self._lower_union(out, where, open_refs)
        _lower_enum(out, where)
        self._lower_object(out, where, open_refs)
        self._lower_array(out, where, open_refs)
        for key, idle in (("additionalProperties", False), ("default", None), ("nullable", False)):
            if key in out and out[key] is idle:
                del out[key]
        _check_keywords(out, where)
        return {key: out[key] for key in sorted(out, key=_rank)}

    def _resolve(self, schema: Schema, where: str, open_refs: tuple[str, ...]) -> tuple[Schema, tuple[str, ...]]:
        """The schema with its reference, and those that it leads to, replaced."""
        while "$ref" in schema:
            ref = schema.pop("$ref")
            if ref in open_refs:
                raise UserError(
                    f"the schema refers to itself through {ref}", where=where, fix="Write out the levels that you need"
                )
            open_refs = (*open_refs, ref)
            schema = {**self._target(ref, where), **schema}
        return schema, open_refs

    def _target(self, ref: Any, where: str) -> Schema:
        fix = "Define it under $defs of the same schema"
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise UserError(f"the reference {ref!r} leads out of the schema", where=where, fix=fix)
        target: Any = self.root
        for step in filter(None, ref[1:].split("/")):  # JSON Pointer, RFC 6901
            key = step.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            raise UserError(f"the reference {ref} leads nowhere", where=where, fix=fix)
        return dict(target)

    def _unwrap_all_of(self, schema: Schema, where: str, open_refs: tuple[str, ...]) -> tuple[Schema, tuple[str, ...]]:
        while (
            isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1 and isinstance(schema["allOf"][0], dict)
        ):
            (only,) = schema.pop("allOf")
            inner, open_refs = self._resolve(dict(only), where, open_refs)
            schema = {**{key: value for key, value in inner.items() if key not in _DROPPED}, **schema}
        return schema, open_refs

    def _lower_union(self, schema: Schema, where: str, open_refs: tuple[str, ...]) -> None:
        """Alternatives become `nullable`, an `enum` or one type where that says the same."""
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            if not isinstance(schema[keyword], list) or not schema[keyword]:
                raise UserError(f"{keyword} is no list of schemas", where=where, fix="Give it at least one schema")
            options = [self.lower(option, where, open_refs) for option in schema.pop(keyword)]
            rest = [option for option in options if option.get("type") != "null"]
            if len(rest) < len(options) or any(option.get("nullable") for option in rest):
                schema["nullable"] = True
                rest = [{k: v for k, v in option.items() if k != "nullable"} for option in rest]
            merged = _merged(rest)
            if merged is None:
                schema["anyOf"] = rest
            else:
                for key, value in merged.items():
                    schema.setdefault(key, value)

    def _lower_object(self, schema: Schema, where: str, open_refs: tuple[str, ...]) -> None:
        if "properties" in schema:
            properties = schema["properties"]
            if not isinstance(properties, Mapping):
                raise UserError("properties is no object", where=where, fix="Map each name to its schema")
            required = _required(schema, where)
            lowered: Schema = {}
            for name, value in properties.items():
                if isinstance(value, Mapping) and isinstance(value.get("required"), bool):  # JSON Schema draft 3
                    required += [name] if value["required"] and name not in required else []
                    value = {key: inner for key, inner in value.items() if key != "required"}
                lowered[name] = self.lower(value, f"{where}.{name}", open_refs)
            schema["properties"] = lowered
            schema.setdefault("type", "object")
            schema["required"] = required
        elif "required" in schema:
            schema["required"] = _required(schema, where)
        if not schema.get("required"):
            schema.pop("required", None)
        if isinstance(schema.get("additionalProperties"), Mapping):
            schema["additionalProperties"] = self.lower(schema["additionalProperties"], f"{where}.*", open_refs)

    def _lower_array(self, schema: Schema, where: str, open_refs: tuple[str, ...]) -> None:
        if isinstance(schema.get("items"), list):  # before draft 2020-12
            schema["prefixItems"] = schema.pop("items")
        if "items" in schema and schema["items"] is not False:
            schema["items"] = self.lower(schema["items"], f"{where}[]", open_refs)
            schema.setdefault("type", "array")
            if not schema["items"]:
                del schema["items"]
        if isinstance(schema.get("prefixItems"), list):
            schema["prefixItems"] = [self.lower(item, f"{where}[]", open_refs) for item in schema["prefixItems"]]
            schema.setdefault("type", "array")


def _check_keywords(schema: Schema, where: str) -> None:
    """Keywords whose values `validate_arguments` and `describe_constraints` rely on."""
    for key in ("description", "format", "pattern"):
        if key in schema and not isinstance(schema[key], str):
            raise UserError(f"{key} is no text", where=where, fix="Write a string, or remove it")
    if "pattern" in schema and compiled(schema["pattern"]) is None:
        raise UserError(f"the pattern {schema['pattern']!r} cannot be read", where=where, fix="Mend or remove it")
    for key in (key for key in _LIMITS if key in schema):
        value = schema[key]
        if json_type(value) not in ("integer", "number") or not (
            math.isfinite(value) and (value >= 0 or key in _SIGNED)
        ):
            raise UserError(f"{key} is {value!r}, no limit", where=where, fix="Write a number, or remove it")


def _lower_type(schema: Schema, where: str) -> None:
    """One lower-case name, a list only if several remain, or no `type` at all for "any"."""
    declared = schema.pop("type", None)
    if declared is None:
        return
    names = [_type_name(name, where) for name in (declared if isinstance(declared, list | tuple) else [declared])]
    if not names:
        raise UserError("the type is an empty list", where=where, fix="Name a type")
    if "any" in names:
        return
    types = list(dict.fromkeys(names))
    if "null" in types and len(types) > 1:
        schema["nullable"] = True
        types.remove("null")
    if "number" in types and "integer" in types:
        types.remove("integer")
    schema["type"] = types[0] if len(types) == 1 else types


def _type_name(name: Any, where: str) -> str:
    known = TYPE_NAMES.get(name.lower()) if isinstance(name, str) else None
    if known is None:
        fix = "Use string, integer, number, boolean, array or object"
        raise UserError(f"the type {name!r} is unknown", where=where, fix=fix)
    return known


def _lower_enum(schema: Schema, where: str) -> None:
    if "enum" not in schema:
        return
    choices = schema["enum"]
    if not isinstance(choices, list | tuple) or not choices:
        raise UserError("enum is no list of values", where=where, fix="List the values, or remove it")
    kept = [choice for choice in choices if choice is not None]
    if not kept:
        del schema["enum"]
        schema["type"] = "null"
        return
    if len(kept) < len(choices):
        schema["nullable"] = True
    schema["enum"] = kept
    if "type" not in schema and "anyOf" not in schema:
        types = {json_type(choice) for choice in kept}
        if types == {"integer", "number"}:
            types = {"number"}
        if len(types) == 1:
            schema["type"] = types.pop()


def _merged(options: list[Schema]) -> Schema | None:
    """One schema that accepts what the options accept together; None if the vocabulary has none."""
    if not options:
        return {"type": "null"}
    if len(options) == 1 or all(same_json(option, options[0]) for option in options):
        return options[0]
    types = {str(option.get("type")) for option in options}
    if all(option.keys() <= {"type", "enum", "description"} and "enum" in option for option in options):
        if len(types) == 1:
            return {"type": types.pop(), "enum": list(_unique(c for option in options for c in option["enum"]))}
    elif types == {"integer", "number"} and all(option.keys() == {"type"} for option in options):
        return {"type": "number"}
    return None


def _unique(values: Any) -> list[Any]:
    kept: list[Any] = []
    for value in values:
        if not any(same_json(value, other) for other in kept):
            kept.append(value)
    return kept


def _required(schema: Schema, where: str) -> list[str]:
    names = schema.get("required") or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError("required is no list of names", where=where, fix="List the names of parameters")
    return list(dict.fromkeys(names))


def _rank(key: str) -> int:
    return _ORDER.index(key) if key in _ORDER else len(_ORDER)
