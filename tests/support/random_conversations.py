"""Random conversations that a format can render, hard ones first: every construct, hostile text.

Driven by a `random.Random` with a seed that can be printed, so that a failure of a long run can be looked at alone.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.formats import Format, Parsed
from portlab_spec.formats.gemma3 import Gemma3
from portlab_spec.formats.gemma4 import REVISIONS, Gemma4
from portlab_spec.formats.markers import FUNCTIONGEMMA, GEMMA4
from portlab_spec.formats.qwen3 import REFUSED_TOKENS, Qwen3

FRAGMENTS = (
    "x", "y} {z:1", '"', "'", '\\"', "{", "}", "[", "]", ",", ":", "call:f{a:1}", "\n", "\r\n", "\t", "\\", "\\n",
    " ", "  ", "null", "None", "true", "555", "02134", "-1", "1e5", "NaN", "é", "ß", "ﬁ", "日本語", "🦙",
    "👩\u200d💻", "\u200b", "\u00a0", "\u2028", "\ufeff", "\U0010ffff", "e\u0301", "\x00", "\x7f", "İ",
    "<", "<|", "|>", "<escape", "end_of_turn>", "}<", "<br>", "```", "```json\n", "response:f{value:1}", "…",
    "a=1", "f(a=1)", "[f()]", "thought\n", "model\n",
)  # fmt: skip
WORDS = ("get", "set", "weather", "steps", "of", "day", "Zone", "A", "b", "_x", "HTTP", "list", "json")
STANDARD_NAMES = ("description", "type", "properties", "required", "nullable")


class Seeded(random.Random):
    """A source of chance that shows its seed; hypothesis draws the seed and not every number."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._seed = seed

    def __repr__(self) -> str:
        return f"Seeded({self._seed})"


@dataclass
class Taste:
    """What a format's conversations may hold."""

    refused: tuple[str, ...] = ()
    reasoning: str = ""  # "calls": beside calls only; "all": beside texts too
    null: bool = True
    standard_names: bool = True
    free_keys: bool = False  # keys of arguments need not be identifiers
    nullable: bool = True
    object_descriptions: bool = False  # objects and lists need a description
    name_characters: str = "._-"
    key_characters: str = "._-"
    is_answer: Callable[[str], bool] = bool  # may the model say this?


def taste_of(fmt: Format) -> Taste:
    """What a format can render."""
    if isinstance(fmt, Gemma4):
        revision = REVISIONS[fmt.revision]
        return Taste(
            refused=GEMMA4.refused,
            reasoning="" if revision.thinks == "none" else revision.thinks,
            null=bool(revision.null),
            standard_names=not revision.drops_standard_names,
            free_keys=True,
            object_descriptions=revision.early,
        )
    if isinstance(fmt, Gemma3):
        # Python writes names of functions and arguments as identifiers; text must not look like a call.
        return Taste(
            refused=FUNCTIONGEMMA.refused,
            name_characters="." if fmt.style == "python" else "._-",
            key_characters="" if fmt.style == "python" else "._-",
            free_keys=fmt.style == "json",
            is_answer=lambda text: fmt.parse_text(text + "<end_of_turn>") == Parsed(text=text, stopped=True),
        )
    if isinstance(fmt, Qwen3):
        return Taste(refused=REFUSED_TOKENS, free_keys=True)
    return Taste(refused=FUNCTIONGEMMA.refused, standard_names=fmt.name != "functiongemma")


def conversation(rng: random.Random, taste: Taste, *, id: str = "c") -> Conversation:
    """One conversation that ends with an assistant message."""
    tools = tuple({t.name: t for t in (_tool(rng, taste) for _ in range(rng.randint(0, 3)))}.values())
    messages: list[Message] = []
    if rng.random() < 0.6:
        messages.append(Message(role="developer", content=_text(rng, taste, empty=0.1)))
    for _ in range(rng.randint(1, 3)):
        messages.append(Message(role="user", content=_text(rng, taste, empty=0.02)))
        while tools and rng.random() < 0.3:
            calls = _calls(rng, taste, tools)
            messages.append(_assistant(rng, taste, tool_calls=calls))
            messages += [_result(rng, taste, call.name) for call in calls]
        messages.append(_assistant(rng, taste, content=_answer(rng, taste)))
    if tools and rng.random() < 0.6:
        messages[-1] = _assistant(rng, taste, tool_calls=_calls(rng, taste, tools))
    return Conversation(id=id, tools=tools, messages=tuple(messages))


