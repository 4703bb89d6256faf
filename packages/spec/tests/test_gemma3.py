"""Gemma 3 rendering: the published template byte for byte without tools, calls and results by agreement with them."""

import ast
import importlib.util
import json
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from portlab_spec.assets import default_model
from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats import encode
from portlab_spec.formats.gemma3 import JSON, PYTHON, REFUSED_TOKENS
from portlab_spec.tokenizer import Tokenizer
from portlab_spec.tools import same_json

FORMATS = [JSON, PYTHON]
WEATHER = Tool(
    name="get_weather",
    description="Weather of a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
DECLARED = (
    '[{"name": "get_weather", "description": "Weather of a city.", "parameters": {"type": "object", "properties":'
    ' {"city": {"type": "string"}}, "required": ["city"]}}]'
)
ASK = Message(role="user", content="Oslo and Rome?")
OSLO = ToolCall(name="get_weather", arguments={"city": "Oslo", "days": 2, "hourly": False, "unit": None})
ROME = ToolCall(name="get_weather", arguments={"city": 'R"o\nme'})
CALLS = Message(role="assistant", tool_calls=(OSLO, ROME))
RESULTS = (
    Message(role="tool", name="get_weather", content='15 "C"'),
    Message(role="tool", name="get_weather", response={"t": 20.5}),
)
ANSWER = Message(role="assistant", content="15 and 20.5.")


def conversation(*messages, tools=(WEATHER,)):
    return Conversation(id="c", tools=tools, messages=messages)


def text_of(fmt, conv, **kwargs):
    return "".join(s.text for s in fmt.render(conv, **kwargs))


def supervised(fmt, conv):
    return "".join(s.text for s in fmt.render(conv) if s.loss)


# --------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("fmt", "form"),
    [
        (
            JSON,
            '{"name": function name, "parameters": dictionary of argument name and its value}'
            ", or a JSON list of these for several calls",
        ),
        (PYTHON, "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]"),
    ],
)
def test_developer_text_instruction_and_functions_open_the_first_user_turn(fmt, form):
    conv = conversation(Message(role="developer", content="Be brief."), ASK)
    assert text_of(fmt, conv, generation_prompt=True) == (
        "<bos><start_of_turn>user\nBe brief.\n\n"
        "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format of"
        f"\n{form}\n\nYou SHOULD NOT include any other text in the response if you call a function\n{DECLARED}\n\n"
        "Oslo and Rome?<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize(
    ("fmt", "calls", "expected"),
    [
        (
            JSON,
            (OSLO,),
            '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2, "hourly": false, "unit": null}}',
        ),
        (
            JSON,
            (ROME, ToolCall(name="now")),
            r'[{"name": "get_weather", "parameters": {"city": "R\"o\nme"}}, {"name": "now", "parameters": {}}]',
        ),
        (PYTHON, (OSLO,), '[get_weather(city="Oslo", days=2, hourly=False, unit=None)]'),
        (PYTHON, (ROME, ToolCall(name="clock.now")), r'[get_weather(city="R\"o\nme"), clock.now()]'),
    ],
)
def test_calls_are_the_whole_turn(fmt, calls, expected):
    conv = conversation(ASK, Message(role="assistant", tool_calls=calls))
    assert supervised(fmt, conv) == expected + "<end_of_turn>"


