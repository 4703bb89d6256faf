"""Each metric on cases small enough to count by hand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_spec.conversation import Conversation, Message, Split, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.metrics import Confusion, Metric, Prediction, confusion, metric, score

WALK = Tool(
    name="walk",
    description="Walk.",
    parameters={"type": "object", "properties": {"km": {"type": "number"}}, "required": ["km"]},
)
REST = Tool(name="rest", description="Rest.")


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def example(id: str, *calls: ToolCall, split: Split = "test") -> Conversation:
    answer = Message(role="assistant", tool_calls=calls) if calls else Message(role="assistant", content="Hi.")
    return Conversation(
        id=id, split=split, tools=(WALK, REST), messages=(Message(role="user", content=f"Q {id}"), answer)
    )


def prediction(
    id: str, *calls: ToolCall, error: str | None = None, stopped: bool = True, names: tuple[str, ...] = ()
) -> Prediction:
    return Prediction(id, calls, error, stopped, names or tuple(c.name for c in calls))


def hits(expected: tuple[ToolCall, ...], got: Prediction, name: str) -> int:
    return score([example("x", *expected)], [got])[name].hits


def test_names_of_the_metrics():
    scores = score([example("a", call("rest"))], [prediction("a", call("rest"))])
    assert list(scores) == [
        "call_exact",
        "name_accuracy",
        "parse_rate",
        "hallucinated_tool_rate",
        "stopped_rate",
        "schema_valid_rate",
        "call_exact_unordered",
        "args_exact",
        "args_ast",
        "over_call",
        "under_call",
        "relevance_accuracy",
        "format_leak_rate",
        "hallucinated_call_rate",
        "unknown_arg_rate",
        "missing_required_rate",
    ]


def test_a_mixed_set_is_counted():
    examples = [example(id, call("walk", km=1)) for id in "abcd"]
    predictions = [
        prediction("a", call("walk", km=1)),
        prediction("b", call("walk", km=2)),
        prediction("c", call("run", km=1)),
        prediction("d", error="no end of call", stopped=False, names=("walk",)),
    ]
    scores = score(examples, predictions)
    assert {name: (m.hits, m.count, m.value) for name, m in scores.items()} == {
        "call_exact": (1, 4, 0.25),
        "name_accuracy": (2, 4, 0.5),
        "parse_rate": (3, 4, 0.75),
        "hallucinated_tool_rate": (1, 4, 0.25),
        "stopped_rate": (3, 4, 0.75),
        "schema_valid_rate": (2, 4, 0.5),
        "call_exact_unordered": (1, 4, 0.25),
        "args_exact": (1, 4, 0.25),
        "args_ast": (1, 4, 0.25),
        "over_call": (0, 4, 0.0),
        "under_call": (0, 4, 0.0),
        "relevance_accuracy": (3, 4, 0.75),
        "format_leak_rate": (0, 4, 0.0),
        "hallucinated_call_rate": (1, 4, 0.25),
        "unknown_arg_rate": (0, 2, 0.0),
        "missing_required_rate": (0, 2, 0.0),
    }


def test_predictions_are_matched_by_id_not_by_place():
    examples = [example("a", call("rest")), example("b", call("walk", km=1))]
    predictions = [prediction("b", call("walk", km=1)), prediction("a", call("rest"))]
    assert score(examples, predictions)["call_exact"].hits == 2


@pytest.mark.parametrize("km", [1.0, True, "1", None, [1]])
def test_exactness_is_strict_about_json_types(km: Any):
    assert hits((call("walk", km=1),), prediction("x", call("walk", km=km)), "call_exact") == 0


def test_exactness_is_free_of_key_order():
    expected, got = call("walk", km=1, m=2), call("walk", m=2, km=1)
    assert hits((expected,), prediction("x", got), "call_exact") == 1


@pytest.mark.parametrize("name", ["call_exact", "name_accuracy"])
@pytest.mark.parametrize(
    "got",
    [
        (call("rest"), call("walk", km=1)),
        (call("walk", km=1),),
        (call("walk", km=1), call("rest"), call("rest")),
        (),
    ],
    ids=["reversed", "one missing", "one too many", "none"],
)
def test_order_and_number_of_calls_count(got: tuple[ToolCall, ...], name: str):
    assert hits((call("walk", km=1), call("rest")), prediction("x", *got), name) == 0


@pytest.mark.parametrize("name", ["call_exact", "name_accuracy", "parse_rate", "schema_valid_rate"])
def test_malformed_output_is_never_right(name: str):
    """Not even if a lenient parser found the right call in it."""
    assert hits((call("rest"),), prediction("x", call("rest"), error="text after the call"), name) == 0


def test_an_invented_tool_in_malformed_output_is_a_hallucination():
    got = prediction("x", error="unbalanced braces", names=("get_sleep_metrics",))
    assert hits((call("rest"),), got, "hallucinated_tool_rate") == 1


def test_an_invented_tool_among_good_calls_is_one_hallucination():
    got = prediction("x", call("rest"), call("fly"), call("swim"))
    assert hits((call("rest"),), got, "hallucinated_tool_rate") == 1


def test_the_wrong_offered_tool_is_no_hallucination():
    assert hits((call("rest"),), prediction("x", call("walk", km=1)), "hallucinated_tool_rate") == 0


@pytest.mark.parametrize(
    ("calls", "valid"),
    [
        ((call("walk", km=2.5),), 1),
        ((call("walk"),), 0),
        ((call("walk", km="far"),), 0),
        ((call("rest", hours=1),), 0),
        ((call("fly"),), 0),
        ((), 0),
    ],
    ids=["valid", "missing argument", "wrong type", "unknown argument", "unknown tool", "no call"],
)
def test_schema_validity(calls: tuple[ToolCall, ...], valid: int):
    assert hits((call("walk", km=1),), prediction("x", *calls), "schema_valid_rate") == valid


@pytest.mark.parametrize("name", ["call_exact", "name_accuracy", "schema_valid_rate"])
def test_plain_text_is_right_where_no_call_is_expected(name: str):
    assert hits((), prediction("x"), name) == 1


def test_a_call_is_wrong_where_none_is_expected():
    assert hits((), prediction("x", call("rest")), "call_exact") == 0


def test_the_baseline_answers_the_most_frequent_training_label():
    train = [example(str(i), call(name), split="train") for i, name in enumerate(["rest", "walk", "walk"])]
    examples = [example("a", call("walk", km=1)), example("b", call("rest")), example("c", call("rest"))]
    predictions = [prediction(id, call("rest")) for id in "abc"]
    assert score(examples, predictions, train=train)["most_frequent_tool"].hits == 1


def test_the_baseline_breaks_ties_by_name():
    train = [example(str(i), call(name), split="train") for i, name in enumerate(["walk", "rest"])]
    scores = score([example("a", call("rest"))], [prediction("a", call("walk"))], train=train)
    assert scores["most_frequent_tool"].hits == 1


def test_confusion_counts_names_most_frequent_first():
    examples = [example(id, call("rest")) for id in "abcd"] + [example("e")]
    predictions = [
        prediction("a", call("rest")),
        prediction("b", call("rest")),
        prediction("c", call("rest"), call("fly")),
        prediction("d", error="cut off"),
        prediction("e"),
    ]
    assert confusion(examples, predictions) == [
        Confusion("rest", "rest", 2),
        Confusion("(no call)", "(no call)", 1),
        Confusion("rest", "(malformed)", 1),
        Confusion("rest", "rest + fly", 1),
    ]


def test_no_examples_is_an_error():
    with pytest.raises(UserError, match="no example to score"):
        score([], [])


def test_no_training_examples_is_an_error():
    with pytest.raises(UserError, match="no training example"):
        score([example("a")], [prediction("a")], train=[])


@pytest.mark.parametrize(
    ("ids", "predicted", "message"),
    [
        ("ab", "a", r"example b has no prediction \(1 such\)"),
        ("a", "ab", r"example b has no conversation \(1 such\)"),
        ("ab", "aba", "two predictions have the id a"),
        ("aa", "a", "two conversations have the id a"),
    ],
)
def test_examples_and_predictions_match_one_to_one(ids: str, predicted: str, message: str):
    with pytest.raises(UserError, match=message):
        score([example(id) for id in ids], [prediction(id) for id in predicted])


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_contains_the_value(counts: tuple[int, int]):
    m = metric(*counts)
    assert 0 <= m.low <= m.value <= m.high <= 1


def test_the_interval_is_the_same_every_time():
    assert metric(59, 63) == metric(59, 63)


def test_the_interval_agrees_with_the_normal_approximation():
    """At 5,000 of 10,000 the standard error is 0.005, and 1.96 of them reach to either side.

    The 2.5 % quantile of 2,000 draws has itself a standard error of sqrt(0.025 * 0.975 / 2,000) / 0.0584 =
    0.06 of that; four of these are allowed.
    """
    m = metric(5_000, 10_000)
    assert m.low == pytest.approx(0.5 - 1.96 * 0.005, abs=4 * 0.06 * 0.005)
    assert m.high == pytest.approx(0.5 + 1.96 * 0.005, abs=4 * 0.06 * 0.005)


def test_the_interval_agrees_with_resampling_the_examples():
    """The binomial draw is the bootstrap, not an approximation of it."""
    flags = np.repeat([1, 0], [59, 4])
    picks = np.random.default_rng(1).integers(0, 63, size=(20_000, 63))
    low, high = np.quantile(flags[picks].mean(axis=1), [0.025, 0.975])
    m = metric(59, 63)
    assert (m.low, m.high) == (pytest.approx(low), pytest.approx(high))


def test_a_metric_as_json():
    assert metric(3, 3).model_dump() == {"value": 1.0, "low": 1.0, "high": 1.0, "hits": 3, "count": 3}
    assert Metric.model_validate(metric(1, 3).model_dump()) == metric(1, 3)
