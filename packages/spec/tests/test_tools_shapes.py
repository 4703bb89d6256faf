"""Every shape of a tool in use is read into the same record."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.conversation import Tool
from portlab_spec.errors import UserError
from portlab_spec.tools import describe_constraints, lint, read_tools, to_openai, validate_arguments

CITY = {"description": "City.", "type": "string"}
DAYS = {"description": "Days ahead.", "type": "integer"}
FORECAST = Tool(
    name="forecast",
    description="Forecast the weather.",
    parameters={"type": "object", "properties": {"city": CITY, "days": DAYS}, "required": ["city"]},
)
NAMED = {"name": "forecast", "description": "Forecast the weather."}
SCHEMA = FORECAST.parameters
FUNCTION = {**NAMED, "parameters": SCHEMA}
UPPER = {
    "type": "OBJECT",
    "properties": {"city": CITY | {"type": "STRING"}, "days": DAYS | {"type": "INTEGER"}},
    "required": ["city"],
}
XLAM = {
    "city": {"type": "str", "description": "City."},
    "days": {"type": "int, optional", "description": "Days ahead."},
}
PYDANTIC = {
    "title": "Forecast",
    "type": "object",
    "properties": {"city": CITY | {"title": "City"}, "days": DAYS | {"title": "Days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$schema": "https://json-schema.org/draft/2020-12/schema",
}
ARROW = {
    "type": "object",
    "properties": {"city": CITY | {"enum": None, "items": None}, "days": DAYS | {"enum": None}, "other": None},
    "required": ["city"],
}


@pytest.mark.parametrize(
    "value",
    [
        pytest.param([{"type": "function", "function": FUNCTION}], id="OpenAI"),
        pytest.param([{"type": "function", **FUNCTION, "strict": True}], id="OpenAI Responses"),
        pytest.param([{"type": "function", "function": {**FUNCTION, "return": {"type": "string"}}}], id="Hugging Face"),
        pytest.param([{"function": {**NAMED, "parameters": UPPER}}], id="mobile-actions"),
        pytest.param([FUNCTION], id="flat"),
        pytest.param([{**NAMED, "parameters": {**SCHEMA, "type": "dict"}}], id="BFCL"),
        pytest.param([{**NAMED, "input_schema": PYDANTIC, "cache_control": {"type": "ephemeral"}}], id="Anthropic"),
        pytest.param([{**NAMED, "inputSchema": PYDANTIC}], id="MCP"),
        pytest.param([{"function_declarations": [{**NAMED, "parameters": UPPER}]}], id="Gemini"),
        pytest.param({"functionDeclarations": [{**NAMED, "parametersJsonSchema": SCHEMA}]}, id="Gemini JSON Schema"),
        pytest.param([{**NAMED, "parameters": XLAM}], id="xLAM"),
        pytest.param([{"function": {**NAMED, "parameters": ARROW}, "name": None}], id="Arrow nulls"),
        pytest.param([{**NAMED, "parameters": {k: v for k, v in SCHEMA.items() if k != "required"},
                       "required": ["city"]}], id="required beside the schema"),
        pytest.param([json.dumps(FUNCTION)], id="a list of JSON texts"),
        pytest.param([{**NAMED, "parameters": json.dumps(SCHEMA)}], id="parameters as JSON text"),
        pytest.param(json.dumps([FUNCTION]), id="JSON text"),
        pytest.param(FUNCTION, id="one tool"),
    ],
)  # fmt: skip
def test_each_shape(value: Any):
    assert read_tools(value, "row") == (FORECAST,)


@pytest.mark.parametrize("value", [None, [], "", "[]", "null"])
def test_no_tools(value: Any):
    assert read_tools(value, "row") == ()


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_no_parameters(parameters: Any):
    (tool,) = read_tools([{**NAMED, "parameters": parameters}], "row")
    assert tool.parameters == {"type": "object", "properties": {}}


def test_what_is_written_as_openai_objects_is_read_back():
    assert read_tools(to_openai([FORECAST]), "row") == (FORECAST,)


@pytest.mark.parametrize(
    ("kind", "schema", "required"),
    [
        ("str", {"type": "string"}, True),
        ("str, optional", {"type": "string"}, False),
        ("List[int]", {"type": "array", "items": {"type": "integer"}}, True),
        ("list[dict]", {"type": "array", "items": {"type": "object"}}, True),
        ("List[Union[int, float]]", {"type": "array", "items": {"type": "number"}}, True),
        ("Tuple[float, float]", {"type": "array", "items": {"type": "number"}}, True),
        ("Optional[bool]", {"type": "boolean", "nullable": True}, False),
        ("float | None", {"type": "number", "nullable": True}, True),
        ("Dict[str, Any]", {"type": "object"}, True),
        ("Dict[str, int]", {"type": "object", "additionalProperties": {"type": "integer"}}, True),
        ("Literal['a', 'b'], optional", {"type": "string", "enum": ["a", "b"]}, False),
        ("Callable[[float], float]", {"type": "string"}, True),
        ("Union[int, str]", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, True),
        ("typing.List", {"type": "array"}, True),
    ],
)
def test_python_types_of_xlam(kind: str, schema: dict[str, Any], required: bool):
    (tool,) = read_tools([{**NAMED, "parameters": {"type": {"type": kind}}}], "row")
    assert tool.parameters["properties"] == {"type": schema}
    assert tool.parameters.get("required", []) == (["type"] if required else [])


def test_an_xlam_parameter_with_a_default_is_not_required():
    given = {"a": {"type": "str", "default": ""}, "b": {"type": "int", "default": 1, "required": True}}
    (tool,) = read_tools([{**NAMED, "parameters": given}], "row")
    assert tool.parameters == {
        "type": "object",
        "properties": {"a": {"type": "string", "default": ""}, "b": {"type": "integer", "default": 1}},
        "required": ["b"],
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[{]", "row: the tools are not JSON"),
        (3, "row: the tools are of type int"),
        ([3], r"row: tools\[0\]: 3 is no tool"),
        ([{"description": "D"}], r"row: tools\[0\]: the tool has no name"),
        ([{"name": "f"}], r"row: tools\[0\]: tool f: the tool has no description"),
        ([{"name": "f g", "description": "D"}], r"row: tools\[0\]: tool f g: this is no name for a tool"),
        ([{"type": "web_search", "function": FUNCTION}], "a tool of type 'web_search' cannot be called"),
        ([{**NAMED, "parameters": {"type": "string"}}], "tool forecast: the parameters are of type string"),
        ([{**NAMED, "parameters": [CITY]}], "tool forecast: the parameters are no object"),
        ([{**NAMED, "parameters": {"type": "object", "properties": {"x": {"type": "strng"}}}}],
         r"tools\[0\]: tool forecast.x: the type 'strng' is unknown"),
        ([{**NAMED, "parameters": {"x": {"type": "Lst[int]"}}}], r"forecast.x: the type 'Lst\[int\]' is unknown"),
        ([{**NAMED, "parameters": {"x": {"type": "1 + __import__('os')"}}}], "forecast.x: the type .* cannot be read"),
    ],
)  # fmt: skip
def test_what_is_no_tool_is_refused_with_its_place(value: Any, message: str):
    with pytest.raises(UserError, match=message):
        read_tools(value, "row")


keys = st.sampled_from([
    "name", "description", "parameters", "function", "type", "properties", "required", "items", "enum", "anyOf",
    "allOf", "$ref", "const", "default", "nullable", "minimum", "maxItems", "prefixItems", "additionalProperties", "x",
    "format",
])  # fmt: skip
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from(["string", "OBJECT", "array", "List[int]", "#", "x"])
)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


@settings(max_examples=600, deadline=None)
@given(anything, anything)
def test_any_json_is_a_tool_or_a_user_error(parameters: Any, arguments: Any):
    try:
        (tool,) = read_tools([{**NAMED, "parameters": parameters}], "row")
    except UserError:
        return
    assert read_tools(to_openai([tool]), "row") == (tool,)
    lint(describe_constraints(tool))
    validate_arguments(tool, arguments if isinstance(arguments, dict) else {"x": arguments})


@settings(max_examples=200, deadline=None)
@given(anything)
def test_any_json_is_tools_or_a_user_error(value: Any):
    with contextlib.suppress(UserError):
        read_tools(value, "row")


def test_deep_nesting_is_refused():
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(20_000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UserError, match="nested too deep"):
        read_tools([{**NAMED, "parameters": {"type": "object", "properties": {"x": schema}}}], "row")
