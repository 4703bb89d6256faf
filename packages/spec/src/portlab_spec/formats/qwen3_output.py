"""Parsing a Qwen3 model's output, whole or as it arrives: text, thinking, and calls as JSON between two tokens."""

import re
from collections.abc import Callable
from typing import Any

from portlab_spec.conversation import ToolCall
from portlab_spec.formats import gemma3_python as python
from portlab_spec.formats.call_json import call_of, read_json
from portlab_spec.formats.call_values import CallSyntaxError
from portlab_spec.formats.gemma3_calls import names_in
from portlab_spec.formats.segments import Delta, Event, Parsed
from portlab_spec.formats.values import NAME

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
RESPONSE, END_RESPONSE = "<tool_response>", "</tool_response>"
THINK, END_THINK = "<think>", "</think>"
STOPS = (IM_END, END_OF_TEXT)  # those of the models' generation_config.json

IS_NAME = re.compile(NAME)
# A call that lost its tokens is text, but its name is not to be overlooked.
_BARE_CALL = re.compile(rf'\{{\s*+"name"\s*+:\s*+"({NAME})"\s*+,\s*+"(?:arguments|parameters)"')


class OutputParser:
    """The machine. `push` pieces in order, each a control token or a run of plain text, then `finish`.

    Text may come before calls, as the template writes it, and not behind them. White space beside calls separates
    them and is no text, save at the end of text that comes first.
    """

    def __init__(self, *, lenient: bool) -> None:
        self._lenient = lenient
        self._calls: list[ToolCall] = []
        self._names: list[str] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._error: str | None = None
        self._stop: str | None = None
        self._state: Callable[[str, bool], list[Event]] = self._outside
        self._in_text = False
        self._blank: list[str] = []  # white space that is text only if more follows
        self._newlines = ""  # in a thought: they belong to it only if more follows
        self._body: list[str] = []
        self._stray = ""

    def push(self, text: str, *, control: bool) -> list[Event]:
        """Take one piece; what it makes certain."""
        return self._state(text, control) if text else []

    def finish(self) -> Parsed:
        """The result, once all pieces are in."""
        if self._state == self._in_call:
            self._fail("a call is not closed")
            self._names += names_in("".join(self._body))
        elif self._state == self._in_thought:
            self._fail("the thinking is not closed")
        if not self._lenient:
            if self._stop is None:
                self._fail("cut off before a stop token")
            elif not self._calls and not self._text:
                self._fail("the answer is empty")
        text = "".join(self._text)
        return Parsed(
            calls=() if self._error and not self._lenient else tuple(self._calls),
            text=text,
            error=self._error,
            stopped=self._stop is not None,
            names=(*self._names, *_BARE_CALL.findall(text)),
            reasoning="".join(self._reasoning),
        )

    # ------------------------------------------------------------------------------------------- states

    def _outside(self, text: str, control: bool) -> list[Event]:
        if not control:
            return self._say(text)
        if text == CALL:
            self._state, self._body, self._stray = self._in_call, [], ""
            self._in_text, self._blank = False, []
        elif text == THINK:
            if self._text or self._calls or self._reasoning:
                self._fail(f"{THINK} after the start")
            elif not self._lenient:
                self._fail("thinking, which the prompt has closed")
            self._state, self._newlines = self._in_thought, ""
            self._in_text, self._blank = False, []
        elif text in STOPS:
            self._stop, self._state = text, self._stopped
        else:
            self._fail(f"{text} outside a call")
        return []

    def _in_call(self, text: str, control: bool) -> list[Event]:
        if not control:
            self._body.append(text)
        elif text == END_CALL:
            return self._end_call(closed=True)
        elif text == CALL or text in STOPS:
            # A lost end token: what is complete without it is a call, but never at the end of a cut-off output.
            return self._end_call(closed=False) + self._outside(text, control=True)
        else:
            self._stray = self._stray or text
        return []

    def _in_thought(self, text: str, control: bool) -> list[Event]:
        if control and text == END_THINK:
            self._state = self._after_thought
            return []
        if control and text in STOPS:
            self._fail("the thinking is not closed")
            self._stop, self._state = text, self._stopped
            return []
        if control:
            self._fail(f"{text} inside the thinking")
        text = self._newlines + text if self._reasoning else (self._newlines + text).lstrip("\n")
        thought = text.rstrip("\n")
        self._newlines = text[len(thought) :]
        if not thought:
            return []
        self._reasoning.append(thought)
        return [Delta("reasoning", thought)]

    def _after_thought(self, text: str, control: bool) -> list[Event]:
        text = text if control else text.lstrip("\n")  # the template's blank line
        if not text:
            return []
        self._state = self._outside
        return self._outside(text, control)

    def _stopped(self, text: str, control: bool) -> list[Event]:
        if not (control and self._lenient and text == END_OF_TEXT):  # it pads as well
            self._fail("output goes on after a stop token")
        return []

    # ------------------------------------------------------------------------------------------- helpers

    def _say(self, text: str) -> list[Event]:
        if not self._in_text:
            self._blank.append(text)
            if text.isspace():
                return []
            text, self._in_text = "".join(self._blank), True
            if self._calls:
                self._fail("text after a call")
        self._text.append(text)
        return [Delta("text", text)]

    def _end_call(self, *, closed: bool) -> list[Event]:
        self._state = self._outside
        body = "".join(self._body)
        call, fault = _read(body)
        self._names += [call.name] if call else names_in(body)
        if self._stray:
            call, fault = None, f"{self._stray} inside a call"
        elif not closed:
            fault = fault or "a call is not closed"
        if call is None or (fault and not self._lenient):
            self._fail(fault)
            return []
        self._calls.append(call)
        return [call] if self._lenient else []

    def _fail(self, reason: str) -> None:
        self._error = self._error or reason


def _read(body: str) -> tuple[ToolCall | None, str]:
    """The call between two tokens, in any spelling with one reading, and why the grammar refuses it, or ""."""
    fault = ""
    for reader in (_strictly, _loosely, _in_python):
        try:
            call = reader(body)
            if not IS_NAME.fullmatch(call.name):
                return None, f"{call.name!r} is not a tool name"
            return call, fault
        except CallSyntaxError as error:
            fault = fault or str(error)
    return None, fault


def _strictly(body: str) -> ToolCall:
    return call_of(read_json(body), ("arguments",))


def _loosely(body: str) -> ToolCall:
    return _loose_call(read_json(body))


def _in_python(body: str) -> ToolCall:
    """As models write objects that remember Python: either quote, `True`, a comma that stands last."""
    return _loose_call(python.read_value(body.strip()))


def _loose_call(value: Any) -> ToolCall:
    """A call with `parameters`, or with its arguments as JSON in a string, as OpenAI's interface has them."""
    if isinstance(value, dict) and isinstance(text := value.get("arguments"), str):
        value = {**value, "arguments": read_json(text)}
    return call_of(value, ("arguments", "parameters"))
