"""Lowering: one spelling for what JSON Schema can say in several ways."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from portlab_spec.errors import UserError
from portlab_spec.tools import lower_schema

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "lowered"),
    [
        pytest.param({"type": "STRING"}, TEXT, id="capitals"),
        pytest.param({"type": "dict", "properties": {}}, {"type": "object", "properties": {}}, id="BFCL dict"),
        pytest.param({"type": "float"}, {"type": "number"}, id="BFCL float"),
        pytest.param({"type": "tuple", "items": TEXT}, {"type": "array", "items": TEXT}, id="BFCL tuple"),
        pytest.param({"type": "any"}, {}, id="BFCL any"),
        pytest.param({"type": ["string", "null"]}, {**TEXT, "nullable": True}, id="type with null"),
        pytest.param({"type": ["integer", "number"]}, {"type": "number"}, id="integer or number"),
        pytest.param({"type": ["string", "integer"]}, {"type": ["string", "integer"]}, id="a real union stays"),
        pytest.param({"anyOf": [TEXT, {"type": "null"}], "default": None}, {**TEXT, "nullable": True}, id="optional"),
        pytest.param({"oneOf": [{"type": "null"}, TEXT]}, {**TEXT, "nullable": True}, id="oneOf with null"),
        pytest.param({"anyOf": [{"type": "integer"}, {"type": "number"}]}, {"type": "number"}, id="numbers"),
        pytest.param(
            {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]},
            {"type": "string", "enum": ["a", "b"]},
            id="constants",
        ),
        pytest.param(
            {"anyOf": [TEXT, {"type": "integer"}, {"type": "null"}]},
            {"nullable": True, "anyOf": [TEXT, {"type": "integer"}]},
            id="null leaves a union",
        ),
        pytest.param(
            {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
            {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
            id="union stays",
        ),
        pytest.param({"allOf": [TEXT], "description": "D"}, {"description": "D", **TEXT}, id="allOf of one"),
        pytest.param({"const": 3}, {"type": "integer", "enum": [3]}, id="const"),
        pytest.param({"enum": ["a", None]}, {**TEXT, "enum": ["a"], "nullable": True}, id="null among choices"),
        pytest.param({"enum": ["a", 1]}, {"enum": ["a", 1]}, id="mixed choices have no type"),
        pytest.param({"title": "T", "$schema": "s", **TEXT}, TEXT, id="titles"),
        pytest.param({"nullable": False, **TEXT}, TEXT, id="not nullable"),
        pytest.param({"items": [TEXT, TEXT]}, {"type": "array", "prefixItems": [TEXT, TEXT]}, id="old tuples"),
        pytest.param({"type": "integer", "minimum": 1, "default": 2}, {"type": "integer", "minimum": 1, "default": 2},
                     id="limits stay"),
        pytest.param(
            {"properties": {"title": {"title": "T", **TEXT}}, "additionalProperties": False},
            {"type": "object", "properties": {"title": TEXT}},
            id="a property may be called title",
        ),
        pytest.param(
            {"properties": {"a": {**TEXT, "required": True}, "b": {**TEXT, "required": False}}},
            {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["a"]},
            id="required inside a property",
        ),
        pytest.param(
            {"type": "object", "additionalProperties": {"type": "INTEGER"}},
            {"type": "object", "additionalProperties": {"type": "integer"}},
            id="values of a dict",
        ),
    ],
)  # fmt: skip
def test_each_spelling(schema: dict[str, Any], lowered: dict[str, Any]):
    assert lower_schema(schema, "t") == lowered


def test_references_are_written_out():
    schema = {
        "$defs": {"Point": {"type": "object", "properties": {"x": {"$ref": "#/$defs/Axis"}}}, "Axis": TEXT},
        "properties": {"to": {"$ref": "#/$defs/Point", "description": "Where to."}},
    }
    point = {"description": "Where to.", "type": "object", "properties": {"x": TEXT}}
    assert lower_schema(schema, "t") == {"type": "object", "properties": {"to": point}}


def test_a_schema_may_be_used_twice():
    schema = {"definitions": {"A/b": TEXT}, "properties": {n: {"$ref": "#/definitions/A~1b"} for n in "xy"}}
    assert lower_schema(schema, "t")["properties"] == {"x": TEXT, "y": TEXT}


def test_keys_come_in_one_order_and_properties_keep_theirs():
    schema = {"required": ["b"], "properties": {"b": {"enum": ["u"], "type": "string", "description": "D"}, "a": TEXT}}
    lowered = lower_schema(schema, "t")
    assert list(lowered) == ["type", "properties", "required"]
    assert list(lowered["properties"]) == ["b", "a"]
    assert list(lowered["properties"]["b"]) == ["description", "type", "enum"]


class Room(BaseModel):
    beds: int = Field(ge=1, description="Beds.")


class Booking(BaseModel):
    rooms: list[Room] = Field(description="Rooms.")
    board: Literal["full", "half"] | None = Field(None, description="Board.")


def test_what_pydantic_writes():
    room = {"type": "object", "properties": {"beds": {"description": "Beds.", "type": "integer", "minimum": 1}},
            "required": ["beds"]}  # fmt: skip
    assert lower_schema(Booking.model_json_schema(), "t") == {
        "type": "object",
        "properties": {
            "rooms": {"description": "Rooms.", "type": "array", "items": room},
            "board": {"description": "Board.", "type": "string", "enum": ["full", "half"], "nullable": True},
        },
        "required": ["rooms"],
    }


def test_lowering_twice_changes_nothing_and_the_input_stays():
    schema = Booking.model_json_schema()
    before = str(schema)
    once = lower_schema(schema, "t")
    assert lower_schema(once, "t") == once
    assert str(schema) == before


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"x": {"type": "strin"}}}, "t.x: the type 'strin' is unknown"),
        ({"properties": {"x": "string"}}, "t.x: 'string' is no schema"),
        ({"items": {"type": 3}}, r"t\[\]: the type 3 is unknown"),
        ({"$ref": "#/$defs/A"}, "t: the reference #/\\$defs/A leads nowhere"),
        ({"$ref": "https://example.com/a"}, "t: the reference .* leads out of the schema"),
        ({"$defs": {"A": {"items": {"$ref": "#/$defs/A"}}}, "$ref": "#/$defs/A"}, r"t\[\]: .* refers to itself"),
        ({"properties": {"x": {"$ref": "#"}}}, "t.x.x: the schema refers to itself through #"),
        ({"enum": []}, "t: enum is no list of values"),
        ({"properties": {}, "required": "x"}, "t: required is no list of names"),
        ({"type": []}, "t: the type is an empty list"),
        ({"anyOf": []}, "t: anyOf is no list of schemas"),
        ({"description": 3}, "t: description is no text"),
        ({"type": "integer", "minimum": "1"}, "t: minimum is '1', no limit"),
        ({"type": "string", "maxLength": -1}, "t: maxLength is -1, no limit"),
        ({"type": "string", "pattern": "("}, "t: the pattern '\\(' cannot be read"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        lower_schema(schema, "t")
