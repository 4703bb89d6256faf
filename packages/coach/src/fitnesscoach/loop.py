"""One turn of the agent, as a state machine: it is told what happened and says what to do next.

    question -> AskModel -> Answered -> RunCalls -> Ran -> AskModel -> ... -> Finish

No input or output happens here. What can go wrong has an outcome of its own, and each turn ends after a bounded
number of rounds. A failed turn leaves no trace in the conversation, or the next question would be asked in the
light of a fault. A turn that has results but no words from the model is closed with the results in plain words: a
model trained on calls alone often has no better ones.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fitnesscoach.tools import ToolResult
from portlab_spec.conversation import Message, ToolCall
from portlab_spec.formats import Parsed

Outcome = Literal[
    "answered",
    "bad_call",
    "malformed",
    "empty",
    "looped",
    "too_many_rounds",
    "tool_failed",
    "model_error",
    "refused",
    "cancelled",
]
MAX_CALLS = 16  # in one answer
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]*")  # as in `Tool`; another one cannot be written into a prompt


@dataclass(frozen=True)
class AskModel:
    """Ask the model to go on from these messages."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class RunCalls:
    """Check and run these calls, side by side."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Finish:
    """The turn is over.

    Attributes:
        text: what the model said.
        detail: what went wrong, one line; empty if nothing did.
        results: of all calls of the turn.
        messages: the conversation to go on from.
    """

    outcome: Outcome
    text: str
    detail: str
    results: tuple[ToolResult, ...]
    messages: tuple[Message, ...]

    @property
    def told(self) -> bool:
        """Whether the user got an answer, be it in the application's words."""
        return bool(self.spoken) and self.outcome not in ("refused", "cancelled")

    @property
    def spoken(self) -> str:
        """The model's words, or the results in plain words where it found none."""
        return self.text or in_words(self.results)


Action = AskModel | RunCalls | Finish


@dataclass(frozen=True)
class Turn:
    """The state. Each method takes an event and gives the next state and what to do.

    Attributes:
        before: the conversation before the question.
        messages: with the question and what came of it.
        rounds_left: answers with calls that are still accepted.
        own_words: the model puts results into words; otherwise they are told as they are, after the first round.
        corrected: the model was told once about a call that cannot run.
    """

    before: tuple[Message, ...]
    messages: tuple[Message, ...]
    rounds_left: int
    own_words: bool = True
    results: tuple[ToolResult, ...] = ()
    corrected: bool = False

    @classmethod
    def ask(
        cls, before: Sequence[Message], question: str, rounds: int, *, own_words: bool = True
    ) -> tuple["Turn", Action]:
        """Begin a turn."""
        messages = (*before, Message(role="user", content=question))
        return cls(tuple(before), messages, rounds, own_words), AskModel(messages)

    def answered(self, answer: Parsed) -> tuple["Turn", Action]:
        """The model answered."""
        if answer.error:
            return self._finish("malformed", f"the model's answer cannot be read: {answer.error}")
        if not answer.calls:
            text = answer.text.strip()
            return self._finish("answered", text=text) if text else self._wordless()
        if len(answer.calls) > MAX_CALLS:
            return self._finish("bad_call", f"the model made {len(answer.calls)} calls at once, {MAX_CALLS} are run")
        if strange := [call.name for call in answer.calls if not _NAME.fullmatch(call.name)]:
            return self._finish("bad_call", f"the model called {strange[0][:80]!r}, which is no name of a tool")
        done = [result.call for result in self.results if result.status != "refused"]
        if all(call in done for call in answer.calls):
            names = ", ".join(call.name for call in answer.calls)
            return self._finish("looped", f"the model repeats a call whose result it has: {names}")
        if not self.rounds_left:
            return self._finish("too_many_rounds", "the model keeps calling tools")
        message = Message(role="assistant", tool_calls=answer.calls)
        turn = replace(self, messages=(*self.messages, message), rounds_left=self.rounds_left - 1)
        return turn, RunCalls(answer.calls)

    def ran(self, results: Sequence[ToolResult]) -> tuple["Turn", Action]:
        """The calls ran; results in the order of the calls."""
        told = [Message(role="tool", name=result.call.name, response=result.response) for result in results]
        refused = [result for result in results if result.status == "refused"]
        turn = replace(
            self,
            messages=(*self.messages, *told),
            results=(*self.results, *results),
            corrected=self.corrected or bool(refused),
        )
        if refused and self.corrected:
            return turn._finish("bad_call", f"the model called {refused[0].call.name} wrongly: {refused[0].error}")
        if not self.own_words and all(result.status in ("ok", "no_data") for result in results):
            return turn._finish("answered")
        return turn, AskModel(turn.messages)

    def failed(self, reason: str) -> tuple["Turn", Action]:
        """The model could not be asked."""
        return self._finish("model_error", reason)

    def cancelled(self) -> tuple["Turn", Action]:
        """The user stopped the turn."""
        return self._finish("cancelled", "stopped")

    def _wordless(self) -> tuple["Turn", Action]:
        if failures := [result for result in self.results if result.status in ("failed", "timeout")]:
            return self._finish("tool_failed", f"{failures[0].call.name}: {failures[0].error}")
        return self._finish("empty", "the model said nothing")

    def _finish(self, outcome: Outcome, detail: str = "", text: str = "") -> tuple["Turn", Action]:
        finish = Finish(outcome, text, detail, self.results, self.before)
        if finish.told:
            finish = replace(finish, messages=(*self.messages, Message(role="assistant", content=finish.spoken)))
        return self, finish


def refuse(before: Sequence[Message], detail: str) -> Finish:
    """The end of a turn that never began."""
    return Finish("refused", "", detail, (), tuple(before))


def in_words(results: Sequence[ToolResult]) -> str:
    """Results as a plain sentence each, the last of each call only."""
    latest = {(r.call.name, repr(r.call.arguments)): r for r in results if r.status in ("ok", "no_data")}
    return " ".join(_sentence(result) for result in latest.values())


def _sentence(result: ToolResult) -> str:
    if result.error:
        return result.error[:1].upper() + result.error[1:] + "."
    if result.words:
        return result.words
    subject = result.call.name.removeprefix("get_").replace("_", " ")
    values = ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in result.response.items())
    return f"{subject[:1].upper()}{subject[1:]}: {values}."


def _plain(value: object) -> str:
    if isinstance(value, list):
        return "; ".join(_plain(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return str(value)


def recent(messages: Sequence[Message], turns: int) -> tuple[Message, ...]:
    """The instructions and the last questions with what follows them: a small model loses the thread beyond."""
    starts = [i for i, message in enumerate(messages) if message.role == "user"]
    head = tuple(message for message in messages[:1] if message.role == "developer")
    if len(starts) <= turns:
        return tuple(messages)
    return head + (tuple(messages[starts[-turns] :]) if turns else ())
