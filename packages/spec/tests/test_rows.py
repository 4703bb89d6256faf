"""Data sets are read whole, or refused with the file, the line and the remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from portlab_spec.conversation import Conversation
from portlab_spec.data import fitness, load_dataset
from portlab_spec.errors import UserError

WALK = {
    "type": "function",
    "function": {
        "name": "walk",
        "description": "Walk.",
        "parameters": {"type": "object", "properties": {"km": {"type": "number"}}, "required": ["km"]},
    },
}
QUESTION = {"user_query": "Go!", "function_call": {"name": "walk", "arguments": {"km": 1}}}
RECORD = {
    "id": "r1",
    "tools": [WALK["function"]],
    "messages": [
        {"role": "user", "content": "Walk a bit."},
        {"role": "assistant", "tool_calls": [{"name": "walk", "arguments": {"km": 2.5}}]},
    ],
}

type Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a data set, a JSON value or raw text per line, with tools.json beside it."""

    def write(*lines: Any, tools: Any = (WALK,)) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        if tools is not None:
            (tmp_path / "tools.json").write_text(json.dumps(tools))
        return path

    return write


def test_built_in_by_name():
    assert load_dataset("fitness-213") == fitness.load()


def test_conversation_records_survive_a_round_trip(write):
    rows = fitness.load()
    path = write(*(row.model_dump_json() for row in rows), tools=None)
    assert load_dataset(path) == rows


def test_question_rows_become_conversations(write):
    path = write(QUESTION | {"id": "q", "split": "test"})
    (row,) = load_dataset(str(path))
    assert (row.id, row.split, row.source) == ("q", "test", "data.jsonl")
    assert [m.role for m in row.messages] == ["developer", "user", "assistant"]
    assert row.messages[1].content == "Go!"
    assert row.target.tool_calls[0].model_dump() == {"name": "walk", "arguments": {"km": 1}}
    assert [tool.to_openai() for tool in row.tools] == [WALK]


def test_question_rows_without_id_are_named_by_file_and_line(write):
    rows = load_dataset(write(QUESTION, "", QUESTION | {"user_query": "Go on!"}))
    assert [row.id for row in rows] == ["data-1", "data-3"]


def test_tools_in_the_row_come_before_tools_beside_the_file(write):
    rest = {"type": "function", "function": {"name": "rest", "description": "Rest."}}
    row = {"user_query": "Stop!", "function_call": {"name": "rest", "arguments": {}}, "tools": [rest]}
    assert [tool.name for tool in load_dataset(write(row))[0].tools] == ["rest"]


def test_tools_beside_the_file_are_not_read_without_need(write):
    assert load_dataset(write(RECORD, tools="not tools"))[0].id == "r1"


def test_both_kinds_of_rows_may_be_mixed(write):
    assert [row.id for row in load_dataset(write(QUESTION, RECORD))] == ["data-1", "r1"]


def test_line_separators_inside_a_string_do_not_end_the_row(write):
    text = "one\u2028two\u0085three"
    path = write(json.dumps(QUESTION | {"user_query": text}, ensure_ascii=False))
    assert load_dataset(path)[0].messages[1].content == text


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    return {"user_query": "Other.", "function_call": {"name": name, "arguments": arguments}}


def ending_with(message: dict[str, Any]) -> dict[str, Any]:
    return RECORD | {"messages": [*RECORD["messages"], message]}


