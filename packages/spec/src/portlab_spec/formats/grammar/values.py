"""From a tool's schema to the rules of its arguments."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from portlab_spec.conversation import Tool
from portlab_spec.errors import UserError
from portlab_spec.formats.grammar.lark import MARKUP, Rules, either, literal, regex, without
from portlab_spec.formats.grammar.numbers import integer_pattern
from portlab_spec.formats.grammar.spelling import Spelling
from portlab_spec.formats.values import MAX_DEPTH
from portlab_spec.tools import lower_schema, validate_arguments

FREE_DEPTH = 8  # how deep a value without a schema may nest: room for any real one, an end to `[[[[`
MAX_UNORDERED = 64  # bits of a parametric rule of llguidance: which keys have been written

_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
# Real days only; of the leap years those that end a century are left out.
_DATE = (
    "([1-9][0-9]{3}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    "|[1-9][0-9](0[48]|[2468][048]|[13579][26])-02-29)"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])?"
STRING_FORMATS = {"date": _DATE, "time": _CLOCK, "date-time": f"{_DATE}T{_CLOCK}"}
_NOT_ENFORCED = ("pattern", "multipleOf", "uniqueItems", "minProperties", "maxProperties")
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SAYS_NOTHING = {"description", "nullable", "default", "examples"}  # of which values are accepted


def unenforced(tool: Tool) -> list[str]:
    """The parts of a tool's schema that its grammar does not hold the model to: "PATH: KEYWORD", in order.

    Calls that the grammar admits can still fail `validate_arguments` on these.
    """
    where = f"tool {tool.name}"
    return list(_unenforced(lower_schema(tool.parameters, where), where))


def _unenforced(schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if "enum" in schema:  # the choices are checked when the grammar is written
        return
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            twice = schema.keys() & option.keys() - _SAYS_NOTHING
            yield from (f"{where}: {keyword}" for keyword in sorted(twice))
            yield from _unenforced(_inherited(schema, option), where)
        return
    types = schema.get("type", "number")
    ranges = () if "number" not in types else _RANGES
    yield from (f"{where}: {keyword}" for keyword in (*_NOT_ENFORCED, *ranges) if keyword in schema)
    if schema.get("format") in STRING_FORMATS:
        yield from (f"{where}: {keyword}" for keyword in ("minLength", "maxLength") if keyword in schema)
    elif "format" in schema:
        yield f"{where}: format"
    for name, inner in (schema.get("properties") or {}).items():
        yield from _unenforced(inner, f"{where}.{name}")
    for keyword, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(schema.get(keyword), Mapping):
            yield from _unenforced(schema[keyword], f"{where}{mark}")
    for i, inner in enumerate(schema.get("prefixItems") or ()):
        yield from _unenforced(inner, f"{where}[{i}]")


def _inherited(schema: Mapping[str, Any], option: Mapping[str, Any]) -> dict[str, Any]:
    """An alternative with what stands beside `anyOf`, where it says nothing of its own."""
    return {**{key: value for key, value in schema.items() if key not in ("anyOf", "nullable")}, **option}


class ValueRules:
    """Writes rules for values into a grammar; its methods return what to put where the value stands."""

    def __init__(self, rules: Rules, spelling: Spelling) -> None:
        self.rules, self._spelling = rules, spelling
        self.parametric: list[str] = []

    def arguments(self, tool: Tool) -> str:
        """The fields between the brackets of a call; "" where a call has no arguments.

        Raises:
            UserError: the schema is damaged, cannot be satisfied, or holds what the format cannot write.
        """
        where = f"tool {tool.name}"
        schema = lower_schema(tool.parameters, where)
        schema.setdefault("properties", {})
        return self._fields(schema, where, 1, argument=True)

    def plain_text(self) -> str:
        """Any text, also none, that spells no control token."""
        text = self.rules.add("TEXT", without(self.rules, "(?s:.)+", self._spelling.refused))
        return self.rules.add("text", f"{text}? ({self.markup()} {text}?)*")

    def markup(self) -> str:
        """A token of HTML: text to us, special to llguidance."""
        return self.rules.add("markup", " | ".join(MARKUP))

    def value(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        """A value that the schema accepts."""
        if depth > MAX_DEPTH:
            raise UserError(f"nested deeper than {MAX_DEPTH} levels", where=where, fix="Flatten the schema")
        options = self._options(schema, where, depth)
        if schema.get("nullable") and self._spelling.null:
            options.append(literal(self._spelling.null))
        if not options:
            raise UserError("no value satisfies this schema", where=where, fix="Mend its enum or limits")
        return either(options)

    # ---------------------------------------------------------------------------------- one kind each

    def _options(self, schema: Mapping[str, Any], where: str, depth: int) -> list[str]:
        declared = schema.get("type")
        types = [declared] if isinstance(declared, str) else list(declared or ())
        if "enum" in schema:
            alone = Tool(name="f", description="f", parameters={"properties": {"value": dict(schema)}})
            choices = [choice for choice in schema["enum"] if not validate_arguments(alone, {"value": choice})]
            return [self._constant(choice, where) for choice in choices]
        if "anyOf" in schema:
            return [self.value(_inherited(schema, option), where, depth) for option in schema["anyOf"]]
        if schema.keys() <= _SAYS_NOTHING:
            return [self._free(FREE_DEPTH)]
        return [option for kind in types or _TYPES if (option := self._typed(kind, schema, where, depth))]

    def _typed(self, kind: str, schema: Mapping[str, Any], where: str, depth: int) -> str:
        spelling = self._spelling
        match kind:
            case "string":
                return self._string(schema)
            case "integer":
                pattern = integer_pattern(schema)
                return self.rules.add("INTEGER", regex(pattern)) if pattern else ""
            case "number":
                return self.rules.add("NUMBER", regex(spelling.number))
            case "boolean":
                return either(map(literal, (spelling.true, spelling.false)))
            case "array":
                return self._array(schema, where, depth)
            case "object":
                return self._object(schema, where, depth)
        return literal(spelling.null) if spelling.null else ""

    def _string(self, schema: Mapping[str, Any]) -> str:
        spelling, (low, high) = self._spelling, _span(schema, "Length")
        if high is not None and high < low:
            return ""
        if schema.get("format") in STRING_FORMATS:
            body = self.rules.add(schema["format"].upper(), regex(STRING_FORMATS[schema["format"]]))
        elif high == 0:
            body = ""
        elif low or high is not None:
            # Without markup, whose tokens would have to be counted by their letters.
            span = f"{{{max(low, 1)},{'' if high is None else high}}}"
            body = self.rules.add("BOUNDED", without(self.rules, f"{spelling.character}{span}", spelling.refused))
            body += "" if low else "?"
        else:
            text = self.rules.add("TEXT", without(self.rules, f"{spelling.character}+", spelling.refused))
            body = f"{text}? ({self.markup()} {text}?)*"
        return self.rules.add("string", f"{spelling.quote} {body} {spelling.quote}")

    def _array(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        low, high = _span(schema, "Items")
        items, comma = schema.get("items", {}), literal(self._spelling.comma)
        heads = [self.value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(schema.get("prefixItems", ()))]
        heads = heads if high is None else heads[:high]
        high = high if isinstance(items, Mapping) else len(heads)
        if high is not None and high < low:
            return ""
        rest = self.value(items, f"{where}[]", depth + 1) if high is None or high > len(heads) else ""
        span = (max(low - len(heads), 0), None if high is None else high - len(heads))
        body = _several(rest, comma, *span, first=not heads) if rest else ""
        for i in reversed(range(len(heads))):
            body = f"{comma if i else ''} {heads[i]} {body}".strip()
            body = body if i < low else f"({body})?"
        return self.rules.add("array", f'"[" {body} "]"')

    def _object(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        if "properties" not in schema and schema.get("additionalProperties", True) is True:
            return self._free_object(FREE_DEPTH - 1)
        return self.rules.add("object", f'"{{" {self._fields(schema, where, depth + 1)} "}}"')

    def _constant(self, value: Any, where: str) -> str:
        """Exactly one value."""
        spelling = self._spelling
        match value:
            case str():
                spelling.check(value, where)
                return f"{spelling.quote} {literal(spelling.escape(value))} {spelling.quote}"
            case None:
                return literal(spelling.null)
            case bool():
                return literal(spelling.true if value else spelling.false)
            case int():
                return literal(str(value))
            case float():
                return literal(spelling.write_float(value))
        raise UserError(f"an enum of {json.dumps(value)} has no grammar", where=where, fix="List scalars")

    # ------------------------------------------------------------------------------------------- keys

    def _fields(self, schema: Mapping[str, Any], where: str, depth: int, *, argument: bool = False) -> str:
        """Declared keys; undeclared ones only where none is declared, since their place in the order is open."""
        declared = dict(schema.get("properties") or {})
        required = schema.get("required") or []
        declared |= {name: {} for name in required if name not in declared}
        extra = schema.get("additionalProperties")
        if not declared:
            if extra is None or extra is False:
                return ""
            value = self.value(extra if isinstance(extra, Mapping) else {}, f"{where}.*", depth)
            return self._free_fields(value, argument=argument)
        spelling = self._spelling
        ordered = not spelling.any_order or len(declared) > MAX_UNORDERED
        names = list(declared) if spelling.any_order else sorted(declared, key=str.lower)
        key = spelling.argument if argument else spelling.key
        fields = []
        for name in names:
            inner = f"{where}.{name}"
            spelling.check(name, inner)
            value = self.value(declared[name], inner, depth)
            fields.append((key.write(name, inner), value, name in required))
        return self._ordered(fields) if ordered else self._unordered(fields)

    def _ordered(self, fields: Sequence[tuple[str, str, bool]]) -> str:
        """Fields in their order, optional ones left out at will; the first that is written has no comma."""
        comma = self._spelling.comma
        tail, heads = "", []
        first = next((i for i, (_, _, needed) in enumerate(fields) if needed), len(fields))
        for i in reversed(range(len(fields))):
            key, value, needed = fields[i]
            if i <= first:
                heads.append(f"{literal(key)} {value} {tail}".strip())
            if i == 0:
                break
            step = f"{literal(comma + key)} {value}"
            tail = f"{step if needed else f'({step})?'} {tail}".strip()
            if i <= first:  # shared by several heads
                tail = self.rules.add("rest", tail)
        if first == len(fields):
            return f"{either(reversed(heads))}?" if len(heads) > 1 else f"({heads[0]})?"
        return either(reversed(heads))

    def _unordered(self, fields: Sequence[tuple[str, str, bool]]) -> str:
        """Fields in any order, each at most once: bit k of the rules' parameter says that field k was written."""
        fields = sorted(fields, key=lambda field: not field[2])  # required ones take the low bits
        required = sum(needed for _, _, needed in fields)
        end = f'"" %if is_ones([0:{required}])' if required else '""'
        first, more = self.rules.fresh("fields"), self.rules.fresh("more")
        for name, comma in ((first, ""), (more, self._spelling.comma)):
            options = [] if name == first and required else [end]
            for k, (key, value, _) in enumerate(fields):
                options.append(f"{literal(comma + key)} {value} {more}::set_bit({k}) %if bit_clear({k})")
            self.rules.define(name, " | ".join(options))
        self.parametric += [first, more]
        return f"{first}::0x0"

    def _free_fields(self, value: str, *, argument: bool = False) -> str:
        key = self._spelling.argument if argument else self._spelling.key
        field = f"{self.rules.add('KEY', regex(f'{key.before}{key.free}{key.after}'))} {value}"
        return f"({field} ({literal(self._spelling.comma)} {field})*)?"

    def _free(self, levels: int) -> str:
        """A value without a schema that nests at most so many levels."""
        options = [self._typed(kind, {}, "", 0) for kind in ("string", "number", "boolean", "null")]
        if levels:
            value, comma = self._free(levels - 1), literal(self._spelling.comma)
            options += [self.rules.add("array", f'"[" {_several(value, comma, 0, None, first=True)} "]"')]
            options += [self._free_object(levels - 1)]
        return self.rules.add("free", " | ".join(filter(None, options)))

    def _free_object(self, levels: int) -> str:
        return self.rules.add("object", f'"{{" {self._free_fields(self._free(levels))} "}}"')


def _span(schema: Mapping[str, Any], noun: str) -> tuple[int, int | None]:
    """The limits of a count; None is no limit."""
    high = schema.get(f"max{noun}")
    return int(schema.get(f"min{noun}", 0)), None if high is None else int(high)


def _several(item: str, comma: str, low: int, high: int | None, *, first: bool) -> str:
    """From `low` to `high` items; `first` says that none stands before them, so that one needs no comma."""
    if high == 0:
        return ""
    if not first:
        return f"({comma} {item}){_times(low, high)}"
    more = f" ({comma} {item}){_times(max(low - 1, 0), high and high - 1)}" if high != 1 else ""
    return f"{item}{more}" if low else f"({item}{more})?"


def _times(low: int, high: int | None) -> str:
    return "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
