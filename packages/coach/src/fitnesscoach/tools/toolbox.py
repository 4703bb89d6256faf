"""A fixed set of tools: what is offered, what may run, and how it is run.

Nothing runs that is not in the set, or whose arguments its schema refuses.
"""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import JsonValue

from fitnesscoach.providers import NoDataError
from portlab_spec.conversation import Tool, ToolCall
from portlab_spec.tools import validate_arguments

TIMEOUT = 20.0  # seconds; a Garmin request has its own, shorter one
Status = Literal["ok", "no_data", "failed", "timeout", "refused"]
Response = dict[str, JsonValue]
_CONTROL = re.compile(r"<[^<>\s]{1,40}>")  # what a wire format might take for one of its tokens


class BadArgumentError(ValueError):
    """An argument that the schema allows and the tool cannot use; the message says which and why."""


@dataclass(frozen=True)
class Capability:
    """One tool: its declaration and the function behind it (arguments by name, JSON object back).

    Attributes:
        words: the result as a sentence, with its keys in braces; empty for a plain list of the values.
    """

    tool: Tool
    run: Callable[..., Response]
    timeout: float = TIMEOUT
    words: str = ""


@dataclass(frozen=True)
class ToolResult:
    """What became of one call.

    Attributes:
        response: what the model is told; for a status other than `ok` its key `error` says why.
        seconds: wall-clock time.
        words: the response as a sentence, if the tool has one.
    """

    call: ToolCall
    status: Status
    response: Response
    seconds: float = 0.0
    words: str = ""

    @property
    def error(self) -> str:
        """Why there is no result; empty if there is one."""
        return "" if self.status == "ok" else str(self.response["error"])


class Toolbox:
    """The tools on offer."""

    def __init__(self, capabilities: Iterable[Capability]) -> None:
        self._by_name: Mapping[str, Capability] = {c.tool.name: c for c in capabilities}

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Declarations, in a fixed order."""
        return tuple(capability.tool for capability in self._by_name.values())

    def problem(self, call: ToolCall) -> str:
        """Why the call must not run, in one line; empty if it may."""
        capability = self._by_name.get(call.name)
        if capability is None:
            return f"there is no tool {call.name[:80]!r}; there are {', '.join(self._by_name)}"
        return "; ".join(validate_arguments(capability.tool, call.arguments))

    async def run(self, call: ToolCall) -> ToolResult:
        """Check and run one call. Never raises, save when it is cancelled."""
        if problem := self.problem(call):
            return refused(call, problem)
        capability = self._by_name[call.name]
        began = time.perf_counter()
        status, response = await _outcome(capability, call.arguments)
        words = capability.words.format(**response) if status == "ok" else ""
        return ToolResult(call, status, response, time.perf_counter() - began, words)


def refused(call: ToolCall, why: str) -> ToolResult:
    """The result of a call that did not run."""
    return ToolResult(call, "refused", {"error": why})


async def _outcome(capability: Capability, arguments: Mapping[str, Any]) -> tuple[Status, Response]:
    try:
        async with asyncio.timeout(capability.timeout):
            return "ok", await _in_thread(capability.run, arguments)
    except TimeoutError:
        return "timeout", {"error": f"no result within {capability.timeout:g} s"}
    except NoDataError as error:
        return "no_data", {"error": str(error)}
    except BadArgumentError as error:
        return "refused", {"error": str(error)}
    except Exception as error:
        # A message of some library ends up in the prompt: one line, short, and nothing like a control token.
        line = " ".join(_CONTROL.sub(" ", str(error)).split())[:200]
        return "failed", {"error": f"the tool failed: {line or type(error).__name__}"}


async def _in_thread(function: Callable[..., Response], arguments: Mapping[str, Any]) -> Response:
    """Run a function in a daemon thread: unlike those of asyncio's pool, a stuck one neither delays the program's
    end nor takes a place from the next."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Response] = loop.create_future()

    def settle(result: Response | None, error: BaseException | None) -> None:
        if future.done():  # given up
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result or {})

    def work() -> None:
        result: Response | None = None
        failure: Exception | None = None
        try:
            result = function(**arguments)
        except StopIteration as error:  # no future can carry it
            failure = RuntimeError(str(error))
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            return  # the loop is closed: nobody waits

    threading.Thread(target=work, daemon=True, name=f"tool {function.__name__}").start()
    return await future
