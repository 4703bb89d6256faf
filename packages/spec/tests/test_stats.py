"""Statistics count what is there, and every row that a format refuses."""

import io

import pytest
from char_tokenizer import CharTokenizer
from rich.console import Console

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.data.stats import DatasetStats, dataset_stats, stats_tables
from portlab_spec.data.tokens import tokenize
from portlab_spec.errors import UserError
from portlab_spec.formats.functiongemma import FORMAT

TOKENIZER = CharTokenizer(FORMAT.control_tokens)


def tool(name):
    return Tool(name=name, description=f"Get {name}.")


def user(text):
    return Message(role="user", content=text)


def say(text):
    return Message(role="assistant", content=text)


def call(*calls):
    return Message(role="assistant", tool_calls=tuple(ToolCall(name=name, arguments=a) for name, a in calls))


TOOLS = (tool("steps"), tool("sleep"))
ROWS = [
    Conversation(id="one", tools=TOOLS, messages=(user("Steps?"), call(("steps", {"day": 1, "exact": True})))),
    Conversation(
        id="two",
        tools=TOOLS,
        split="test",
        messages=(user("Both?"), call(("steps", {"day": "Monday"}), ("steps", {"where": {"x": [1]}, "up": 1.5}))),
    ),
    Conversation(
        id="turns",
        tools=TOOLS[:1],
        messages=(
            user("Hi"),
            say("Hello."),
            user("Steps?"),
            call(("steps", {"day": None, "list": []})),
            Message(role="tool", name="steps", content="5"),
            say("Five."),
        ),
    ),
    Conversation(id="text", messages=(user("Hi"), say("Hello."))),
]
BAD = Conversation(id="bad [/]", messages=(user("<end_of_turn>"), say("Hello.")))


@pytest.fixture(scope="module")
def stats():
    return dataset_stats([*ROWS, BAD], FORMAT, TOKENIZER, max_length=200)


def test_conversations_are_counted(stats):
    assert stats.rows == 5
    assert stats.splits == {"train": 4, "test": 1}
    assert stats.rows_without_call == 2
    assert stats.rows_with_results == 1
    assert stats.multi_turn_share == 1 / 5


def test_calls_tools_and_arguments_are_counted(stats):
    assert stats.calls_per_row == {0: 2, 1: 2, 2: 1}
    assert stats.tools_per_row == {0: 2, 1: 1, 2: 2}
    assert stats.tool_sets == 3
    assert stats.tools_called == {"steps": 4}
    assert stats.tools_never_called == ("sleep",)
    kinds = ("array", "boolean", "integer", "null", "number", "object", "string")
    assert stats.argument_types == dict.fromkeys(kinds, 1)


def test_tokens_are_those_of_the_rows(stats):
    found, rows = stats.formats[0], tokenize(ROWS, FORMAT, TOKENIZER, 10_000)
    lengths = sorted(len(row.ids) for row in rows)
    assert (found.tokens.min, found.tokens.max, found.tokens.total) == (lengths[0], lengths[-1], sum(lengths))
    assert found.tokens.p50 == lengths[1]
    assert found.supervised_tokens == sum(sum(row.loss) for row in rows)
    assert found.supervised_share == found.supervised_tokens / sum(lengths)
    assert [row.tokens for row in found.longest] == lengths[::-1]
    assert found.too_long == sum(length > 200 for length in lengths) > 0


def test_the_saving_is_that_of_the_groups(stats):
    """One and two share a prompt; the other two share what they can."""
    found, rows = stats.formats[0], tokenize(ROWS, FORMAT, TOKENIZER, 10_000)
    pair = next(i for i, (a, b) in enumerate(zip(rows[0].ids, rows[1].ids, strict=False)) if a != b)
    rest = next(i for i, (a, b) in enumerate(zip(rows[2].ids, rows[3].ids, strict=False)) if a != b)
    assert found.prefix_groups == 2
    assert found.prefix_tokens == (pair + rest) / 2
    assert found.prefix_share == pytest.approx((pair + rest) / found.tokens.total)


def test_a_refused_row_is_counted_with_its_reason(stats):
    found = stats.formats[0]
    assert found.rows == 4
    (refusal,) = found.refused
    assert (refusal.rows, refusal.first) == (1, "bad [/]")
    assert "<end_of_turn>" in refusal.reason


def test_a_row_without_a_target_is_counted():
    found = dataset_stats([*ROWS, Conversation(id="open", messages=(user("Hi"),))], FORMAT, TOKENIZER).formats[0]
    assert (found.rows, found.unsupervised_rows) == (5, 1)


def test_formats_stand_side_by_side():
    class Refusing(CharTokenizer):
        def token_id(self, token):
            raise UserError(f"has no token {token}")

    stats = dataset_stats(ROWS, FORMAT, TOKENIZER, beside=[(FORMAT, Refusing(FORMAT.control_tokens))])
    assert [found.rows for found in stats.formats] == [4, 0]
    assert stats.formats[1].tokens is None
    assert stats.formats[1].refused[0].rows == 4


def test_statistics_survive_json(stats):
    assert DatasetStats.model_validate_json(stats.model_dump_json()) == stats


def test_no_conversations_are_refused():
    with pytest.raises(UserError, match="no conversations to count"):
        dataset_stats([], FORMAT, TOKENIZER)


def test_tables_show_the_counts_and_take_any_text(stats):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(stats_tables(stats, most_tools=0))
    text = console.export_text()
    for shown in ("train 4, test 1", "bad [/]", "longer than 200", "(1 more tools)", "functiongemma"):
        assert shown in text
