"""What is stored comes back equal, and other trainers' forms mean the same."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_conversations import Taste, conversation

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.data import fitness, load_dataset
from portlab_spec.data.importers.context import Context
from portlab_spec.data.importers.normalise import read_messages
from portlab_spec.data.store import read_conversations, to_openai, to_trl, write_conversations
from portlab_spec.errors import UserError

SUFFIXES = [".jsonl", ".jsonl.gz", ".parquet"]
HARD = Taste(reasoning="all", free_keys=True)
WITHOUT_NULLS = Taste(reasoning="all", free_keys=True, null=False)  # a null that a schema forbids is undone
META = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)


@st.composite
def conversations(draw: Callable[..., object], taste: Taste = HARD) -> Conversation:
    rng = random.Random(draw(st.integers(0, 2**32)))  # type: ignore[arg-type]
    made = conversation(rng, taste)
    update = {"id": draw(st.text(max_size=5)), "split": draw(st.sampled_from(["train", "test"])), "meta": draw(META)}
    return made.model_copy(update=update)


def context() -> Context:
    return Context(stem="x", number=1, source="x", split="train", read_tools=lambda value: (), shared_tools=lambda: ())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_reading_back_is_identity(suffix, tmp_path_factory):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path_factory.mktemp("store") / f"rows{suffix}"

    @settings(max_examples=60, deadline=None)
    @given(st.lists(conversations(), max_size=3))
    def check(rows):
        assert write_conversations(path, rows) == len(rows)
        assert list(read_conversations(path)) == rows

    check()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_stored_data_set_loads_as_any_other(suffix, tmp_path):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"rows{suffix}"
    write_conversations(path, iter(fitness.load()))
    assert load_dataset(path) == fitness.load()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_rows_give_the_same_bytes(suffix, tmp_path):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        write_conversations(path, fitness.load()[:5])
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failure_leaves_the_old_file(suffix, tmp_path):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"rows{suffix}"
    write_conversations(path, fitness.load()[:1])
    before = path.read_bytes()

    def rows():
        yield fitness.load()[1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_conversations(path, rows())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_outside_json_are_refused(tmp_path):
    row = fitness.load()[0].model_copy(update={"meta": {"score": float("nan")}})
    with pytest.raises(UserError, match=rf"{row.id}: not JSON"):
        write_conversations(tmp_path / "rows.jsonl", [row])


def test_an_unknown_suffix_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"rows\.csv: unknown kind of file\. End the name in \.jsonl"):
        write_conversations(tmp_path / "rows.csv", [])


def test_a_row_that_is_no_record_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "x"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:1: messages: Field required"):
        list(read_conversations(path))


# ------------------------------------------------------------------------------------------------ exports


@settings(max_examples=100, deadline=None)
@given(conversations(WITHOUT_NULLS))
def test_the_trl_form_reads_back_as_the_same_messages(row):
    exported = json.loads(json.dumps(to_trl(row)))
    assert read_messages(exported["messages"], row.tools, context()) == list(row.messages)


@settings(max_examples=100, deadline=None)
@given(conversations(WITHOUT_NULLS))
def test_the_openai_form_reads_back_as_the_same_messages_but_for_object_results(row):
    exported = json.loads(json.dumps(to_openai(row)))
    read = read_messages(exported["messages"], row.tools, context())
    expected = [
        m
        if m.response is None
        else Message(role="tool", name=m.name, content=json.dumps(m.response, ensure_ascii=False))
        for m in row.messages
    ]
    assert read == expected


ROW = Conversation(
    id="a",
    tools=(Tool(name="get_steps", description="Steps walked."),),
    messages=(
        Message(role="developer", content="Be brief."),
        Message(role="user", content="How far?"),
        Message(role="assistant", tool_calls=(ToolCall(name="get_steps", arguments={"day": "today"}),)),
        Message(role="tool", name="get_steps", response={"steps": 2400}),
        Message(role="assistant", content="2400 steps.", supervised=False),
    ),
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_steps",
        "description": "Steps walked.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def test_the_openai_form():
    assert to_openai(ROW) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "How far?"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call_2_0",
                        "type": "function",
                        "function": {"name": "get_steps", "arguments": '{"day": "today"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_2_0", "content": '{"steps": 2400}'},
            {"role": "assistant", "content": "2400 steps.", "weight": 0},
        ],
        "tools": [TOOL],
    }


def test_the_trl_form():
    assert to_trl(ROW) == {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "How far?"},
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "get_steps", "arguments": {"day": "today"}}}],
            },
            {
                "role": "tool",
                "name": "get_steps",
                "content": {"name": "get_steps", "response": {"steps": 2400}},
            },
            {"role": "assistant", "content": "2400 steps.", "weight": 0},
        ],
        "tools": [TOOL],
    }


def test_the_developer_may_be_called_system():
    assert to_trl(ROW, developer_role="system")["messages"][0]["role"] == "system"


def test_a_row_without_tools_has_no_such_key(tmp_path: Path):
    row = ROW.model_copy(update={"tools": (), "messages": ROW.messages[:2]})
    assert "tools" not in to_openai(row)
    assert "tools" not in to_trl(row)
