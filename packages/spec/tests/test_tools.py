"""A function's signature and docstring become a tool; arguments are checked against it."""

import enum
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_spec.conversation import Tool
from portlab_spec.errors import UserError
from portlab_spec.tools import same_json, tool_from_function, validate_arguments


class Unit(enum.Enum):
    METRES = "m"
    MILES = "mi"


class Ratio(enum.Enum):
    HALF = 0.5


def plan_run(
    distance: float,
    unit: Unit,
    laps: int,
    outdoors: bool,
    partners: list[str],
    pace: Literal["easy", "hard"] = "easy",
    note: str | None = None,
) -> str:
    """Plan a run
    for tomorrow.

    A longer explanation that is not part of the declaration.

    Args:
        distance (float): How far to run:
            in the unit given.
        unit: Unit of the distance.
        laps: Number of laps.
        outdoors: Whether to run outside.
        partners: Who comes along.
        pace: How fast to run.
        note: A remark, if any.

    Returns:
        A plan.
    """
    raise NotImplementedError


PLAN_RUN = tool_from_function(plan_run)
GOOD: dict[str, Any] = {"distance": 5, "unit": "m", "laps": 3, "outdoors": True, "partners": ["Ada"]}


def test_name_and_first_paragraph():
    assert (PLAN_RUN.name, PLAN_RUN.description) == ("plan_run", "Plan a run for tomorrow.")


@pytest.mark.parametrize(
    ("parameter", "schema"),
    [
        ("distance", {"description": "How far to run: in the unit given.", "type": "number"}),
        ("unit", {"description": "Unit of the distance.", "type": "string", "enum": ["m", "mi"]}),
        ("laps", {"description": "Number of laps.", "type": "integer"}),
        ("outdoors", {"description": "Whether to run outside.", "type": "boolean"}),
        ("partners", {"description": "Who comes along.", "type": "array", "items": {"type": "string"}}),
        ("pace", {"description": "How fast to run.", "type": "string", "enum": ["easy", "hard"]}),
        ("note", {"description": "A remark, if any.", "type": "string", "nullable": True}),
    ],
)
def test_schema_of_each_type(parameter: str, schema: dict[str, Any]):
    assert PLAN_RUN.parameters["properties"][parameter] == schema


def test_parameters_with_a_default_are_not_required():
    assert PLAN_RUN.parameters["required"] == ["distance", "unit", "laps", "outdoors", "partners"]


def test_a_function_without_parameters_has_no_required_key():
    def rest() -> None:
        """Take a break.
        Args:
            None
        """

    tool = tool_from_function(rest)
    assert (tool.description, tool.parameters) == ("Take a break.", {"type": "object", "properties": {}})


def no_docstring(): ...


def no_description():
    """
    Args:
        None
    """


def no_hint(x):
    """Do it.

    Args:
        x: A thing.
    """


def not_described(x: int):
    """Do it."""


def stray(x: int):
    """Do it.

    Args:
        x: A thing.
        y: Another.
    """


def variadic(*x: int):
    """Do it.

    Args:
        x: Things.
    """


def keywords(**x: int):
    """Do it.

    Args:
        x: Things.
    """


def positional(x: int, /):
    """Do it.

    Args:
        x: A thing.
    """


