"""How a turn looks on a terminal."""

import json
import re
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from fitnesscoach.loop import Finish
from fitnesscoach.session import Calls, Results, TextPiece, Update
from fitnesscoach.tools import ToolResult
from fitnesscoach.wrap import UNLIMITED, WordWrap
from portlab_spec.conversation import Tool, ToolCall

# Escape sequences and marks that reverse the direction of writing: a model's text must not drive the terminal.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONG = 160  # characters of a call or a result
_SPEAKER = "coach "


class TurnView:
    """Shows one turn as it happens: text and calls in the order in which they come, a clock while nothing does.

    On a terminal lines are broken between words; elsewhere they are left whole.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text: WordWrap | None = None  # of the paragraph that is being written
        self._clock: Progress | None = None

    def __enter__(self) -> Self:
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_waiting()

    async def show(self, update: Update) -> None:
        """Show an update."""
        self._stop_waiting()
        match update:
            case TextPiece(text):
                self._stream(safe(text))
            case Calls(calls):
                self._end_text()
                for call in calls:
                    self._line("→", call_line(call), "cyan")
            case Results(results):
                for result in results:
                    self._line("←", result_line(result), "red" if result.error else "green")
                self._wait()

    def finish(self, finish: Finish) -> None:
        """Show how the turn ended, as far as it has not been seen."""
        self._end_text()
        if finish.detail:
            self._line("!", safe(finish.detail), "yellow")
        if not finish.text and finish.told:
            self._stream(safe(finish.spoken))
            self._end_text()

    def stopped(self) -> None:
        """The user stopped the turn."""
        self._end_text()
        self._line("!", "stopped", "yellow")

    def _stream(self, text: str) -> None:
        if self._text is None:
            if not (text := text.lstrip()):
                return
            self._text = word_wrap(self._console, len(_SPEAKER))
            self._print(Text(_SPEAKER, style="bold"), end="")
        self._print(Text(self._text.feed(text)), end="")

    def _end_text(self) -> None:
        self._stop_waiting()
        if self._text is not None:
            self._print(Text(self._text.end()))
            self._text = None

    def _line(self, mark: str, text: str, style: str) -> None:
        start = f"  {mark} "
        self._print(Text(start + word_wrap(self._console, len(start)).whole(text), style=style))

    def _print(self, text: Text, end: str = "\n") -> None:
        self._console.print(text, end=end, soft_wrap=True, highlight=False)

    def _wait(self) -> None:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn(" "), SpinnerColumn(), TimeElapsedColumn())
            self._clock = Progress(*columns, console=self._console, transient=True)
            self._clock.add_task("")
            self._clock.start()

    def _stop_waiting(self) -> None:
        if self._clock:
            self._clock.stop()
            self._clock = None


def word_wrap(console: Console, indent: int) -> WordWrap:
    """How text that begins at `indent` goes on: to the width of a terminal, anywhere else as it is."""
    return WordWrap(console.width, indent) if console.is_terminal else WordWrap(UNLIMITED, 0)


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


def tool_lines(tools: Sequence[Tool], console: Console) -> Text:
    """The tools on offer, each with what it does under its name."""
    text = Text()
    for tool in tools:
        properties = tool.parameters.get("properties")
        names = ", ".join(properties) if isinstance(properties, dict) else ""
        for line, indent, style in ((f"{tool.name}({names})", 2, "cyan"), (tool.description, 4, "")):
            text.append(" " * indent + word_wrap(console, indent).whole(line) + "\n", style)
    text.rstrip()
    return text


def _short(text: str) -> str:
    text = safe(" ".join(text.split()))
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"
