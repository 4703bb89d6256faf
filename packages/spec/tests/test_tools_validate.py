"""Arguments against limits, formats and nesting; verdicts compared with the jsonschema package."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.conversation import Tool
from portlab_spec.tools import validate_arguments


def problems(schema: dict[str, Any], value: Any) -> list[str]:
    tool = Tool(name="f", description="Do it.", parameters={"type": "object", "properties": {"x": schema}})
    return validate_arguments(tool, {"x": value})


@pytest.mark.parametrize(
    ("schema", "good", "bad", "problem"),
    [
        ({"type": "integer", "minimum": 1}, 1, 0, "x is 0, below 1"),
        ({"type": "integer", "maximum": 9}, 9, 10, "x is 10, above 9"),
        ({"type": "number", "exclusiveMinimum": 0}, 0.1, 0, "x is 0, not above 0"),
        ({"type": "number", "exclusiveMaximum": 1}, 0.9, 1.0, "x is 1.0, not below 1"),
        ({"type": "number", "multipleOf": 0.1}, 0.3, 0.25, "x is 0.25, not a multiple of 0.1"),
        ({"type": "string", "minLength": 2}, "ab", "a", "x has 1 characters, fewer than 2"),
        ({"type": "string", "maxLength": 2}, "ab", "abc", "x has 3 characters, more than 2"),
        ({"type": "string", "pattern": "^[0-9]{5}$"}, "02134", "2134", "x is '2134', which does not match ^[0-9]{5}$"),
        ({"type": "array", "minItems": 1}, [1], [], "x has 0 items, fewer than 1"),
        ({"type": "array", "maxItems": 1}, [1], [1, 2], "x has 2 items, more than 1"),
        ({"type": "array", "uniqueItems": True}, [1, True, 1.0], [1, 1], "x holds the same item twice"),
        ({"type": "array", "items": {"type": "integer", "minimum": 1}}, [1], [1, 0], "x[1] is 0, below 1"),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], ["a", "a"],
         "x[0] is a string, not an integer"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "a", None,
         "x is None, which none of the 2 alternatives accepts"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}, {"a": "b"},
         "x.a is a string, not an integer"),
        ({"enum": [1, "a"]}, 1, 1.0, "x is 1.0, not one of 1, 'a'"),
        ({"type": "integer", "enum": [1], "nullable": True}, None, 2, "x is 2, not one of 1"),
    ],
)  # fmt: skip
def test_each_keyword(schema: dict[str, Any], good: Any, bad: Any, problem: str):
    assert problems(schema, good) == []
    assert problems(schema, bad) == [problem]


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (
            "date",
            ["2026-01-31", "2024-02-29"],
            ["2026-02-29", "2026-1-31", "31.01.2026", "20260131", "2026-01-31T10:00"],
        ),
        ("time", ["13:45:00", "13:45:00.5Z", "13:45:00+02:00"], ["13:45", "1:45 pm", "24:01:00", "13:45:60"]),
        (
            "date-time",
            ["2026-01-31T13:45:00", "2026-01-31T13:45:00Z", "2026-01-31T13:45:00.123456-05:00"],
            ["2026-01-31 13:45:00", "2026-01-31", "2026-02-30T13:45:00Z", "2026-01-31T13:45:00+0200", "tomorrow"],
        ),
    ],
)
def test_formats_are_strict_iso_8601(format: str, good: list[str], bad: list[str]):
    schema = {"type": "string", "format": format}
    assert [value for value in good if problems(schema, value)] == []
    assert [value for value in bad if not problems(schema, value)] == []


def test_other_formats_and_patterns_that_python_cannot_read_are_not_checked():
    assert problems({"type": "string", "format": "email"}, "nobody") == []
    assert problems({"type": "string", "pattern": r"\p{L}+"}, "1") == []


def test_pattern_classes_are_ascii():
    assert problems({"type": "string", "pattern": r"^\d+$"}, "٣") == ["x is '٣', which does not match ^\\d+$"]


# ------------------------------------------------------------------------------------------- against jsonschema

small = st.integers(-2, 4)
scalar = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), small)
        | {"multipleOf": st.sampled_from([1, 2, 0.5])},
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": st.integers(0, 2),
            "maxLength": st.integers(0, 2),
            "pattern": st.sampled_from(["a", "^b$"]),
        },
    ),
    st.builds(lambda e: {"enum": e}, st.lists(st.sampled_from(["a", "b", 1, 2]), min_size=1)),
    st.just({"type": "boolean"}),
)
schemas = st.recursive(
    scalar,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={"minItems": st.integers(0, 2), "maxItems": st.integers(0, 2), "uniqueItems": st.booleans()},
        ),
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("ab"), inner)},
            optional={"required": st.lists(st.sampled_from("ab"), unique=True)},
        ).map(lambda s: s | {"additionalProperties": False}),
        st.builds(lambda v: {"type": "object", "additionalProperties": v}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    ),
    max_leaves=5,
)
# Without integral floats, and 0 and 1 beside false and true: there the two differ on purpose.
values = st.recursive(
    st.booleans() | st.integers(2, 4) | st.just(-1.5) | st.sampled_from(["", "a", "b", "ab"]) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(schemas, values)
def test_verdicts_are_those_of_jsonschema(schema: dict[str, Any], value: Any):
    jsonschema = pytest.importorskip("jsonschema")
    theirs = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert (problems(schema, value) == []) == theirs