def unresolved(x: "Nowhere"):  # noqa: F821
    """Do it.

    Args:
        x: A thing.
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "no_docstring: the function has no docstring"),
        (no_description, "no_description: the function has no docstring"),
        (no_hint, r"no_hint\(x\): the parameter has no type hint"),
        (not_described, r"not_described\(x\): the parameter is not described"),
        (stray, r"stray\(y\): `Args:` describes a parameter that does not exist"),
        (variadic, r"variadic\(x\): a tool cannot take \*args"),
        (keywords, r"keywords\(x\): a tool cannot take \*args or \*\*kwargs"),
        (positional, r"positional\(x\): a tool's arguments are passed by name"),
        (unresolved, "unresolved: a type hint is unknown"),
    ],
)
def test_what_cannot_be_expressed_is_refused(function: Callable[..., Any], message: str):
    with pytest.raises(UserError, match=message):
        tool_from_function(function)


@pytest.mark.parametrize(
    "hint",
    [
        dict,
        dict[str, int],
        list,
        list[list[int]],
        tuple[int, int],
        int | str,
        list[int | str],
        Any,
        object,
        None,
    ],
)
def test_types_that_templates_render_wrongly_are_refused(hint: Any):
    def function(x):
        """Do it.

        Args:
            x: A thing.
        """

    function.__annotations__["x"] = hint
    with pytest.raises(UserError, match=r"function\(x\): the type .* has no tool schema"):
        tool_from_function(function)


@pytest.mark.parametrize("hint", [Literal["a", 1], Literal[True, False], Ratio])
def test_only_strings_and_integers_can_be_enumerated(hint: Any):
    def function(x):
        """Do it.

        Args:
            x: A thing.
        """

    function.__annotations__["x"] = hint
    with pytest.raises(UserError, match=r"function\(x\): only strings and integers can be enumerated"):
        tool_from_function(function)


def test_a_lambda_has_no_usable_name():
    nameless = lambda: 0  # noqa: E731
    nameless.__doc__ = "Do it."
    with pytest.raises(UserError, match="this is no name for a tool"):
        tool_from_function(nameless)


def test_valid_arguments_have_no_problem():
    assert validate_arguments(PLAN_RUN, GOOD) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"distance": "5"}, "distance is a string, not a number"),
        ({"distance": True}, "distance is a boolean, not a number"),
        ({"laps": 3.0}, "laps is a number, not an integer"),
        ({"laps": True}, "laps is a boolean, not an integer"),
        ({"laps": None}, "laps is null, not an integer"),
        ({"outdoors": 1}, "outdoors is an integer, not a boolean"),
        ({"unit": "km"}, "unit is 'km', not one of 'm', 'mi'"),
        ({"partners": "Ada"}, "partners is a string, not an array"),
        ({"partners": ["Ada", 7]}, "partners[1] is an integer, not a string"),
        ({"shoes": "red"}, "unknown argument shoes"),
    ],
)
def test_each_problem_is_named(change: dict[str, Any], problem: str):
    assert validate_arguments(PLAN_RUN, GOOD | change) == [problem]


def test_missing_arguments_are_named():
    assert validate_arguments(PLAN_RUN, {"unit": "m", "outdoors": True, "partners": []}) == [
        "missing argument distance",
        "missing argument laps",
    ]


def test_null_is_valid_only_where_nullable():
    assert validate_arguments(PLAN_RUN, GOOD | {"note": None}) == []
    assert validate_arguments(PLAN_RUN, GOOD | {"pace": None}) == ["pace is null, not a string"]


def test_nested_objects_are_checked():
    point = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    tool = Tool(name="go", description="Go.", parameters={"type": "object", "properties": {"to": point}})
    assert validate_arguments(tool, {"to": {"y": 1}}) == ["missing argument to.x", "unknown argument to.y"]


def test_additional_properties_are_allowed_where_declared():
    free = Tool(name="go", description="Go.", parameters={"type": "object", "additionalProperties": True})
    typed = Tool(
        name="go",
        description="Go.",
        parameters={"type": "object", "additionalProperties": {"type": "string"}},
    )
    assert validate_arguments(free, {"x": 1}) == []
    assert validate_arguments(typed, {"x": 1}) == ["x is an integer, not a string"]


@pytest.mark.parametrize(
    ("left", "right"), [(1, True), (1, 1.0), (0, False), (1, "1"), ([], {}), (None, False), ([1], [True])]
)
def test_json_types_are_strict(left: Any, right: Any):
    assert not same_json(left, right)
    assert not same_json({"k": left}, {"k": right})


def test_key_order_is_free_and_list_order_is_not():
    assert same_json({"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1})
    assert not same_json([1, 2], [2, 1])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_every_json_value_equals_itself(value: Any):
    assert same_json(value, value)