@pytest.mark.parametrize("fmt", FORMATS)
def test_results_of_one_round_share_a_user_turn(fmt):
    assert text_of(fmt, conversation(ASK, CALLS, *RESULTS, ANSWER)).endswith(
        "<end_of_turn>\n<start_of_turn>user\n```tool_output\n"
        r'{"name": "get_weather", "response": "15 \"C\""}'
        '\n{"name": "get_weather", "response": {"t": 20.5}}\n```'
        "<end_of_turn>\n<start_of_turn>model\n15 and 20.5.<end_of_turn>\n"
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_loss_covers_what_the_model_writes_in_supervised_turns_only(fmt):
    first = supervised(fmt, conversation(ASK, CALLS))
    conv = conversation(ASK, CALLS, *RESULTS, ANSWER)
    assert supervised(fmt, conv) == first + "15 and 20.5.<end_of_turn>"
    context = CALLS.model_copy(update={"supervised": False})
    assert supervised(fmt, conversation(ASK, context, *RESULTS, ANSWER)) == "15 and 20.5.<end_of_turn>"


# --------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ((ASK, ASK), "messages[1]: a message of role user follows a user message"),
        ((ASK, ANSWER, ANSWER), "messages[2]: a message of role assistant follows an answer"),
        ((ANSWER,), "messages[0]: a message of role assistant follows the start"),
        ((ASK, CALLS, ASK), "messages[2]: a message of role user follows tool calls"),
        ((ASK, CALLS, ANSWER), "messages[2]: a message of role assistant follows tool calls"),
        ((ASK, CALLS, *RESULTS, ASK), "messages[4]: a message of role user follows tool results"),
        ((ASK, ANSWER, RESULTS[0]), "messages[2]: a message of role tool follows an answer"),
        ((ASK, Message(role="developer", content="x")), "messages[1]: a message of role developer follows"),
        ((Message(role="developer", content="x"),), "c: there is no user message"),
        ((ASK, Message(role="assistant", content=" ")), "messages[1]: an assistant message is empty"),
        ((ASK, Message(role="assistant", content="x", reasoning="y")), "messages[1]: Gemma 3 has no place"),
        ((ASK, Message(role="assistant", content="[1] says so")), "messages[1].content: this text would be read"),
        ((ASK, Message(role="assistant", content="So:\n[f(a=1)]")), "messages[1].content: this text would be read"),
        ((Message(role="user", content="\ud800"),), "messages[0].content: a string holds half of a surrogate pair"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_the_format_cannot_say_is_refused_by_message(fmt, messages, said):
    with pytest.raises(UserError) as refusal:
        fmt.render(conversation(*messages))
    assert said in str(refusal.value)


@pytest.mark.parametrize("fmt", FORMATS)
def test_without_tools_an_answer_may_begin_with_a_bracket(fmt):
    conv = conversation(ASK, Message(role="assistant", content="[1] says so"), tools=())
    assert supervised(fmt, conv) == "[1] says so<end_of_turn>"


@pytest.mark.parametrize("token", REFUSED_TOKENS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_control_token_in_an_argument_is_refused_by_its_path(fmt, token):
    call = ToolCall(name="f", arguments={"a": {"b": [f"x{token}"]}})
    with pytest.raises(UserError, match=r"c: messages\[1\].tool_calls\[0\].arguments.a.b\[0\]: .*control token"):
        fmt.render(conversation(ASK, Message(role="assistant", tool_calls=(call,))))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\udfff", 10**4300], ids=["nan", "inf", "half", "long"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_value_that_does_not_come_back_is_refused_by_its_path(fmt, value):
    call = ToolCall.model_construct(name="f", arguments={"a": [value]})
    message = Message.model_construct(role="assistant", tool_calls=(call,), supervised=True, reasoning=None)
    conv = Conversation.model_construct(id="c", tools=(), messages=(ASK, message))
    with pytest.raises(UserError, match=r"tool_calls\[0\].arguments.a\[0\]: "):
        fmt.render(conv)


@pytest.mark.parametrize("key", ["two words", "a-b", "a.b", "1st", "class", "True", "", "ﬁ"])
def test_python_cannot_name_an_argument_like_this(key):
    message = Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={key: 1}),))
    with pytest.raises(UserError, match=r"tool_calls\[0\].arguments: the argument name .* use the format gemma3-json"):
        PYTHON.render(conversation(ASK, message))
    assert JSON.render(conversation(ASK, message))


