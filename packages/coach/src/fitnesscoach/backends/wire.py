"""Chat completions on the wire (the OpenAI API as vLLM, llama.cpp and others serve it): messages out, deltas in."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from portlab_spec.conversation import Message, ToolCall
from portlab_spec.files import parse_json
from portlab_spec.formats import Parsed

SystemRole = Literal["developer", "system"]
MAX_OUTPUT = 200_000  # characters of text and arguments in one answer; a server that says more is not listened to
MAX_CALLS = 64
_LEAKED_CALL = re.compile(r"<start_function_call>|<\|tool_call>|<tool_call>|\bcall:[A-Za-z_][\w.-]*\{")


class WireError(Exception):
    """What the server sent is no chat completion; the message says what is wrong."""


def to_openai_messages(messages: Sequence[Message], system_role: SystemRole) -> list[dict[str, Any]]:
    """Messages as the API has them.

    Ids of calls are counted from the start of the conversation (nine letters and digits, which every server accepts):
    results stand in the order of their calls, so that what the server called them need not be kept.
    """
    out: list[dict[str, Any]] = []
    made = answered = 0
    for message in messages:
        if message.tool_calls:
            calls = [_openai_call(call, f"call{made + i:05d}") for i, call in enumerate(message.tool_calls)]
            made += len(calls)
            out.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif message.role == "tool":
            content = message.content if message.response is None else json.dumps(message.response, ensure_ascii=False)
            row = {"role": "tool", "tool_call_id": f"call{answered:05d}", "name": message.name, "content": content}
            out.append(row)
            answered += 1
        else:
            role = system_role if message.role == "developer" else message.role
            out.append({"role": role, "content": message.content})
    return out


def _openai_call(call: ToolCall, id: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


@dataclass
class _Fragments:
    name: str = ""
    arguments: str = ""


@dataclass
class Assembler:
    """Puts the deltas of a streamed answer together. `feed` one chunk at a time, then `parsed`."""

    text: str = ""
    finish_reason: str | None = None
    _calls: dict[int, _Fragments] = field(default_factory=dict)
    _size: int = 0

    def feed(self, chunk: Any) -> str:
        """Take one decoded chunk; the text that it adds.

        Raises:
            WireError: it is none, or there is too much of it.
        """
        if not isinstance(chunk, Mapping):
            raise WireError("a chunk is not an object")
        if error := chunk.get("error"):  # servers report faults in the stream, under status 200
            raise WireError(f"the server reports: {describe_error(error)}")
        choices = chunk.get("choices")
        if not choices:  # usage comes without a choice
            return ""
        if not isinstance(choices, list) or not isinstance(choices[0], Mapping):
            raise WireError("`choices` is not a list of objects")
        choice = choices[0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta")
        if delta is None:
            delta = choice.get("message") or {}
        if not isinstance(delta, Mapping):
            raise WireError("`delta` is not an object")
        for position, piece in enumerate(delta.get("tool_calls") or ()):
            self._feed_call(piece, position)
        text = delta.get("content") or ""
        if not isinstance(text, str):
            raise WireError("`content` is not text")
        self._count(len(text))
        self.text += text
        return text

    def _feed_call(self, piece: Any, position: int) -> None:
        function = piece.get("function") if isinstance(piece, Mapping) else None
        if not isinstance(function, Mapping):
            raise WireError("a tool call has no function")
        index = piece.get("index", position)
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if not (isinstance(index, int) and isinstance(name, str) and isinstance(arguments, str)):
            raise WireError("a tool call is not made of text")
        self._count(len(name) + len(arguments))
        call = self._calls.setdefault(index, _Fragments())
        if len(self._calls) > MAX_CALLS:
            raise WireError(f"more than {MAX_CALLS} tool calls in one answer")
        call.name, call.arguments = call.name + name, call.arguments + arguments

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > MAX_OUTPUT:
            raise WireError(f"the answer is longer than {MAX_OUTPUT:,} characters")

    def parsed(self) -> Parsed:
        """The whole answer. A call that cannot be read is an error of the model, not of the wire."""
        fragments = [self._calls[index] for index in sorted(self._calls)]
        names = tuple(call.name for call in fragments if call.name)
        stopped = self.finish_reason != "length"
        text = "" if self.text.isspace() else self.text

        def malformed(why: str) -> Parsed:
            return Parsed((), text, why, stopped, names)

        calls = []
        for call in fragments:
            try:
                arguments = parse_json((call.arguments or "{}").encode())
            except ValueError as error:
                return malformed(f"the arguments of {call.name or 'a call'} are not JSON ({error})")
            if not call.name or not isinstance(arguments, dict):
                return malformed("a call has no name" if not call.name else f"arguments of {call.name} are no object")
            calls.append(ToolCall(name=call.name, arguments=arguments))
        if not calls and _LEAKED_CALL.search(text):
            return malformed("the call came as text: the server needs a tool parser for this model")
        if not stopped:
            return malformed("cut off at the length limit")
        return Parsed(tuple(calls), text, None, stopped, names)


def describe_error(error: Any) -> str:
    """What a server's error object says, on one short line."""
    message = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(str(message).split())[:300]
