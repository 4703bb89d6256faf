"""A conversation with the coach: the loop, driven with a model, tools and a transcript."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache

from fitnesscoach.backends import Backend, BackendError
from fitnesscoach.loop import AskModel, Finish, RunCalls, Turn, recent, refuse
from fitnesscoach.providers import FitnessData
from fitnesscoach.tools import ToolResult, ToolSet
from fitnesscoach.trace import Trace
from portlab_spec.conversation import Message, ToolCall
from portlab_spec.formats import FORMATS

MAX_QUESTION = 8_000  # characters
ROUNDS = 4
MEMORY = 3  # earlier questions that the model still sees


@dataclass(frozen=True)
class TextPiece:
    """A piece of the model's answer, as it arrives. What was shown may turn out not to be the answer."""

    text: str


@dataclass(frozen=True)
class Calls:
    """The model asks for these calls."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Results:
    """What came of the calls."""

    results: tuple[ToolResult, ...]


Update = TextPiece | Calls | Results
Show = Callable[[Update], Awaitable[None]]


async def ignore(update: Update) -> None:
    """A `Show` for those who wait for the end."""


class Session:
    """One user's conversation. Ask one question at a time.

    Args:
        backend: the model; many sessions may share it.
        memory: earlier questions that the model still sees.
        rounds: answers with calls that are accepted in one turn.
        own_words: the model puts results into words; otherwise they are told as they are.
    """

    def __init__(
        self,
        backend: Backend,
        tool_set: ToolSet,
        data: FitnessData,
        *,
        memory: int = MEMORY,
        rounds: int = ROUNDS,
        own_words: bool = True,
        trace: Trace | None = None,
    ) -> None:
        self.backend, self.tool_set, self.data = backend, tool_set, data
        self._memory, self._rounds, self._own_words = memory, rounds, own_words
        self._trace = trace or Trace()
        self._messages: tuple[Message, ...] = ()

    def reset(self) -> None:
        """Forget the conversation."""
        self._messages = ()

    async def ask(self, question: str, show: Show = ignore) -> Finish:
        """Answer a question; updates are shown on the way.

        A cancelled question leaves the conversation as it was.
        """
        began = time.perf_counter()
        self._trace.question(question)
        before = self._before()
        if problem := question_problem(question):
            finish = refuse(before, problem)
        else:
            try:
                finish = await self._run(before, question, show)
            except asyncio.CancelledError:
                self._trace.finish(Finish("cancelled", "", "stopped", (), before), time.perf_counter() - began)
                raise
        self._messages = finish.messages
        self._trace.finish(finish, time.perf_counter() - began)
        return finish

    def _before(self) -> tuple[Message, ...]:
        """The conversation so far under today's instructions, without what is too old."""
        prompt = Message(role="developer", content=self.tool_set.prompt(self.data.now()))
        return (prompt, *(message for message in recent(self._messages, self._memory) if message.role != "developer"))

    async def _run(self, before: Sequence[Message], question: str, show: Show) -> Finish:
        turn, action = Turn.ask(before, question.strip(), self._rounds, own_words=self._own_words)
        while True:
            match action:
                case AskModel(messages):
                    turn, action = await self._ask_model(turn, messages, show)
                case RunCalls(calls):
                    await show(Calls(calls))
                    results = await asyncio.gather(*map(self.tool_set.toolbox.run, calls))
                    for result in results:
                        self._trace.tool(result)
                    await show(Results(tuple(results)))
                    turn, action = turn.ran(results)
                case Finish():
                    return action

    async def _ask_model(
        self, turn: Turn, messages: Sequence[Message], show: Show
    ) -> tuple[Turn, AskModel | RunCalls | Finish]:
        began = time.perf_counter()
        try:
            answer = await self.backend.answer(
                messages, self.tool_set.toolbox.tools, lambda text: show(TextPiece(text))
            )
        except BackendError as error:
            return turn.failed(str(error))
        self._trace.model(self.backend.name, answer, time.perf_counter() - began)
        return turn.answered(answer.usable)


def question_problem(question: str) -> str:
    """Why a question is not put to the model, in one line; empty if it is."""
    if not question.strip():
        return "the question is empty"
    if len(question) > MAX_QUESTION:
        return f"the question has {len(question):,} characters, at most {MAX_QUESTION:,} are taken"
    if found := [token for token in _control_tokens() if token in question]:
        return f"the question holds {found[0]}, which a model takes for a part of the conversation's structure"
    try:
        question.encode()
    except UnicodeEncodeError:
        return "the question holds what is no text (half a surrogate pair)"
    return ""


@cache
def _control_tokens() -> tuple[str, ...]:
    """Tokens of every format: servers encode them as such wherever they stand."""
    return tuple(sorted({token for fmt in FORMATS.values() for token in fmt.control_tokens}))
