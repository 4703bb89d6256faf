"""The rules of `portlab_spec.tools.lint`, one function for each aspect of a schema.

A template writes a schema in one of three places, and each place has its own rules:

    parameters   the outermost object: `properties`, `required` and `type` are written, nothing else
    property     `description`, `enum` of a string, `items`, `nullable`, `properties`, `required`, `type`
    items        what a list holds: every key is written, values that are objects with quoted keys as if they were data
"""

import keyword
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from portlab_spec.conversation import Tool
from portlab_spec.formats import qwen3
from portlab_spec.formats.declarations import STANDARD_KEYS
from portlab_spec.formats.gemma3 import REFUSED_TOKENS
from portlab_spec.formats.gemma4 import REVISIONS
from portlab_spec.formats.markers import FUNCTIONGEMMA as FUNCTIONGEMMA_MARKERS
from portlab_spec.formats.markers import GEMMA4 as GEMMA4_MARKERS
from portlab_spec.tools.constraints import CONSTRAINTS, sentences

Place = Literal["parameters", "property", "items"]
Severity = Literal["error", "warning"]
Code = Literal[
    "additional-properties", "array-of-arrays", "case-collision", "constraint", "control-token", "default",
    "duplicate-tool", "enum-member", "enum-not-string", "fake-property", "items-keyword", "items-missing", "keyword",
    "long-description", "no-description", "no-description-commas", "no-type", "nullable", "object-without-properties",
    "parameter-name", "parameters-type", "prefix-items", "reference", "required-unknown", "reserved-name", "tool-name",
    "type-list", "type-unknown", "union",
]  # fmt: skip

FUNCTIONGEMMA = "functiongemma"
GEMMA4 = tuple(f"gemma4@{commit}" for commit in REVISIONS)
GEMMA3 = ("gemma3-json", "gemma3-python")
QWEN3 = ("qwen3",)
NATIVE = (FUNCTIONGEMMA, *GEMMA4)
ALL = (*NATIVE, *GEMMA3, *QWEN3)
# Those that drop a parameter called like a key of the schema language.
DROP_STANDARD_NAMES = (
    FUNCTIONGEMMA,
    *(f"gemma4@{commit}" for commit, revision in REVISIONS.items() if revision.drops_standard_names),
)

TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
LONG_DESCRIPTION = 1024  # characters; OpenAI's limit, and some 250 tokens of every prompt

_UNIONS = ("anyOf", "oneOf", "allOf", "not", "if")
_WRITTEN = ("description", "type", "enum", "items", "properties", "required", "nullable")
_OWN_RULE = (*_WRITTEN, *_UNIONS, *CONSTRAINTS, "default", "$ref", "prefixItems", "additionalProperties")
_KEY = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]*")
_PLAIN_KEY = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_CONTROL_TOKENS = {
    (FUNCTIONGEMMA,): FUNCTIONGEMMA_MARKERS.refused,
    GEMMA4: GEMMA4_MARKERS.refused,
    GEMMA3: REFUSED_TOKENS,
    QWEN3: qwen3.REFUSED_TOKENS,
}


@dataclass(frozen=True)
class Draft:
    """A finding without its place; `formats` are all that it would concern."""

    code: Code
    severity: Severity
    formats: tuple[str, ...]
    what: str
    fix: str


def check_tool(tool: Tool) -> Iterator[Draft]:
    """Name and description of the tool itself."""
    if not _PLAIN_KEY.fullmatch(tool.name):
        what = "some servers' parsers read names of letters, digits and _ only, and lose calls of this one"
        yield Draft("tool-name", "warning", NATIVE, what, "Use _ in place of . and -")
    if not all(map(_is_python_name, tool.name.split("."))):
        fix = "Rename the tool, or use the format gemma3-json"
        yield Draft("tool-name", "error", ("gemma3-python",), "no Python call can be written with this name", fix)
    yield from _long_description(tool.description)


def check_texts(tool: Tool) -> Iterator[tuple[str, Draft]]:
    """Control tokens in anything that is rendered as text, with the path of the text."""
    for path, text in (("", tool.description), *_texts(tool.parameters, "")):
        for formats, tokens in _CONTROL_TOKENS.items():
            if token := next((token for token in tokens if token in text), None):
                what = f"a text holds the control token {token!r}, which no format can escape"
                yield path, Draft("control-token", "error", formats, what, "Remove or rewrite it")


def check_schema(schema: dict[str, Any], place: Place) -> Iterator[tuple[str, Draft]]:
    """All that concerns one schema, with the path below it; its properties and items are checked by themselves."""
    for rule in (_type, _enum, _description, _keywords, _object, _array):
        for draft in rule(schema, place):
            yield "", draft
    yield from _names(schema)


