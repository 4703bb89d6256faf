"""What is mended in messages, what is counted, and what is rejected rather than guessed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from portlab_spec.conversation import Conversation, Message
from portlab_spec.data.rows import Imported, import_rows


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}


TEXT = {"type": "string", "description": "Some text."}
TOOLS = [
    tool("find", query=TEXT, page={"type": "integer", "description": "Page.", "nullable": True}),
    tool("note", text=TEXT, place={"type": "object", "description": "Where.", "properties": {"room": TEXT}}),
]
ASK = {"role": "user", "content": "?"}
DONE = {"role": "assistant", "content": "Done."}

type Read = Callable[..., Imported]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Import one row with these messages."""

    def read(*messages: Any, tools: Any = TOOLS, **options: Any) -> Imported:
        path = tmp_path / "data.jsonl"
        path.write_text(json.dumps({"messages": messages, "tools": tools}))
        return import_rows(path, **options)

    return read


def row_of(got: Imported) -> Conversation:
    assert [reject.reason for reject in got.rejects] == []
    return got.conversations[0]


def reason_of(got: Imported) -> str:
    (reject,) = got.rejects
    return reject.reason


def call(name: str = "find", arguments: Any = None, id: str | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    return made if id is None else made | {"id": id}


def calling(*calls: Any, **rest: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)} | rest


def result(content: Any, **rest: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content} | rest


def results(got: Imported) -> list[tuple[str | None, Any]]:
    return [(m.name, m.content if m.response is None else m.response) for m in row_of(got).messages if m.role == "tool"]


def arguments(got: Imported) -> Any:
    return row_of(got).target.tool_calls[0].arguments


# ------------------------------------------------------------------------------------------------ roles and text


@pytest.mark.parametrize(("role", "expected"), [("system", "developer"), ("developer", "developer"), ("human", "user")])
def test_roles_of_prompts(read, role, expected):
    assert row_of(read({"role": role, "content": "x"}, ASK, DONE)).messages[0].role == expected


@pytest.mark.parametrize("role", ["assistant", "model", "gpt"])
def test_roles_of_answers(read, role):
    assert row_of(read(ASK, {"role": role, "content": "x"})).target.content == "x"


def test_an_unknown_role_is_rejected(read):
    assert reason_of(read(ASK, {"role": "critic", "content": "x"})).startswith("messages.1: unknown role 'critic'. Use")


def test_an_unknown_key_is_rejected_unless_it_is_null(read):
    assert row_of(read(ASK, DONE | {"refusal": None, "audio": None})).target.content == "Done."
    assert reason_of(read(ASK, DONE | {"refusal": "No."})).startswith("messages.1: unknown key refusal")


def test_text_parts_are_joined(read):
    parts = [{"type": "text", "text": "Look "}, {"type": "text", "text": "here."}]
    assert row_of(read({"role": "user", "content": parts}, DONE)).messages[0].content == "Look here."


def test_other_parts_are_rejected(read):
    parts = [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": "data:"}}]
    reason = reason_of(read({"role": "user", "content": parts}, DONE))
    assert reason.startswith("messages.0: content holds a part of type 'image_url'")


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept(read, key):
    assert row_of(read(ASK, DONE | {key: "Hm."})).target == Message(role="assistant", content="Done.", reasoning="Hm.")


@pytest.mark.parametrize("weight", [0.5, "1", -1])
def test_weights_between_are_rejected(read, weight):
    assert reason_of(read(ASK, DONE | {"weight": weight})).startswith(f"messages.1: weight is {weight!r}")


def test_a_row_without_a_supervised_answer_is_rejected(read):
    assert reason_of(read(ASK, DONE | {"weight": 0})).startswith("no assistant message is supervised")


# ------------------------------------------------------------------------------------------------ calls


def test_arguments_as_json_text(read):
    assert arguments(read(ASK, calling(call(arguments='{"query": "x"}')))) == {"query": "x"}


def test_blank_arguments_are_none_and_counted(read):
    got = read(ASK, calling({"function": {"name": "find", "arguments": ""}}))
    assert (arguments(got), got.repairs) == ({}, {"blank arguments read as none": 1})


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ("{", "arguments is not JSON"),
        ('{"a": 1, "a": 2}', "arguments is not JSON (the key 'a' occurs twice)"),
        ('{"a": 1e999}', "arguments is not JSON (a number is too large)"),
        ("[1]", "arguments is not an object"),
        ([1], "arguments is not an object"),
    ],
)
def test_bad_arguments_are_rejected(read, bad, what):
    assert reason_of(read(ASK, calling(call(arguments=bad)))).startswith(f"messages.1: {what}")


