"""A function's signature and docstring become a tool; arguments are checked against it."""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from portlab_spec.conversation import Tool
from portlab_spec.data import fitness
from portlab_spec.errors import UserError
from portlab_spec.tools import same_json, tool_from_function, tool_from_model, validate_arguments


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


class Priority(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Leg:
    """A leg of the trip.

    Attributes:
        city: Where to.
        nights: How long.
    """

    city: str
    nights: int = 1


class Traveller(TypedDict):
    """Who travels.

    :param name: Full name.
    """

    name: str
    age: NotRequired[Annotated[int, Field(ge=0, description="Age in years.")]]


class Payment(BaseModel):
    """How to pay."""

    method: Literal["card", "cash"] = Field(description="Method.")
    tip: float | None = Field(None, ge=0, le=1, description="Tip, a share of the price.")


LEG = {
    "type": "object",
    "properties": {
        "city": {"description": "Where to.", "type": "string"},
        "nights": {"description": "How long.", "type": "integer"},
    },
    "required": ["city"],
}
TRAVELLER = {
    "type": "object",
    "properties": {
        "name": {"description": "Full name.", "type": "string"},
        "age": {"description": "Age in years.", "type": "integer", "minimum": 0},
    },
    "required": ["name"],
}
PAYMENT = {
    "type": "object",
    "properties": {
        "method": {"description": "Method.", "type": "string", "enum": ["card", "cash"]},
        "tip": {
            "description": "Tip, a share of the price.",
            "type": "number",
            "nullable": True,
            "minimum": 0,
            "maximum": 1,
        },
    },
    "required": ["method"],
}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (Leg, {"description": "A thing.", **LEG}),
        (Traveller, {"description": "A thing.", **TRAVELLER}),
        (Payment, {"description": "A thing.", **PAYMENT}),
        (list[Leg], {"description": "A thing.", "type": "array", "items": LEG}),
        (Leg | None, {"description": "A thing.", **LEG, "nullable": True}),
        (Annotated[int, "Better text."], {"description": "Better text.", "type": "integer"}),
        (Annotated[int | None, Field(ge=1)],
         {"description": "A thing.", "type": "integer", "nullable": True, "minimum": 1}),
        (Annotated[list[str], Field(min_length=1)],
         {"description": "A thing.", "type": "array", "items": {"type": "string"}, "minItems": 1}),
        (list[Annotated[str, Field(pattern="^a")]],
         {"description": "A thing.", "type": "array", "items": {"type": "string", "pattern": "^a"}}),
        (Literal[1, 2], {"description": "A thing. One of 1, 2.", "type": "integer"}),
        (Priority, {"description": "A thing. One of 1, 2.", "type": "integer"}),
        (list[Unit], {"description": "A thing.", "type": "array", "items": {"type": "string", "enum": ["m", "mi"]}}),
    ],
)  # fmt: skip
def test_records_annotations_and_choices(hint: Any, schema: dict[str, Any]):
    def function(x):
        """Do it.

        Args:
            x: A thing.
        """

    function.__annotations__["x"] = hint
    assert tool_from_function(function).parameters["properties"]["x"] == schema


class Tree(BaseModel):
    children: list["Tree"] = []


def test_a_record_that_holds_itself_is_refused():
    def function(x: Tree):
        """Do it.

        Args:
            x: A thing.
        """

    with pytest.raises(UserError, match=r"function\(x\).children: Tree holds itself"):
        tool_from_function(function)


def test_the_fix_fits_the_type():
    def function(x: dict[str, int]):
        """Do it.

        Args:
            x: A thing.
        """

    with pytest.raises(UserError, match="list of objects with a key and a value"):
        tool_from_function(function)


def numpy_style(x: int, y: str = ""):
    """Do it.

    Parameters
    ----------
    x : int
        A thing
        of two lines.
    y : str, optional
        Another.

    Returns
    -------
    None
    """


def sphinx_style(x: int, y: str = ""):
    """Do it.

    :param x: A thing
        of two lines.
    :param y: Another.
    :returns: Nothing.
    """


async def google_style(x: int, y: str = ""):
    """Do it.

    Args:
        x: A thing
            of two lines.
        y (str, optional): Another.

    Raises:
        ValueError: never.
    """


class Service:
    def method(self, x: int, y: str = ""):
        """Do it.

        Args:
            x: A thing of two lines.
            y: Another.
        """


@pytest.mark.parametrize("function", [numpy_style, sphinx_style, google_style, Service.method, Service().method])
def test_every_docstring_style_says_the_same(function: Callable[..., Any]):
    tool = tool_from_function(function)
    assert tool.description == "Do it."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "x": {"description": "A thing of two lines.", "type": "integer"},
            "y": {"description": "Another.", "type": "string"},
        },
        "required": ["x"],
    }


def test_a_pydantic_model_is_a_tool():
    tool = tool_from_model(Payment)
    assert (tool.name, tool.description, tool.parameters) == ("Payment", "How to pay.", PAYMENT)
    assert tool_from_model(Payment, name="pay", description="Pay.").name == "pay"
    with pytest.raises(UserError, match="Tree: the model has no docstring"):
        tool_from_model(Tree)


def test_the_declarations_of_fitness_213_never_change():
    """Adapters in use were trained on these bytes."""
    text = json.dumps([tool.model_dump() for tool in fitness.tools()])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "95f69da8c5727480"


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
