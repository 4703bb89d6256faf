"""Server-sent events of a chat completion, read as they arrive: when tokens came, of which kind, and how many.

The reader runs between two arrivals of a busy loop, so it does little: it cuts events apart, and looks into each once.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

_DONE = b"[DONE]"


@dataclass(slots=True)
class Answer:
    """What a stream has said so far.

    Attributes:
        chunks: arrival of every event with tokens, seconds on the caller's clock.
        kinds: events with text, reasoning, calls.
        finish: reason of the last choice that named one.
        usage: the server's counts, of the last event that held them.
        error: what the server reported inside the stream.
        done: `[DONE]` was seen.
        malformed: first event that was no JSON object.
    """

    chunks: list[float] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: str = ""
    done: bool = False
    malformed: str = ""
    _rest: bytes = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that arrived at `now`, cut anywhere."""
        if self._rest:
            data = self._rest + data
        # The specification lets a line end in \n, \r\n or \r; servers in use write the first two.
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._rest = events.pop()
        for event in events:
            self._read(event, now)

    def end(self, now: float) -> None:
        """The body is over: what is left is an event without an empty line behind it."""
        rest, self._rest = self._rest, b""
        if rest.strip():
            self._read(rest, now)

    def _read(self, event: bytes, now: float) -> None:
        if event.startswith(b"data:") and b"\n" not in event:
            payload = event[5:].strip()
        else:
            lines = event.split(b"\n")
            payload = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        if not payload:  # a comment, by which servers keep a connection open
            return
        if payload == _DONE:
            self.done = True
            return
        try:
            said = orjson.loads(payload)
        except orjson.JSONDecodeError:
            said = None
        if not isinstance(said, dict):
            self.malformed = self.malformed or payload[:120].decode("utf-8", "replace")
            return
        if usage := said.get("usage"):
            self.usage = usage
        if "error" in said:
            error = said["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        tokens = False
        for choice in said.get("choices") or ():
            delta = choice.get("delta") or {}
            for kind, held in (
                ("text", delta.get("content") or choice.get("text")),
                # vLLM says `reasoning` since 0.16, and others, and it before, `reasoning_content`.
                ("reasoning", delta.get("reasoning") or delta.get("reasoning_content")),
                ("calls", delta.get("tool_calls")),
            ):
                if held:
                    self.kinds[kind] = self.kinds.get(kind, 0) + 1
                    tokens = True
            self.finish = choice.get("finish_reason") or self.finish
        if tokens:
            self.chunks.append(now)