def test_a_null_argument_of_another_tool_is_dropped_and_counted(read):
    got = read(ASK, calling(call(arguments={"query": "x", "text": None, "room": None})))
    assert arguments(got) == {"query": "x"}
    assert got.repairs == {"null argument of another tool dropped": 2}


def test_a_null_for_an_argument_that_takes_none_is_dropped_and_counted(read):
    got = read(ASK, calling(call(arguments={"query": None})))
    assert (arguments(got), got.repairs) == ({}, {"null argument dropped": 1})


def test_a_null_for_a_nullable_argument_is_kept(read):
    got = read(ASK, calling(call(arguments={"query": "x", "page": None})))
    assert (arguments(got), got.repairs) == ({"query": "x", "page": None}, {})


def test_nulls_inside_an_object_are_undone_too(read):
    got = read(ASK, calling(call("note", {"place": {"room": "hall", "floor": None}})))
    assert arguments(got) == {"place": {"room": "hall"}}


def test_a_real_value_for_an_unknown_argument_is_rejected(read):
    assert reason_of(read(ASK, calling(call(arguments={"colour": 1})))).startswith("call to find: unknown argument")


def test_text_beside_calls_is_rejected(read):
    reason = reason_of(read(ASK, calling(call(), content="Let me see.")))
    assert reason.startswith("messages.1: the assistant message holds text and calls. Choose calls_with_text")


def test_text_beside_calls_may_be_dropped(read):
    got = read(ASK, calling(call(), content="Let me see."), calls_with_text="drop")
    assert [m.content for m in row_of(got).messages] == ["?", None]
    assert got.repairs == {"text beside calls: drop": 1}


def test_text_beside_calls_may_be_split_off(read):
    got = read(ASK, calling(call(), content="Let me see.", reasoning="Hm."), result("x"), DONE, calls_with_text="split")
    assert [(m.role, m.content, m.reasoning, len(m.tool_calls)) for m in row_of(got).messages] == [
        ("user", "?", None, 0),
        ("assistant", "Let me see.", "Hm.", 0),
        ("assistant", None, None, 1),
        ("tool", "x", None, 0),
        ("assistant", "Done.", None, 0),
    ]
    assert got.repairs == {"text beside calls: split": 1}


@pytest.mark.parametrize("blank", ["", "\n", None, []])
def test_blank_text_beside_calls_is_none(read, blank):
    assert row_of(read(ASK, calling(call(), content=blank))).target.content is None


# ------------------------------------------------------------------------------------------------ results


TWO = calling(call("find", id="a"), call("note", id="b"))


def test_results_stand_in_the_order_of_the_calls(read):
    got = read(ASK, TWO, result("2", tool_call_id="b"), result("1", tool_call_id="a"), DONE)
    assert results(got) == [("find", "1"), ("note", "2")]
    assert got.repairs == {"results put in the order of the calls": 1}


def test_results_in_order_need_no_repair(read):
    got = read(ASK, TWO, result("1", tool_call_id="a"), result("2", tool_call_id="b"), DONE)
    assert (results(got), got.repairs) == ([("find", "1"), ("note", "2")], {})


def test_results_by_name(read):
    got = read(ASK, calling(call("find"), call("note")), result("2", name="note"), result("1", name="find"), DONE)
    assert results(got) == [("find", "1"), ("note", "2")]


