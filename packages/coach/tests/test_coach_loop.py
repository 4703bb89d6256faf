"""The loop alone: events in, actions out, nothing run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitnesscoach.loop import AskModel, Finish, RunCalls, Turn, in_words, recent
from fitnesscoach.tools import ToolResult, refused
from portlab_spec.conversation import Conversation, Message, ToolCall
from portlab_spec.formats import FORMATS, Parsed

BEFORE = (Message(role="developer", content="Obey."),)
STEPS = ToolCall(name="get_steps")
SLEEP = ToolCall(name="get_sleep")


def ok(call, **response):
    return ToolResult(call, "ok", response or {"steps": 7})


def start(rounds=3, **options):
    turn, action = Turn.ask(BEFORE, "How many steps?", rounds, **options)
    assert isinstance(action, AskModel)
    return turn


def test_text_ends_the_turn_and_joins_the_conversation():
    _, action = start().answered(Parsed(text=" Seven. "))
    assert action == Finish(
        "answered",
        "Seven.",
        "",
        (),
        (*BEFORE, Message(role="user", content="How many steps?"), Message(role="assistant", content="Seven.")),
    )


def test_calls_are_run_and_their_results_put_to_the_model():
    turn, action = start().answered(Parsed(calls=(STEPS, SLEEP)))
    assert action == RunCalls((STEPS, SLEEP))
    _, action = turn.ran([ok(STEPS), ok(SLEEP)])
    assert [message.role for message in action.messages] == ["developer", "user", "assistant", "tool", "tool"]


def test_without_words_of_its_own_the_model_is_not_asked_again():
    turn, _ = start(own_words=False).answered(Parsed(calls=(STEPS,)))
    _, action = turn.ran([ok(STEPS)])
    assert (action.outcome, action.spoken) == ("answered", "Steps: steps 7.")


def test_without_words_of_its_own_it_is_still_told_what_it_called_wrongly():
    turn, _ = start(own_words=False).answered(Parsed(calls=(STEPS,)))
    assert isinstance(turn.ran([refused(STEPS, "no")])[1], AskModel)


def test_a_malformed_answer_ends_the_turn_at_once():
    assert start().answered(Parsed(error="a call is not closed"))[1].outcome == "malformed"


def test_what_was_found_before_a_fault_is_still_told():
    turn, _ = start().answered(Parsed(calls=(STEPS,)))
    turn, _ = turn.ran([ok(STEPS)])
    finish = turn.answered(Parsed(error="broken"))[1]
    assert finish.told
    assert finish.messages[-1] == Message(role="assistant", content="Steps: steps 7.")


def test_a_failed_turn_leaves_the_conversation_as_it_was():
    finish = start().answered(Parsed(error="broken"))[1]
    assert not finish.told
    assert finish.messages == BEFORE


def test_a_tool_that_failed_is_named_when_the_model_has_nothing_to_say():
    turn, _ = start().answered(Parsed(calls=(STEPS,)))
    turn, action = turn.ran([ToolResult(STEPS, "timeout", {"error": "no result within 20 s"})])
    assert isinstance(action, AskModel)
    finish = turn.answered(Parsed())[1]
    assert (finish.outcome, finish.detail) == ("tool_failed", "get_steps: no result within 20 s")


def test_a_failed_call_may_not_be_repeated_either():
    turn, _ = start().answered(Parsed(calls=(STEPS,)))
    turn, _ = turn.ran([ToolResult(STEPS, "failed", {"error": "x"})])
    assert turn.answered(Parsed(calls=(STEPS,)))[1].outcome == "looped"


@pytest.mark.parametrize("name", ["", "get steps", "a:b{}", "<eos>", "x\n"])
def test_a_name_that_no_tool_can_have_never_enters_the_conversation(name):
    assert start().answered(Parsed(calls=(ToolCall(name=name),)))[1].outcome == "bad_call"


def test_a_cancelled_turn_is_over():
    assert start().cancelled()[1].outcome == "cancelled"


def test_results_of_the_same_call_are_said_once():
    assert in_words([ok(STEPS, steps=1), ok(STEPS, steps=2), refused(SLEEP, "no")]) == "Steps: steps 2."


def test_old_questions_are_forgotten_whole():
    one = (Message(role="user", content="1"), Message(role="assistant", content="a"))
    two = (Message(role="user", content="2"), Message(role="assistant", content="b"))
    assert recent((*BEFORE, *one, *two), 1) == (*BEFORE, *two)
    assert recent((*BEFORE, *one, *two), 0) == BEFORE
    assert recent((*BEFORE, *one, *two), 5) == (*BEFORE, *one, *two)


parsed = st.one_of(
    st.builds(lambda text: Parsed(text=text), st.sampled_from(["", " ", "Seven."])),
    st.just(Parsed(error="broken")),
    st.builds(
        lambda names: Parsed(calls=tuple(ToolCall(name=n) for n in names)),
        st.lists(st.sampled_from(["get_steps", "get_sleep", "nope", "a b"]), min_size=1, max_size=4),
    ),
)
status = st.sampled_from(["ok", "no_data", "failed", "timeout", "refused"])


@settings(deadline=None)
@given(st.integers(1, 5), st.booleans(), st.lists(parsed, min_size=12, max_size=12), st.data())
def test_whatever_happens_a_turn_ends_and_leaves_a_conversation_that_every_format_can_write(rounds, own, answers, data):
    turn, action = Turn.ask(BEFORE, "How many steps?", rounds, own_words=own)
    for answer in answers:
        assert isinstance(action, AskModel)
        turn, action = turn.answered(answer)
        if isinstance(action, RunCalls):
            results = []
            for call in action.calls:
                said = data.draw(status)
                results.append(ToolResult(call, said, {"steps": 7} if said == "ok" else {"error": "why"}))
            turn, action = turn.ran(results)
        if isinstance(action, Finish):
            break
    assert isinstance(action, Finish)
    messages = (*action.messages, Message(role="user", content="And?"))
    FORMATS["functiongemma"].render(Conversation(id="x", messages=messages), generation_prompt=True)
