"""What one answer is judged to be, flag by flag, and what becomes of it in the sums."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats import Parsed
from portlab_spec.metrics import ExampleScore, Prediction, confusion, judge, metric, per_example, ratio, score

WALK = Tool(
    name="walk",
    description="Walk.",
    parameters={
        "type": "object",
        "properties": {"km": {"type": "number"}, "place": {"type": "string"}},
        "required": ["km"],
    },
)
REST = Tool(name="rest", description="Rest.")
QUESTION = Message(role="user", content="What now?")


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def example(*calls: ToolCall, id: str = "x", **meta: Any) -> Conversation:
    answer = Message(role="assistant", tool_calls=calls) if calls else Message(role="assistant", content="Hi.")
    return Conversation(id=id, tools=(WALK, REST), messages=(QUESTION, answer), meta=meta)


def any_call_will_do(id: str = "x") -> Conversation:
    return Conversation(id=id, tools=(WALK, REST), messages=(QUESTION,), meta={"expects": "call"})


def answer(*calls: ToolCall, id: str = "x", error: str | None = None, **rest: Any) -> Prediction:
    names = rest.pop("names", tuple(c.name for c in calls))
    return Prediction(id, calls, error, rest.pop("stopped", True), names, **rest)


def flag(expected: tuple[ToolCall, ...], got: Prediction, name: str) -> bool | None:
    return judge(example(*expected), got).flags.get(name)


A, B = call("walk", km=1), call("rest")


# Equality of calls


@pytest.mark.parametrize(
    ("got", "same"),
    [((A, B), True), ((B, A), True), ((A,), False), ((A, B, B), False), ((A, A), False), ((), False)],
    ids=["same", "reversed", "one missing", "one too many", "one twice", "none"],
)
def test_unordered_exactness_compares_multisets(got: tuple[ToolCall, ...], same: bool):
    assert flag((A, B), answer(*got), "call_exact_unordered") is same
    assert flag((A, B), answer(*got), "args_exact") is same


def test_unordered_exactness_is_strict_about_json_types():
    assert flag((A,), answer(call("walk", km=1.0)), "call_exact_unordered") is False


def test_arguments_are_judged_only_where_calls_are_expected():
    flags = judge(example(), answer()).flags
    assert "args_exact" not in flags
    assert "args_ast" not in flags


def test_accepted_alternatives_count_for_the_ast_rules_alone():
    conversation = example(A, accepted=[{"walk": {"km": [1, 2], "place": ["the park", ""]}}])
    flags = judge(conversation, answer(call("walk", km=2, place="The Park"))).flags
    assert (flags["args_ast"], flags["args_exact"], flags["call_exact"]) == (True, False, False)


def test_without_alternatives_the_ast_rules_compare_with_the_target():
    expected = (call("walk", km=1, place="the park"),)
    assert flag(expected, answer(call("walk", km=1.0, place="The Park.")), "args_ast") is True
    assert flag(expected, answer(call("walk", km=1)), "args_ast") is False


@pytest.mark.parametrize("accepted", ["walk", [{"walk": 1}], [{"walk": {"km": 1}}], [{"walk": {}, "rest": {}}], [5]])
def test_alternatives_of_another_form_are_an_error(accepted: Any):
    with pytest.raises(UserError, match=r"x: meta.accepted is no list of accepted calls"):
        judge(example(A, accepted=accepted), answer(A))


# Number of calls


@pytest.mark.parametrize(
    ("got", "over", "under"),
    [
        (answer(A), False, False),
        (answer(A, B), True, False),
        (answer(), False, True),
        (answer(error="no end", names=("walk", "walk", "walk"), stopped=False), True, False),
        (answer(error="no name"), False, True),
    ],
    ids=["as many", "too many", "none", "runaway calls in malformed output", "malformed without a name"],
)
def test_too_many_and_too_few_calls(got: Prediction, over: bool, under: bool):
    assert (flag((A,), got, "over_call"), flag((A,), got, "under_call")) == (over, under)


# The decision to call


@pytest.mark.parametrize(
    ("got", "right"),
    [
        (answer(), True),
        (answer(A), False),
        (answer(error="garbage"), False),
        (answer(names=("walk",)), False),
    ],
    ids=["text", "a call", "malformed", "a name in call position"],
)
def test_irrelevance_wants_well_formed_text(got: Prediction, right: bool):
    assert flag((), got, "irrelevance_accuracy") is right
    assert flag((), got, "relevance_accuracy") is None


@pytest.mark.parametrize(
    ("got", "right"),
    [(answer(B), True), (answer(), False), (answer(error="no end", names=("walk",)), False)],
    ids=["any call", "text", "malformed"],
)
def test_relevance_wants_a_well_formed_call_whichever(got: Prediction, right: bool):
    assert flag((A,), got, "relevance_accuracy") is right
    assert judge(any_call_will_do(), got).flags["relevance_accuracy"] is right
    assert flag((A,), got, "irrelevance_accuracy") is None


def test_an_example_that_takes_any_call_has_no_exact_answer():
    flags = judge(any_call_will_do(), answer(A)).flags
    assert flags.keys() == {
        "parse_rate",
        "hallucinated_tool_rate",
        "stopped_rate",
        "schema_valid_rate",
        "relevance_accuracy",
        "format_leak_rate",
    }


def test_a_conversation_must_say_what_is_expected():
    conversation = Conversation(id="x", messages=(QUESTION,))
    with pytest.raises(UserError, match="x: the conversation does not end with the expected answer"):
        judge(conversation, answer())


# Text


@pytest.mark.parametrize(
    ("text", "leaks"),
    [
        ("I cannot do that.", False),
        ("Use 3 < 4 and <b>bold</b>.", False),
        ("Please call: Bob {at home}", False),
        ("Sure<end_of_turn>", True),
        ("<escape>", True),
        ("call:walk{km:1}", True),
        ("<start_function_call>", True),
    ],
)
def test_control_text_that_reaches_the_user_is_a_leak(text: str, leaks: bool):
    assert flag((), answer(text=text), "format_leak_rate") is leaks


def test_a_leak_in_the_lenient_text_counts():
    got = answer(error="stray text", lenient=Parsed(text="<end_function_call>", error="stray text"))
    assert flag((), got, "format_leak_rate") is True


# Calls


def test_faults_of_calls_are_counted_per_call():
    got = answer(A, call("walk", place="x"), call("rest", km=1, hours=2), call("fly"))
    assert judge(example(A), got).calls == {
        "hallucinated_call_rate": (1, 4),
        "unknown_arg_rate": (1, 3),
        "missing_required_rate": (1, 3),
    }


def test_names_of_malformed_calls_are_calls():
    got = answer(error="no end", names=("walk", "fly", "fly"))
    assert judge(example(A), got).calls["hallucinated_call_rate"] == (2, 3)


def test_a_tool_with_additional_properties_has_no_unknown_argument():
    tool = Tool(name="log", description="Log.", parameters={"type": "object", "additionalProperties": True})
    conversation = Conversation(
        id="x", tools=(tool,), messages=(QUESTION, Message(role="assistant", tool_calls=(call("log"),)))
    )
    assert judge(conversation, answer(call("log", a=1))).calls["unknown_arg_rate"] == (0, 1)


def test_a_share_of_calls_sums_over_examples():
    examples = [example(A, id=id) for id in "ab"]
    scores = score(examples, [answer(A, B, id="a"), answer(call("fly"), id="b")])
    m = scores["hallucinated_call_rate"]
    assert (m.hits, m.count, m.value) == (1, 3, pytest.approx(1 / 3))


# Metrics for which nothing counts


def test_a_metric_without_examples_is_left_out():
    scores = score([example()], [answer()])
    absent = {"args_exact", "args_ast", "relevance_accuracy", "hallucinated_call_rate", "unknown_arg_rate"}
    assert not absent & scores.keys()
    assert scores["irrelevance_accuracy"].count == 1


def test_denominators_are_the_examples_that_apply():
    scores = score(
        [example(A, id="a"), example(id="b"), any_call_will_do("c")],
        [answer(A, id="a"), answer(id="b"), answer(B, id="c")],
    )
    counts = {name: m.count for name, m in scores.items()}
    assert (counts["parse_rate"], counts["call_exact"], counts["args_ast"]) == (3, 2, 1)
    assert (counts["relevance_accuracy"], counts["irrelevance_accuracy"]) == (2, 1)


def test_examples_that_take_any_call_are_outside_the_baseline():
    train = [example(A, id="t")]
    scores = score([example(B, id="a"), any_call_will_do("b")], [answer(id="a"), answer(id="b")], train=train)
    assert (scores["most_frequent_tool"].hits, scores["most_frequent_tool"].count) == (0, 1)


def test_confusion_names_examples_that_take_any_call():
    (row,) = confusion([any_call_will_do()], [answer(B)])
    assert (row.expected, row.got) == ("(any call)", "rest")


# Strict and lenient


def test_a_prediction_is_made_of_the_parses():
    strict = Parsed(calls=(A,), text="t", error=None, stopped=True, names=("walk",))
    lenient = Parsed(calls=(A,), names=("walk",))
    assert Prediction.from_parsed("x", strict, lenient) == Prediction("x", (A,), None, True, ("walk",), "t", lenient)


def test_without_a_lenient_parse_there_are_no_lenient_metrics():
    assert not [name for name in score([example(A)], [answer(A)]) if name.endswith("_lenient")]


def test_leniency_has_metrics_of_its_own():
    """The strict ones do not move."""
    got = answer(error="text after the call", names=("walk",), lenient=Parsed(calls=(A,), names=("walk",)))
    scores = score([example(A)], [got])
    for name in ("call_exact", "call_exact_unordered", "name_accuracy", "args_exact", "args_ast", "parse_rate"):
        assert (scores[name].value, scores[f"{name}_lenient"].value) == (0, 1), name
    for name in ("schema_valid_rate", "relevance_accuracy"):
        assert (scores[name].value, scores[f"{name}_lenient"].value) == (0, 1), name


def test_a_call_read_from_malformed_output_counts_leniently():
    got = answer(error="no end", names=("walk",), lenient=Parsed(calls=(A,), error="no end", names=("walk",)))
    flags = judge(example(A), got).flags
    assert (flags["call_exact_lenient"], flags["parse_rate_lenient"]) == (True, False)


def test_malformed_output_without_a_call_is_no_decision_against_calling():
    """Or a model with a broken format would score where no call is wanted."""
    got = answer(error="garbage", lenient=Parsed(error="garbage"))
    flags = judge(example(), got).flags
    assert (flags["irrelevance_accuracy_lenient"], flags["call_exact_lenient"]) == (False, False)


def test_a_lenient_parse_for_some_only_is_an_error():
    examples = [example(A, id="a"), example(A, id="b")]
    with pytest.raises(UserError, match="1 of 2 predictions have a lenient parse"):
        score(examples, [answer(A, id="a", lenient=Parsed()), answer(A, id="b")])


# Reasons


@pytest.mark.parametrize(
    ("expected", "got", "reason"),
    [
        ((A,), answer(A), ""),
        ((), answer(), ""),
        ((A,), answer(error="no end of\ncall"), "malformed: no end of call"),
        ((A,), answer(error="no end", stopped=False), "malformed, cut off at the length limit: no end"),
        ((A,), answer(A, call("fly")), "calls fly, which is not offered"),
        ((), answer(A, B), "calls walk + rest, where no call is wanted"),
        ((A, B), answer(), "no call, expected walk + rest"),
        ((A,), answer(B), "calls rest, expected walk"),
        ((A, B), answer(A), "calls walk, expected walk + rest"),
        ((A,), answer(call("walk", km=2)), "walk: km is 2, expected 1"),
        ((A,), answer(call("walk", km=1.0)), "walk: km is 1.0, expected 1"),
        ((A,), answer(call("walk")), "walk: km is missing"),
        ((A,), answer(call("walk", km=1, place="x")), "walk: place is not expected"),
        ((A, call("walk", km=2)), answer(call("walk", km=3), A), "walk: km is 3, expected 2"),
        ((A, B), answer(B, A), "the expected calls in another order"),
    ],
)
def test_the_reason_why_an_answer_is_not_exact(expected: tuple[ToolCall, ...], got: Prediction, reason: str):
    assert judge(example(*expected), got).reason == reason


def test_any_call_needs_a_call():
    assert judge(any_call_will_do(), answer()).reason == "no call, where one is wanted"
    assert judge(any_call_will_do(), answer(B)).reason == ""


CALLS = st.lists(
    st.builds(
        call,
        st.sampled_from(["walk", "rest", "fly"]),
        km=st.sampled_from([1, 2, 1.0, "1"]),
    ),
    max_size=3,
).map(tuple)


@given(CALLS, CALLS, st.sampled_from([None, "no end"]))
def test_there_is_a_reason_unless_the_answer_is_exact(
    expected: tuple[ToolCall, ...], got: tuple[ToolCall, ...], error: str | None
):
    judged = judge(example(*expected), answer(*got, error=error))
    invented = any(c.name == "fly" for c in expected)  # an expected call to an unknown tool is data to mend
    assert bool(judged.reason) is not judged.flags["call_exact"] or invented


@given(CALLS, CALLS)
def test_the_flags_are_ordered_by_strictness(expected: tuple[ToolCall, ...], got: tuple[ToolCall, ...]):
    flags = judge(example(*expected), answer(*got)).flags
    assert flags["call_exact"] <= flags["call_exact_unordered"]
    assert flags["call_exact"] <= flags["name_accuracy"]
    assert not (flags["over_call"] and flags["under_call"])


def test_one_record_per_example_in_the_order_of_the_conversations():
    examples = [example(A, id="a", category="simple"), example(id="b")]
    records = per_example(examples, [answer(id="b"), answer(A, id="a")])
    assert [(r.id, r.category, r.reason) for r in records] == [("a", "simple", ""), ("b", "", "")]
    assert ExampleScore.model_validate_json(records[0].model_dump_json()) == records[0]


# Intervals of shares of calls


@given(st.lists(st.integers(0, 4).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=1))
def test_the_interval_of_a_ratio_lies_between_0_and_1(pairs: list[tuple[int, int]]):
    if not any(count for _, count in pairs):
        with pytest.raises(UserError, match="no call to score"):
            ratio(pairs)
        return
    m = ratio(pairs)
    assert 0 <= m.low <= m.high <= 1
    assert m.value == sum(hits for hits, _ in pairs) / sum(count for _, count in pairs)


def test_the_interval_of_a_ratio_agrees_with_resampling_the_examples():
    """The multinomial draw is the bootstrap; 2,000 resamples leave the ends within a percentage point."""
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 5, size=200)
    pairs = np.stack([rng.binomial(counts, 0.3), counts], axis=1)
    picks = pairs[rng.integers(0, 200, size=(20_000, 200))].sum(axis=1)
    low, high = np.quantile(picks[:, 0] / picks[:, 1], [0.025, 0.975])
    m = ratio([(int(hits), int(count)) for hits, count in pairs])
    assert (m.low, m.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))


def test_calls_of_one_answer_stand_or_fall_together():
    """Ten answers of ten calls each say less than a hundred independent calls."""
    together, alone = ratio([(10, 10)] * 5 + [(0, 10)] * 5), metric(50, 100)
    assert together.high - together.low > 2 * (alone.high - alone.low)
