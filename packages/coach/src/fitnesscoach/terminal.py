"""How a turn looks on a terminal."""

import json
import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fitnesscoach.loop import Finish
from fitnesscoach.session import Calls, Results, TextPiece, Update
from fitnesscoach.tools import ToolResult
from portlab_spec.conversation import Tool, ToolCall

# Escape sequences and marks that reverse the direction of writing: a model's text must not drive the terminal.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONG = 160  # characters of a result on one line


class TurnView:
    """Shows one turn as it happens; text and calls in the order in which they come."""

    def __init__(self, console: Console) -> None:
        self._console, self._in_text = console, False

    async def show(self, update: Update) -> None:
        """Show an update."""
        match update:
            case TextPiece(text):
                if not self._in_text:
                    text = text.lstrip()
                if text:
                    self._begin_text()
                    self._print(Text(safe(text)), end="")
            case Calls(calls):
                self._end_text()
                for call in calls:
                    self._print(Text(f"  → {call_line(call)}", style="cyan"))
            case Results(results):
                for result in results:
                    self._print(Text(f"  ← {result_line(result)}", style="red" if result.error else "green"))

    def finish(self, finish: Finish) -> None:
        """Show how the turn ended, as far as it has not been seen."""
        self._end_text()
        if finish.detail:
            self._print(Text(f"  ! {safe(finish.detail)}", style="yellow"))
        if not finish.text and finish.told:
            self._print(Text.assemble(("coach ", "bold"), safe(finish.spoken)))

    def stopped(self) -> None:
        """The user stopped the turn."""
        self._end_text()
        self._print(Text("  ! stopped", style="yellow"))

    def _begin_text(self) -> None:
        if not self._in_text:
            self._print(Text("coach ", style="bold"), end="")
            self._in_text = True

    def _end_text(self) -> None:
        if self._in_text:
            self._print(Text(""))
            self._in_text = False

    def _print(self, text: Text, end: str = "\n") -> None:
        self._console.print(text, end=end, soft_wrap=True, highlight=False)


def safe(text: str) -> str:
    """Text that only shows, whatever a model or a server wrote."""
    return _UNSAFE.sub("�", text).encode(errors="replace").decode()


def call_line(call: ToolCall) -> str:
    """A call, as code would have it."""
    arguments = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in call.arguments.items())
    return _short(f"{call.name}({arguments})")


def result_line(result: ToolResult) -> str:
    """A result or its fault, with the time if it took noticeably long."""
    text = f"{result.status}: {result.error}" if result.error else json.dumps(result.response, ensure_ascii=False)
    return _short(text) + (f"  {result.seconds:.1f} s" if result.seconds >= 0.5 else "")


def tools_table(tools: Sequence[Tool]) -> Table:
    """The tools on offer."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    for tool in tools:
        properties = tool.parameters.get("properties")
        names = ", ".join(properties) if isinstance(properties, dict) else ""
        table.add_row(Text(f"{tool.name}({names})", style="cyan"), Text(tool.description))
    return table


def _short(text: str) -> str:
    text = safe(" ".join(text.split()))
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"