def _type(schema: dict[str, Any], place: Place) -> Iterator[Draft]:
    declared, fix = schema.get("type"), "Run toolspec lint --fix"
    if place == "parameters":
        if str(declared).lower() != "object":
            what = f"the parameters are of type {declared!r}: their braces are not closed"
            yield Draft("parameters-type", "error", NATIVE, what, 'Set "type": "object"')
        return
    if "$ref" in schema:
        yield Draft("reference", "error", NATIVE, "a reference is not followed: the type is empty", fix)
    elif found := [key for key in _UNIONS if key in schema]:
        what = f"{found[0]} is dropped and the type is empty"
        if place == "items":
            what = f"{found[0]} is written as data, with quoted keys"
        yield Draft("union", "error", NATIVE, what, "Choose one of the types, or write one parameter for each")
    elif isinstance(declared, list):
        what = "the list of types is written as Python text, ['STRING', 'NULL']"
        if place == "items":
            what = "a list of types is written where the model expects one"
        yield Draft("type-list", "error", NATIVE, what, f"{fix}, or choose one type")
    elif declared is None:
        yield Draft("no-type", "error", NATIVE, "the schema has no type: an empty one is written", "Give it one")
    elif str(declared).lower() not in TYPES:
        what = f"{declared!r} is no JSON Schema type"
        yield Draft("type-unknown", "error", ALL, what, f"Use one of: {', '.join(TYPES)}")


def _enum(schema: dict[str, Any], place: Place) -> Iterator[Draft]:
    choices, kind = schema.get("enum"), str(schema.get("type")).lower()
    if not isinstance(choices, list) or not choices or place == "parameters":
        return
    if kind == "string":
        if not all(isinstance(choice, str) for choice in choices):
            what = "choices that are no strings are written bare, None and all"
            yield Draft("enum-member", "error", NATIVE, what, "Use strings, and nullable for null")
    elif place == "property":
        fix = "Use strings, or run toolspec lint --fix" if kind in ("integer", "number") else "Remove it"
        yield Draft("enum-not-string", "error", NATIVE, f"the choices of type {kind} are dropped", fix)
    elif any(isinstance(choice, dict | list) for choice in choices):
        what = f"the choices of type {kind} are written as data, with quoted keys"
        yield Draft("enum-not-string", "error", NATIVE, what, "Remove it")


def _description(schema: dict[str, Any], place: Place) -> Iterator[Draft]:
    text = schema.get("description")
    yield from _long_description(str(text or ""))
    if place == "property" and not text:
        fix = "Say in one sentence what the parameter means"
        yield Draft("no-description", "warning", ALL, "the parameter is not described", fix)
        kind = str(schema.get("type")).lower()
        if (kind == "object" or (kind == "array" and schema.get("items"))) and not schema.get("nullable"):
            what = "without a description, commas are misplaced in this declaration"
            yield Draft("no-description-commas", "error", GEMMA4[:1], what, fix)
    if schema.get("nullable") and place != "parameters":
        what = "how FunctionGemma was trained on nullable is not published; it is not written"
        fix = "Leave the parameter out of `required` instead, and drop nullable"
        yield Draft("nullable", "warning", (FUNCTIONGEMMA,), what, fix)


def _long_description(text: str) -> Iterator[Draft]:
    if len(text) > LONG_DESCRIPTION:
        what = f"the description has {len(text)} characters, which every prompt repeats"
        yield Draft("long-description", "warning", ALL, what, f"Stay below {LONG_DESCRIPTION}")


def _keywords(schema: dict[str, Any], place: Place) -> Iterator[Draft]:
    if place == "items":  # every key is written here; objects with quoted keys
        for key, value in schema.items():
            if (key == "default" or key not in _OWN_RULE) and _holds_objects(value):
                what = f"{key} is written as data, with quoted keys"
                yield Draft("items-keyword", "error", NATIVE, what, "Remove it")
        return
    told = str(schema.get("description") or "")
    for keywords, sentence in sentences(schema):
        if sentence in told or "enum" in keywords:
            continue
        code: Code = "default" if keywords == ("default",) else "constraint"
        what = f"{' and '.join(keywords)} {'are' if len(keywords) > 1 else 'is'} dropped"
        fix = f'Write "{sentence}" into the description, or run toolspec lint --fix'
        yield Draft(code, "warning", NATIVE, what, fix)
    written = ("type", "properties", "required") if place == "parameters" else _WRITTEN
    dropped = [key for key in schema if key not in written and (key in _WRITTEN or key not in _OWN_RULE)]
    if place == "parameters":
        dropped += [key for key in (*_UNIONS, "$ref") if key in schema]
    if dropped:
        what = f"{', '.join(dropped)} {'are' if len(dropped) > 1 else 'is'} dropped"
        yield Draft("keyword", "warning", NATIVE, what, "Remove it, or say it in a description")


