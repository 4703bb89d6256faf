"""A scripted chat through the OpenAI client: twenty held-out questions of a run's data, one conversation.

Each turn is a question, the model's calls (streamed in every other turn), a result for each call, and a sentence that
the script says in the model's place: these models are trained to call. Later turns see the last few before them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.data import load_dataset
from portlab_spec.tools import validate_arguments

TURNS, MEMORY = 20, 3
IDLE = "Thank you, that was kind of you."
Json = dict[str, Any]


@dataclass(frozen=True)
class TurnOutcome:
    """What a question got, beside what it should have."""

    question: str
    expected: list[tuple[str, Any]]
    calls: list[tuple[str, Any]]
    content: str
    streamed: bool

    @property
    def right(self) -> bool:
        """The right tools with the right arguments, types included, and nothing said beside them."""
        return json.dumps(self.calls, sort_keys=True) == json.dumps(self.expected, sort_keys=True) and not self.content


def script(dataset: str) -> list[Conversation]:
    """Held-out questions with one call each, under one developer message and one set of tools, all tools in turn."""
    rows = [row for row in load_dataset(dataset) if row.split == "test" and _is_single(row)]
    first = next(row for row in rows if row.meta.get("offer") in (None, "fixed"))
    rows = [row for row in rows if (row.messages[0], row.tools) == (first.messages[0], first.tools)]
    by_tool: dict[str, list[Conversation]] = {}
    for row in rows:
        by_tool.setdefault(row.target.tool_calls[0].name, []).append(row)
    return list(_in_turn(list(by_tool.values())))[:TURNS]


def _is_single(row: Conversation) -> bool:
    return [m.role for m in row.messages] == ["developer", "user", "assistant"] and len(row.target.tool_calls) == 1


def _in_turn(lists: list[list[Conversation]]) -> Iterator[Conversation]:
    for i in range(max(map(len, lists))):
        yield from (rows[i] for rows in lists if i < len(rows))


def hold(client: openai.OpenAI, rows: Sequence[Conversation], answer: Callable[[ToolCall], Any]) -> list[TurnOutcome]:
    """Hold the chat.

    Args:
        client: of the server, which serves the model as `base`.
        rows: from `script`.
        answer: the result of a call.
    """
    tools = [tool.to_openai() for tool in rows[0].tools]
    developer = {"role": "developer", "content": rows[0].messages[0].content}
    turns: list[list[Json]] = []
    outcomes = []
    for number, row in enumerate(rows):
        question: Json = {"role": "user", "content": row.messages[1].content}
        earlier = [message for turn in turns[-MEMORY:] for message in turn]
        body: Json = {
            "model": "base",
            "messages": [developer, *earlier, question],
            "tools": tools,
            "temperature": 0,
            "max_tokens": 128,
        }
        streamed = number % 2 == 1
        said = (stream if streamed else whole)(client, body)
        calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in said.get("tool_calls", [])]
        expected = [(call.name, call.arguments) for call in row.target.tool_calls]
        outcomes.append(TurnOutcome(str(question["content"]), expected, calls, said.get("content") or "", streamed))
        turns.append([question, said, *results(said, answer), {"role": "assistant", "content": "There you are."}])
    return outcomes


def whole(client: openai.OpenAI, body: Json) -> Json:
    """The assistant's message, asked for at once."""
    message = client.chat.completions.create(**body).choices[0].message
    calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls or []]
    return _message(message.content, calls)


def stream(client: openai.OpenAI, body: Json) -> Json:
    """The assistant's message, put together from pieces."""
    content, calls = "", dict[int, Json]()
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                call = calls.setdefault(
                    piece.index, {"id": piece.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["function"]["name"] += (piece.function and piece.function.name) or ""
                call["function"]["arguments"] += (piece.function and piece.function.arguments) or ""
    return _message(content, [calls[i] for i in sorted(calls)])


def _message(content: str | None, calls: list[Json]) -> Json:
    return {"role": "assistant", "content": content or None, **({"tool_calls": calls} if calls else {})}


def results(said: Json, answer: Callable[[ToolCall], Any]) -> list[Json]:
    """A tool message for each call of an assistant's message."""
    found = []
    for call in said.get("tool_calls", []):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        content = json.dumps(answer(ToolCall(name=name, arguments=arguments)))
        found.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return found


def choices(client: openai.OpenAI, row: Conversation) -> dict[str, list[list[Any]]]:
    """The calls, each a name and arguments, under each `tool_choice`, of a question that needs none of the tools."""
    tools = [tool.to_openai() for tool in row.tools]
    other = next(tool.name for tool in row.tools if tool.name != row.target.tool_calls[0].name)
    asked: dict[str, Any] = {
        "auto": "auto",
        "none": "none",
        "required": "required",
        f"named {other}": {"type": "function", "function": {"name": other}},
    }
    messages = messages_of(row.prompt.messages)
    idle = [*messages[:-1], {"role": "user", "content": IDLE}]
    body = {"model": "base", "temperature": 0, "max_tokens": 128, "tools": tools}

    def calls(messages: list[Json], choice: Any) -> list[list[Any]]:
        said = whole(client, body | {"messages": messages, "tool_choice": choice})
        return [[c["function"]["name"], json.loads(c["function"]["arguments"])] for c in said.get("tool_calls", [])]

    return {
        **{name: calls(messages, choice) for name, choice in asked.items()},
        **{f"{name}, asked idly": calls(idle, choice) for name, choice in asked.items()},
    }


def choice_faults(found: dict[str, list[list[Any]]], tools: Sequence[Tool]) -> list[str]:
    """What `choices` found against the meaning of `tool_choice`; what is called under `auto` is the model's to say."""
    by_name = {tool.name: tool for tool in tools}
    faults = []
    for choice, calls in found.items():
        kind = choice.partition(",")[0]
        if kind == "none" and calls:
            faults.append(f"tool_choice {choice} calls {calls}")
        if (kind == "required" and not calls) or (kind.startswith("named ") and [c[0] for c in calls] != [kind[6:]]):
            faults.append(f"tool_choice {choice} calls {calls}")
        if kind in ("auto", "none"):
            continue
        for name, arguments in calls:
            if problems := validate_arguments(by_name[name], arguments):
                faults.append(f"tool_choice {choice}: {name}: {problems}")
    return faults


def messages_of(messages: Sequence[Message]) -> list[Json]:
    """A prompt of developer and user as the API takes it."""
    return [{"role": message.role, "content": message.content} for message in messages]
