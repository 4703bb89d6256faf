"""Finding calls in what Gemma 3 wrote, in one pass over text that may arrive in pieces.

Gemma 3 has no token that opens a call, so position decides. A *block* of calls is

- a bracketed text that starts on a line of its own and, up to its closing bracket, is nothing but calls;
- a code fence (` ``` `, `json`, `python`, `tool_code`, `tool_call`) that holds nothing but such blocks, or, under
  `tool_code`, bare calls `f(a=1)`.

Everything else is text, above all a sentence that mentions `f(a=1)` and a fence with other code in it. A block that is
not closed makes text of what follows: nothing is tried twice, so that time is linear in the text.
"""

import re
from collections.abc import Callable, Sequence

from portlab_spec.conversation import ToolCall
from portlab_spec.formats.gemma3_calls import names_in, read_calls_leniently
from portlab_spec.formats.segments import Delta, Event
from portlab_spec.formats.values import MAX_DEPTH

_FENCE = "```"
_CALL_FENCE = re.compile(r"```(json|python|tool_code|tool_calls?|)[ \t]{0,8}\r?\n")
_CALL_FENCE_SO_FAR = re.compile(r"```[a-z_]{0,10}[ \t]{0,8}\r?")
_CLOSING_FENCE = re.compile(r"[ \t]*```[ \t\r]*")
_BARE_CALL = re.compile(r"[A-Za-z_][\w.-]{0,127}\(")
_BARE_CALL_SO_FAR = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_SPACE = re.compile(r"\s*")
# In each string, and outside strings: the characters that matter.
_NOTABLE = {'"': re.compile(r'["\\\n]'), "'": re.compile(r"['\\\n]"), "": re.compile(r"[\[\](){}\"'`]")}
_MAX_BRACKETS = MAX_DEPTH + 4  # a list of calls, a call and its arguments stand around the deepest value
_OPENERS = {"[": "]", "{": "}", "(": ")"}


class Brackets:
    """Finds where a bracketed text ends, minding strings; goes on where it stopped when more text is there.

    Attributes:
        at: position reached, counted from the opening bracket.
        failed: brackets do not match, a string runs over the end of its line, a code fence comes, or nesting is too
            deep.
    """

    def __init__(self) -> None:
        self.at = 0
        self.failed = False
        self._closers: list[str] = []
        self._quote = ""

    def scan(self, text: str, start: int) -> bool:
        """Go on in `text`, whose bracket opens at `start`; true once the end or a fault is found."""
        while match := _NOTABLE[self._quote].search(text, start + self.at):
            char, after = match[0], match.end()
            if char == "\\":
                if after == len(text):
                    self.at = match.start() - start
                    return False
                after += text[after] != "\n"
            elif char == "\n":
                self.failed = True
            elif char == "`":  # a fence opens or closes here
                self.failed = True
                after = match.start()
            elif char in "\"'":
                self._quote = "" if self._quote else char
            elif char in _OPENERS:
                self._closers.append(_OPENERS[char])
                self.failed = len(self._closers) > _MAX_BRACKETS
            else:
                self.failed = self._closers.pop() != char
            self.at = after - start
            if self.failed or not self._closers:
                return True
        self.at = len(text) - start
        return False


