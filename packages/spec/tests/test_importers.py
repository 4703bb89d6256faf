"""Every published shape of a data set is known by its marks and becomes the same kind of record."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.conversation import Conversation, Message, ToolCall
from portlab_spec.data.fitness import DEVELOPER_PROMPT
from portlab_spec.data.importers import IMPORTERS
from portlab_spec.data.rows import Imported, import_rows, load_dataset
from portlab_spec.errors import UserError

CITY = {"type": "string", "description": "Name of the city."}
WEATHER = {
    "name": "get_weather",
    "description": "Look up the weather.",
    "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
}
TOOL = {"type": "function", "function": WEATHER}
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Is it raining in Oslo?"}
OSLO = {"name": "get_weather", "arguments": {"city": "Oslo"}}
ANSWER = {"role": "assistant", "content": "Yes, it is."}

HERMES_SYSTEM = (
    "You may call functions. Here are the available tools:\n"
    f"<tools>\n[{json.dumps(TOOL)}]\n</tools>\nReturn each call inside <tool_call></tool_call> tags."
)
TOOLACE_TOOL = {
    "name": "Weather Look Up",
    "description": "Look up the weather.",
    "parameters": {"type": "dict", "properties": {"city": CITY}, "required": ["city"]},
    "required": None,
}

ROWS: dict[str, list[dict[str, Any]]] = {
    "record": [
        {
            "id": "r",
            "tools": [WEATHER],
            "messages": [
                {"role": "developer", "content": "Be brief."},
                ASK,
                {"role": "assistant", "tool_calls": [OSLO]},
            ],
        },
        {"id": "chat", "messages": [ASK, ANSWER]},
    ],
    "seed": [{"user_query": ASK["content"], "function_call": OSLO, "tools": [TOOL]}],
    "fitness-coach": [
        {
            "messages": json.dumps(
                [SYSTEM, ASK, {"role": "assistant", "tool_calls": [{"type": "function", "function": OSLO}]}]
            ),
            "tools": json.dumps([{"type": "function", "function": WEATHER | {"return": {"type": "string"}}}]),
        },
        {
            "system": "Be brief.",
            "user": ASK["content"],
            "assistant": "<call>",
            "function_name": "get_weather",
            "function_arguments": '{"city": "Oslo"}',
            "tools": json.dumps([TOOL]),
        },
    ],
    "mobile-actions": [
        {
            "metadata": "train",
            "tools": [
                {
                    "function": {
                        "name": "get_weather",
                        "description": "Look up the weather.",
                        "parameters": {
                            "type": "OBJECT",
                            "properties": {"city": {"type": "STRING", "description": "Name of the city."}},
                            "required": ["city"],
                        },
                    }
                }
            ],
            "messages": [
                {"role": "developer", "content": "It is Monday.\n"},
                ASK,
                {"role": "assistant", "tool_calls": [{"function": OSLO}]},
            ],
        }
    ],
    "simple-tool-calling": [
        {
            "user_content": ASK["content"],
            "tool_name": "get_weather",
            "tool_arguments": '{"city": "Oslo"}',
            "tools": [TOOL],
        }
    ],
    "openai": [
        {
            "messages": [
                SYSTEM,
                ASK,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                ANSWER,
            ],
            "tools": [TOOL],
            "parallel_tool_calls": False,
        },
        {"messages": [ASK, ANSWER | {"weight": 0}, ASK, ANSWER | {"weight": 1}]},
    ],
    "openai-functions": [
        {
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                },
                {"role": "function", "name": "get_weather", "content": "rain"},
                ANSWER,
            ],
            "functions": [WEATHER],
        }
    ],
    "trl": [
        {
            "messages": [
                SYSTEM,
                ASK,
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": OSLO}]},
                {"role": "tool", "name": "get_weather", "content": "rain", "tool_calls": None},
                ANSWER | {"tool_calls": None},
            ],
            "tools": [TOOL],
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ],
    "trl-prompt-completion": [
        {"prompt": "Is it raining in Oslo?", "completion": "Yes, it is."},
        {
            "prompt": [ASK, ANSWER, {"role": "user", "content": "Look it up."}],
            "completion": [{"role": "assistant", "tool_calls": [{"type": "function", "function": OSLO}]}],
            "tools": json.dumps([TOOL]),
        },
    ],
    "xlam": [
        {
            "id": 7,
            "query": ASK["content"],
            "answers": json.dumps([OSLO]),
            "tools": json.dumps(
                [
                    {
                        "name": "get_weather",
                        "description": "Look up the weather.",
                        "parameters": {"city": {"type": "str", "description": "Name of the city."}},
                    }
                ]
            ),
        }
    ],
    "hermes": [
        {
            "id": "h",
            "conversations": [
                {"from": "system", "value": HERMES_SYSTEM},
                {"from": "human", "value": ASK["content"]},
                {
                    "from": "gpt",
                    "value": "<tool_call>\n{'arguments': {'city': 'Oslo'}, 'name': 'get_weather'}\n</tool_call>",
                },
                {
                    "from": "tool",
                    "value": '<tool_response>\n{"name": "get_weather", "content": {"rain": true}}\n</tool_response>',
                },
                {"from": "gpt", "value": "Yes, it is."},
            ],
            "tools": json.dumps([TOOL]),
            "category": "Weather",
        },
        {
            "conversations": [
                {"from": "human", "value": ASK["content"]},
                {"from": "function_call", "value": json.dumps(OSLO)},
                {"from": "observation", "value": "rain"},
                {"from": "gpt", "value": "Yes, it is."},
            ],
            "tools": json.dumps([WEATHER]),
        },
    ],
    "glaive": [
        {
            "system": "SYSTEM: You are helpful and may call these functions -\n" + json.dumps(WEATHER, indent=4),
            "chat": (
                "USER: Is it raining in Oslo?\n\n\nASSISTANT: <functioncall> "
                '{"name": "get_weather", "arguments": \'{"city": "Oslo"}\'} <|endoftext|>\n\n\n'
                'FUNCTION RESPONSE: {"rain": true}\n\n\nASSISTANT: Yes, it is. <|endoftext|>'
            ),
        }
    ],
    "toolace": [
        {
            "system": f"You compose functions. These can be invoked:\n{json.dumps([TOOLACE_TOOL])}. Answer with [f()].",
            "conversations": [
                {"from": "user", "value": ASK["content"]},
                {"from": "assistant", "value": '[Weather Look Up(city="Oslo")]'},
                {"from": "tool", "value": '[{"name": "Weather Look Up", "results": {"rain": true}}]'},
                {"from": "assistant", "value": "Yes, it is."},
            ],
        }
    ],
    "dolly": [{"instruction": "Summarise.", "context": "It rains.", "response": "Rain.", "category": "summarization"}],
    "messages": [{"messages": [SYSTEM, ASK, ANSWER]}, {"id": "m", "messages": [SYSTEM, ASK, ANSWER], "topic": "rain"}],
}
CALL = Message(role="assistant", tool_calls=(ToolCall(name="get_weather", arguments={"city": "Oslo"}),))


def imported(tmp_path: Path, *rows: Any, **options: Any) -> Imported:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return import_rows(path, **options)


def only(tmp_path: Path, row: Any, **options: Any) -> Conversation:
    got = imported(tmp_path, row, **options)
    assert [reject.reason for reject in got.rejects] == []
    return got.conversations[0]


def test_there_is_a_sample_of_every_shape():
    assert ROWS.keys() == IMPORTERS.keys()


@pytest.mark.parametrize("shape", ROWS)
def test_each_shape_is_known_by_its_marks_alone(shape):
    for row in ROWS[shape]:
        assert [name for name, importer in IMPORTERS.items() if importer.matches(row)] == [shape]


@pytest.mark.parametrize("shape", ROWS)
def test_no_row_is_lost(shape, tmp_path):
    """Good rows, the same rows again (their ids repeat), and broken ones: each is a conversation or a reject."""
    good = [row | {"id": f"{shape}-{i}"} for i, row in enumerate(ROWS[shape])]
    broken = [{key: value for key, value in good[0].items() if key != drop} for drop in good[0]]
    rows = [*good, *good, *broken, {}, [], {"text": "?"}]
    got = imported(tmp_path, *rows)
    assert len(got.conversations) + len(got.rejects) == len(rows)
    assert [c.id for c in got.conversations][: len(good)] == [row["id"] for row in good]
    assert all("already that of line" in reject.reason for reject in got.rejects[: len(good)])
    assert all(reject.raw == rows[reject.line - 1] for reject in got.rejects)


@pytest.mark.parametrize("shape", ROWS)
def test_naming_the_shape_changes_nothing(shape, tmp_path):
    assert imported(tmp_path, *ROWS[shape], shape=shape) == imported(tmp_path, *ROWS[shape])


@pytest.mark.parametrize("shape", ROWS)
def test_the_strict_entry_reads_every_shape(shape, tmp_path):
    rows = imported(tmp_path, *ROWS[shape]).conversations
    assert load_dataset(tmp_path / "data.jsonl") == rows


def test_shapes_are_counted_and_may_be_mixed(tmp_path):
    rows = [row for shape in ROWS for row in ROWS[shape]]
    got = imported(tmp_path, *rows)
    assert got.rejects == []
    assert got.shape_counts == {shape: len(ROWS[shape]) for shape in ROWS}


@pytest.mark.parametrize(
    ("shape", "which"),
    [
        ("record", 0), ("seed", 0), ("fitness-coach", 0), ("fitness-coach", 1), ("mobile-actions", 0),
        ("simple-tool-calling", 0), ("openai", 0), ("openai-functions", 0), ("trl", 0), ("trl-prompt-completion", 1),
        ("xlam", 0), ("hermes", 0), ("hermes", 1), ("glaive", 0),
    ],
)  # fmt: skip
def test_the_call_and_its_tool_are_the_same_from_every_shape(shape, which, tmp_path):
    row = only(tmp_path, ROWS[shape][which])
    assert CALL in row.messages
    assert [tool.to_openai() for tool in row.tools] == [TOOL]
    assert ASK["content"] in [message.content for message in row.messages if message.role == "user"]


def test_tools_of_a_record_are_lowered_as_any_other(tmp_path):
    by_hand = WEATHER | {"parameters": {"type": "OBJECT", "properties": {"city": CITY}, "required": ["city"]}}
    got = imported(tmp_path, ROWS["record"][0] | {"tools": [by_hand]})
    assert [tool.to_openai() for tool in got.conversations[0].tools] == [TOOL]
    assert got.repairs == {"tools lowered": 1}


def test_seed_rows_get_the_developer_prompt(tmp_path):
    assert only(tmp_path, ROWS["seed"][0]).messages[0] == Message(role="developer", content=DEVELOPER_PROMPT)


def test_seed_rows_with_a_comma_behind_them_are_mended_and_counted(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(ROWS['seed'][0])},\n")
    got = import_rows(path)
    assert (len(got.conversations), got.repairs) == (1, {"comma behind the row": 1})
    with pytest.raises(UserError, match="not JSON"):
        load_dataset(path)


def test_fitness_columns_keep_the_text_of_the_call_aside(tmp_path):
    row = only(tmp_path, ROWS["fitness-coach"][1])
    assert [m.role for m in row.messages] == ["developer", "user", "assistant"]
    assert row.meta == {"assistant": "<call>"}


@pytest.mark.parametrize(("metadata", "split"), [("train", "train"), ("eval", "test")])
def test_mobile_actions_says_its_split(tmp_path, metadata, split):
    row = only(tmp_path, ROWS["mobile-actions"][0] | {"metadata": metadata})
    assert (row.split, row.meta) == (split, {})


def test_mobile_actions_arguments_may_be_json_text(tmp_path):
    sample = ROWS["mobile-actions"][0]
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    row = only(tmp_path, sample | {"messages": [*sample["messages"][:2], {"role": "assistant", "tool_calls": [call]}]})
    assert row.target == CALL


def test_simple_tool_calling_takes_the_tools_beside_the_file(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    sample = {key: value for key, value in ROWS["simple-tool-calling"][0].items() if key != "tools"}
    assert only(tmp_path, sample).tools[0].name == "get_weather"


def test_tools_can_be_given(tmp_path):
    tools = only(tmp_path, ROWS["seed"][0]).tools
    row = only(tmp_path, {"user_query": "Rain?", "function_call": OSLO}, tools=tools)
    assert row.tools == tools


def test_openai_results_take_the_name_of_their_call(tmp_path):
    row = only(tmp_path, ROWS["openai"][0])
    assert row.messages[3] == Message(role="tool", name="get_weather", content="rain")
    assert row.meta == {"parallel_tool_calls": False}


def test_weight_zero_is_context_only(tmp_path):
    row = only(tmp_path, ROWS["openai"][1])
    assert [m.supervised for m in row.messages if m.role == "assistant"] == [False, True]


def test_trl_template_arguments_go_to_meta(tmp_path):
    assert only(tmp_path, ROWS["trl"][0]).meta == {"chat_template_kwargs": {"enable_thinking": False}}


def test_trl_learns_the_completion_only(tmp_path):
    row = only(tmp_path, ROWS["trl-prompt-completion"][1])
    assert [m.supervised for m in row.messages if m.role == "assistant"] == [False, True]


def test_a_number_as_id_counts_within_its_file(tmp_path):
    assert only(tmp_path, ROWS["xlam"][0]).id == "data-id-7"


def test_xlam_without_answers_has_nothing_to_learn(tmp_path):
    (reject,) = imported(tmp_path, ROWS["xlam"][0] | {"answers": "[]"}).rejects
    assert reject.reason == "answers is empty: there is nothing to learn. Remove the row"


@pytest.mark.parametrize("shape", ["hermes", "glaive", "toolace"])
def test_prompts_that_teach_another_format_are_replaced_and_counted(tmp_path, shape):
    got = imported(tmp_path, ROWS[shape][0])
    assert got.conversations[0].messages[0] == Message(role="developer", content=DEVELOPER_PROMPT)
    assert got.repairs["system prompt of another format replaced"] == 1


@pytest.mark.parametrize("shape", ["hermes", "glaive", "toolace"])
def test_results_in_text_become_objects(tmp_path, shape):
    (result,) = (m for m in only(tmp_path, ROWS[shape][0]).messages if m.role == "tool")
    assert result.response == {"rain": True}


def test_hermes_tools_are_read_from_the_prompt_without_a_column(tmp_path):
    sample = {key: value for key, value in ROWS["hermes"][0].items() if key != "tools"}
    assert [tool.to_openai() for tool in only(tmp_path, sample).tools] == [TOOL]


def test_hermes_with_half_a_tag_is_rejected(tmp_path):
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "<tool_call>\n{}"}]
    (reject,) = imported(tmp_path, {"conversations": turns}).rejects
    assert reject.reason.startswith("<tool_call> is opened or closed without its other half")


def test_hermes_thoughts_become_reasoning(tmp_path):
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "<think>\nHm.\n</think>\n\nYes."}]
    row = only(tmp_path, {"conversations": turns})
    assert row.target == Message(role="assistant", reasoning="Hm.", content="Yes.")


def test_glaive_without_functions_keeps_its_prompt(tmp_path):
    row = only(tmp_path, {"system": "SYSTEM: You are kind.", "chat": "USER: Hi\n\n\nASSISTANT: Hello! <|endoftext|>"})
    assert [m.content for m in row.messages] == ["You are kind.", "Hi", "Hello!"]


def test_glaive_arguments_may_hold_apostrophes(tmp_path):
    sample = ROWS["glaive"][0]
    row = only(tmp_path, sample | {"chat": sample["chat"].replace('"Oslo"', '"L\'Aquila"')})
    assert row.messages[2].tool_calls[0].arguments == {"city": "L'Aquila"}


def test_toolace_names_get_underscores_everywhere(tmp_path):
    got = imported(tmp_path, ROWS["toolace"][0])
    row = got.conversations[0]
    assert row.tools[0].name == row.messages[2].tool_calls[0].name == row.messages[3].name == "Weather_Look_Up"
    assert got.repairs["name with characters that no tool name has"] == 2


def test_toolace_text_in_brackets_is_no_call(tmp_path):
    sample = ROWS["toolace"][0]
    turns = [{"from": "user", "value": "?"}, {"from": "assistant", "value": "[none of them fits]"}]
    assert only(tmp_path, sample | {"conversations": turns}).target.content == "[none of them fits]"


def test_toolace_calls_that_cannot_be_read_are_rejected(tmp_path):
    sample = ROWS["toolace"][0]
    turns = [{"from": "user", "value": "?"}, {"from": "assistant", "value": "[Weather Look Up(city=open('x'))]"}]
    (reject,) = imported(tmp_path, sample | {"conversations": turns}).rejects
    assert reject.reason.startswith("a list of calls cannot be read")


def test_dolly_context_follows_the_instruction(tmp_path):
    row = only(tmp_path, ROWS["dolly"][0])
    assert [m.content for m in row.messages] == ["Summarise.\n\nContext: It rains.", "Rain."]
    assert (row.tools, row.meta) == ((), {"category": "summarization"})


def test_columns_that_no_shape_knows_go_to_meta(tmp_path):
    assert only(tmp_path, ROWS["messages"][1]).meta == {"topic": "rain"}


def test_a_row_of_two_shapes_names_both(tmp_path):
    (reject,) = imported(tmp_path, ROWS["dolly"][0] | ROWS["seed"][0]).rejects
    assert reject.reason == "the row may be seed or dolly. Name the shape (--shape)"
    assert only(tmp_path, ROWS["dolly"][0] | ROWS["glaive"][0], shape="dolly").messages[1].content == "Rain."


def test_an_unknown_shape_lists_the_names(tmp_path):
    with pytest.raises(UserError, match=r"unknown shape 'xlm'.*Use one of: record, seed.*xlam"):
        imported(tmp_path, {}, shape="xlm")


@pytest.mark.parametrize("shape", ROWS)
def test_a_row_of_another_shape_is_rejected_not_misread(shape, tmp_path):
    (reject,) = imported(tmp_path, {"unrelated": 1}, shape=shape).rejects
    assert "\n" not in reject.reason


def test_rejects_say_where_what_and_how_to_mend(tmp_path):
    (reject,) = imported(tmp_path, ROWS["seed"][0] | {"id": "q1", "function_call": {"name": "fly"}}).rejects
    assert (reject.line, reject.id, reject.where) == (1, "q1", f"{tmp_path / 'data.jsonl'}:1")
    assert reject.reason == "call to fly, which is not offered. Offer it, or call one of: get_weather"
    assert reject.raw["user_query"] == ASK["content"]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in inner for place in places(item, (*at, key)))]


def replaced(value: Any, at: tuple[Any, ...], by: Any) -> Any:
    if not at:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], by)
    return copy


ODD = st.sampled_from(
    [
        None, True, 0, -1, 1.5, "", " ", "x", "null", "[", "[{", "{}", "[1]", "<tool_call>", "<functioncall>", "[f(",
        [], [None], [1], ["x"], [[]], {}, [{}], {"name": None}, {"type": "text"}, {"name": 1, "response": 2},
        {"function": 3}, "\ud800",
    ]
)  # fmt: skip


@pytest.mark.parametrize("shape", ROWS)
def test_a_damaged_row_is_never_a_crash(shape, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def check(data):
        row = data.draw(st.sampled_from(ROWS[shape]))
        for _ in range(data.draw(st.integers(1, 3))):
            row = replaced(row, data.draw(st.sampled_from(places(row))), data.draw(ODD))
        for named in (None, shape):
            got = imported(folder, row, shape=named)
            assert len(got.conversations) + len(got.rejects) == 1

    check()
