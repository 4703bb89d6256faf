"""Gemma 4: our text is the published templates', revision by revision, and parses back."""

import importlib.util
from functools import cache
from pathlib import Path
from random import Random

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from random_conversations import Seeded, conversation, taste_of

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats.gemma4 import LATEST, REVISIONS, Gemma4

# Files of the TRL distribution, by the commit of google/gemma-4-E2B-it that they were copied from.
TEMPLATE_FILES = {
    "4742fe8": "gemma4_v2.jinja",
    "b446025": "gemma4_v3.jinja",
    "6b7e72c": "gemma4.jinja",
    "905e84b": "gemma4_v4.jinja",
    "8995379": "gemma4_v5.jinja",
}


@cache
def template(revision: str, large: bool) -> jinja2.Template:
    """The real template, compiled as transformers does; found without importing TRL, which would import torch."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, which ships the templates, is not installed")
    text = (Path(spec.origin).parent / "chat_templates" / TEMPLATE_FILES[revision]).read_text(encoding="utf-8")
    if large:
        # The one difference of the larger models: the plain generation prompt ends with an empty thought.
        plain_prompt = "{{- '<|turn>model\\n' -}}\n"
        assert text.count(plain_prompt) == 1
        empty = "{%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}\n"
        text = text.replace(plain_prompt, plain_prompt + empty)
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.globals["raise_exception"] = _raise
    return env.from_string(text)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def hf_messages(conv: Conversation, revision: str) -> list[dict[str, object]]:
    """Messages as the template wants them: results in `tool_responses` of the message with the calls."""
    out: list[dict[str, object]] = []
    for message in conv.messages:
        item: dict[str, object] = {"role": message.role, "content": message.content}
        if message.reasoning:
            item["reasoning"] = message.reasoning
        if message.tool_calls:
            item["tool_calls"] = [{"function": call.model_dump()} for call in message.tool_calls]
        if message.role == "tool":
            response = message.content if message.response is None else message.response
            out[-1].setdefault("tool_responses", []).append({"name": message.name, "response": response})  # type: ignore[attr-defined]
        elif revision == "4742fe8" and message.role == "assistant" and message.content and "tool_responses" in out[-1]:
            out[-1]["content"] = message.content  # the first revision has the answer on the same message
        else:
            out.append(item)
    return out


def official(conv: Conversation, fmt: Gemma4, *, generation_prompt: bool = False) -> str:
    return template(fmt.revision, fmt.large).render(
        messages=hf_messages(conv, fmt.revision),
        tools=[tool.to_openai() for tool in conv.tools] or None,
        bos_token="<bos>",
        add_generation_prompt=generation_prompt,
        enable_thinking=fmt.thinking,
        preserve_thinking=fmt.keep_thinking,
    )


def text_of(fmt: Gemma4, conv: Conversation, *, generation_prompt: bool = False) -> str:
    return "".join(s.text for s in fmt.render(conv, generation_prompt=generation_prompt))


variants = st.builds(
    Gemma4, st.sampled_from(sorted(REVISIONS)), large=st.booleans(), thinking=st.booleans(), keep_thinking=st.booleans()
)


@settings(max_examples=2000, deadline=None)
@given(variants, st.integers(0, 2**40).map(Seeded))
def test_the_text_is_that_of_the_official_template(fmt: Gemma4, rng: Random):
    conv = conversation(rng, taste_of(fmt))
    assert text_of(fmt, conv) == official(conv, fmt)


@settings(max_examples=2000, deadline=None)
@given(variants, st.integers(0, 2**40).map(Seeded))
def test_the_prompt_is_that_of_the_official_template(fmt: Gemma4, rng: Random):
    conv = conversation(rng, taste_of(fmt))
    cut = [i for i, m in enumerate(conv.messages) if m.role == "assistant"]
    prompt = conv.model_copy(update={"messages": conv.messages[: rng.choice(cut)]})
    assert text_of(fmt, prompt, generation_prompt=True) == official(prompt, fmt, generation_prompt=True)


QUESTION = Message(role="user", content="Steps?")
CALL = Message(role="assistant", tool_calls=(ToolCall(name="get_steps"),))
RESULT = Message(role="tool", name="get_steps", content="2400")
ANSWER = Message(role="assistant", content="2,400.")
TOOL = Tool(name="get_steps", description="Steps.")


def conv_of(*messages: Message) -> Conversation:
    return Conversation(id="c", tools=(TOOL,), messages=messages)


def learnt(fmt: Gemma4, conv: Conversation) -> list[str]:
    """Runs of text that carry loss."""
    out, before = [""], False
    for segment in fmt.render(conv):
        if segment.loss and not before:
            out.append("")
        if segment.loss:
            out[-1] += segment.text
        before = segment.loss
    return out[1:]


def test_calls_learn_their_stop_token_and_the_answer_learns_its_own():
    assert learnt(Gemma4(), conv_of(QUESTION, CALL, RESULT, ANSWER)) == [
        "<|tool_call>call:get_steps{}<tool_call|><|tool_response>",
        "2,400.<turn|>",
    ]


def test_reasoning_is_learnt_or_not_by_choice():
    thinking = Message(role="assistant", content="2,400.", reasoning="Look it up.")
    thought = "<|channel>thought\nLook it up.\n<channel|>"
    assert learnt(Gemma4(), conv_of(QUESTION, thinking)) == [f"{thought}2,400.<turn|>"]
    assert learnt(Gemma4(learn_thinking=False), conv_of(QUESTION, thinking)) == ["2,400.<turn|>"]


def test_a_message_that_is_context_only_is_not_learnt():
    context = CALL.model_copy(update={"supervised": False})
    assert learnt(Gemma4(), conv_of(QUESTION, context, RESULT, ANSWER)) == ["2,400.<turn|>"]


def test_the_prompt_of_the_larger_models_ends_with_an_empty_thought_that_the_history_does_not_hold():
    large, prompt = Gemma4(large=True), conv_of(QUESTION)
    assert text_of(large, prompt, generation_prompt=True).endswith("<|turn>model\n<|channel>thought\n<channel|>")
    assert "thought" not in text_of(large, conv_of(QUESTION, ANSWER))


def test_after_a_result_a_thinking_model_goes_on_inside_its_thought():
    fmt, prompt = Gemma4(thinking=True), conv_of(QUESTION, CALL, RESULT)
    segments = fmt.render(prompt, generation_prompt=True)
    assert "".join(s.text for s in segments).endswith("<tool_response|><|channel>thought\n")
    parsed = fmt.after(segments).parse_text("So 2400.\n<channel|>2,400.<turn|>")
    assert (parsed.reasoning, parsed.text, parsed.error) == ("So 2400.", "2,400.", None)


def test_text_before_calls_is_one_turn_in_the_latest_revision_only():
    said = Message(role="assistant", content="Let me look.")
    text = text_of(Gemma4(), conv_of(QUESTION, said, CALL))
    assert text.endswith("<|turn>model\nLet me look.<|tool_call>call:get_steps{}<tool_call|><|tool_response>")
    with pytest.raises(UserError, match="two assistant messages in a row"):
        Gemma4("905e84b").render(conv_of(QUESTION, said, CALL))


@pytest.mark.parametrize("revision", sorted(set(REVISIONS) - {LATEST}))
def test_a_null_is_refused_where_the_template_would_write_none(revision: str):
    call = Message(role="assistant", tool_calls=(ToolCall(name="get_steps", arguments={"day": None}),))
    with pytest.raises(UserError, match=r"arguments\.day: this revision of the format has no null"):
        Gemma4(revision).render(conv_of(QUESTION, call))


@pytest.mark.parametrize(
    ("revision", "message"),
    [("4742fe8", ANSWER), ("b446025", ANSWER), ("4742fe8", CALL)],
)
def test_reasoning_that_the_template_would_drop_is_refused(revision: str, message: Message):
    with pytest.raises(UserError, match="drops this message's reasoning"):
        Gemma4(revision).render(conv_of(QUESTION, message.model_copy(update={"reasoning": "Hm."})))


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ((QUESTION, CALL, QUESTION), "a message of role user follows tool calls"),
        ((QUESTION, CALL, ANSWER), "a message of role assistant follows tool calls"),
        ((QUESTION, RESULT), "a tool result without a call"),
        ((QUESTION, ANSWER, ANSWER), "two assistant messages in a row"),
        ((QUESTION, Message(role="developer", content="Be brief.")), "a developer message is not the first"),
        ((QUESTION, Message(role="assistant", content="  ")), "an assistant message is empty"),
    ],
)
def test_turns_that_the_template_renders_broken_are_refused(messages: tuple[Message, ...], complaint: str):
    with pytest.raises(UserError, match=complaint):
        Gemma4().render(conv_of(*messages))