class Scanner:
    """Splits what a model wrote into text and calls, as it arrives.

    Attributes:
        text: all text found, in pieces.
        calls: all calls found.
        names: names in call position, in brackets that are no calls too.
    """

    def __init__(self) -> None:
        self.text: list[str] = []
        self.calls: list[ToolCall] = []
        self.names: list[str] = []
        self._events: list[Event] = []
        self._said: list[str] = []  # text that no event has told yet
        self._buffer = ""
        self._at = 0  # all before it is decided
        self._state: Callable[[], bool] = self._line_start
        self._brackets = Brackets()
        self._language = ""
        self._body = 0  # in a fence, counted from `_at`: where its content starts,
        self._inner = 0  # where its next block may start,
        self._blocks: list[tuple[int, int]] = []  # and where the blocks so far stand
        self._line = ""  # of a fence of other code: its current line, as far as known

    def feed(self, text: str) -> list[Event]:
        """Take in more text; what it makes certain."""
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        while self._at < len(self._buffer) and self._state():
            pass
        return self._new_events()

    def finish(self, *, ended: bool) -> list[Event]:
        """The text is over; what that makes certain.

        Args:
            ended: the model ended its turn. Without that, an open block was cut off: it is neither call nor text.
        """
        size = len(self._buffer) - self._at
        in_fence = self._state == self._fence_body
        if ended and in_fence and self._blocks and not self._buffer[self._at + self._inner :].strip():
            self._read_fence(size)  # only the closing fence is missing
        else:
            if in_fence or self._state == self._block:
                self._note_names(self._body if in_fence else 0, size)
            if ended:
                self._say(size)
        return self._new_events()

    @property
    def open_text(self) -> str:
        """What is neither text nor call so far: a block that may go on."""
        return self._buffer[self._at :]

    # Each state decides the text at `_at` and returns false where it needs more.

    def _line_start(self) -> bool:
        self._say(len(_SPACE.match(self._buffer, self._at)[0]))  # type: ignore[index]  # it matches anything
        start = self._buffer[self._at : self._at + len(_FENCE)]
        if start[:1] in _OPENERS and start[0] != "(":
            self._brackets = Brackets()
            self._state = self._block
        elif start == _FENCE:
            self._state = self._fence
        elif _FENCE.startswith(start):
            return False
        else:
            self._state = self._prose
        return True

    def _prose(self) -> bool:
        end = self._buffer.find("\n", self._at) + 1
        self._say((end or len(self._buffer)) - self._at)
        if end:
            self._state = self._line_start
        return True

    def _block(self) -> bool:
        if not self._brackets.scan(self._buffer, self._at):
            return False
        size = self._brackets.at
        block = self._buffer[self._at : self._at + size]
        calls = None if self._brackets.failed else read_calls_leniently(block)
        if calls:
            self._call(calls, size)
        else:
            self._note_names(0, size)
            self._say(size)
        self._state = self._line_start if calls or block.endswith("\n") else self._prose
        return True

    def _fence(self) -> bool:
        if opened := _CALL_FENCE.match(self._buffer, self._at):
            self._language = opened[1]
            self._body = self._inner = opened.end() - self._at
            self._blocks = []
            self._brackets = Brackets()
            self._state = self._fence_body
        elif _CALL_FENCE_SO_FAR.fullmatch(self._buffer, self._at):
            return False
        else:
            self._line = ""
            self._state = self._other_opening
        return True

    def _fence_body(self) -> bool:
        at = _SPACE.match(self._buffer, self._at + self._inner).end()  # type: ignore[union-attr]
        self._inner = at - self._at
        start = self._buffer[at : at + len(_FENCE)]
        if start == _FENCE:
            self._read_fence(self._inner + len(_FENCE))
            return True
        if _FENCE.startswith(start):
            return False
        bracket = at
        if start[0] not in "[{":
            bare = self._language == "tool_code" and _BARE_CALL.match(self._buffer, at)
            if not bare:
                if self._language == "tool_code" and _BARE_CALL_SO_FAR.fullmatch(self._buffer, at):
                    return False
                return self._not_a_call_fence(self._inner)
            bracket = bare.end() - 1
        if not self._brackets.scan(self._buffer, bracket):
            return False
        end = bracket + self._brackets.at - self._at
        if self._brackets.failed:
            return self._not_a_call_fence(end)
        self._blocks.append((self._inner, end))
        self._inner = end
        self._brackets = Brackets()
        return True

    def _other_opening(self) -> bool:
        if self._line_ends():
            # A backtick after the opening ones makes it code within a line.
            self._state = self._line_start if "`" in self._line[len(_FENCE) :] else self._other_fence
            self._line = ""
        return True

    def _other_fence(self) -> bool:
        if self._line_ends():
            if _CLOSING_FENCE.fullmatch(self._line):
                self._state = self._line_start
            self._line = ""
        return True

    def _line_ends(self) -> bool:
        """Say the rest of the line, and whether its end is there."""
        end = self._buffer.find("\n", self._at)
        piece = self._buffer[self._at : end if end >= 0 else None]
        self._line += piece
        self._say(len(piece) + (end >= 0))
        return end >= 0

    def _not_a_call_fence(self, size: int) -> bool:
        self._note_names(self._body, size)
        self._say(self._body)
        self._line = ""
        self._state = self._other_fence
        return True

    def _read_fence(self, size: int) -> None:
        blocks = [read_calls_leniently(self._buffer[self._at + a : self._at + b]) for a, b in self._blocks]
        if blocks and all(blocks):
            self._call([call for calls in blocks for call in calls or ()], size)
        else:
            self._note_names(self._body, size)
            self._say(size)
        self._state = self._line_start

    # What has been decided.

    def _say(self, size: int) -> None:
        if size:
            self._said.append(self._buffer[self._at : self._at + size])
            self._at += size

    def _call(self, calls: Sequence[ToolCall], size: int) -> None:
        self._flush_text()
        self._events += calls
        self.calls += calls
        self.names += [call.name for call in calls]
        self._at += size

    def _note_names(self, start: int, end: int) -> None:
        self.names += names_in(self._buffer[self._at + start : self._at + end])

    def _flush_text(self) -> None:
        text = "".join(self._said)
        if text and (self.text or not text.isspace()):  # whitespace alone is no text
            self._said = []
            self.text.append(text)
            self._events.append(Delta("text", text))

    def _new_events(self) -> list[Event]:
        self._flush_text()
        events, self._events = self._events, []
        return events
