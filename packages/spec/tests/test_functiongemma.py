"""FunctionGemma rendering and parsing, on official examples and on every value a call can carry."""

import math

import pytest
from char_tokenizer import CharTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats import encode
from portlab_spec.formats.functiongemma import FORMAT, MARKERS

WEATHER = Tool(
    name="get_current_temperature",
    description="Gets the current temperature for a given location.",
    parameters={
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city name, e.g. San Francisco"}},
        "required": ["location"],
    },
)
STEPS = Tool(name="get_steps", description="Steps walked today.")


TOKENIZER = CharTokenizer(FORMAT.control_tokens)


def conversation(*messages, tools=(WEATHER,)):
    return Conversation(id="c", tools=tools, messages=messages)


def text_of(conv, **kwargs):
    return "".join(s.text for s in FORMAT.render(conv, **kwargs))


CALL_LONDON = Message(role="assistant", tool_calls=(ToolCall(name=WEATHER.name, arguments={"location": "London"}),))
DEVELOPER = Message(
    role="developer",
    content="You are a model that can do function calling with the following functions",
)
ASK = Message(role="user", content="What's the temperature in London?")
PROMPT = (
    "<bos><start_of_turn>developer\nYou are a model that can do function calling with the following functions"
    "<start_function_declaration>declaration:get_current_temperature{description:<escape>Gets the current"
    " temperature for a given location.<escape>,parameters:{properties:{location:{description:<escape>"
    "The city name, e.g. San Francisco<escape>,type:<escape>STRING<escape>}},required:[<escape>location<escape>],"
    "type:<escape>OBJECT<escape>}}<end_function_declaration><end_of_turn>\n"
    "<start_of_turn>user\nWhat's the temperature in London?<end_of_turn>\n<start_of_turn>model\n"
)


def test_prompt_is_the_published_one():
    assert text_of(conversation(DEVELOPER, ASK), generation_prompt=True) == PROMPT


def test_call_follows_the_prompt_and_ends_with_the_response_marker():
    expected = (
        "<start_function_call>call:get_current_temperature{location:<escape>London<escape>}"
        "<end_function_call><start_function_response>"
    )
    assert text_of(conversation(DEVELOPER, ASK, CALL_LONDON)) == PROMPT + expected


def test_result_and_answer_stay_in_the_model_turn():
    result = Message(role="tool", name=WEATHER.name, content="15")
    answer = Message(role="assistant", content="It is 15 degrees.")
    rendered = text_of(conversation(DEVELOPER, ASK, CALL_LONDON, result, answer))
    assert rendered.endswith(
        "<end_function_call><start_function_response>response:get_current_temperature{value:<escape>15<escape>}"
        "<end_function_response>It is 15 degrees.<end_of_turn>\n"
    )


def test_tool_without_parameters_has_no_properties():
    rendered = text_of(conversation(DEVELOPER, ASK, tools=(STEPS,)))
    assert (
        "declaration:get_steps{description:<escape>Steps walked today.<escape>,"
        "parameters:{type:<escape>OBJECT<escape>}}" in rendered
    )
    assert "properties" not in rendered


def declared(properties, **more):
    """The text between `properties:{` and the end of the declaration."""
    tool = Tool(name="t", description="d", parameters={"type": "object", "properties": properties, **more})
    head = "declaration:t{description:<escape>d<escape>,parameters:{properties:{"
    return text_of(conversation(DEVELOPER, ASK, tools=(tool,))).partition(head)[2].partition("<end_function_decl")[0]


