"""A scripted server with the OpenAI API, on a free port of this machine.

A script is a function of the request's body that says how to answer. The server counts what is open, so that a test
can tell whether a client went away properly.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Script = Callable[[dict[str, Any], web.Request], Awaitable[web.StreamResponse]]


@dataclass
class FakeServer:
    script: Script
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self.script(body, request)
        finally:
            self.open -= 1

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "base"}, {"id": "tuned"}]})


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[FakeServer]:
    fake = FakeServer(script)
    app = web.Application(client_max_size=8 << 20)
    app.router.add_post("/v1/chat/completions", fake.handle)
    app.router.add_get("/v1/models", fake.models)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    fake.url = f"http://127.0.0.1:{port}/v1"
    try:
        yield fake
    finally:
        await runner.cleanup()


@contextmanager
def in_thread(script: Script) -> Iterator[FakeServer]:
    """A scripted server in a thread, for a client in another process."""
    started, at = threading.Event(), dict[str, Any]()

    async def main() -> None:
        at["stop"], at["loop"] = asyncio.Event(), asyncio.get_running_loop()
        async with serving(script) as fake:
            at["fake"] = fake
            started.set()
            await at["stop"].wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait(10)
    try:
        yield at["fake"]
    finally:
        at["loop"].call_soon_threadsafe(at["stop"].set)
        thread.join(10)


def call(name: str, arguments: Any = None, index: int = 0) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"index": index, "id": f"x{index}", "type": "function", "function": {"name": name, "arguments": text}}


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


async def stream(request: web.Request, *chunks: Any, pause: float = 0, done: bool = True) -> web.StreamResponse:
    """Server-sent events; a string is sent as it is."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in chunks:
        data = piece if isinstance(piece, str) else json.dumps(piece)
        await response.write(f"data: {data}\n\n".encode())
        await asyncio.sleep(pause)
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


async def say(request: web.Request, text: str) -> web.StreamResponse:
    """Text, word by word."""
    words = [chunk(content=word) for word in text.split(" ")]
    pieces = [chunk(content=(" " if i else "") + w["choices"][0]["delta"]["content"]) for i, w in enumerate(words)]
    return await stream(request, *pieces, chunk("stop"))


async def make_calls(request: web.Request, *calls: dict[str, Any]) -> web.StreamResponse:
    """Calls, their arguments cut in two as servers do."""
    pieces = []
    for item in calls:
        name, arguments = item["function"]["name"], item["function"]["arguments"]
        head = {**item, "function": {"name": name, "arguments": arguments[:1]}}
        tail = {"index": item["index"], "function": {"arguments": arguments[1:]}}
        pieces += [chunk(tool_calls=[head]), chunk(tool_calls=[tail])]
    return await stream(request, *pieces, chunk("tool_calls"))


def last_role(body: dict[str, Any]) -> str:
    return body["messages"][-1]["role"]
