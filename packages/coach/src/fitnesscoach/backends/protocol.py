"""What a model is to the application: messages and tools in, one parsed answer out."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from portlab_spec.conversation import Message, Tool
from portlab_spec.formats import Parsed

OnText = Callable[[str], Awaitable[None]]


class BackendError(Exception):
    """The model gave no answer: what happened and what to do, in one line."""


@dataclass(frozen=True)
class Answer:
    """One answer of a model.

    Attributes:
        strict: what it says by the strict parser of the format, or by the server.
        lenient: by the lenient parser, where the raw output was seen.
        prompt: what was sent, for the transcript.
        raw: what came back, for the transcript.
    """

    strict: Parsed
    lenient: Parsed | None = None
    prompt: str = ""
    raw: str = ""

    @property
    def usable(self) -> Parsed:
        """The strict reading, or the lenient one where that alone is without fault or finds calls."""
        if self.strict.error and self.lenient and (self.lenient.calls or not self.lenient.error):
            return Parsed(self.lenient.calls, self.lenient.text, None, self.lenient.stopped, self.lenient.names)
        return self.strict


class Backend(Protocol):
    """A model that can be asked, by many at once. `name` is what the user called it."""

    name: str

    async def answer(self, messages: Sequence[Message], tools: Sequence[Tool], on_text: OnText) -> Answer:
        """The answer to a conversation; pieces of text are passed on as they arrive.

        Raises:
            BackendError: there is none.
        """

    async def close(self) -> None:
        """Give back connections or memory."""


async def discard(text: str) -> None:
    """An `OnText` for those who wait for the whole answer."""