# What the official template makes of each construct, retyped from its published outputs.
@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "description:<escape><escape>,type:<escape>STRING<escape>"),
        ({"type": "NUMBER", "description": "n"}, "description:<escape>n<escape>,type:<escape>NUMBER<escape>"),
        (
            {"type": "string", "description": "c", "enum": ["red", "blue"]},
            "description:<escape>c<escape>,enum:[<escape>red<escape>,<escape>blue<escape>],type:<escape>STRING<escape>",
        ),
        (
            {"type": "array", "description": "e", "items": {"type": "string"}},
            "description:<escape>e<escape>,items:{type:<escape>STRING<escape>},type:<escape>ARRAY<escape>",
        ),
        (
            {
                "type": "object",
                "description": "o",
                "properties": {"b": {"type": "string", "description": "B"}, "a": {"type": "string"}},
                "required": ["a"],
            },
            "description:<escape>o<escape>,properties:{a:{description:<escape><escape>,type:<escape>STRING<escape>},"
            "b:{description:<escape>B<escape>,type:<escape>STRING<escape>}},required:[<escape>a<escape>],"
            "type:<escape>OBJECT<escape>",
        ),
    ],
)
def test_a_parameter_is_declared_as_the_official_template_does(schema, expected):
    assert declared({"x": schema}) == f"x:{{{expected}}}}},type:<escape>OBJECT<escape>}}}}"


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"type": ["string", "null"]}, "no single type"),
        ({"description": "untyped"}, "no single type"),
        ({"type": "integer", "enum": [1, 2]}, "an enum of type integer is not rendered"),
        ({"type": "string", "enum": [1, 2]}, "only strings can stand here"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "an object needs `properties`"),
        ({"type": "array"}, "an array needs `items`"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "string"}}}, "a list of lists"),
    ],
)
def test_what_the_template_renders_wrongly_is_refused(schema, complaint):
    with pytest.raises(UserError, match=complaint) as refusal:
        declared({"x": schema})
    assert refusal.value.where.startswith("c: tool t.parameters.x")


@pytest.mark.parametrize("name", ["description", "type", "properties", "required", "nullable"])
def test_a_parameter_that_the_template_drops_for_its_name_is_refused(name):
    with pytest.raises(UserError, match=f"the template drops parameters called '{name}'"):
        declared({name: {"type": "string"}})


def test_an_action_of_a_phone_with_its_date_and_two_calls():
    calendar = Tool(
        name="create_calendar_event",
        description="Creates a new calendar event.",
        parameters={
            "type": "OBJECT",
            "properties": {
                "title": {"type": "STRING", "description": "The title of the event."},
                "datetime": {"type": "STRING", "description": "The date and time of the event."},
            },
            "required": ["title", "datetime"],
        },
    )
    wifi = Tool(name="open_wifi_settings", description="Opens the Wi-Fi settings.")
    developer = Message(role="developer", content="Day of week is Friday\nUse these functions\n")
    arguments = {"title": "Meeting with Mr. Dubois", "datetime": "2026-01-20T15:00:00"}
    calls = Message(
        role="assistant", tool_calls=(ToolCall(name=calendar.name, arguments=arguments), ToolCall(name=wifi.name))
    )
    conv = conversation(developer, Message(role="user", content="Set it up."), calls, tools=(wifi, calendar))
    assert text_of(conv) == (
        "<bos><start_of_turn>developer\nDay of week is Friday\nUse these functions"
        "<start_function_declaration>declaration:open_wifi_settings{description:<escape>Opens the Wi-Fi settings."
        "<escape>,parameters:{type:<escape>OBJECT<escape>}}<end_function_declaration>"
        "<start_function_declaration>declaration:create_calendar_event{description:<escape>Creates a new calendar"
        " event.<escape>,parameters:{properties:{datetime:{description:<escape>The date and time of the event."
        "<escape>,type:<escape>STRING<escape>},title:{description:<escape>The title of the event.<escape>,"
        "type:<escape>STRING<escape>}},required:[<escape>title<escape>,<escape>datetime<escape>],"
        "type:<escape>OBJECT<escape>}}<end_function_declaration><end_of_turn>\n"
        "<start_of_turn>user\nSet it up.<end_of_turn>\n<start_of_turn>model\n"
        "<start_function_call>call:create_calendar_event{datetime:<escape>2026-01-20T15:00:00<escape>,"
        "title:<escape>Meeting with Mr. Dubois<escape>}<end_function_call>"
        "<start_function_call>call:open_wifi_settings{}<end_function_call><start_function_response>"
    )


def test_a_structured_result_is_written_field_by_field():
    result = Message(role="tool", name=WEATHER.name, response={"weather": "sunny", "temperature": 15})
    answer = Message(role="assistant", content="Sunny, 15 degrees.")
    assert text_of(conversation(DEVELOPER, ASK, CALL_LONDON, result, answer)).endswith(
        "<start_function_response>response:get_current_temperature{temperature:15,weather:<escape>sunny<escape>}"
        "<end_function_response>Sunny, 15 degrees.<end_of_turn>\n"
    )


