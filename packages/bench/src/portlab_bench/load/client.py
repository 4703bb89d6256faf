"""Streamed requests over kept-alive connections, with as little between the socket and the clock as Python allows.

A protocol of asyncio's with httptools' parser: an HTTP library's layers would cost several times the reading of an
event, and a small model's tokens come faster than they can be read then. Times are taken when bytes arrive, before
anything looks at them.
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from portlab_bench.load.stream import Answer
from portlab_bench.schema import Outcome, RequestRecord
from portlab_spec.errors import UserError

_ERROR_BODY = 4096


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        host, port, tls: of the server.
        path: of the endpoint.
        headers: sent with every request.
    """

    host: str
    port: int
    tls: bool
    path: str
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, url: str, headers: Mapping[str, str] | None = None, path: str = "/chat/completions") -> "Target":
        """The endpoint of a server's address, "http://host:8000", "https://host/v1" or the whole path.

        Raises:
            UserError: no such address.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UserError("is no address of a server", where=repr(url), fix="Give one such as http://localhost:8000")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/")
        whole = base if base.endswith(path) else f"{base or '/v1'}{path}"
        return cls(parts.hostname, port or (443 if tls else 80), tls, whole, dict(headers or {}))

    def request(self, body: bytes) -> bytes:
        """The bytes of a POST request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        headers = {
            "Host": f"{host}:{self.port}",
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Content-Length": str(len(body)),
            **self.headers,
        }
        for name, value in headers.items():
            if "\r" in name + value or "\n" in name + value:
                raise UserError(f"a header must not hold a line end: {name!r}", fix="Mend it")
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + body


class _Connection(asyncio.Protocol):
    """One connection; it serves one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self._reset()

    def _reset(self) -> None:
        self.answer = Answer()
        self.status = 0
        self.ended: float | None = None
        self.lost = ""
        self.waiter: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.body = b""  # the start of an answer that is no stream
        self._now = 0.0

    def start(self, data: bytes, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Send a request; the future ends with its answer, or with the connection."""
        self._reset()
        self.waiter = loop.create_future()
        assert self.transport is not None
        self.transport.write(data)
        return self.waiter

    # ------------------------------------------------------------------------------------------- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.lost = f"no HTTP: {error}"
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.waiter and not self.waiter.done():
            # A body without length ends with its connection.
            self.lost = self.lost or (str(exc) if exc else "the connection was closed")
            self.ended = time.monotonic()
            self.waiter.set_result(None)

    # ----------------------------------------------------------------------------------------- httptools' calls

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status == 200:
            self.answer.feed(body, self._now)
        elif len(self.body) < _ERROR_BODY:
            self.body += body

    def on_message_complete(self) -> None:
        self.ended = self._now
        if not self._parser.should_keep_alive():
            self._close()
        if self.waiter and not self.waiter.done():
            self.waiter.set_result(None)

    def _close(self) -> None:
        self.closed = True
        if self.transport:
            self.transport.close()


class Client:
    """Sends requests to one target and keeps connections for the next.

    Args:
        target: where to.
        timeout: seconds that a request may take, connecting included.
    """

    def __init__(self, target: Target, timeout: float = 600.0) -> None:
        self._target, self._timeout = target, timeout
        self._idle: deque[_Connection] = deque()
        self._tls = ssl.create_default_context() if target.tls else None

    async def connect(self, count: int) -> None:
        """Open connections ahead of time, so that connecting is in no latency.

        Raises:
            OSError: the server does not take connections, or not in time.
        """
        self._idle.extend(await asyncio.gather(*(self._open() for _ in range(count))))

    async def send(self, body: bytes, index: int, start: float, scheduled: float | None = None) -> RequestRecord:
        """Send a request and read its stream to the end.

        Args:
            body: JSON.
            index: of the request.
            start: the clock's zero, by time.monotonic.
            scheduled: seconds from `start` when it should have been sent.
        """
        loop = asyncio.get_running_loop()
        data = self._target.request(body)
        sent = time.monotonic()
        connection: _Connection | None = None
        fault, what = None, ""
        handle = None
        try:
            # One timer for the whole of it is cheaper than asyncio.timeout around every wait.
            connection = self._take()
            if connection is None:
                connection = await self._open()
            waiter = connection.start(data, loop)
            handle = loop.call_later(sent + self._timeout - time.monotonic(), _give_up, waiter)
            await waiter
        except TimeoutError:
            fault, what = "timeout", f"no answer after {self._timeout:g} s"
        except OSError as error:
            fault, what = "broken", f"cannot connect ({error})"
        except asyncio.CancelledError:
            if connection:
                connection._close()
            raise
        finally:
            if handle:
                handle.cancel()
        now = time.monotonic()
        if connection is None:
            assert fault
            return RequestRecord(
                index=index, scheduled=scheduled, sent=sent - start, done=now - start, outcome=fault, error=what
            )
        if fault or connection.closed or connection.ended is None:
            connection._close()
        else:
            self._idle.append(connection)
        return _record(connection, index, start, sent, scheduled, fault, what)

    async def close(self) -> None:
        """Close what is kept."""
        while self._idle:
            self._idle.pop()._close()
        await asyncio.sleep(0)

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _open(self) -> _Connection:
        target, loop = self._target, asyncio.get_running_loop()
        opening = loop.create_connection(_Connection, target.host, target.port, ssl=self._tls)
        _, connection = await asyncio.wait_for(opening, self._timeout)
        return connection


def _give_up(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


def _record(
    connection: _Connection,
    index: int,
    start: float,
    sent: float,
    scheduled: float | None,
    fault: str | None,
    what: str,
) -> RequestRecord:
    answer = connection.answer
    ended = connection.ended if connection.ended is not None else time.monotonic()
    answer.end(ended)
    outcome: Outcome = "ok"
    error = ""
    if fault:
        outcome, error = "timeout", what
    elif connection.status and connection.status != 200:
        outcome, error = "http_error", f"status {connection.status}: {_words(connection.body)}"
    elif answer.error:
        outcome, error = "server_error", answer.error
    elif answer.malformed:
        outcome, error = "malformed", f"an event is no JSON object: {answer.malformed}"
    elif not answer.done:
        outcome, error = "broken", connection.lost or "the stream ended without [DONE]"
    usage = answer.usage or {}
    counted = usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details") or {}
    return RequestRecord(
        index=index,
        scheduled=scheduled,
        sent=sent - start,
        chunks=tuple(chunk - start for chunk in answer.chunks),
        kinds=answer.kinds,
        done=ended - start,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
        output_tokens=len(answer.chunks) if counted is None else counted,
        tokens_from="chunks" if counted is None else "usage",
        finish=answer.finish,
        outcome=outcome,
        error=" ".join(error.split())[:300],
    )


def _words(body: bytes) -> str:
    return " ".join(body.decode("utf-8", "replace").split())[:200]
