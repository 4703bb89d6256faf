"""Parsing a model's output in the native dialects, whole or as it arrives.

One machine reads pieces (a control token, or any run of plain text) and keeps no more than the call it is in; the
parse of a whole output and the stream are both made of it, so they cannot differ.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from portlab_spec.conversation import ToolCall
from portlab_spec.formats.call_body import MalformedError, name_of, parse_body
from portlab_spec.formats.markers import Markers
from portlab_spec.formats.segments import Delta, Event, Parsed, TextTokenizer
from portlab_spec.formats.values import NAME

_BARE_CALL = re.compile(rf"\bcall:\s*+({NAME})\s*+\{{")
THOUGHT = "thought"  # the name of the one channel that Gemma 4 thinks in


@dataclass(frozen=True)
class OutputGrammar:
    """What a dialect's output may be.

    Attributes:
        markers: its control tokens.
        key: what a bare key must match.
        call_stop: the token that ends an output with calls.
        text_before_calls: text may come before calls in one output.
        in_thought: the prompt has opened the thinking channel already.
    """

    markers: Markers
    key: re.Pattern[str]
    call_stop: str
    text_before_calls: bool = False
    in_thought: bool = False


class OutputParser:
    """The machine. `push` pieces in order, then `finish`."""

    def __init__(self, grammar: OutputGrammar, *, lenient: bool) -> None:
        self._grammar, self._markers, self._lenient = grammar, grammar.markers, lenient
        self._calls: list[ToolCall] = []
        self._names: list[str] = []
        self._text: list[str] = []
        self._blank: list[str] = []  # whitespace that is text only if more follows
        self._reasoning: list[str] = []
        self._newline = ""  # the line end before a channel closes is not part of the reasoning
        self._error: str | None = None
        self._stop: str | None = None
        self._last = ""
        self._state = self._in_thought if grammar.in_thought else self._outside
        self._channel: list[str] | None = None  # the channel's name while it is being read
        self._body: list[tuple[str, bool]] = []
        self._string: list[str] | None = None
        self._stray = ""

    def push(self, text: str, *, control: bool) -> list[Event]:
        """Take one piece; what it makes certain."""
        if not text:
            return []
        self._last = text if control else ""
        return self._state(text, control)

    def finish(self) -> Parsed:
        """The result, once all pieces are in."""
        cut = self._stop is None
        if self._state == self._in_call:
            self._fail("a call is not closed")
            self._note(name_of([*self._plain_body()]))
        elif self._state == self._in_thought:
            self._fail("the thinking is not closed")
        stopped = not cut or self._last in self._markers.stops
        if not self._lenient:
            if self._calls and self._stop != self._grammar.call_stop:
                self._fail(f"calls do not end with {self._grammar.call_stop}")
            elif not self._calls and cut:
                self._fail("cut off before a stop token")
            elif not self._calls and self._stop == self._markers.response:
                self._fail(f"{self._markers.response} without a call")
            elif not self._calls and not self._text:
                self._fail("the answer is empty")
        text = "".join(self._text)
        names = (*self._names, *_BARE_CALL.findall(text))
        calls = () if self._error and not self._lenient else tuple(self._calls)
        return Parsed(calls, text, self._error, stopped, names, "".join(self._reasoning))

    # ------------------------------------------------------------------------------------------- states

    def _outside(self, text: str, control: bool) -> list[Event]:
        markers = self._markers
        if not control:
            return self._say(text)
        if text == markers.call:
            if self._text and not self._grammar.text_before_calls:
                self._fail("text beside calls")
            self._state, self._body, self._string, self._stray = self._in_call, [], None, ""
        elif text in markers.stops:
            self._stop, self._state = text, self._stopped
        elif text == markers.channel:
            if self._calls:
                self._fail("thinking after calls")
            self._state, self._channel = self._in_thought, []
        else:
            self._fail(f"{text} outside a call")
        return []

    def _in_call(self, text: str, control: bool) -> list[Event]:
        markers = self._markers
        if self._string is not None:  # opaque up to the next delimiter, whatever stands in it
            if control and text == markers.quote:
                self._body.append(("".join(self._string), True))
                self._string = None
            else:
                self._string.append(text)
        elif not control:
            self._body.append((text, False))
        elif text == markers.quote:
            self._string = []
        elif text == markers.end_call:
            return self._end_call()
        elif text == markers.call or text in markers.stops:
            # A lost end marker: what is complete without it is a call, but never at the end of a cut-off output.
            self._stray = self._stray or f"{text} inside a call"
            events = self._end_call(closed=False)
            return events + self._outside(text, control=True)
        else:
            self._stray = self._stray or f"{text} inside a call"
        return []

    def _in_thought(self, text: str, control: bool) -> list[Event]:
        if control and text == self._markers.end_channel:
            self._end_channel_name()
            self._state, self._newline = self._outside, ""
            return []
        if control and text in self._markers.stops:
            self._fail("the thinking is not closed")
            self._stop, self._state = text, self._stopped
            return []
        if control:
            self._fail(f"{text} inside the thinking")
        if self._channel is not None:
            name, newline, text = text.partition("\n")
            self._channel.append(name)
            if not newline:
                return []
            self._end_channel_name()
        return self._think(text)

    def _stopped(self, text: str, control: bool) -> list[Event]:
        if not (control and self._lenient and text in (self._markers.eos, self._markers.pad)):
            self._fail("output goes on after a stop token")
        return []

    # ------------------------------------------------------------------------------------------- helpers

    def _say(self, text: str) -> list[Event]:
        if not self._text:
            self._blank.append(text)
            if text.isspace():
                return []
            text = "".join(self._blank)
        if self._calls and not text.isspace():
            self._fail("text beside calls")
        self._text.append(text)
        return [Delta("text", text)]

    def _think(self, text: str) -> list[Event]:
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if not text:
            return []
        self._reasoning.append(text)
        return [Delta("reasoning", text)]

    def _end_channel_name(self) -> None:
        if self._channel is not None and "".join(self._channel).strip() != THOUGHT:
            self._fail(f"the channel {''.join(self._channel)[:24]!r} is unknown")
        self._channel = None
        if self._reasoning:
            self._newline = "\n"  # between two thoughts

    def _end_call(self, *, closed: bool = True) -> list[Event]:
        self._state = self._outside
        body = [*self._plain_body()]
        self._note(name_of(body))
        try:
            if self._stray and (closed or not self._lenient):
                raise MalformedError(self._stray)
            call = parse_body(body, self._grammar.key, lenient=self._lenient)
            if not closed and not (body and not body[-1][1] and body[-1][0].rstrip().endswith("}")):
                raise MalformedError("a call is not closed")
        except MalformedError as error:
            self._fail(str(error))
            return []
        self._calls.append(call)
        return [call] if self._lenient else []

    def _plain_body(self) -> Iterator[tuple[str, bool]]:
        """The body with neighbouring runs of plain text joined: pieces may be cut anywhere."""
        run: list[str] = []
        for text, is_string in self._body:
            if not is_string:
                run.append(text)
                continue
            if run:
                yield "".join(run), False
                run = []
            yield text, True
        if run:
            yield "".join(run), False

    def _note(self, name: str | None) -> None:
        if name is not None:
            self._names.append(name)

    def _fail(self, reason: str) -> None:
        self._error = self._error or reason


class PieceParser(Protocol):
    """What reads the pieces of an output."""

    def push(self, text: str, *, control: bool) -> list[Event]:
        """Take one piece, a control token or a run of plain text; what it makes certain."""

    def finish(self) -> Parsed:
        """The result, once all pieces are in."""


class PieceStream:
    """`Stream` over a parser of pieces; with a tokenizer it also takes token ids."""

    def __init__(self, parser: PieceParser, controls: Sequence[str], tokenizer: TextTokenizer | None = None) -> None:
        self._parser = parser
        self._splitter = Splitter(controls)
        self._tokenizer = tokenizer
        self._by_id = control_ids(controls, tokenizer) if tokenizer else {}
        self._run: list[int] = []

    def feed(self, text: str) -> list[Event]:
        """Take a piece of text, cut anywhere, with control tokens written out."""
        return self._push(self._splitter.feed(text))

    def feed_ids(self, ids: Sequence[int]) -> list[Event]:
        """Take token ids: a marker is a token, never a run of characters.

        A token that is one byte of a character waits for the next one that is not.

        Raises:
            ValueError: the stream was made without a tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError("a stream that is fed with token ids needs a tokenizer")
        return self._push(self._cut(ids, self._tokenizer))

    def close(self) -> Parsed:
        """The parse of everything that was fed."""
        self._push(self._splitter.close())
        self._push(self._flush())
        return self._parser.finish()

    def _push(self, pieces: Iterable[tuple[str, bool]]) -> list[Event]:
        return [event for text, control in pieces for event in self._parser.push(text, control=control)]

    def _cut(self, ids: Sequence[int], tokenizer: TextTokenizer) -> Iterator[tuple[str, bool]]:
        for token in ids:
            if token in self._by_id:
                yield from self._flush()
                yield self._by_id[token], True
                continue
            self._run.append(token)
            if tokenizer.decode([token]) != "\ufffd":
                yield from self._flush()

    def _flush(self) -> Iterator[tuple[str, bool]]:
        if self._run and self._tokenizer:
            yield self._tokenizer.decode(self._run), False
        self._run = []


