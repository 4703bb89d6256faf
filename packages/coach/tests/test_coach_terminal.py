"""What a turn looks like, and the chat with its commands, signals and hostile text."""

import asyncio
import contextlib
import io
import json
import os
import pty
import re
import readline
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from fake_openai import call, in_thread, last_role, make_calls, say
from rich.console import Console

from fitnesscoach.loop import Finish
from fitnesscoach.session import Calls, Results, TextPiece
from fitnesscoach.terminal import TurnView, call_line, safe, tool_lines
from fitnesscoach.tools import ToolResult
from portlab_spec.conversation import Tool, ToolCall

STEPS = ToolCall(name="get_steps", arguments={"date": "2026-05-12"})


def shown(*updates, finish, **options):
    console = Console(file=io.StringIO(), **{"width": 80, **options})

    async def show():
        for update in updates:
            await view.show(update)

    with TurnView(console) as view:
        asyncio.run(show())
        view.finish(finish)
    return console.file.getvalue()


def done(text="", outcome="answered", detail="", results=()):
    return Finish(outcome, text, detail, results, ())


def test_calls_results_and_streamed_text_are_shown_in_their_order():
    result = ToolResult(STEPS, "ok", {"steps": 7})
    text = shown(Calls((STEPS,)), Results((result,)), TextPiece("Se"), TextPiece("ven."), finish=done("Seven."))
    assert text == '  → get_steps(date="2026-05-12")\n  ← {"steps": 7}\ncoach Seven.\n'


def test_a_fault_is_one_line_and_what_was_found_is_still_told():
    result = ToolResult(STEPS, "ok", {"steps": 7})
    text = shown(finish=done(outcome="looped", detail="the model repeats a call", results=(result,)))
    assert text == "  ! the model repeats a call\ncoach Steps: steps 7.\n"


def test_escape_sequences_and_reversed_text_are_not_passed_on():
    assert safe("a\x1b[2Jb\u202ec\rd\x07\ud800") == "a�[2Jb�c�d�?"
    assert "\x1b" not in shown(TextPiece("\x1b]0;title\x07hi [red]x[/red]"), finish=done("x"))


def test_text_is_not_taken_for_markup():
    assert "[bold]x[/bold] [/nope]" in shown(TextPiece("[bold]x[/bold] [/nope]"), finish=done("x"))


def test_a_long_call_stays_on_one_line():
    assert len(call_line(ToolCall(name="x", arguments={"a": "y\n" * 5000}))) == 160


def test_on_a_terminal_lines_break_between_words_and_nowhere_else():
    result = ToolResult(STEPS, "ok", {"steps": 7, "date": "2026-05-12"})
    turn = (Calls((STEPS,)), Results((result,)), TextPiece("You have walk"), TextPiece("ed seven steps\nin all."))
    on_terminal = {"force_terminal": True, "color_system": None, "_environ": {"TERM": "dumb"}, "height": 24}
    assert shown(*turn, finish=done("x"), width=24, **on_terminal).splitlines() == [
        '  → get_steps(date="2026',
        '    -05-12")',
        '  ← {"steps": 7, "date":',
        '    "2026-05-12"}',
        "coach You have walked",
        "      seven steps",
        "      in all.",
    ]
    assert shown(*turn, finish=done("x"), width=24).splitlines()[2:] == ["coach You have walked seven steps", "in all."]


def test_a_clock_runs_until_something_comes_and_leaves_nothing_behind():
    on_terminal = {"force_terminal": True, "color_system": None, "_environ": {"TERM": "xterm"}}
    text = shown(TextPiece("Se"), TextPiece("ven."), finish=done("Seven."), **on_terminal)
    assert "0:00:00" in text
    erased = text.rindex("\x1b[2K")
    assert text.index("0:00:00") < erased < text.index("coach Seven.")
    assert text.endswith("coach Seven.\n")


def test_the_tools_are_listed_with_what_they_take():
    tool = Tool(name="get_steps", description="Get the steps of a day.", parameters={"properties": {"date": {}}})
    console = Console(force_terminal=True, width=24, height=24)
    assert str(tool_lines([tool], console)) == "  get_steps(date)\n    Get the steps of a\n    day."


# ---------------------------------------------------------------------------------------------- as a program


async def coach(body, request):
    if last_role(body) == "tool":
        return await say(request, "A fair amount.")
    if "slow" in body["messages"][-1]["content"]:
        await asyncio.sleep(60)
    return await make_calls(request, call("get_steps"))


def coach_command(*args):
    return [sys.executable, "-m", "fitnesscoach", *args]