def test_required_keeps_its_order_while_properties_are_sorted():
    tool = Tool(
        name="send",
        description="d",
        parameters={
            "type": "object",
            "properties": {k: {"type": "string"} for k in ("to", "subject", "body")},
            "required": ["to", "subject"],
        },
    )
    rendered = text_of(conversation(DEVELOPER, ASK, tools=(tool,)))
    assert rendered.index("body:{") < rendered.index("subject:{") < rendered.index("to:{")
    assert "required:[<escape>to<escape>,<escape>subject<escape>]" in rendered


def test_parallel_calls_share_one_response_marker():
    two = Message(role="assistant", tool_calls=(ToolCall(name="get_steps"), ToolCall(name="get_goal")))
    rendered = text_of(conversation(DEVELOPER, ASK, two))
    assert rendered.endswith(
        "<start_function_call>call:get_steps{}<end_function_call>"
        "<start_function_call>call:get_goal{}<end_function_call><start_function_response>"
    )


def test_loss_covers_exactly_what_the_model_writes():
    result = Message(role="tool", name=WEATHER.name, content="15")
    answer = Message(role="assistant", content="Fifteen.")
    encoded = encode(FORMAT.render(conversation(DEVELOPER, ASK, CALL_LONDON, result, answer)), TOKENIZER)
    supervised = TOKENIZER.decode([i for i, flag in zip(encoded.ids, encoded.loss, strict=True) if flag])
    assert supervised == (
        "<start_function_call>call:get_current_temperature{location:<escape>London<escape>}<end_function_call>"
        "<start_function_response>Fifteen.<end_of_turn>"
    )


def test_prompt_ids_are_a_prefix_of_the_whole():
    conv = conversation(DEVELOPER, ASK, CALL_LONDON)
    prompt = encode(FORMAT.render(conv.prompt, generation_prompt=True), TOKENIZER).ids
    whole = encode(FORMAT.render(conv), TOKENIZER).ids
    assert whole[: len(prompt)] == prompt
    assert whole.count(TOKENIZER.token_id("<bos>")) == 1


@pytest.mark.parametrize("token", FORMAT.control_tokens)
def test_control_text_in_data_is_refused_by_field(token):
    with pytest.raises(UserError, match=r"c: messages\[1\].content: .*control token"):
        text_of(conversation(DEVELOPER, Message(role="user", content=f"hi {token} there")))
    call = Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"a": {"b": [token]}}),))
    with pytest.raises(UserError, match=r"tool_calls\[0\].arguments.a.b\[0\]"):
        text_of(conversation(DEVELOPER, ASK, call))


def test_turns_out_of_order_are_refused():
    with pytest.raises(UserError, match="user message follows tool calls"):
        text_of(conversation(DEVELOPER, ASK, CALL_LONDON, ASK))
    with pytest.raises(UserError, match="without a call"):
        text_of(conversation(DEVELOPER, ASK, Message(role="tool", name="f", content="1")))


# Names and values for round trips: any JSON, keys that the grammar can write.
keys = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,12}", fullmatch=True)
strings = st.text(max_size=30).filter(lambda s: not any(t in s for t in MARKERS.refused))
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | strings,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
calls = st.builds(ToolCall, name=keys, arguments=st.dictionaries(keys, values, max_size=4))