def _object(schema: dict[str, Any], place: Place) -> Iterator[Draft]:
    kind, properties = str(schema.get("type")).lower(), schema.get("properties")
    additional = schema.get("additionalProperties")
    has_properties = isinstance(properties, dict)
    if kind == "object" and place == "property" and not has_properties:
        yield from _free_object(schema)
    elif "additionalProperties" in schema and additional is not False:
        what = "additionalProperties is dropped: the model is not told of other keys"
        if written_as_data := place == "items" and _holds_objects(additional):
            what = "additionalProperties is written as data, with quoted keys"
        fix = "Name the keys, or use a list of objects with a key and a value"
        yield Draft("additional-properties", "error" if written_as_data else "warning", NATIVE, what, fix)
    if kind == "object" and place != "parameters" and (not properties and (has_properties or place == "items")):
        what = "the object has no properties: the model is not told what it holds"
        yield Draft("object-without-properties", "warning", NATIVE, what, "Declare its properties")


def _free_object(schema: dict[str, Any]) -> Iterator[Draft]:
    fakes = [key for key in schema if key not in STANDARD_KEYS]
    if "additionalProperties" in fakes:
        what = "additionalProperties is written as a parameter of that name"
        fix = "Name the keys, or use a list of objects with a key and a value"
        yield Draft("additional-properties", "error", NATIVE, what, fix)
    if others := [key for key in fakes if key != "additionalProperties"]:
        what = f"without properties, {', '.join(others)} {'are' if len(others) > 1 else 'is'} written as parameters"
        yield Draft("fake-property", "error", NATIVE, what, "Declare the object's properties")
    what = "the object has no properties: the model is not told what it holds"
    yield Draft("object-without-properties", "error", NATIVE, what, "Declare its properties")


def _array(schema: dict[str, Any], place: Place) -> Iterator[Draft]:
    kind, items = str(schema.get("type")).lower(), schema.get("items")
    if "prefixItems" in schema or isinstance(items, list):
        what = "prefixItems is dropped" if place != "items" else "prefixItems is written as data, with quoted keys"
        yield Draft("prefix-items", "error", NATIVE, what, "Use an object with one property for each place")
    holds = isinstance(items, dict) and bool(items)
    if kind == "array" and place == "items" and holds:
        what = "a list of lists is written with quoted, lower-case keys"
        yield Draft("array-of-arrays", "error", NATIVE, what, "Use a list of objects that hold the inner list")
    elif kind == "array" and not holds:
        what = "the list has no items: the model is not told what it holds"
        yield Draft("items-missing", "error", NATIVE, what, 'Say what it holds, for example {"type": "string"}')


def _names(schema: dict[str, Any]) -> Iterator[tuple[str, Draft]]:
    """Names of parameters."""
    properties = schema.get("properties")
    names = list(properties) if isinstance(properties, dict) else []
    for name in names:
        for draft in _name(name):
            yield f".{name}", draft
    folded: dict[str, list[str]] = {}
    for name in names:
        folded.setdefault(name.lower(), []).append(name)
    for same in (group for group in folded.values() if len(group) > 1):
        what = f"{' and '.join(same)} differ in case only: their order is that of the input, not of the alphabet"
        yield f".{same[0]}", Draft("case-collision", "warning", NATIVE, what, "Rename one")
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in names:
            what, fix = f"required names {name!r}, which is no parameter", "Declare or remove it"
            yield "", Draft("required-unknown", "error", ALL, what, fix)


def _name(name: str) -> Iterator[Draft]:
    if name in STANDARD_KEYS:
        what = f"a parameter called {name!r} is dropped"
        yield Draft("reserved-name", "error", DROP_STANDARD_NAMES, what, f"Rename it, for example {name}_text")
    if not _KEY.fullmatch(name):
        what = "calls write the name bare, and the grammar does not read it back"
        yield Draft("parameter-name", "error", NATIVE, what, "Use letters, digits and _, a letter first")
    elif not _PLAIN_KEY.fullmatch(name):
        what = "the generation grammar of LiteRT-LM has no . or - in names"
        yield Draft("parameter-name", "warning", NATIVE, what, "Use _ in place of . and -")
    if not _is_python_name(name):
        fix = "Rename it, or use the format gemma3-json"
        yield Draft("parameter-name", "error", ("gemma3-python",), "no Python call can be written with this name", fix)


def _is_python_name(text: str) -> bool:
    # Python folds compatibility characters in names (PEP 3131): the call would name another parameter.
    return text.isidentifier() and not keyword.iskeyword(text) and unicodedata.normalize("NFKC", text) == text


def _holds_objects(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_objects, value)))


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text in a schema, names included, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, path)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "properties" and isinstance(inner, Mapping):
                for name, schema in inner.items():
                    yield f"{path}.{name}", name
                    yield from _texts(schema, f"{path}.{name}")
            else:
                yield from _texts(inner, f"{path}[]" if key == "items" else path)
