"""Any server with an OpenAI-compatible chat completions API: vLLM, llama.cpp, Ollama, a hosted one."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from fitnesscoach.backends.protocol import Answer, BackendError, OnText
from fitnesscoach.backends.wire import Assembler, SystemRole, WireError, describe_error, to_openai_messages
from portlab_spec.conversation import Message, Tool
from portlab_spec.errors import UserError
from portlab_spec.files import parse_json

CONNECT_SECONDS = 10.0
RETRIES = 2
# The server did not begin on the request: asking again costs nobody anything twice.
_NOT_BEGUN = {429, 502, 503, 504}
_WAIT = (0.5, 2.0)  # seconds before each retry, and at most as long as the server asks
MAX_BYTES = 4_000_000  # of one answer on the wire


class Endpoint:
    """A model behind an endpoint, see `Backend`.

    Args:
        url: base, such as http://127.0.0.1:8000/v1.
        model: as the server calls it.
        timeout: seconds for one answer, everything included.
        system_role: role of the instructions: `developer` for FunctionGemma's template, `system` for most others.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        timeout: float = 60.0,
        max_tokens: int = 256,
        system_role: SystemRole = "developer",
        api_key: str = "",
    ) -> None:
        self.name = model
        self._url, self._timeout = url.rstrip("/") + "/chat/completions", timeout
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        self._system_role: SystemRole = system_role
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    async def answer(self, messages: Sequence[Message], tools: Sequence[Tool], on_text: OnText) -> Answer:
        """See `Backend`."""
        body: dict[str, Any] = {**self._body, "messages": to_openai_messages(messages, self._system_role)}
        if tools:
            body["tools"] = [tool.to_openai() for tool in tools]
        try:
            async with asyncio.timeout(self._timeout):
                assembler, raw = await self._ask(body, on_text)
        except TimeoutError:
            raise BackendError(f"{self.name}: no complete answer within {self._timeout:g} s") from None
        except WireError as error:
            raise BackendError(f"{self.name}: {error}") from None
        except httpx.HTTPError as error:
            raise BackendError(f"{self.name}: {_describe(error, self._url)}") from None
        prompt = json.dumps(body, ensure_ascii=False)
        return Answer(assembler.parsed(), prompt=prompt, raw="\n".join(raw))

    async def close(self) -> None:
        """See `Backend`."""
        await self._client.aclose()

    async def _ask(self, body: dict[str, Any], on_text: OnText) -> tuple[Assembler, list[str]]:
        """Ask, and again only where the server has not begun to answer."""
        for attempt in range(RETRIES + 1):
            try:
                async with self._client.stream("POST", self._url, json=body) as response:
                    if response.status_code not in _NOT_BEGUN or attempt == RETRIES:
                        await _check(response)
                        return await _read(response, on_text)
                    wait = _wait(attempt, response.headers.get("retry-after"))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if attempt == RETRIES:
                    raise
                wait = _wait(attempt, None)
            await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")


async def list_models(url: str, *, api_key: str = "", timeout: float = CONNECT_SECONDS) -> list[str]:
    """Names of the models that an endpoint serves.

    Raises:
        UserError: it cannot be asked.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    where = url.rstrip("/") + "/models"
    try:
        async with httpx.AsyncClient(timeout=timeout, headers=headers) as client:
            response = await client.get(where)
            response.raise_for_status()
            return [str(row["id"]) for row in parse_json(response.content)["data"]]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(_describe(error, where), fix="Check --endpoint, and that the server runs") from None
    except (ValueError, KeyError, TypeError):
        raise UserError("no list of models came back", where=where, fix="Check that --endpoint ends in /v1") from None


async def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    body = (await response.aread())[:10_000]
    try:
        found = parse_json(body)
        said = describe_error(found.get("error", found)) if isinstance(found, dict) else ""
    except ValueError:
        said = ""
    reason = f": {said}" if said else ""
    raise WireError(f"the server answered {response.status_code} {response.reason_phrase}{reason}")


async def _read(response: httpx.Response, on_text: OnText) -> tuple[Assembler, list[str]]:
    """Read server-sent events, or one object from a server that does not stream."""
    assembler, raw = Assembler(), []
    if "text/event-stream" not in response.headers.get("content-type", ""):
        raw.append("\n".join([line async for line in _lines(response)]))
        await on_text(assembler.feed(_json(raw[0])))
        return assembler, raw
    async for line in _lines(response):
        name, _, data = line.partition(":")
        if name != "data":
            continue
        if (data := data.strip()) == "[DONE]":
            return assembler, raw
        raw.append(data)
        if text := assembler.feed(_json(data)):
            await on_text(text)
    if assembler.finish_reason is None:
        raise WireError("the connection ended in the middle of the answer")
    return assembler, raw


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines of a body, which may not be larger than an answer ever is: httpx's own lines have no such limit."""
    held, size = b"", 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > MAX_BYTES:
            raise WireError(f"the server sent more than {MAX_BYTES // 1_000_000} MB")
        *whole, held = (held + piece).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    yield held.decode(errors="replace")


def _json(text: str) -> Any:
    try:
        return parse_json(text.encode())
    except ValueError as error:
        raise WireError(f"the server sent what is not JSON ({error})") from None


def _wait(attempt: int, asked: str | None) -> float:
    base = _WAIT[attempt]
    if asked and asked.isdigit():
        return min(float(asked), _WAIT[-1])
    return base * random.uniform(0.8, 1.2)  # many clients should not come back at the same moment


def _describe(error: Exception, url: str) -> str:
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return f"nothing answers at {url}"
        case httpx.TimeoutException():
            return "the server stopped answering"
        case httpx.RemoteProtocolError() | httpx.ReadError():
            return "the connection broke in the middle of the answer"
        case httpx.HTTPStatusError():
            return f"{url} answered {error.response.status_code} {error.response.reason_phrase}"
    return f"{url}: {' '.join(str(error).split()).rstrip('.') or type(error).__name__}"
