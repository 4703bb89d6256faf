"""Conversations as rows: what is refused, and what rows share."""

import pytest

from portlab_spec.conversation import Conversation, Message, ToolCall
from portlab_spec.data.tokens import Row, shared_prefix_length, tokenize
from portlab_spec.errors import UserError
from portlab_spec.formats.functiongemma import FORMAT


class CharTokenizer:
    def encode(self, text):
        return [ord(c) + 100 for c in text]

    def token_id(self, token):
        return FORMAT.control_tokens.index(token)

    def decode(self, ids):
        return "".join(FORMAT.control_tokens[i] if i < 100 else chr(i - 100) for i in ids)


def conversation(*messages, id="c"):
    return Conversation(id=id, messages=messages)


ASK = Message(role="user", content="Steps?")
CALL = Message(role="assistant", tool_calls=(ToolCall(name="get_steps"),))


def test_a_row_knows_its_first_target_and_stratum():
    row = tokenize([conversation(ASK, CALL)], FORMAT, CharTokenizer(), 200)[0]
    assert row.stratum == "get_steps"
    assert row.ids[row.first_target] == FORMAT.control_tokens.index("<start_function_call>")
    assert CharTokenizer().decode(row.ids[row.first_target :]).startswith("<start_function_call>call:get_steps{}")


def test_a_row_is_never_cut():
    row = tokenize([conversation(ASK, CALL)], FORMAT, CharTokenizer(), 200)[0]
    assert len(tokenize([conversation(ASK, CALL)], FORMAT, CharTokenizer(), len(row.ids))) == 1
    with pytest.raises(UserError, match=f"c: the row needs {len(row.ids)} tokens and max_length is {len(row.ids) - 1}"):
        tokenize([conversation(ASK, CALL)], FORMAT, CharTokenizer(), len(row.ids) - 1)


def test_a_row_without_a_supervised_token_is_refused():
    with pytest.raises(UserError, match="no token of the row is supervised"):
        tokenize([conversation(ASK)], FORMAT, CharTokenizer(), 200)


def test_no_rows_are_refused():
    with pytest.raises(UserError, match="no conversations"):
        tokenize([], FORMAT, CharTokenizer(), 200)


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
