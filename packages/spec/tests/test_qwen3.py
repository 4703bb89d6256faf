"""Qwen3 rendering: our text is the published template's with thinking off, and only what the model writes is learnt."""

import importlib.util
import json
from functools import cache
from pathlib import Path
from random import Random

import jinja2
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from random_conversations import Seeded, conversation, taste_of

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.data import load_dataset
from portlab_spec.errors import UserError
from portlab_spec.formats import encode, find_format
from portlab_spec.formats.grammar import lark_grammar
from portlab_spec.formats.qwen3 import FORMAT, REFUSED_TOKENS
from portlab_spec.tokenizer import Tokenizer
from portlab_spec.tools import same_json

WEATHER = Tool(
    name="get_weather",
    description="Weather of a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
ASK = Message(role="user", content="Oslo and Rome?")
OSLO = ToolCall(name="get_weather", arguments={"city": "Oslo", "days": 2, "hourly": False, "unit": None})
ROME = ToolCall(name="get_weather", arguments={"city": 'Zürich "HB"\n'})
CALLS = Message(role="assistant", tool_calls=(OSLO, ROME))
RESULTS = (
    Message(role="tool", name="get_weather", content='15 "C"'),
    Message(role="tool", name="get_weather", response={"t": 20.5}),
)
ANSWER = Message(role="assistant", content="15 and 20.5.")
WRITTEN = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2, "hourly": false, "unit": null}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich \\"HB\\"\\n"}}\n</tool_call>'
)

randoms = st.integers(0, 2**40).map(Seeded)


def conv_of(*messages: Message, tools=(WEATHER,)) -> Conversation:
    return Conversation(id="c", tools=tools, messages=messages)


def text_of(conv: Conversation, *, generation_prompt: bool = False) -> str:
    return "".join(s.text for s in FORMAT.render(conv, generation_prompt=generation_prompt))


def learnt(conv: Conversation) -> list[str]:
    """Runs of text that carry loss."""
    out, before = [], False
    for segment in FORMAT.render(conv):
        if segment.loss:
            out = [*out[:-1], out[-1] + segment.text] if before else [*out, segment.text]
        before = segment.loss
    return out


# ----------------------------------------------------------------------------------- the published template