def argument_value(rng: random.Random, taste: Taste, depth: int = 0) -> Any:
    """Any JSON value that the format can write."""
    makers: list[Callable[[], Any]] = [
        lambda: _text(rng, taste, empty=0.1),
        lambda: rng.choice((0, 1, -1, 7, 1000, 2**53 + 1, -(10**30), rng.randint(-(10**6), 10**6))),
        lambda: rng.choice((True, False)),
    ]
    makers.append(lambda: rng.choice((0.0, -0.0, 1.5, 1e-5, 1e21, 1.7976931348623157e308, 5e-324, rng.gauss(0, 1e3))))
    if taste.null:
        makers.append(lambda: None)
    if depth < 3:
        makers.append(lambda: [argument_value(rng, taste, depth + 1) for _ in range(rng.randint(0, 3))])
        makers.append(lambda: _arguments(rng, taste, depth + 1))
    return rng.choice(makers)()


def _arguments(rng: random.Random, taste: Taste, depth: int = 0) -> dict[str, Any]:
    return {_key(rng, taste): argument_value(rng, taste, depth) for _ in range(rng.choice((0, 1, 1, 2, 3)))}


def _calls(rng: random.Random, taste: Taste, tools: tuple[Tool, ...]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(name=rng.choice(tools).name, arguments=_arguments(rng, taste)) for _ in range(rng.choice((1, 1, 2, 3)))
    )


def _assistant(rng: random.Random, taste: Taste, **what: Any) -> Message:
    thinks = taste.reasoning == "all" or (taste.reasoning == "calls" and "tool_calls" in what)
    reasoning = _text(rng, taste) if thinks and rng.random() < 0.4 else None
    return Message(role="assistant", reasoning=reasoning, supervised=rng.random() < 0.9, **what)


def _result(rng: random.Random, taste: Taste, name: str) -> Message:
    if rng.random() < 0.5:
        return Message(role="tool", name=name, content=_text(rng, taste, empty=0.1))
    return Message(role="tool", name=name, response=_arguments(rng, taste))


def _tool(rng: random.Random, taste: Taste) -> Tool:
    return Tool(
        name=_name(rng, taste.name_characters),
        description=_text(rng, taste),
        parameters={"type": "object", **_object(rng, taste, depth=0)},
    )


def _object(rng: random.Random, taste: Taste, depth: int) -> dict[str, Any]:
    properties = {
        _name(rng, taste.key_characters): _property(rng, taste, depth) for _ in range(rng.choice((0, 1, 2, 3)))
    }
    if taste.standard_names and rng.random() < 0.1:
        properties[rng.choice(STANDARD_NAMES)] = _property(rng, taste, depth)
    required = rng.sample(sorted(properties), rng.randint(0, len(properties)))
    return {"properties": properties, **({"required": required} if required else {})}


def _property(rng: random.Random, taste: Taste, depth: int) -> dict[str, Any]:
    kind = rng.choice(("string", "integer", "number", "boolean", *(("array", "object") if depth < 2 else ())))
    out: dict[str, Any] = {"type": kind}
    if rng.random() < 0.8 or (taste.object_descriptions and kind in ("array", "object")):
        out["description"] = _text(rng, taste)
    if kind == "string" and rng.random() < 0.3:
        out["enum"] = [_text(rng, taste) for _ in range(rng.randint(1, 3))]
    if kind == "object":
        out |= _object(rng, taste, depth + 1)
    if kind == "array":
        item: dict[str, Any] = {"type": rng.choice(("string", "integer", "object"))}
        if item["type"] == "object":
            item |= _object(rng, taste, depth + 1)
        elif rng.random() < 0.5:
            item["description"] = _text(rng, taste)
        out["items"] = item
    if taste.nullable and rng.random() < 0.1:
        out["nullable"] = True
    return out


def _name(rng: random.Random, characters: str) -> str:
    while True:
        words = rng.sample(WORDS, rng.randint(1, 3))
        name = words[0] + "".join(rng.choice(characters + "_") + word for word in words[1:])
        name += rng.choice(("", "", "1", "2"))
        if name not in STANDARD_NAMES:
            return name


def _key(rng: random.Random, taste: Taste) -> str:
    if taste.free_keys and rng.random() < 0.2:
        return rng.choice(("key with space", "Ärger", "日本", "1st", "a-b", "a.b", "a/b", "x&y", "true", "7"))
    return _name(rng, taste.key_characters)


def _text(rng: random.Random, taste: Taste, *, empty: float = 0.0) -> str:
    """Text without surrounding whitespace at turn level (formats trim it), hostile inside."""
    if rng.random() < empty:
        return ""
    while True:
        parts = [
            rng.choice(FRAGMENTS) if rng.random() < 0.5 else "".join(rng.choices(string.ascii_letters + " ", k=5))
            for _ in range(rng.randint(1, 6))
        ]
        text = "".join(parts).strip()
        if text and not any(token in text for token in taste.refused):
            return text


def _answer(rng: random.Random, taste: Taste) -> str:
    while not taste.is_answer(text := _text(rng, taste)):
        pass
    return text
