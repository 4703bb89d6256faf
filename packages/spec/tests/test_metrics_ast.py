"""BFCL's rules for right calls, one rule at a time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_spec.conversation import Tool, ToolCall
from portlab_spec.metrics import accepted_calls, accepts, match_calls, refusal

STRINGS = {"type": "array", "items": {"type": "string"}}
NUMBERS = {"type": "array", "items": {"type": "number"}}
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}
OBJECTS = {"type": "array", "items": OBJECT}


def schema(name: str) -> dict[str, Any]:
    return {"type": name}


@pytest.mark.parametrize(
    ("declared", "value", "accepted", "right"),
    [
        ("integer", 5, [4, 5], True),
        ("integer", 5, [4], False),
        ("integer", 5.0, [5], False),
        ("integer", True, [1], False),
        ("integer", "5", [5], False),
        ("number", 5, [5.0], True),
        ("number", 5.5, [5.5], True),
        ("number", True, [1.0], False),
        ("boolean", True, [True], True),
        ("boolean", 1, [True], False),
        ("string", 5, ["5"], False),
        ("string", None, ["x"], False),
    ],
)
def test_types_are_strict_but_integers_are_numbers(declared: str, value: Any, accepted: list[Any], right: bool):
    assert accepts(schema(declared), value, accepted) is right


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("San Francisco, CA", True),
        ("san francisco ca", True),
        ("SanFrancisco-CA", True),
        ("San_Francisco.CA/*^", True),
        ("San Francisco; CA", False),
        ("San Francisco", False),
    ],
)
def test_strings_are_equal_without_case_spaces_and_some_punctuation(value: str, right: bool):
    assert accepts(schema("string"), value, ["San Francisco, CA"]) is right


def test_single_quotes_are_double_quotes():
    assert accepts(schema("string"), "name = 'x'", ['name = "x"'])


def test_an_undeclared_type_is_a_string():
    assert accepts({}, "X y", ["xy"])
    assert not accepts({}, 5, ["5"])


def test_a_value_of_the_type_of_the_accepted_one_is_met_to_the_letter():
    """BFCL's case of a variable that stands for a value."""
    assert accepts(schema("integer"), "maxLength", ["maxLength"])
    assert not accepts(schema("integer"), "MAXLENGTH", ["maxLength"])
    assert accepts(schema("string"), 5, [5])


def test_the_empty_string_is_a_value_where_a_parameter_may_be_left_out():
    assert accepts(schema("string"), "", ["x", ""])


@pytest.mark.parametrize(
    ("declared", "value", "accepted", "right"),
    [
        (STRINGS, ["A b", "c"], [["ab", "C."]], True),
        (STRINGS, ["c", "ab"], [["ab", "c"]], False),
        (STRINGS, ["a", 1], [["a", 1]], False),
        (STRINGS, "a", [["a"]], False),
        (NUMBERS, [1.0, 2.0], [[1.0, 2.0]], True),
        (NUMBERS, [1, 2], [[1.0, 2.0]], False),
        (NUMBERS, [1, 2], [[1, 2]], True),
        (NUMBERS, [], [[1.0], ""], True),
        (NUMBERS, [], [[1.0]], False),
    ],
    ids=[
        "strings inside are compared as strings",
        "order counts",
        "an item of another type",
        "an item alone",
        "numbers",
        "an integer item is no number",
        "unless the accepted items are",
        "empty where it may be left out",
        "empty",
    ],
)
def test_arrays(declared: dict[str, Any], value: Any, accepted: list[Any], right: bool):
    assert accepts(declared, value, accepted) is right


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ({"a": "X.", "b": 1}, True),
        ({"a": "y"}, True),
        ({"b": 1}, False),
        ({"a": "z"}, False),
        ({"a": "x", "c": 1}, False),
        ("x", False),
    ],
    ids=["both keys", "a key left out", "a needed key left out", "wrong value", "unknown key", "no object"],
)
def test_objects_have_accepted_values_per_key(value: Any, right: bool):
    assert accepts(OBJECT, value, [{"a": ["x", "y"], "b": [1, ""]}]) is right


