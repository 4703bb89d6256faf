"""What holds for any output at all, in both native dialects."""

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from char_tokenizer import CharTokenizer
from hostile_outputs import HOSTILE, hostile
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.conversation import Conversation, Message, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats import Delta, Format, find_format
from portlab_spec.formats.gemma4 import Gemma4
from portlab_spec.formats.markers import FUNCTIONGEMMA, GEMMA4, Markers
from portlab_spec.formats.output import pieces_of_text


@dataclass(frozen=True)
class Dialect:
    fmt: Format
    markers: Markers

    @property
    def tokenizer(self):
        return CharTokenizer(self.markers.structure)

    def ids(self, text: str) -> list[int]:
        """Ids as a tokenizer gives them: a marker is a token."""
        pieces = pieces_of_text(text, self.markers.structure)
        tokenizer = self.tokenizer
        return [
            i
            for piece, control in pieces
            for i in ([tokenizer.token_id(piece)] if control else tokenizer.encode(piece))
        ]

    def calls(self) -> tuple[str, ...]:
        """Whole calls, so that random outputs hold some."""
        m = self.markers
        return (
            f"{m.call}call:f{{a:1}}{m.end_call}",
            f"{m.call}call:g{{s:{m.quote}x}},y{m.quote},n:{{l:[1,{m.quote}{m.quote}]}}}}{m.end_call}",
            f"{m.call}call:h{m.end_call}{m.response}",
        )


DIALECTS = (
    Dialect(find_format("functiongemma"), FUNCTIONGEMMA),
    Dialect(Gemma4(), GEMMA4),
    Dialect(Gemma4(in_thought=True), GEMMA4),
    Dialect(Gemma4("4742fe8"), GEMMA4),  # ends its calls as it ends its texts
)
ASK = Message(role="user", content="?")
# What the grammar is made of, and what models write by mistake.
FRAGMENTS = (
    "call:f", "call:g", "call:math.add", "call", "call:", ":f", "f(", ")", "{", "}", "[", "]", ":", ",", "=", "a:",
    "b:", "a=1", "my-key:", "my key:", "1", "-2.5", "1e5", "007", "true", "null", "None", "word", "two words", " ",
    "\n", "thought", "thought\n", '"', "'", '"x"', "'y'", "\\", '\\"', "é", "🦙", "<", "<|", "|>", "<escape", "\x00",
    "\ufffd", "call:f{a:1}",
)  # fmt: skip


@st.composite
def outputs(draw) -> tuple[Dialect, str]:
    """A dialect and an output: control tokens, fragments, text and whole calls in any order."""
    dialect = draw(st.sampled_from(DIALECTS))
    known = [st.sampled_from(group) for group in (dialect.markers.structure, FRAGMENTS, dialect.calls())]
    return dialect, "".join(draw(st.lists(st.one_of(*known, st.text(max_size=4)), max_size=24)))


def parts(data, whole):
    """A text or a list of ids, cut at random."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])]


def held_back(dialect: Dialect, text: str, by_ids: bool) -> bool:
    """Whether text may be missing from a stream's deltas: it could have become a control token, or a character."""
    if by_ids:
        return not text.strip("\ufffd")
    return not text or any(token.startswith(text) for token in dialect.markers.structure)


@settings(max_examples=1000, deadline=None)
@given(outputs(), st.booleans(), st.data())
def test_a_stream_gives_the_parse_of_the_whole(output, lenient, data):
    dialect, text = output
    whole = dialect.fmt.parse_text(text, lenient=lenient)
    assert dialect.fmt.parse(dialect.ids(text), dialect.tokenizer, lenient=lenient) == whole
    for by_ids, pieces in (False, parts(data, text)), (False, list(text)), (True, parts(data, dialect.ids(text))):
        stream = dialect.fmt.stream(lenient=lenient, tokenizer=dialect.tokenizer)
        events = [event for piece in pieces for event in (stream.feed_ids(piece) if by_ids else stream.feed(piece))]
        assert stream.close() == whole
        assert [e for e in events if isinstance(e, ToolCall)] == (list(whole.calls) if lenient else [])
        for kind, expected in (("text", whole.text), ("reasoning", whole.reasoning)):
            joined = "".join(e.text for e in events if isinstance(e, Delta) and e.kind == kind)
            assert expected.startswith(joined)
            assert held_back(dialect, expected[len(joined) :], by_ids)


@settings(max_examples=1000, deadline=None)
@given(outputs())
def test_lenient_reads_whatever_strict_reads_and_the_same_way(output):
    dialect, text = output
    strict, lenient = dialect.fmt.parse_text(text), dialect.fmt.parse_text(text, lenient=True)
    assert not strict.error or strict.calls == ()
    assert (strict.text, strict.reasoning, strict.names) == (lenient.text, lenient.reasoning, lenient.names)
    if not strict.error:
        assert lenient == strict


@settings(max_examples=1000, deadline=None)
@given(outputs())
def test_calls_that_strict_accepts_can_be_written_and_read_again(output):
    dialect, text = output
    parsed = dialect.fmt.parse_text(text)
    if not parsed.calls:
        return
    # The latest revision writes every value; a string that quotes a marker is the one thing that none can write.
    writer = dialect.fmt if dialect.markers is FUNCTIONGEMMA else Gemma4()
    messages = (ASK, Message(role="assistant", tool_calls=parsed.calls))
    try:
        segments = writer.render(Conversation(id="c", messages=messages))
    except UserError as error:
        assert any(token in repr(parsed.calls) for token in dialect.markers.refused), error  # noqa: PT017
        return
    again = writer.parse_text("".join(s.text for s in segments if s.loss))
    assert (again.error, again.calls) == (None, parsed.calls)


@settings(max_examples=1000, deadline=None)
@given(outputs(), st.data())
def test_an_output_cut_off_anywhere_holds_no_call_that_the_whole_does_not(output, data):
    dialect, text = output
    cut = data.draw(st.integers(0, len(text)))
    part, whole = (dialect.fmt.parse_text(t, lenient=True).calls for t in (text[:cut], text))
    assert part == whole[: len(part)]


def is_linear(work: Callable[[int], Callable[[], object]], n: int) -> bool:
    """Whether twice the input takes less than three times the processor's time; noise is given three tries.

    A machine may be ten times as slow as usual for a while: only the ratio tells, and that it ends.
    """

    def seconds(size: int) -> float:
        run = work(size)
        gc.collect()
        gc.disable()  # its time depends on all else in the process
        start = time.process_time()
        run()
        gc.enable()
        return time.process_time() - start

    return any(seconds(n) < min(30.0, 3 * max(seconds(n // 2), 0.05)) for _ in range(3))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    ("dialect", "size"), [(DIALECTS[0], 1_000_000), (DIALECTS[1], 200_000)], ids=["functiongemma", "gemma4"]
)
def test_an_output_is_parsed_in_linear_time(dialect, size, name):
    def parse(size: int) -> Callable[[], object]:
        text = hostile(name, dialect.markers, size)
        return lambda: dialect.fmt.parse_text(text, lenient=True)

    assert is_linear(parse, size)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_stream_of_small_pieces_takes_linear_time_too(name):
    def feed(size: int) -> Callable[[], object]:
        text, stream = hostile(name, GEMMA4, size), DIALECTS[1].fmt.stream(lenient=True)
        return lambda: [[stream.feed(text[i : i + 4]) for i in range(0, len(text), 4)], stream.close()]

    assert is_linear(feed, 100_000)
