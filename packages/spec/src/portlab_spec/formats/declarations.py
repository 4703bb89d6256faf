"""Tool declarations in the native dialects.

What the published chat templates do with a schema, construct by construct. They drop or mangle what they do not
know without a word; here that is an error where the result would be wrong, and `portlab_spec.tools.lint` names
the rest (defaults, limits) with a way to rewrite it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from portlab_spec.conversation import Tool
from portlab_spec.errors import UserError
from portlab_spec.formats.segments import Segment, plain
from portlab_spec.formats.values import ValueWriter

STANDARD_KEYS = ("description", "type", "properties", "required", "nullable")


@dataclass(frozen=True)
class DeclarationWriter:
    """Writes one tool.

    Attributes:
        values: writer of strings and values.
        empty_descriptions: a property without a description still gets an empty one.
        nullable: where `nullable:true` goes: behind the description, behind enum and items, or nowhere.
        drops_standard_names: the template drops parameters that are called like a schema key, so they are refused.
    """

    values: ValueWriter
    empty_descriptions: bool = False
    nullable: str = "late"  # "early" | "late" | "never"
    drops_standard_names: bool = False

    def tool(self, tool: Tool, where: str) -> list[Segment]:
        """Segments of a declaration, its two markers included.

        Raises:
            UserError: a construct that the template renders wrongly; names the parameter.
        """
        markers = self.values.markers
        head = plain(f"declaration:{tool.name}{{description:", where, markers.refused)
        out = [Segment(markers.declare, control=True), head]
        out += self.values.string(tool.description, f"{where}.description")
        out += [Segment(",parameters:{"), *self._parameters(tool.parameters, f"{where}.parameters"), Segment("}}")]
        return [*out, Segment(markers.end_declare, control=True)]

    def _parameters(self, schema: Mapping[str, Any], where: str) -> list[Segment]:
        if str(schema.get("type")).lower() != "object":
            raise UserError(f"parameters are of type {schema.get('type')!r}", where=where, fix="Set type to object")
        parts = []
        if schema.get("properties"):
            parts.append([Segment("properties:"), *self._properties(schema["properties"], where)])
        if schema.get("required"):
            parts.append([Segment("required:"), *self._strings(schema["required"], f"{where}.required")])
        return _joined([*parts, self._type("object", where)])

    def _properties(self, properties: Mapping[str, Any], where: str) -> list[Segment]:
        out = [Segment("{")]
        for n, name in enumerate(sorted(properties, key=str.lower)):
            inner = f"{where}.{name}"
            if self.drops_standard_names and name in STANDARD_KEYS:
                raise UserError(
                    f"the template drops parameters called {name!r}", where=inner, fix="Give it another name"
                )
            refused = self.values.markers.refused
            out += [Segment("," if n else ""), plain(name, inner, refused), Segment(":{")]
            out += [*self._property(properties[name], inner), Segment("}")]
        return [*out, Segment("}")]

    def _property(self, schema: Mapping[str, Any], where: str) -> list[Segment]:
        kind = self._kind(schema, where)
        text, enum = str(schema.get("description") or ""), schema.get("enum")
        if enum and kind != "string":
            raise UserError(f"an enum of type {kind} is not rendered", where=where, fix="Use strings")
        parts: list[list[Segment]] = []
        if text or self.empty_descriptions:
            parts.append([Segment("description:"), *self.values.string(text, where)])
        nullable = [Segment("nullable:true")]
        if schema.get("nullable") and self.nullable == "early":
            parts.append(nullable)
        if kind in ("object", "array") and self.nullable == "early" and not parts:
            raise UserError("the template needs a description here", where=where, fix="Describe the parameter")
        if enum:
            parts.append([Segment("enum:"), *self._strings(enum, f"{where}.enum")])
        if kind == "array":
            parts.append([Segment("items:"), *self._items(schema.get("items"), f"{where}.items")])
        if schema.get("nullable") and self.nullable == "late":
            parts.append(nullable)
        if kind == "object":
            if not isinstance(schema.get("properties"), Mapping):
                raise UserError("an object needs `properties`", where=where, fix="Declare its properties")
            parts.append([Segment("properties:"), *self._properties(schema["properties"], where)])
            if schema.get("required"):
                parts.append([Segment("required:"), *self._strings(schema["required"], f"{where}.required")])
        return _joined([*parts, self._type(kind, where)])

    def _items(self, schema: Any, where: str) -> list[Segment]:
        """What a list holds: the schema's keys in alphabetical order."""
        if not isinstance(schema, Mapping) or not schema:
            raise UserError("an array needs `items`", where=where, fix="Say what the array holds")
        if self._kind(schema, where) == "array":
            raise UserError("a list of lists is rendered wrongly", where=where, fix="Use a list of objects")
        parts = []
        for key in sorted(schema, key=str.lower):
            value = schema[key]
            if value is None:
                continue
            match key:
                case "properties":
                    part = self._properties(value, where)
                case "required":
                    part = self._strings(value, f"{where}.required")
                case "type":
                    part = self.values.string(value.upper(), where)
                case _ if isinstance(value, Mapping) or (isinstance(value, list) and any(map(_nested, value))):
                    raise UserError(f"{key!r} of a list's items is rendered wrongly", where=where, fix="Remove it")
                case _:
                    part = self.values.value(value, f"{where}.{key}")
            parts.append([plain(f"{key}:", where, self.values.markers.refused), *part])
        return [Segment("{"), *_joined(parts), Segment("}")]

    def _kind(self, schema: Mapping[str, Any], where: str) -> str:
        kind = schema.get("type")
        if not isinstance(kind, str):
            raise UserError(
                f"the schema has no single type ({kind!r})", where=where, fix="Give it one JSON Schema type"
            )
        return kind.lower()

    def _type(self, kind: str, where: str) -> list[Segment]:
        return [Segment("type:"), *self.values.string(kind.upper(), where)]

    def _strings(self, texts: Any, where: str) -> list[Segment]:
        if not all(isinstance(text, str) for text in texts):
            raise UserError("only strings can stand here", where=where, fix="Use strings")
        return self.values.strings(list(texts), where)


def _nested(value: Any) -> bool:
    return isinstance(value, Mapping | list)


def _joined(parts: list[list[Segment]]) -> list[Segment]:
    out = list(parts[0]) if parts else []
    for part in parts[1:]:
        out += [Segment(","), *part]
    return out
