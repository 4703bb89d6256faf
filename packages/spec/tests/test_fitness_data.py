"""The built-in data set: counts, splits, and questions that one tool answers."""

import hashlib
import re
from collections import Counter
from itertools import combinations

import pytest

from portlab_spec.conversation import Conversation
from portlab_spec.data import fitness, load_dataset
from portlab_spec.data.split import check_leakage, normalise
from portlab_spec.tools import validate_arguments

TOOL_NAMES = [
    "get_steps",
    "get_daily_step_goal",
    "get_step_goal_progress",
    "get_sleeping_minutes",
    "get_active_minutes",
    "get_heart_rate",
    "get_body_battery_level",
]


@pytest.fixture(scope="module")
def rows() -> list[Conversation]:
    return load_dataset("fitness-213")


def question(row: Conversation) -> str:
    return row.messages[1].content or ""


def answer(row: Conversation) -> str:
    (call,) = row.target.tool_calls
    return call.name


def test_seven_tools_in_a_fixed_order():
    assert [tool.name for tool in fitness.tools()] == TOOL_NAMES


def test_tools_take_no_arguments():
    assert all(tool.parameters == {"type": "object", "properties": {}} for tool in fitness.tools())


def test_descriptions_are_one_short_sentence():
    for tool in fitness.tools():
        assert len(tool.description.split()) < 20
        assert tool.description.count(".") == 1


def test_functions_return_what_they_declare():
    for function in fitness.FUNCTIONS:
        assert type(function()) is function.__annotations__["return"]


def test_213_rows_30_or_31_per_tool(rows):
    counts = Counter(map(answer, rows))
    assert len(rows) == 213
    assert set(counts) == set(TOOL_NAMES)
    assert sorted(counts.values()) == [30, 30, 30, 30, 31, 31, 31]


def test_split_sizes(rows):
    assert Counter(row.split for row in rows) == {"train": 122, "validation": 28, "test": 63}


def test_each_tool_is_held_out_equally(rows):
    held_out = Counter((row.split, answer(row)) for row in rows)
    assert {held_out["test", name] for name in TOOL_NAMES} == {9}
    assert {held_out["validation", name] for name in TOOL_NAMES} == {4}


def test_the_test_split_never_changes(rows):
    """Figures in the docs are over these 63 rows."""
    ids = "\n".join(sorted(row.id for row in rows if row.split == "test"))
    assert hashlib.sha256(ids.encode()).hexdigest()[:16] == "a87e40cb34e68593"


def test_each_row_is_prompt_question_and_one_call(rows):
    for row in rows:
        assert [message.role for message in row.messages] == ["developer", "user", "assistant"]
        assert row.messages[0].content == ("You are a model that can do function calling with the following functions")
        assert row.target.tool_calls[0].arguments == {}
        assert row.tools == fitness.tools()
        assert row.source == "fitness-213"


def test_calls_are_valid(rows):
    by_name = {tool.name: tool for tool in fitness.tools()}
    for row in rows:
        (call,) = row.target.tool_calls
        assert validate_arguments(by_name[call.name], call.arguments) == []


def test_ids_are_unique(rows):
    assert len({row.id for row in rows}) == 213


def test_questions_are_unique(rows):
    assert len({normalise(question(row)) for row in rows}) == 213


def test_questions_are_short(rows):
    assert all(0 < len(question(row).split()) < 20 for row in rows)


def test_questions_have_no_stray_whitespace(rows):
    assert all(question(row) == " ".join(question(row).split()) for row in rows)


def test_no_question_names_a_function(rows):
    assert not any("get_" in question(row) or "_" in question(row) for row in rows)


def test_no_leakage(rows):
    check_leakage(rows)


def test_no_near_duplicates(rows):
    """Token Jaccard similarity of any two questions, within and across splits."""
    words = [frozenset(re.findall(r"[\w']+", question(row).casefold())) for row in rows]
    similar = [
        (question(rows[i]), question(rows[j]))
        for i, j in combinations(range(len(rows)), 2)
        if len(words[i] & words[j]) >= 0.8 * len(words[i] | words[j])
    ]
    assert similar == []