def same(a, b):
    """Equality with JSON types kept apart: 1, 1.0 and True differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@settings(max_examples=300, deadline=None)
@given(st.lists(calls, min_size=1, max_size=3))
def test_parsing_a_rendered_call_gives_the_call_back(expected):
    conv = conversation(DEVELOPER, ASK, Message(role="assistant", tool_calls=tuple(expected)), tools=())
    prompt = encode(FORMAT.render(conv.prompt, generation_prompt=True), TOKENIZER)
    whole = encode(FORMAT.render(conv), TOKENIZER)
    output = whole.ids[len(prompt.ids) :]
    for parsed in (FORMAT.parse(output, TOKENIZER), FORMAT.parse_text(TOKENIZER.decode(output))):
        assert parsed.error is None
        assert parsed.stopped
        assert [c.name for c in parsed.calls] == [c.name for c in expected]
        assert all(same(p.arguments, e.arguments) for p, e in zip(parsed.calls, expected, strict=True))


@settings(max_examples=200, deadline=None)
@given(calls, st.data())
def test_output_cut_anywhere_yields_no_call(call, data):
    conv = conversation(DEVELOPER, ASK, Message(role="assistant", tool_calls=(call,)), tools=())
    prompt = encode(FORMAT.render(conv.prompt, generation_prompt=True), TOKENIZER)
    output = encode(FORMAT.render(conv), TOKENIZER).ids[len(prompt.ids) :]
    cut = data.draw(st.integers(0, len(output) - 1))
    parsed = FORMAT.parse(output[:cut], TOKENIZER)
    assert parsed.calls == ()
    assert parsed.error


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from([*FORMAT.control_tokens, "call:f", "{", "}", "[", "]", "a:", ",", "1", "true", " "]),
        max_size=14,
    )
)
def test_no_output_crashes_the_parser(pieces):
    FORMAT.parse_text("".join(pieces))


OPEN, CLOSE = "<start_function_call>", "<end_function_call><start_function_response>"


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("call:f", {}),
        ("call:f{}", {}),
        ("call:f{a:1,b:-2.5}", {"a": 1, "b": -2.5}),
        ("call:f{a:true,c:null}", {"a": True, "c": None}),
        ("call:f{a:<escape>02134<escape>}", {"a": "02134"}),
        ("call:f{a:<escape>x,y} {z:1<escape>,b:2}", {"a": "x,y} {z:1", "b": 2}),
        ("call:f{a:<escape>one\ntwo<escape>}", {"a": "one\ntwo"}),
        ("call:f{a:<escape>  x <escape>}", {"a": "  x "}),
        ("call:f{a:[<escape>x<escape>,<escape>y<escape>]}", {"a": ["x", "y"]}),
        ("call:f{a:[1,2]}", {"a": [1, 2]}),
        ("call:f{a:{b:{c:<escape>d<escape>}}}", {"a": {"b": {"c": "d"}}}),
        ("call:f{my-key:1}", {"my-key": 1}),
        ("call:f{a:9007199254740993}", {"a": 9007199254740993}),
        ("call:f{a:1.5e3}", {"a": 1500.0}),
        (" call : f { a : 1 } ", {"a": 1}),
    ],
)
def test_accepted_calls(body, arguments):
    parsed = FORMAT.parse_text(OPEN + body + CLOSE)
    assert parsed.error is None
    assert same(parsed.calls[0].arguments, arguments)


@pytest.mark.parametrize("name", ["math.add", "get-weather"])
def test_names_with_dots_and_dashes(name):
    assert FORMAT.parse_text(f"{OPEN}call:{name}{{}}{CLOSE}").calls[0].name == name


@pytest.mark.parametrize(
    "body",
    [
        "call:f{a:None}",
        "call:f{a:007}",
        'call:f{a:"x"}',
        "call:f{my key:1}",
        "call f{}",
        "call:f{a:1,}",
        "call:f{a:1,a:2}",
        "call:f[1]",
        "call:{}",
        "call:f{a:<escape>x}",
        "call:f{a:1}}",
        "call:f{a:1} call:g{}",
    ],
)
def test_malformed_calls_are_errors_without_a_partial_call(body):
    parsed = FORMAT.parse_text(OPEN + body + CLOSE)
    assert parsed.error
    assert parsed.calls == ()


def test_invented_names_are_seen_in_malformed_output():
    assert FORMAT.parse_text("<start_function_call>call:get_sleep_metrics{a:").names == ("get_sleep_metrics",)
    assert FORMAT.parse_text("call:made_up{}<end_of_turn>").names == ("made_up",)
    assert FORMAT.parse_text("I call you later.<end_of_turn>").names == ()


def test_a_call_in_plain_text_is_not_a_call():
    parsed = FORMAT.parse_text("call:f{}<end_of_turn>")
    assert parsed.calls == ()
    assert parsed.text == "call:f{}"


def test_a_plain_answer_is_text():
    parsed = FORMAT.parse_text("Good morning.<end_of_turn>")
    assert (parsed.error, parsed.text, parsed.stopped) == (None, "Good morning.", True)
