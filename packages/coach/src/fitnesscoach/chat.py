"""The conversation on a terminal. Ctrl-C ends a turn, Ctrl-D or /quit the program."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

from fitnesscoach.session import Session
from fitnesscoach.terminal import TurnView, safe, tool_lines, word_wrap
from fitnesscoach.trace import Trace

HELP = (
    ("/help", "this list"),
    ("/tools", "what the model may look up"),
    ("/trace", "the last turn in detail: prompt sizes, raw output, calls, seconds"),
    ("/reset", "forget the conversation"),
    ("/quit", "leave (also Ctrl-D)"),
    ("Ctrl-C", "stop the answer that is being given"),
)


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
        takes_pastes = _edit_lines()
        session = self._session
        self._say(f"Coach on {session.backend.name}, data: {session.data.name}. /help lists commands.")
        self._say(f"Ask, for instance: {session.tool_set.examples[0]}")
        staying = True
        while staying:
            try:
                staying = self._step(runner)
            except EOFError:
                staying = False
                if sys.stdin.isatty() and not takes_pastes:  # else readline ended the line
                    self._say("")
            except KeyboardInterrupt:
                self._say("\nCtrl-D or /quit leaves.")

    def _step(self, runner: asyncio.Runner) -> bool:
        """Read one line and do what it says; whether to go on."""
        line = input("you   " if sys.stdin.isatty() else "").strip()
        if line.startswith("/"):
            return self._command(line[1:].strip())
        if line:
            self._turn(runner, line)
        return True

    def _command(self, name: str) -> bool:
        """Run a command; whether to go on."""
        if name in self._commands:
            return self._commands[name]()
        self._say(f"There is no command /{safe(name)[:40]}. /help lists them.")
        return True

    def _turn(self, runner: asyncio.Runner, question: str) -> None:
        with _unechoed(), TurnView(self._console) as view:
            try:
                view.finish(runner.run(self._session.ask(question, view.show)))
            except KeyboardInterrupt:  # the runner has cancelled the turn and waited for it
                view.stopped()

    def _help(self) -> bool:
        for name, about in HELP:
            self._say(f"  {name:<8} " + about, indent=11)
        self._say("Ask, for instance:")
        for example in self._session.tool_set.examples:
            self._say("  " + example, indent=2)
        return True

    def _tools(self) -> bool:
        lines = tool_lines(self._session.tool_set.toolbox.tools, self._console)
        self._console.print(lines, highlight=False, soft_wrap=True)
        return True

    def _show_trace(self) -> bool:
        for line in self._trace.last_turn() or ["Nothing was asked yet."]:
            self._say("  " + safe(line), indent=12)
        return True

    def _reset(self) -> bool:
        self._session.reset()
        self._say("Forgotten.")
        return True

    def _say(self, text: str, indent: int = 0) -> None:
        """Say something, the lines after the first under the character `indent` of it."""
        body = word_wrap(self._console, indent).whole(text[indent:])
        self._console.print(Text(text[:indent] + body, style="dim"), highlight=False, soft_wrap=True)


def _edit_lines() -> bool:
    """Give input() a history and line editing; whether a pasted text of several lines will be one question.

    Python turns bracketed paste off for its own prompt, libedit has none, and a dumb terminal would show its codes.
    """
    try:
        import readline
    except ImportError:
        return False
    takes_pastes = "GNU" in (readline.__doc__ or "") and os.environ.get("TERM", "dumb") != "dumb"
    if takes_pastes:
        readline.parse_and_bind("set enable-bracketed-paste on")
    return takes_pastes


@contextlib.contextmanager
def _unechoed() -> Iterator[None]:
    """Keep keys pressed meanwhile off the screen; what was typed is there at the next prompt."""
    try:
        import termios
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
