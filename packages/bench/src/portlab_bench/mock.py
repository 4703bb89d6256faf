"""A server whose delays are known: what a load generator is held to, and a stand-in to try a bench on.

It answers like vLLM's chat endpoint, streamed, after `ttft` seconds and then a token every `itl` seconds, for at most
`slots` requests at once; others wait their turn, which makes a knee. It writes down, on the system's monotonic clock,
when each event went out (`GET /log`): a client's times can be held to what happened, and not to what was planned.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
import orjson


@dataclass(frozen=True)
class Behaviour:
    """What the server does.

    Attributes:
        ttft: seconds from a request's turn to its first token.
        itl: seconds between tokens.
        jitter: share by which both vary, uniformly.
        tokens: of an answer, unless the request's max_tokens says less.
        slots: requests that are answered at once.
        kind: what the tokens are: text, reasoning, calls.
        burst: tokens in an event.
        fail_every: the n-th, 2n-th, ... request gets status 500; 0 for none.
        drop_every: the same, but the connection breaks in the middle of the answer.
        usage: whether answers end with the server's counts.
        cached: share of each prompt that it claims its prefix cache held.
        length: prompt tokens are this many characters long.
    """

    ttft: float = 0.05
    itl: float = 0.01
    jitter: float = 0.0
    tokens: int = 16
    slots: int = 1_000_000
    kind: str = "text"
    burst: int = 1
    fail_every: int = 0
    drop_every: int = 0
    usage: bool = True
    cached: float = 0.0
    length: int = 4


@dataclass
class Sent:
    """What went out for a request, whose body may name itself with `request_id`: times on time.monotonic."""

    number: int
    received: float
    id: str = ""
    events: list[float] = field(default_factory=list)
    tokens: int = 0
    outcome: str = "ok"


class MockServer:
    """The server; `log` holds what it sent."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.log = behaviour, list[Sent]()
        self._turns = asyncio.Semaphore(behaviour.slots)
        self._random = random.Random(0)
        self._count = 0
        self.prompt_tokens = self.cached_tokens = self.running = 0

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> asyncio.Server:
        """Listen; the port is in the returned server's socket."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _Peer(self), host, port, backlog=4096)

    async def answer(self, body: bytes, write: Callable[[bytes], None], close: Callable[[], None]) -> None:
        """Answer one chat request."""
        received, how = time.monotonic(), self.behaviour
        self._count += 1
        sent = Sent(self._count, received)
        self.log.append(sent)
        if how.fail_every and self._count % how.fail_every == 0:
            sent.outcome = "http_error"
            write(_plain(500, b'{"error": {"message": "as asked"}}'))
            return
        request = orjson.loads(body)
        sent.id = str(request.get("request_id", ""))
        tokens = min(how.tokens, request.get("max_tokens") or how.tokens)
        prompt = len(body) // how.length
        self.prompt_tokens += prompt
        self.cached_tokens += int(prompt * how.cached)
        async with self._turns:
            self.running += 1
            try:
                await self._stream(sent, tokens, prompt, write, close)
            finally:
                self.running -= 1

    async def _stream(
        self, sent: Sent, tokens: int, prompt: int, write: Callable[[bytes], None], close: Callable[[], None]
    ) -> None:
        how = self.behaviour
        drop = how.drop_every and sent.number % how.drop_every == 0
        write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        # As vLLM does: an event that holds the role alone comes with the first token, not before it.
        first = _chunk(_event({"role": "assistant", "content": ""}))
        due = time.monotonic() + self._vary(how.ttft)
        done = 0
        while done < tokens:
            # Due times do not drift: each waits for its own, whatever the last one's timer did.
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            held = min(how.burst, tokens - done)
            sent.events.append(time.monotonic())
            write((first if not done else b"") + _chunk(_event(_delta(how.kind, held))))
            done += held
            sent.tokens = done
            if drop and done * 2 >= tokens:
                sent.outcome = "broken"
                close()
                return
            due += self._vary(how.itl) * held
        last = _event({}, "stop" if how.kind != "calls" else "tool_calls")
        if how.usage:
            counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": tokens}
            if how.cached:
                counts["prompt_tokens_details"] = {"cached_tokens": int(prompt * how.cached)}
            last += b"data: " + orjson.dumps({"choices": [], "usage": counts}) + b"\n\n"
        write(_chunk(last + b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _vary(self, seconds: float) -> float:
        return seconds * (1 + self.behaviour.jitter * self._random.uniform(-1, 1))

    def metrics(self) -> bytes:
        """The counters of vLLM's /metrics that a bench reads."""
        lines = (
            f"vllm:num_requests_running {self.running}",
            "vllm:num_requests_waiting 0",
            f"vllm:prefix_cache_queries_total {self.prompt_tokens}",
            f"vllm:prefix_cache_hits_total {self.cached_tokens}",
            f"vllm:prompt_tokens_total {self.prompt_tokens}",
        )
        return "\n".join(lines).encode() + b"\n"


class _Peer(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._body, self._url = b"", b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task:
            self._task.cancel()

    def on_message_begin(self) -> None:
        self._body, self._url = b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0]
        if path.endswith(b"/completions"):
            job = self._server.answer(self._body, self._transport.write, self._transport.close)
            self._task = asyncio.get_running_loop().create_task(job)
        elif path == b"/metrics":
            self._transport.write(_plain(200, self._server.metrics(), b"text/plain"))
        elif path == b"/log":
            self._transport.write(_plain(200, orjson.dumps([vars(sent) for sent in self._server.log])))
        elif path == b"/v1/models":
            self._transport.write(_plain(200, b'{"object": "list", "data": [{"id": "mock", "object": "model"}]}'))
        elif path in (b"/health", b"/version"):
            self._transport.write(_plain(200, b'{"version": "mock"}'))
        else:
            self._transport.write(_plain(404, b'{"error": {"message": "no such path"}}'))


def _plain(status: int, body: bytes, kind: bytes = b"application/json") -> bytes:
    reason = {200: b"OK", 404: b"Not Found", 500: b"Internal Server Error"}[status]
    head = b"HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (status, reason, kind, len(body))
    return head + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _delta(kind: str, tokens: int) -> dict[str, Any]:
    words = "tok " * tokens
    match kind:
        case "reasoning":
            return {"reasoning": words}
        case "calls":
            return {"tool_calls": [{"index": 0, "function": {"arguments": words}}]}
        case _:
            return {"content": words}


def _event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    said = {"id": "chatcmpl-mock", "object": "chat.completion.chunk", "model": "mock", "choices": [choice]}
    return b"data: " + orjson.dumps(said) + b"\n\n"
