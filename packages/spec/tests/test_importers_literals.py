"""Value texts are read strictly: JSON values or nothing, and no code runs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_spec.data.importers.literals import read_call_list, read_json_objects, read_literal

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(VALUES)
def test_python_and_json_texts_read_alike(value):
    assert read_literal(repr(value)) == value
    assert read_literal(json.dumps(value)) == value


@given(VALUES)
def test_arguments_survive_a_list_of_calls(value):
    (call,) = read_call_list(f"[f(a={value!r})]")
    assert call == {"name": "f", "arguments": {"a": value}}


def test_json_words_may_stand_in_a_python_text():
    assert read_literal("{'a': true, 'b': [null, None, -1, (2, 3)]}") == {"a": True, "b": [None, None, -1, [2, 3]]}


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "open('x')", "b'x'", "{1, 2}", "1j", "f'{1}'", "1 + 1", "-True", "{1: 2}", "1e999",
        "-1e999", "NaN", "[1][0]", "'a' if 1 else 2", "lambda: 1", "(" * 1000, "[" * 100_000, "'\x00",
        "{'a': 1, 'a': 2}", "{**{}}", "...", "9" * 5000,
    ],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError):
        read_literal(text)


def test_calls_with_odd_names():
    text = "[Market Trends API(from='x', user-id=1), a.b-c(),  d ( x = 'a, b)', y=[{'k': (1, 2)}] ) ]"
    assert read_call_list(text) == [
        {"name": "Market Trends API", "arguments": {"from": "x", "user-id": 1}},
        {"name": "a.b-c", "arguments": {}},
        {"name": "d", "arguments": {"x": "a, b)", "y": [{"k": [1, 2]}]}},
    ]


def test_no_calls():
    assert read_call_list(" [ ] ") == []


@pytest.mark.parametrize(
    "text",
    [
        "f()", "[f(]", "[f(1)]", "[f(a=1, a=2)]", "[f(a=g())]", "[f(a=1)", "[f(a='x)]", "[f() g()]", "[f(a=)]",
        "[f(),]", "[f(a==1)]", "[f)]", "[1]", "[f(*a)]", "[f()()]",
    ],
)  # fmt: skip
def test_what_is_no_list_of_calls_is_refused(text):
    with pytest.raises(ValueError):
        read_call_list(text)


def test_objects_one_after_the_other_or_in_a_list():
    assert read_json_objects('{"a": 1}\n{"b": 2},\n[{"c": 3}] and so on') == [{"a": 1}, {"b": 2}, {"c": 3}]


@pytest.mark.parametrize("text", ['{"a": 1} {"b"', "[1]", '{"a": NaN}'])
def test_broken_objects_are_refused(text):
    with pytest.raises(ValueError):
        read_json_objects(text)