@pytest.mark.parametrize(
    ("bad", "what", "fix"),
    [
        ("{", "not JSON", "Write one JSON object per line"),
        ('{"user_query": "x"},', "not JSON (Extra data", "without a comma behind it"),
        ('{"a": NaN}', "not JSON (NaN is not a JSON value)", "Write one JSON object"),
        ('{"id": "x", "id": "y"}', "not JSON (the key 'id' occurs twice)", "Write one JSON object"),
        ("[" * 100_000, "not JSON", "Write one JSON object"),
        ("[1]", "the row is not an object", "Write one JSON object"),
        ({}, "unknown kind of row, with the keys (none)", "Give `messages`, or `user_query`"),
        ({"text": "x"}, "unknown kind of row, with the keys text", "Give `messages`, or `user_query`"),
        ({"user_query": "x"}, "missing key function_call", "Add it"),
        (QUESTION | {"answer": 1}, "unknown key answer", "Remove it"),
        (QUESTION | {"split": "dev"}, "split: Input should be 'train', 'validation' or 'test'", "Mend"),
        (RECORD | {"tool": []}, "unknown key tool", "Remove it"),
        (RECORD | {"messages": []}, "messages: Tuple should have at least 1 item", "Mend the value"),
        (RECORD | {"messages": [{"role": "user"}]}, "messages.0: a user message needs content", "Mend"),
        (calling("fly"), "call to fly, which is not offered", "Offer it, or call one of: walk"),
        (RECORD | {"tools": []}, "call to walk, which is not offered", "(none offered)"),
        (calling("walk"), "call to walk: missing argument km", "Correct the call"),
        (calling("walk", km="far"), "call to walk: km is a string, not a number", "Correct the call"),
        (calling("walk", km=1) | {"tools": []}, "the row offers no tools", "Add the key `tools`"),
        (ending_with({"role": "user", "content": "?"}), "the last message is of role user", "End with"),
        (RECORD | {"tools": RECORD["tools"] * 2}, "two tools have the same name", "Offer each tool once"),
        (QUESTION | {"id": "first"}, "the id 'first' is already that of line 1", "Give every row its own id"),
    ],
)
def test_a_bad_row_is_named_by_line(write, bad, what, fix):
    path = write(QUESTION | {"id": "first"}, bad)
    with pytest.raises(UserError) as caught:
        load_dataset(path)
    assert caught.value.where == f"{path}:2"
    assert caught.value.what.startswith(what)
    assert fix in caught.value.fix


def test_arguments_as_json_text_are_refused(write):
    path = write({"user_query": "x", "function_call": {"name": "walk", "arguments": '{"km": 1}'}})
    with pytest.raises(UserError, match=r"data.jsonl:1: function_call.arguments: Input should be a valid dictionary"):
        load_dataset(path)


def test_bytes_that_are_not_utf8_are_named_by_line(write):
    path = write(QUESTION)
    path.write_bytes(path.read_bytes() + b'{"user_query": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"data.jsonl:2: not UTF-8"):
        load_dataset(path)


def test_question_rows_need_tools(write):
    path = write(QUESTION, tools=None)
    with pytest.raises(UserError, match=r"data.jsonl:1: the row offers no tools"):
        load_dataset(path)


def test_a_fault_in_the_shared_tools_names_that_file(write):
    path = write(QUESTION, tools=[{"type": "function", "function": {"name": "walk"}}])
    with pytest.raises(UserError, match=r"tools.json: tools\[0\]: tool walk: the tool has no description"):
        load_dataset(path)


@pytest.mark.parametrize("lines", [(), ("",), ("", "  ")], ids=["no bytes", "one blank", "blanks"])
def test_an_empty_file_is_refused(write, lines):
    with pytest.raises(UserError, match=r"data.jsonl: the data set is empty"):
        load_dataset(write(*lines))


def test_an_unknown_name_lists_the_built_in_ones():
    with pytest.raises(UserError, match=r"fitness-214: no data set of this name.*fitness-213"):
        load_dataset("fitness-214")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        load_dataset(tmp_path)


def test_leakage_names_the_file_and_both_rows(write):
    path = write(QUESTION | {"id": "a"}, QUESTION | {"id": "b", "split": "test"})
    with pytest.raises(UserError, match=r"data.jsonl: a in train and b in test ask the same"):
        load_dataset(path)


def test_rows_are_conversations(write):
    assert all(isinstance(row, Conversation) for row in load_dataset(write(QUESTION, RECORD)))
