"""Results of tools, matched to the calls that they answer and put in the order of these."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from portlab_spec.conversation import Message, ToolCall
from portlab_spec.data.importers.context import Context, RowError


@dataclass(frozen=True)
class Result:
    """What a tool returned: text in `content` or an object in `response`; named, or tied to the id of a call."""

    name: str | None
    call_id: str | None
    content: str | None = None
    response: dict[str, Any] | None = None


class PendingCalls:
    """The calls of the last assistant message, and the results that have arrived for them.

    Sources tie a result to its call by id, by name, or by order alone. The record has neither ids nor a second
    order: a result names its tool, and results stand in the order of the calls.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._calls: Sequence[ToolCall] = ()
        self._ids: Sequence[str | None] = ()
        self._results: list[Result] = []

    def expect(self, calls: Sequence[ToolCall], ids: Sequence[str | None]) -> None:
        """The calls that the next results answer."""
        known = [call_id for call_id in ids if call_id is not None]
        if len(set(known)) < len(known):
            raise RowError("two calls have the same id", "Give every call its own id")
        self._calls, self._ids = calls, ids

    def answer(self, results: Iterable[Result]) -> None:
        """Take results in the order in which they arrive."""
        self._results += results
        if not self._calls:
            raise RowError("a result without a call before it", "Add the call, or remove the result")
        if len(self._results) > len(self._calls):
            raise RowError(f"{len(self._results)} results for {len(self._calls)} calls", "Give one result per call")

    def settle(self) -> list[Message]:
        """The results as messages, in the order of the calls; the calls are answered then.

        Raises:
            RowError: some calls are answered and some are not, or a result fits none.
        """
        if not self._results:
            self._calls, self._ids = (), ()
            return []
        if len(self._results) < len(self._calls):
            raise RowError(
                f"{len(self._results)} of {len(self._calls)} calls are answered", "Give every call its result"
            )
        places: dict[int, Result] = {}
        # Ids are certain and names nearly so: what carries either chooses before what has only its place.
        for result in sorted(self._results, key=lambda r: (r.call_id is None, r.name is None)):
            places[self._place(result, places)] = result
        if [places[place] for place in sorted(places)] != self._results:
            self._context.mended("results put in the order of the calls")
        messages = [
            Message(role="tool", name=call.name, content=places[i].content, response=places[i].response)
            for i, call in enumerate(self._calls)
        ]
        self._calls, self._ids, self._results = (), (), []
        return messages

    def _place(self, result: Result, taken: dict[int, Result]) -> int:
        free = [i for i in range(len(self._calls)) if i not in taken]
        if result.call_id is not None and any(self._ids):
            if result.call_id not in self._ids:
                raise RowError(f"a result answers the call {result.call_id!r}, which was not made")
            place = self._ids.index(result.call_id)
            if place in taken:
                raise RowError(f"the call {result.call_id!r} is answered twice")
            if result.name not in (None, self._calls[place].name):
                raise RowError(f"the result of {self._calls[place].name} is named {result.name}")
            return place
        if result.name is not None:
            for place in free:
                if self._calls[place].name == result.name:
                    return place
            raise RowError(f"a result of {result.name}, which was not called, or not that often")
        if len(self._calls) > 1:
            self._context.mended("unnamed result matched by order")
        return free[0]