class Splitter:
    """Cuts text into control tokens and the runs between them, fed in pieces of any size."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, tokens)))
        self._tokens, self._longest = tokens, max(map(len, tokens))
        self._held = ""

    def feed(self, text: str) -> Iterator[tuple[str, bool]]:
        """Pieces (text, is a control token); the start of what may become a token is held back."""
        text = self._held + text
        end = self._safe_end(text)
        at = 0
        for match in self._pattern.finditer(text, 0, end):
            if match.start() > at:
                yield text[at : match.start()], False
            yield match[0], True
            at = match.end()
        if at < end:
            yield text[at:end], False
        self._held = text[end:]

    def close(self) -> Iterator[tuple[str, bool]]:
        """What was held back."""
        if self._held:
            yield self._held, False
        self._held = ""

    def _safe_end(self, text: str) -> int:
        at = text.find("<", max(len(text) - self._longest + 1, 0))
        while at >= 0:
            if any(token.startswith(text[at:]) for token in self._tokens if len(token) > len(text) - at):
                return at
            at = text.find("<", at + 1)
        return len(text)


def control_ids(tokens: Sequence[str], tokenizer: TextTokenizer) -> dict[int, str]:
    """Control tokens by id."""
    return {tokenizer.token_id(token): token for token in tokens}


def parse_pieces(pieces: Iterable[tuple[str, bool]], parser: PieceParser) -> Parsed:
    """The parse of a whole output."""
    for text, control in pieces:
        parser.push(text, control=control)
    return parser.finish()


def pieces_of_ids(ids: Sequence[int], controls: Sequence[str], tokenizer: TextTokenizer) -> Iterator[tuple[str, bool]]:
    """Pieces of token ids: control tokens by id, plain text decoded run by run."""
    by_id = control_ids(controls, tokenizer)
    run: list[int] = []
    for token in ids:
        if token not in by_id:
            run.append(token)
            continue
        if run:
            yield tokenizer.decode(run), False
            run = []
        yield by_id[token], True
    if run:
        yield tokenizer.decode(run), False


def pieces_of_text(text: str, controls: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Pieces of text with its control tokens written out."""
    splitter = Splitter(controls)
    yield from splitter.feed(text)
    yield from splitter.close()
