"""What the turns of both native dialects are made of."""

import re
from dataclasses import dataclass, field

from portlab_spec.conversation import Conversation, Message, Tool
from portlab_spec.errors import UserError
from portlab_spec.formats.declarations import DeclarationWriter
from portlab_spec.formats.segments import Segment, joined, plain
from portlab_spec.formats.values import NAME, ValueWriter

_NAME = re.compile(NAME)
_KEPT = 4096  # declarations


@dataclass(frozen=True)
class TurnWriter:
    """Writes turns, declarations, calls and results."""

    values: ValueWriter
    declared: DeclarationWriter
    _declared: dict[int, tuple[Tool, list[Segment]]] = field(default_factory=dict, repr=False, compare=False)

    def control(self, token: str, *, loss: bool = False) -> Segment:
        """One control token."""
        return Segment(token, loss=loss, control=True)

    def open(self, role: str) -> list[Segment]:
        """The start of a turn."""
        return [self.control(self.values.markers.turn), Segment(role + "\n")]

    def close(self, *, loss: bool = False) -> list[Segment]:
        """The end of a turn. The model is never asked for the newline: it stops before."""
        return [self.control(self.values.markers.end_turn, loss=loss), Segment("\n")]

    def text(self, text: str, where: str, *, loss: bool = False) -> list[Segment]:
        """Plain text, nothing if empty; refused if it holds a control token."""
        return [plain(text, where, self.values.markers.refused, loss=loss)] if text else []

    def declarations(self, conversation: Conversation) -> list[Segment]:
        """The tools on offer, one behind the other.

        A data set offers the same few tools over and over, so what was written for one is kept with it.
        """
        out: list[Segment] = []
        for tool in conversation.tools:
            found = self._declared.get(id(tool))
            if found is None or found[0] is not tool:
                segments = joined(self.declared.tool(tool, f"{conversation.id}: tool {tool.name}"))
                if len(self._declared) >= _KEPT:
                    self._declared.clear()
                # The tool is kept too: while it lives, no other can have its identity.
                found = self._declared[id(tool)] = (tool, segments)
            out += found[1]
        return out

    def calls(self, message: Message, where: str) -> list[Segment]:
        """The calls of a message, one behind the other."""
        markers, loss = self.values.markers, message.supervised
        out: list[Segment] = []
        for j, call in enumerate(message.tool_calls):
            inner = f"{where}.tool_calls[{j}]"
            if not _NAME.fullmatch(call.name):
                raise UserError(f"{call.name!r} is not a tool name", where=inner, fix="Use letters, digits, _ . -")
            out += [
                self.control(markers.call, loss=loss),
                plain(f"call:{call.name}", inner, markers.refused, loss=loss),
            ]
            out += self.values.fields(call.arguments, f"{inner}.arguments", loss=loss)
            out.append(self.control(markers.end_call, loss=loss))
        return out

    def result(self, message: Message, where: str, *, opened: bool) -> list[Segment]:
        """The result of a call; `opened` if its first marker is already there, as the stop token of the call."""
        markers = self.values.markers
        if not _NAME.fullmatch(message.name or ""):
            raise UserError(f"{message.name!r} is not a tool name", where=where, fix="Use letters, digits, _ . -")
        out = [] if opened else [self.control(markers.response)]
        out.append(plain(f"response:{message.name}", where, markers.refused))
        fields = {"value": message.content or ""} if message.response is None else message.response
        out += self.values.fields(fields, f"{where}.{'content' if message.response is None else 'response'}")
        return [*out, self.control(markers.end_response)]