@pytest.mark.parametrize("name", ["get-weather", "a..b", "lambda", "x.import", ""])
def test_python_cannot_name_a_tool_like_this(name):
    message = Message(role="assistant", tool_calls=(ToolCall(name=name),))
    with pytest.raises(UserError, match=r"messages\[1\].tool_calls\[0\]: "):
        PYTHON.render(conversation(ASK, message))


# --------------------------------------------------------------------------------------------- the real template

words = st.text(st.characters(codec="utf-8", exclude_characters="<▁"), max_size=30)
answers = words.filter(str.strip)


@st.composite
def chats(draw):
    """Conversations without tools, which end with either side."""
    messages = [Message(role="developer", content=draw(words))] if draw(st.booleans()) else []
    for n in range(draw(st.integers(1, 5))):
        role = "assistant" if n % 2 else "user"
        messages.append(Message(role=role, content=draw(answers if n % 2 else words)))
    return conversation(*messages, tools=())


@pytest.fixture(scope="module")
def template() -> jinja2.Template:
    """The chat template of google/gemma-3-*-it as TRL ships it, found without importing TRL, which imports torch."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, which ships the template, is not installed")
    text = (Path(spec.origin).parent / "chat_templates" / "gemma3.jinja").read_text(encoding="utf-8")
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)  # as transformers compiles it
    env.globals["raise_exception"] = _raise
    return env.from_string(text)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def test_without_tools_the_text_is_the_templates(template):
    @settings(max_examples=200, deadline=None)
    @given(chats(), st.booleans(), st.sampled_from(FORMATS))
    def check(conv, prompt, fmt):
        role = {"developer": "system"}
        messages = [{"role": role.get(m.role, m.role), "content": m.content} for m in conv.messages]
        expected = template.render(messages=messages, bos_token="<bos>", add_generation_prompt=prompt)
        assert text_of(fmt, conv, generation_prompt=prompt) == expected

    check()


# --------------------------------------------------------------------------------------------- round trips

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
strings = (
    st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=12)
    | st.sampled_from(
        [
            '"',
            "\\",
            "\\n",
            "'",
            "]}",
            ")]",
            "\x00",
            "\x7f",
            "\u2028",
            "\r\n",
            "```",
            "[f()]",
            "true",
            "1e5",
            "\\u0041",
            "/",
        ]
    )
).filter(lambda text: not any(token in text for token in REFUSED_TOKENS))
values = st.recursive(
    scalars | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=8,
)
identifiers = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True).map(lambda name: f"x_{name}")
names = st.lists(identifiers, min_size=1, max_size=2).map(".".join)


@st.composite
def call_turns(draw, fmt):
    keys = strings if fmt is JSON else identifiers
    calls = st.builds(ToolCall, name=names, arguments=st.dictionaries(keys, values, max_size=4))
    return conversation(ASK, Message(role="assistant", tool_calls=tuple(draw(st.lists(calls, min_size=1, max_size=3)))))


def assert_same(calls, expected):
    assert [c.name for c in calls] == [c.name for c in expected]
    assert all(same_json(a.arguments, b.arguments) for a, b in zip(calls, expected, strict=True))


@pytest.mark.parametrize("fmt", FORMATS)
def test_calls_come_back_from_their_text(fmt):
    @settings(max_examples=200, deadline=None)
    @given(call_turns(fmt), st.booleans())
    def check(conv, lenient):
        parsed = fmt.parse_text(supervised(fmt, conv), lenient=lenient)
        assert (parsed.error, parsed.text, parsed.stopped) == (None, "", True)
        assert_same(parsed.calls, conv.target.tool_calls)
        assert parsed.names == tuple(c.name for c in parsed.calls)

    check()


@pytest.mark.parametrize("fmt", FORMATS)
def test_calls_come_back_leniently_where_the_server_strips_the_stop_token(fmt):
    @settings(max_examples=200, deadline=None)
    @given(call_turns(fmt))
    def check(conv):
        stripped = supervised(fmt, conv).removesuffix("<end_of_turn>")
        assert_same(fmt.parse_text(stripped, lenient=True).calls, conv.target.tool_calls)
        assert fmt.parse_text(stripped).calls == ()

    check()


@settings(max_examples=200, deadline=None)
@given(call_turns(PYTHON))
def test_python_itself_reads_the_calls(conv):
    text = supervised(PYTHON, conv).removesuffix("<end_of_turn>")
    for node, call in zip(ast.parse(text, mode="eval").body.elts, conv.target.tool_calls, strict=True):
        assert ast.unparse(node.func) == call.name
        assert same_json({k.arg: ast.literal_eval(k.value) for k in node.keywords}, call.arguments)


@settings(max_examples=200, deadline=None)
@given(call_turns(JSON))
def test_json_itself_reads_the_calls(conv):
    read = json.loads(supervised(JSON, conv).removesuffix("<end_of_turn>"))
    read = read if isinstance(read, list) else [read]
    assert_same([ToolCall(name=c["name"], arguments=c["parameters"]) for c in read], conv.target.tool_calls)


@settings(max_examples=200, deadline=None)
@given(answers.filter(lambda text: text.strip()[0] not in "[{`"), st.sampled_from(FORMATS))
def test_a_text_answer_comes_back(text, fmt):
    conv = conversation(ASK, Message(role="assistant", content=text), tools=())
    parsed = fmt.parse_text(supervised(fmt, conv))
    assert (parsed.error, parsed.text, parsed.calls) == (None, text.strip(), ())


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(default_model().path)


@pytest.mark.real_model
@pytest.mark.parametrize("fmt", FORMATS)
def test_ids_are_those_of_the_whole_text_and_the_mask_is_the_models_part(fmt, tokenizer):
    @settings(max_examples=150, deadline=None)
    @given(call_turns(fmt) | chats())
    def check(conv):
        segments = fmt.render(conv)
        encoded = encode(segments, tokenizer)
        assert encoded.ids == tokenizer.encode("".join(s.text for s in segments))
        assert [i for i, token in enumerate(encoded.ids) if token == tokenizer.bos_id] == [0]
        if conv.messages[-1].role != "assistant":
            return
        prompt = encode(fmt.render(conv.prompt, generation_prompt=True), tokenizer).ids
        assert encoded.ids[: len(prompt)] == prompt
        loss = encoded.loss[len(prompt) :]
        assert loss == [True] * (len(loss) - 1) + [False]  # all but the newline after <end_of_turn>
        answer = encoded.ids[len(prompt) : -1]
        assert answer[-1] == tokenizer.token_id("<end_of_turn>")
        if conv.tools:
            parsed = fmt.parse(answer, tokenizer)
            assert parsed.error is None
            assert_same(parsed.calls, conv.target.tool_calls)

    check()


@pytest.mark.real_model
@pytest.mark.parametrize("fmt", FORMATS)
def test_only_the_id_of_a_stop_token_ends_a_turn(fmt, tokenizer):
    spelt = [i for part in ("<end", "_of_turn", ">") for i in tokenizer.encode(part)]
    parsed = fmt.parse([*tokenizer.encode("Say "), *spelt, 106], tokenizer)
    assert (parsed.text, parsed.error, parsed.stopped) == ("Say <end_of_turn>", None, True)
    assert not fmt.parse([*tokenizer.encode("Say "), *spelt], tokenizer).stopped


@pytest.mark.parametrize("fmt", [JSON, PYTHON])
@pytest.mark.parametrize("text", ["[f()]", '{"name": "f", "parameters": {}}', "[1] is the first", "Look:\n[f()]"])
def test_an_answer_that_reads_as_a_call_is_refused_where_calls_are_possible(fmt, text):
    tools = (Tool(name="f", description="Do it."),)
    messages = (Message(role="user", content="Hi"), Message(role="assistant", content=text))
    with pytest.raises(UserError, match=r"messages\[1\]\.content: this text would be read as a call"):
        fmt.render(Conversation(id="c", tools=tools, messages=messages))
