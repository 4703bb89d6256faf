"""Model output as a chat completion's message: text, reasoning and calls, whole or as it arrives.

Nothing here knows vLLM; `vllm_plugin` wraps it. Parsing is `portlab_spec.formats`, leniently: vLLM leaves the stop
token out of the text, and a grammar that insists on it would refuse every call.

A call is passed on in one piece once it is complete: what is cut off in the middle never becomes half a call. Output
that looks like a call and is none is passed on as text, so that nothing the model said is lost without a trace.
"""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from portlab_spec.conversation import ToolCall
from portlab_spec.formats import Format
from portlab_spec.formats.gemma3 import END_TURN, Gemma3
from portlab_spec.formats.markers import GEMMA4
from portlab_spec.formats.segments import Delta, Event, Parsed


@dataclass(frozen=True)
class Call:
    """A call as the API names it: position in the message, id, and arguments as JSON text."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """What has become certain of a message.

    Attributes:
        content: text.
        reasoning: what the model thought.
        calls: complete calls.
        fault: why a part of the output was not read as a call, for the log.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    fault: str | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def new_call_id() -> str:
    """An id as OpenAI's API gives them."""
    return f"call_{uuid.uuid4().hex[:24]}"


def read_output(fmt: Format, text: str, call_id: Callable[[], str] = new_call_id) -> Piece:
    """The message that a whole output is."""
    parsed = fmt.parse_text(text + _end_of(fmt), lenient=True)
    calls = _numbered(parsed.calls, 0, call_id)
    return Piece(parsed.text or _unread(parsed, text), parsed.reasoning, calls, parsed.error)


def split_thought(text: str) -> tuple[str, str]:
    """A whole output of Gemma 4 as its thought, markers included, and the rest.

    A thought stands before everything else. Its opening marker is missing where the prompt has it; so the closing one
    counts too, unless it stands behind the start of a call, in whose arguments it may be quoted.
    """
    before_calls = text.partition(GEMMA4.call)[0]
    if not text.startswith(GEMMA4.channel) and GEMMA4.end_channel not in before_calls:
        return "", text
    thought, end, rest = text.partition(GEMMA4.end_channel)
    return thought + end, rest


class OutputStream:
    """A message as it arrives, in pieces of text cut anywhere."""

    def __init__(self, fmt: Format, call_id: Callable[[], str] = new_call_id) -> None:
        self._stream, self._end, self._call_id = fmt.stream(lenient=True), _end_of(fmt), call_id
        self._raw: list[str] = []
        self._content = self._reasoning = self._calls = 0  # passed on so far: characters, characters, calls

    def feed(self, text: str) -> Piece:
        """What this piece makes certain."""
        self._raw.append(text)
        return self._pass_on(self._stream.feed(text))

    def finish(self) -> Piece:
        """What only the end makes certain."""
        self._stream.feed(self._end)  # its events are part of what `close` returns
        parsed = self._stream.close()
        return Piece(
            parsed.text[self._content :] or _unread(parsed, "".join(self._raw)),
            parsed.reasoning[self._reasoning :],
            _numbered(parsed.calls[self._calls :], self._calls, self._call_id),
            parsed.error,
        )

    def _pass_on(self, events: list[Event]) -> Piece:
        texts = {"text": "", "reasoning": ""}
        calls: list[ToolCall] = []
        for event in events:
            if isinstance(event, Delta):
                texts[event.kind] += event.text
            else:
                calls.append(event)
        piece = Piece(texts["text"], texts["reasoning"], _numbered(tuple(calls), self._calls, self._call_id))
        self._content += len(piece.content)
        self._reasoning += len(piece.reasoning)
        self._calls += len(calls)
        return piece


def _end_of(fmt: Format) -> str:
    """What to put where vLLM took the stop token off: Gemma 3's `<` at the end is text only if a turn ends there.

    The native formats do without, and must: there a stop token would close a call that was cut off.
    """
    return END_TURN if isinstance(fmt, Gemma3) else ""


def _numbered(calls: tuple[ToolCall, ...], first: int, call_id: Callable[[], str]) -> tuple[Call, ...]:
    return tuple(
        Call(first + i, call_id(), call.name, json.dumps(call.arguments, ensure_ascii=False))
        for i, call in enumerate(calls)
    )


def _unread(parsed: Parsed, raw: str) -> str:
    """The output itself, if nothing of it could be read."""
    return raw if parsed.error and not (parsed.text or parsed.calls) else ""