def test_a_conversation_over_a_pipe(tmp_path):
    lines = "/help\n/trace\nSteps?\n/trace\n/tools\n/nope\n/reset\n\n/quit\nnever read\n"
    with in_thread(coach) as fake:
        trace = tmp_path / "t.jsonl"
        args = coach_command("chat", "--endpoint", fake.url, "--model", "tuned", "--trace", str(trace))
        done = subprocess.run(args, input=lines, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for expected in (
        "Coach on tuned", "Nothing was asked yet", "→ get_steps()", "coach A fair amount.", "finish", "answered",
        "Get the current heart rate", "There is no command /nope", "Forgotten.",
    ):  # fmt: skip
        assert expected in done.stdout
    steps = [json.loads(line)["step"] for line in trace.read_text().splitlines()]
    assert steps == ["question", "model", "tool", "model", "finish"]


def test_without_a_server_the_chat_says_so_and_goes_on():
    args = coach_command("chat", "--endpoint", "http://127.0.0.1:9/v1", "--model", "tuned")
    done = subprocess.run(args, input="Steps?\n/trace\n", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  ! tuned: nothing answers at http://127.0.0.1:9/v1" in done.stdout
    assert "model_error" in done.stdout


@contextlib.contextmanager
def on_terminal(url, columns=80, **env):
    """The chat as a program on a terminal of its own."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    kept = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "INPUTRC")
    }
    process = subprocess.Popen(
        coach_command("chat", "--endpoint", url, "--model", "tuned"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**kept, "TERM": "dumb", **env},
    )
    os.close(slave)
    try:
        yield Screen(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_ctrl_c_ends_the_turn_and_not_the_program():
    with in_thread(coach) as fake, on_terminal(fake.url) as screen:
        screen.ask("slow question\n")
        wait_until(lambda: fake.open == 1)
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for("! stopped")
        wait_until(lambda: fake.open == 0)
        screen.ask("Steps?\n")
        screen.wait_for("coach A fair amount.")
        screen.wait_for_prompt()
        screen.interrupt_prompt("/quit leaves")
        screen.ask("/quit\n")
        assert screen.process.wait(10) == 0


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_ctrl_d_leaves_on_a_line_of_its_own(terminal):
    with in_thread(coach) as fake, on_terminal(fake.url, TERM=terminal) as screen:
        screen.ask("\x04")
        assert screen.rest().count("\n") == 1
        assert screen.process.wait(10) == 0


def test_keys_pressed_during_an_answer_are_kept_for_the_next_prompt():
    with in_thread(coach) as fake, on_terminal(fake.url) as screen:
        screen.ask("slow question\n")
        wait_until(lambda: fake.open == 1)
        screen.write("How many steps")
        screen.process.send_signal(signal.SIGINT)
        assert "How" not in screen.wait_for("! stopped")
        screen.wait_for("you   How many steps")
        screen.write(" today?\n")
        screen.wait_for("coach A fair amount.")
    assert fake.requests[-1]["messages"][1]["content"] == "How many steps today?"


def test_the_arrow_up_brings_the_last_question_back():
    with in_thread(coach) as fake, on_terminal(fake.url, TERM="xterm") as screen:
        screen.ask("Steps?\n")
        screen.wait_for("coach ")
        screen.ask("\x1b[A\n")
        wait_until(lambda: len(fake.requests) == 4)
        screen.wait_for("coach ")
        screen.wait_for("you   ")
    assert [m["content"] for m in fake.requests[-1]["messages"] if m["role"] == "user"] == ["Steps?", "Steps?"]


@pytest.mark.skipif(
    "GNU" not in (readline.__doc__ or ""), reason="only GNU readline tells pasted lines from typed ones"
)
def test_pasted_lines_are_one_question():
    with in_thread(coach) as fake, on_terminal(fake.url, TERM="xterm") as screen:
        screen.ask("\x1b[200~How many steps\rtoday?\x1b[201~\n")
        screen.wait_for("A fair amount.")
    assert fake.requests[0]["messages"][1]["content"] == "How many steps\ntoday?"


def test_answers_wrap_at_the_width_of_the_terminal_without_colours_if_asked():
    with in_thread(coach) as fake, on_terminal(fake.url, columns=18, NO_COLOR="1", TERM="xterm") as screen:
        screen.ask("Steps?\n")
        screen.wait_for("A fair\r\n      amount.")
        screen.ask("/quit\n")
        assert not re.search(r"\x1b\[(\d+;)*[34]\dm", screen.rest())


class Screen:
    """A terminal that a program runs on: what it shows is read until something appears."""

    def __init__(self, handle, process):
        self._handle, self.process, self._text = handle, process, ""

    def write(self, keys):
        os.write(self._handle, keys.encode())

    def ask(self, keys):
        """Press keys once the program waits for them at its prompt."""
        self.wait_for_prompt()
        self.write(keys)

    def wait_for_prompt(self):
        self.wait_for("you   ")
        wait_until(lambda: not termios.tcgetattr(self._handle)[3] & termios.ICANON)  # readline reads key by key

    def interrupt_prompt(self, answer):
        """Ctrl-C until it is answered: a signal just before Python's readline waits for a key is lost on its wait."""
        end = time.monotonic() + 20
        while not self._shows(answer, time.monotonic() + 1):
            assert time.monotonic() < end, self._text
            self.process.send_signal(signal.SIGINT)

    def wait_for(self, text):
        """What was shown before and with the text."""
        assert self._shows(text, time.monotonic() + 30), self._text
        before, _, self._text = self._text.partition(text)
        return before + text

    def _shows(self, text, end):
        """Whether the text is there, or comes in time."""
        while text not in self._text:
            ready, _, _ = select.select([self._handle], [], [], max(0, end - time.monotonic()))
            if not ready:
                return False
            self._text += os.read(self._handle, 4096).decode(errors="replace")
        return True

    def rest(self):
        """All that is shown until the program ends."""
        with contextlib.suppress(OSError):  # the terminal hung up
            while piece := os.read(self._handle, 4096):
                self._text += piece.decode()
        return self._text


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