def test_results_without_name_are_matched_by_order_and_counted(read):
    got = read(ASK, calling(call("find"), call("note")), result("1"), result("2"), DONE)
    assert results(got) == [("find", "1"), ("note", "2")]
    assert got.repairs == {"unnamed result matched by order": 2}


def test_two_calls_of_one_tool_are_answered_in_turn(read):
    got = read(ASK, calling(call(), call()), result("1", name="find"), result("2", name="find"), DONE)
    assert results(got) == [("find", "1"), ("find", "2")]


@pytest.mark.parametrize(
    ("content", "rest", "expected"),
    [
        ("rain", {"name": "find"}, "rain"),
        ({"name": "find", "response": {"rain": True}}, {}, {"rain": True}),
        ([{"name": "find", "response": {"rain": True}}], {}, {"rain": True}),
        ({"name": "find", "response": 7}, {}, "7"),
        ({"rain": True, "name": None}, {"name": "find"}, {"rain": True, "name": None}),
        ([1, 2], {"name": "find"}, "[1, 2]"),
        ([{"type": "text", "text": "rain"}], {}, "rain"),
        ("", {}, ""),
    ],
)
def test_forms_of_a_result(read, content, rest, expected):
    assert results(read(ASK, calling(call()), result(content, **rest), DONE)) == [("find", expected)]


def test_one_message_may_hold_all_results(read):
    both = [{"name": "note", "response": {"n": 2}}, {"name": "find", "response": {"n": 1}}]
    assert results(read(ASK, TWO, result(both), DONE)) == [("find", {"n": 1}), ("note", {"n": 2})]


def test_results_on_the_assistant_message_are_unfolded(read):
    """The legacy form of Google's notebooks: the text beside them is the answer that follows."""
    message = calling(call(), tool_responses=[{"name": "find", "response": {"n": 1}}], content="One.")
    got = read(ASK, message)
    assert [(m.role, m.content, m.response) for m in row_of(got).messages[1:]] == [
        ("assistant", None, None),
        ("tool", None, {"n": 1}),
        ("assistant", "One.", None),
    ]


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([result("x"), DONE], "messages.1: a result without a call before it"),
        ([TWO, result("x", tool_call_id="a"), DONE], "messages.3: 1 of 2 calls are answered"),
        ([calling(call()), result("x"), result("y"), DONE], "messages.3: 2 results for 1 calls"),
        ([calling(call(id="a")), result("x", tool_call_id="z"), DONE], "messages.3: a result answers the call 'z'"),
        ([TWO, *[result("x", tool_call_id="a")] * 2, DONE], "messages.4: the call 'a' is answered twice"),
        ([calling(call()), result("x", name="note"), DONE], "messages.3: a result of note, which was not called"),
        ([calling(call(id="a")), result("x", tool_call_id="a", name="note"), DONE], "messages.3: the result of find"),
        ([calling(call(id="a"), call(id="a")), DONE], "messages.1: two calls have the same id"),
        ([calling(call()), DONE, result("x"), DONE], "messages.3: a result without a call before it"),
        ([calling(call()), result(None), DONE], "messages.2: a tool message needs content"),
        ([calling(call()), result("x")], "the last message is of role tool"),
    ],
)
def test_results_that_fit_no_call_are_rejected(read, messages, what):
    assert reason_of(read(ASK, *messages)).startswith(what)


# ------------------------------------------------------------------------------------------------ calls, malformed


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        ([3], "a call is not an object"),
        ([{"function": {}}], "a call has no name"),
        ([{"type": "retrieval"}], "a call of type 'retrieval'"),
        ([call(id="x") | {"id": 4}], "the id of a call is not text"),
    ],
)
def test_malformed_calls_are_rejected(read, calls, what):
    assert reason_of(read(ASK, calling(*calls))).startswith(f"messages.1: {what}")


def test_faults_in_the_tools_name_the_tool(read):
    reason = reason_of(read(ASK, DONE, tools=[*TOOLS, {"name": "stop"}]))
    assert reason.startswith("tools[2]: tool stop: the tool has no description")
