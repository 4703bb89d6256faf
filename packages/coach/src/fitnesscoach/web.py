"""The conversation on a local web page: one page, one process, one session for each tab.

    GET  /            the page
    GET  /api/about   model, data, tools, and questions that they answer
    GET  /api/today   what was recorded today, without any model
    POST /api/ask     {"session": ..., "question": ...} -> JSON Lines: text, calls, results, finish
    POST /api/reset   {"session": ...}

Only pages that this server sent may use it: the Host must be one that it listens under (against DNS rebinding), an
Origin must be its own, and a POST must be JSON, which no other site can send without asking. A client that goes away
ends its turn.
"""

import asyncio
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any

from aiohttp import web

from fitnesscoach import summary
from fitnesscoach.loop import Finish
from fitnesscoach.session import Calls, Results, Session, TextPiece, Update
from portlab_spec.errors import UserError

MAX_SESSIONS = 50
IDLE_SECONDS = 3600.0
MAX_BODY = 64 * 1024  # bytes of a request
STOPPING_SECONDS = 2.0  # for the end of an answer that its tab has just stopped
_LOCAL = {"127.0.0.1", "localhost", "::1"}
_ID = 64  # most characters of a session's name


@dataclass
class _Tab:
    session: Session
    used: float
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """Sessions by the name that a tab made up; the one that was idle longest makes room."""

    def __init__(self, new: Callable[[], Session]) -> None:
        self._new, self._tabs = new, dict[str, _Tab]()

    def get(self, name: str) -> _Tab:
        """The session of a tab, a new one on its first question."""
        now = time.monotonic()
        for stale in [n for n, tab in self._tabs.items() if now - tab.used > IDLE_SECONDS and not tab.busy.locked()]:
            del self._tabs[stale]
        tab = self._tabs.pop(name, None)
        if tab is None:
            if len(self._tabs) >= MAX_SESSIONS:
                idle = next((n for n, other in self._tabs.items() if not other.busy.locked()), None)
                if idle is None:
                    raise web.HTTPServiceUnavailable(text="too many conversations at the same time")
                del self._tabs[idle]
            tab = _Tab(self._new(), now)
        tab.used = now
        self._tabs[name] = tab  # at the end: order is that of use
        return tab

    def __len__(self) -> int:
        return len(self._tabs)


def application(new_session: Callable[[], Session], host: str) -> web.Application:
    """The web application, to be served under `host`."""
    app = web.Application(middlewares=[_guard(host)], client_max_size=MAX_BODY)
    handlers = _Handlers(new_session)
    app.router.add_get("/", handlers.page)
    app.router.add_get("/api/about", handlers.about)
    app.router.add_get("/api/today", handlers.today)
    app.router.add_post("/api/ask", handlers.ask)
    app.router.add_post("/api/reset", handlers.reset)
    return app


async def serve(new_session: Callable[[], Session], host: str, port: int) -> None:
    """Serve until the process is told to stop.

    Raises:
        UserError: the address is taken or is none of this machine's.
    """
    runner = web.AppRunner(application(new_session, host), handler_cancellation=True, shutdown_timeout=2)
    await runner.setup()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            reason = (error.strerror or str(error)).split(": ")[-1]
            raise UserError(f"cannot listen ({reason})", where=f"{host}:{port}", fix="Pass another --port") from None
        address = runner.addresses[0]
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        print(f"The coach is at http://{shown}:{address[1]}/ until Ctrl-C.", flush=True)
        await stopped.wait()
    finally:
        await runner.cleanup()


def _guard(host: str) -> Any:
    names = _LOCAL if host in _LOCAL else None  # on another address the user chose to be reachable by any name

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if names is not None and _host_name(request.host) not in names:
            raise web.HTTPForbidden(text="this address is not the coach's")
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            raise web.HTTPForbidden(text="only the coach's own page may ask")
        if request.method == "POST" and request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="send application/json")
        response: web.StreamResponse = await handler(request)
        if not response.prepared:
            response.headers.setdefault("X-Content-Type-Options", "nosniff")
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    return guard


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


class _Handlers:
    def __init__(self, new_session: Callable[[], Session]) -> None:
        self._example = new_session()
        self._sessions = Sessions(new_session)
        self._page = (resources.files("fitnesscoach") / "page.html").read_text(encoding="utf-8")

    async def page(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'; trusted-types 'none'"
        )
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
        return web.Response(text=self._page.replace("{{nonce}}", nonce), content_type="text/html", headers=headers)

    async def about(self, request: web.Request) -> web.Response:
        session = self._example
        tools = [{"name": tool.name, "description": tool.description} for tool in session.tool_set.toolbox.tools]
        examples = session.tool_set.examples
        return web.json_response(
            {"model": session.backend.name, "data": session.data.name, "tools": tools, "examples": examples}
        )

    async def today(self, request: web.Request) -> web.Response:
        return web.json_response({"values": summary.recorded(await summary.today(self._example.data))})

    async def reset(self, request: web.Request) -> web.Response:
        body = await _body(request)
        tab = self._sessions.get(_text(body, "session", _ID))
        async with tab.busy:  # after the answer that is being given, which its tab has stopped
            tab.session.reset()
        return web.json_response({})

    async def ask(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        question = _text(body, "question", MAX_BODY)
        tab = self._sessions.get(_text(body, "session", _ID))
        async with _turn_of(tab):
            headers = {"Content-Type": "application/x-ndjson", "X-Content-Type-Options": "nosniff"}
            response = web.StreamResponse(headers={**headers, "Cache-Control": "no-store"})
            await response.prepare(request)

            async def send(row: dict[str, Any]) -> None:
                await response.write(json.dumps(row).encode() + b"\n")

            async def show(update: Update) -> None:
                await send(as_row(update))

            await send(as_row(await tab.session.ask(question, show)))
            await response.write_eof()
        return response


@asynccontextmanager
async def _turn_of(tab: _Tab) -> AsyncIterator[None]:
    """The turn of a question; the next one of the same tab is refused meanwhile.

    Raises:
        HTTPConflict: the last question is still being answered, and not about to stop.
    """
    try:
        async with asyncio.timeout(STOPPING_SECONDS):
            await tab.busy.acquire()
    except TimeoutError:
        raise web.HTTPConflict(text="the last question of this tab is still being answered") from None
    try:
        yield
    finally:
        tab.busy.release()


def as_row(update: Update | Finish) -> dict[str, Any]:
    """An update as the page gets it."""
    match update:
        case TextPiece(text):
            return {"kind": "text", "text": text}
        case Calls(calls):
            return {"kind": "calls", "calls": [call.model_dump() for call in calls]}
        case Results(results):
            rows = [{**asdict(result), "call": result.call.model_dump()} for result in results]
            return {"kind": "results", "results": rows}
    answer = update.spoken if update.told else ""
    return {"kind": "finish", "outcome": update.outcome, "answer": answer, "detail": update.detail}


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        raise web.HTTPBadRequest(text="the body is not JSON") from None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body is no object")
    return body


def _text(body: dict[str, Any], key: str, most: int) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise web.HTTPBadRequest(text=f"{key} must be text of at most {most} characters")
    return value