@cache
def template() -> jinja2.Template:
    """The chat template of Qwen/Qwen3-* as TRL ships it, compiled as transformers does; TRL is not imported."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, which ships the template, is not installed")
    text = (Path(spec.origin).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return env.from_string(text)


def official(conv: Conversation, *, generation_prompt: bool = False) -> str:
    messages = []
    for message in conv.messages:
        item: dict[str, object] = {"role": {"developer": "system"}.get(message.role, message.role)}
        item["content"] = message.content
        if message.response is not None:
            item["content"] = json.dumps(message.response, ensure_ascii=False)
        if message.tool_calls:
            item["tool_calls"] = [{"type": "function", "function": call.model_dump()} for call in message.tool_calls]
        messages.append(item)
    return template().render(
        messages=messages,
        tools=[tool.to_openai() for tool in conv.tools] or None,
        add_generation_prompt=generation_prompt,
        enable_thinking=False,
    )


@pytest.mark.parametrize("tools", [(), (WEATHER,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("developer", [(), ("Be brief.",), ("",)], ids=["no system", "system", "empty system"])
@pytest.mark.parametrize(
    "messages",
    [
        (ASK,),
        (ASK, ANSWER),
        (ASK, Message(role="assistant", tool_calls=(OSLO,))),
        (ASK, CALLS),
        (ASK, CALLS, *RESULTS),
        (ASK, CALLS, *RESULTS, ANSWER),
        (ASK, CALLS, *RESULTS, ANSWER, ASK),
        (ASK, CALLS, *RESULTS, ANSWER, ASK, CALLS),
        (ASK, CALLS, *RESULTS, CALLS, *RESULTS, ANSWER),
        (ASK, CALLS, *RESULTS, ASK, ANSWER),
        (ASK, ASK, Message(role="developer", content="Now in French."), ANSWER),
        (ASK, Message(role="assistant", content="\n\n spaced \n"), ASK, Message(role="assistant", content="\n\n x \n")),
    ],
    ids=lambda messages: " ".join(m.role for m in messages),
)
def test_the_text_is_that_of_the_published_template(messages, developer, tools):
    first = tuple(Message(role="developer", content=text) for text in developer)
    conv = conv_of(*first, *messages, tools=tools)
    for prompt in (False, True):
        assert text_of(conv, generation_prompt=prompt) == official(conv, generation_prompt=prompt)


@settings(max_examples=1000, deadline=None)
@given(randoms, st.booleans())
def test_random_conversations_are_those_of_the_published_template(rng: Random, prompt: bool):
    conv = conversation(rng, taste_of(FORMAT))
    if prompt:
        cut = [i for i, m in enumerate(conv.messages) if m.role == "assistant"]
        conv = conv.model_copy(update={"messages": conv.messages[: rng.choice(cut)]})
    assert text_of(conv, generation_prompt=prompt) == official(conv, generation_prompt=prompt)


# --------------------------------------------------------------------------------------------- layout and mask


def test_calls_and_results_as_they_are_written():
    assert text_of(conv_of(ASK, CALLS, *RESULTS, ANSWER)).endswith(
        f"<|im_start|>user\nOslo and Rome?<|im_end|>\n<|im_start|>assistant\n{WRITTEN}<|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n15 "C"\n</tool_response>\n'
        '<tool_response>\n{"t": 20.5}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n<think>\n\n</think>\n\n15 and 20.5.<|im_end|>\n"
    )


def test_the_model_learns_what_it_writes_and_its_stop_token():
    assert learnt(conv_of(ASK, CALLS, *RESULTS, ANSWER)) == [f"{WRITTEN}<|im_end|>", "15 and 20.5.<|im_end|>"]


def test_a_message_that_is_context_only_is_not_learnt():
    context = CALLS.model_copy(update={"supervised": False})
    assert learnt(conv_of(ASK, context, *RESULTS, ANSWER)) == ["15 and 20.5.<|im_end|>"]


@settings(max_examples=500, deadline=None)
@given(randoms)
def test_the_last_answer_is_learnt_under_exactly_its_own_prompt(rng: Random):
    conv = conversation(rng, taste_of(FORMAT))
    prompt = text_of(conv.prompt, generation_prompt=True)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert text_of(conv).startswith(prompt)
    if conv.target.supervised:
        assert text_of(conv) == f"{prompt}{learnt(conv)[-1]}\n"


def test_an_earlier_answer_stands_without_the_thought_of_its_prompt():
    assert text_of(conv_of(ASK, ANSWER, ASK)).count("<think>") == 0
    assert text_of(conv_of(ASK, ANSWER, ASK, ANSWER)).count("<think>") == 1


# --------------------------------------------------------------------------------------------- ids


@cache
def tokenizer() -> Tokenizer:
    """As Qwen's: bytes, and control tokens that are single ids wherever their text stands."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in REFUSED_TOKENS])
    return Tokenizer(backend)


@settings(max_examples=300, deadline=None)
@given(randoms, st.booleans())
def test_ids_are_those_of_the_whole_text_in_one_piece(rng: Random, prompt: bool):
    segments = FORMAT.render(conversation(rng, taste_of(FORMAT)), generation_prompt=prompt)
    assert encode(segments, tokenizer()).ids == tokenizer().encode("".join(s.text for s in segments))


