"""The conversation on a terminal. Ctrl-C ends a turn, Ctrl-D or /quit the program."""

import asyncio
import contextlib
import sys
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from fitnesscoach.session import Session
from fitnesscoach.terminal import TurnView, safe, tools_table
from fitnesscoach.trace import Trace

HELP = """\
  /help    this list
  /tools   what the model may look up
  /trace   what happened in the last turn: prompt sizes, raw output, calls, seconds
  /reset   forget the conversation
  /quit    leave (also Ctrl-D)
  Ctrl-C   stop the answer that is being given"""


class Chat:
    """Reads lines, answers them, until the end of input."""

    def __init__(self, session: Session, trace: Trace, console: Console) -> None:
        self._session, self._trace, self._console = session, trace, console
        self._commands: dict[str, Callable[[], bool]] = {
            "help": self._help,
            "tools": self._tools,
            "trace": self._show_trace,
            "reset": self._reset,
            "quit": lambda: False,
        }

    def run(self, runner: asyncio.Runner) -> None:
        """Talk until the user leaves. Turns run in `runner`, so that connections outlive them."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 -- gives input() a history and line editing
        self._say(f"Coach on {self._session.backend.name}, data: {self._session.data.name}. /help lists commands.")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line[1:].strip()):
                    return
            elif line:
                self._turn(runner, line)

    def _read(self) -> str | None:
        """A line without its edges; None at the end."""
        try:
            return input("you   " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._say("\nCtrl-D or /quit leaves.")
            return ""

    def _command(self, name: str) -> bool:
        """Run a command; whether to go on."""
        if name in self._commands:
            return self._commands[name]()
        self._say(f"There is no command /{safe(name)[:40]}. /help lists them.")
        return True

    def _turn(self, runner: asyncio.Runner, question: str) -> None:
        view = TurnView(self._console)
        try:
            view.finish(runner.run(self._session.ask(question, view.show)))
        except KeyboardInterrupt:  # the runner has cancelled the turn and waited for it
            view.stopped()

    def _help(self) -> bool:
        self._say(HELP)
        return True

    def _tools(self) -> bool:
        self._console.print(tools_table(self._session.tool_set.toolbox.tools))
        return True

    def _show_trace(self) -> bool:
        lines = self._trace.last_turn()
        self._say("\n".join(f"  {safe(line)}" for line in lines) or "  Nothing was asked yet.")
        return True

    def _reset(self) -> bool:
        self._session.reset()
        self._say("Forgotten.")
        return True

    def _say(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), highlight=False, soft_wrap=True)
