"""Chat templates: those that ship here, and whether a model's own asks in the words that it was trained with.

A prompt that differs from training's by a newline costs accuracy, and nobody sees it. So a model's own template is
rendered on a probe beside `portlab_spec.formats`, and is used only if the two agree.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.formats import Format, find_format
from portlab_spec.formats.gemma4 import REVISIONS, Gemma4

SHIPPED = ("functiongemma", "gemma3-json", "gemma3-python", "gemma4", "gemma4-31b")

_CALL = ToolCall(name="get_weather", arguments={"city": "Oslo", "days": 2})
_TOOL = Tool(
    name="get_weather",
    description="Forecast for a city.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "days": {"type": "integer", "description": "How many days."},
        },
        "required": ["city"],
    },
)
_ASKED = (Message(role="developer", content="Be brief."), Message(role="user", content="Weather in Oslo?"))
_ANSWERED = (
    *_ASKED,
    Message(role="assistant", tool_calls=(_CALL,)),
    Message(role="tool", name="get_weather", content="Rain."),
)
PROBES = tuple(Conversation(id="probe", tools=(_TOOL,), messages=messages) for messages in (_ASKED, _ANSWERED))


@dataclass(frozen=True)
class Choice:
    """Which template a server is to use.

    Attributes:
        path: of a shipped one, for --chat-template; None for the model's own.
        reason: why, in a sentence.
    """

    path: Path | None
    reason: str


def shipped(name: str) -> Path | None:
    """The file of a format's template; None where the model's own is the only one."""
    return Path(str(resources.files("portlab_serve.templates") / f"{name}.jinja")) if name in SHIPPED else None


def choose(name: str, own: str | None) -> Choice:
    """The template for a format: the model's own if it renders the probe as the format does, or else the shipped one.

    Args:
        name: of the format.
        own: text of the model's template, None if it has none.
    """
    path = shipped(name)
    if own is None:
        return Choice(path, "the model has none" if path else "neither the model nor this program has one")
    fault = difference(own, name)
    if fault is None:
        return Choice(None, "the model's own renders the probe as training did")
    return Choice(path, f"the model's own {fault}")


def difference(template: str, name: str) -> str | None:
    """How a template departs from a format on the probe, None if it does not.

    Of Gemma 4's template every published revision will do.
    """
    fmt = find_format(name)
    candidates = [fmt]
    if isinstance(fmt, Gemma4):
        candidates = [replace(fmt, revision=commit) for commit in reversed(REVISIONS)]
    faults = [_difference(template, candidate) for candidate in candidates]
    return None if None in faults else faults[0]


def _difference(template: str, fmt: Format) -> str | None:
    for probe in PROBES:
        wanted = "".join(s.text for s in fmt.render(probe, generation_prompt=True))
        try:
            made = render(template, chat_messages(probe), [tool.to_openai() for tool in probe.tools])
        except jinja2.TemplateError as raised:
            return f"fails on a conversation with tools ({' '.join(str(raised).split())[:80]})"
        if made != wanted:
            at = next((i for i, (a, b) in enumerate(zip(made, wanted, strict=False)) if a != b), len(made))
            return f"departs from {fmt.name} behind {made[max(0, at - 24) : at]!r}"
    return None


def chat_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Messages as a chat completion's request holds them, after vLLM has parsed the arguments."""
    out: list[dict[str, Any]] = []
    pending: list[str] = []
    for message in conversation.messages:
        item: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            item["reasoning"] = message.reasoning
        if message.tool_calls:
            pending = [f"call_{len(out)}_{i}" for i in range(len(message.tool_calls))]
            item["tool_calls"] = [
                {"id": key, "type": "function", "function": call.model_dump()}
                for key, call in zip(pending, message.tool_calls, strict=True)
            ]
        elif message.role == "tool":
            item["tool_call_id"] = pending.pop(0) if pending else ""
            item["name"] = message.name
            if message.response is not None:
                item["content"] = message.response
        out.append(item)
    return out


def render(
    template: str,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Render as transformers does, whose environment vLLM uses (`transformers/utils/chat_template_utils.py`).

    Raises:
        jinja2.TemplateError: the template is broken, or refuses the messages.
    """
    return _compiled(template).render(
        messages=messages,
        tools=list(tools) if tools else None,
        add_generation_prompt=add_generation_prompt,
        bos_token="<bos>",
        eos_token="<eos>",
        **variables,
    )


@cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