@settings(max_examples=300, deadline=None)
@given(randoms)
def test_the_learnt_ids_of_the_last_answer_parse_back(rng: Random):
    conv = conversation(rng, taste_of(FORMAT))
    conv = conv.model_copy(
        update={"messages": (*conv.messages[:-1], conv.target.model_copy(update={"supervised": True}))}
    )
    encoded = encode(FORMAT.render(conv), tokenizer())
    prompt = encode(FORMAT.render(conv.prompt, generation_prompt=True), tokenizer()).ids
    assert encoded.ids[: len(prompt)] == prompt
    answer = [i for i, loss in list(zip(encoded.ids, encoded.loss, strict=True))[len(prompt) :] if loss]
    assert answer == encoded.ids[len(prompt) : -1]
    parsed = FORMAT.parse(answer, tokenizer())
    assert (parsed.error, parsed.stopped, parsed.text) == (None, True, conv.target.content or "")
    calls = conv.target.tool_calls
    assert [call.name for call in parsed.calls] == [call.name for call in calls]
    assert all(same_json(a.arguments, b.arguments) for a, b in zip(parsed.calls, calls, strict=True))


# --------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ((ANSWER,), "messages[0]: an assistant message before any of the user"),
        ((Message(role="developer", content="x"), ANSWER), "messages[1]: an assistant message before any of the user"),
        ((ASK, ANSWER, ANSWER), "messages[2]: two assistant messages in a row"),
        ((ASK, RESULTS[0]), "messages[1]: a tool result without a call"),
        ((ASK, ANSWER, RESULTS[0]), "messages[2]: a tool result without a call"),
        ((ASK, CALLS, ASK), "messages[2]: a message of role user follows tool calls"),
        ((ASK, CALLS, ANSWER), "messages[2]: a message of role assistant follows tool calls"),
        ((ASK, Message(role="assistant", content=" \n")), "messages[1]: an assistant message is empty"),
        ((ASK, Message(role="assistant", content="x", reasoning="y")), "messages[1]: qwen3 is trained with"),
        ((Message(role="user", content="\ud800"),), "messages[0].content: the text holds half a surrogate pair"),
        (
            (ASK, Message(role="assistant", tool_calls=(ToolCall(name='f"'),))),
            "messages[1].tool_calls[0]: 'f\"' is not a tool name",
        ),
    ],
)  # fmt: skip
def test_what_no_prompt_leads_to_is_refused_by_message(messages, said):
    with pytest.raises(UserError) as refusal:
        FORMAT.render(conv_of(*messages))
    assert said in str(refusal.value)


@pytest.mark.parametrize("token", REFUSED_TOKENS)
def test_a_token_of_the_vocabulary_in_an_argument_is_refused_by_its_path(token):
    call = ToolCall(name="f", arguments={"a": {"b": [f"x{token}"]}})
    with pytest.raises(UserError, match=r"c: messages\[1\].tool_calls\[0\].arguments.a.b\[0\]: .*control token"):
        FORMAT.render(conv_of(ASK, Message(role="assistant", tool_calls=(call,))))


@pytest.mark.parametrize("value", [float("nan"), "\udfff", 10**4300], ids=["nan", "half", "long"])
def test_a_value_that_does_not_come_back_is_refused_by_its_path(value):
    call = ToolCall.model_construct(name="f", arguments={"a": [value]})
    message = Message.model_construct(role="assistant", tool_calls=(call,), supervised=True, reasoning=None, content="")
    conv = Conversation.model_construct(id="c", tools=(), messages=(ASK, message))
    with pytest.raises(UserError, match=r"tool_calls\[0\].arguments.a\[0\]: "):
        FORMAT.render(conv)


def test_there_is_no_grammar_and_it_is_said():
    with pytest.raises(UserError, match="there is no grammar for qwen3"):
        lark_grammar([WEATHER], FORMAT)


def test_the_documented_example_is_what_is_rendered():
    page = (Path(__file__).parents[3] / "docs" / "formats.md").read_text(encoding="utf-8")
    shown = page.partition("--format qwen3 | tail -n 15\n")[2].partition("```")[0]
    row = next(row for row in load_dataset("fitness-213") if row.id == "steps-01")
    assert "\n".join((text_of(row) + "\n").split("\n")[-16:]) == shown


def test_the_format_is_found_by_its_name_and_adds_no_token():
    assert find_format("qwen3") is FORMAT
    assert FORMAT.stop_tokens[0] == "<|im_end|>"
    assert FORMAT.added_tokens == ()