def test_a_bare_value_of_a_key_stands_for_itself():
    assert accepts(OBJECT, {"a": "abc"}, [{"a": "abc"}])
    assert not accepts(OBJECT, {"a": "b"}, [{"a": "abc"}])


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ([{"a": "X"}, {"a": "y"}], True),
        ([{"a": "y"}, {"a": "x"}], False),
        ([{"a": "x"}], False),
        ([{"a": "x"}, 5], False),
    ],
    ids=["each", "order counts", "too few", "no object"],
)
def test_arrays_of_objects_go_item_by_item(value: Any, right: bool):
    assert accepts(OBJECTS, value, [[{"a": ["x"]}, {"a": ["y"]}]]) is right


RIDE = Tool(
    name="ride",
    description="Ride.",
    parameters={
        "type": "object",
        "properties": {"km": {"type": "integer"}, "place": {"type": "string"}, "bike": {"type": "string"}},
        "required": ["km"],
    },
)
ACCEPTED = {"km": [5, 6], "place": ["Davos", ""]}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"km": 6}, ""),
        ({"km": 5, "place": "davos"}, ""),
        ({"place": "Davos"}, "km is missing"),
        ({"km": 7}, "km is 7, accepted: 5, 6"),
        ({"km": 5, "speed": 3}, "speed is not expected"),
        ({"km": 5, "bike": "red"}, "bike is not expected"),
    ],
)
def test_the_arguments_of_a_call(arguments: dict[str, Any], reason: str):
    assert refusal(RIDE, arguments, ACCEPTED) == reason


def test_an_optional_parameter_with_accepted_values_must_be_given():
    assert refusal(RIDE, {"km": 5}, {"km": [5], "place": ["Davos"]}) == "place is missing"


def ride(km: int) -> ToolCall:
    return ToolCall(name="ride", arguments={"km": km})


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([ride(1), ride(2)], True),
        ([ride(2), ride(1)], True),
        ([ride(1)], False),
        ([ride(1), ride(1)], False),
        ([ride(1), ride(2), ride(2)], False),
        ([ride(1), ToolCall(name="Ride", arguments={"km": 2})], False),
    ],
    ids=["in order", "reversed", "one missing", "one twice", "one too many", "name in another case"],
)
def test_calls_answer_one_to_one_in_any_order(calls: list[ToolCall], right: bool):
    assert match_calls(calls, [{"ride": {"km": [1]}}, {"ride": {"km": [2]}}], [RIDE]) is right


def test_a_pairing_is_found_even_if_the_first_fit_blocks_it():
    """1 fits both, 2 only the first: giving 1 to the first is a dead end."""
    accepted = [{"ride": {"km": [1, 2]}}, {"ride": {"km": [1]}}]
    assert match_calls([ride(1), ride(2)], accepted, [RIDE])


def test_no_call_is_right_where_none_is_accepted():
    assert match_calls([], [], [RIDE])


ANY_TYPES = Tool(
    name="log",
    description="Log.",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "on": {"type": "boolean"},
            "tags": STRINGS,
            "where": OBJECT,
            "points": OBJECTS,
            "free": {},
        },
    },
)
VALUES = {
    "text": st.text(),
    "count": st.integers(),
    "share": st.floats(allow_nan=False) | st.integers(),
    "on": st.booleans(),
    "tags": st.lists(st.text()),
    "where": st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.integers())),
    "points": st.lists(st.dictionaries(st.text(), st.text())),
    "free": st.text() | st.integers() | st.none() | st.lists(st.integers()),
}
LOGS = st.lists(
    st.fixed_dictionaries({}, optional=VALUES).map(lambda arguments: ToolCall(name="log", arguments=arguments)),
    max_size=3,
)


@given(LOGS)
def test_a_target_answers_itself(calls: list[ToolCall]):
    assert match_calls(calls, accepted_calls(calls, [ANY_TYPES]), [ANY_TYPES])
    assert match_calls(calls[::-1], accepted_calls(calls, [ANY_TYPES]), [ANY_TYPES])


@given(
    LOGS,
    st.sampled_from(sorted(VALUES)),
    st.recursive(st.none() | st.booleans() | st.floats(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)),
)
def test_any_value_whatever_has_a_verdict(calls: list[ToolCall], name: str, value: Any):
    got = [ToolCall(name="log", arguments={name: value}) for _ in calls]
    assert match_calls(got, accepted_calls(calls, [ANY_TYPES]), [ANY_TYPES]) in (True, False)
