"""What a turn looks like, and the chat with its commands, signals and hostile text."""

import asyncio
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

from fake_openai import call, in_thread, last_role, make_calls, say
from rich.console import Console

from fitnesscoach.loop import Finish
from fitnesscoach.session import Calls, Results, TextPiece
from fitnesscoach.terminal import TurnView, call_line, safe
from fitnesscoach.tools import ToolResult
from portlab_spec.conversation import ToolCall

STEPS = ToolCall(name="get_steps", arguments={"date": "2026-05-12"})


def shown(*updates, finish):
    out = io.StringIO()
    view = TurnView(Console(file=out, width=80))

    async def show():
        for update in updates:
            await view.show(update)

    asyncio.run(show())
    view.finish(finish)
    return out.getvalue()


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


def test_ctrl_c_ends_the_turn_and_not_the_program():
    with in_thread(coach) as fake:
        master, slave = pty.openpty()
        process = subprocess.Popen(
            coach_command("chat", "--endpoint", fake.url, "--model", "tuned"),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "NO_COLOR": "1"},
        )
        os.close(slave)
        try:
            screen = Screen(master)
            screen.wait_for("you   ")
            os.write(master, b"slow question\n")
            wait_until(lambda: fake.open == 1)
            process.send_signal(signal.SIGINT)
            screen.wait_for("! stopped")
            wait_until(lambda: fake.open == 0)
            os.write(master, b"Steps?\n")
            screen.wait_for("coach A fair amount.")
            screen.wait_for("you   ")
            time.sleep(0.5)  # the prompt is there just before readline waits
            process.send_signal(signal.SIGINT)  # at the prompt: a hint
            screen.wait_for("/quit leaves")
            os.write(master, b"/quit\n")
            assert process.wait(10) == 0
        finally:
            process.kill()
            os.close(master)


class Screen:
    """Reads a terminal until something appears."""

    def __init__(self, handle):
        self._handle, self._text = handle, ""

    def wait_for(self, text):
        end = time.monotonic() + 20
        while text not in self._text:
            ready, _, _ = select.select([self._handle], [], [], max(0, end - time.monotonic()))
            assert ready, self._text
            self._text += os.read(self._handle, 4096).decode()
        self._text = self._text.partition(text)[2]


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
