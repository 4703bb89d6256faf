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
from random_conversations import Taste, conversation

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats.gemma4 import LATEST, MARKERS, REVISIONS, Gemma4

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


def taste(revision: str) -> Taste:
    of = REVISIONS[revision]
    return Taste(
        refused=MARKERS.refused,
        reasoning=of.thinks == "all",
        null=bool(of.null),
        standard_names=not of.drops_standard_names,
        free_keys=True,
        object_descriptions=of.early,
    )


variants = st.builds(Gemma4, st.sampled_from(sorted(REVISIONS)), large=st.booleans(), thinking=st.booleans())


@settings(max_examples=600, deadline=None)
@given(variants, st.randoms(use_true_random=False))
def test_the_text_is_that_of_the_official_template(fmt: Gemma4, rng: Random):
    conv = conversation(rng, taste(fmt.revision))
    assert text_of(fmt, conv) == official(conv, fmt)


@settings(max_examples=600, deadline=None)
@given(variants, st.randoms(use_true_random=False))
def test_the_prompt_is_that_of_the_official_template(fmt: Gemma4, rng: Random):
    conv = conversation(rng, taste(fmt.revision))
    cut = [i for i, m in enumerate(conv.messages) if m.role == "assistant" and not m.reasoning]
    if not cut:
        return
    prompt = conv.model_copy(update={"messages": conv.messages[: rng.choice(cut)] or conv.messages[:1]})
    assert text_of(fmt, prompt, generation_prompt=True) == official(prompt, fmt, generation_prompt=True)
