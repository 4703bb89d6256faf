"""Qwen3 parsing: what is a call, what is text, and that no output can break, slow down or fool the parser."""

import itertools
import time

import pytest
from char_tokenizer import CharTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.conversation import Conversation, Message, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats import Delta
from portlab_spec.formats.output import pieces_of_text
from portlab_spec.formats.qwen3 import CONTROL_TOKENS, FORMAT, REFUSED_TOKENS
from portlab_spec.formats.values import MAX_DEPTH

END = "<|im_end|>"
F1 = (ToolCall(name="f", arguments={"a": 1}),)
G = (ToolCall(name="g"),)
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
TOKENIZER = CharTokenizer(CONTROL_TOKENS)


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>{END}"


# --------------------------------------------------------------------------------------------- strict


@pytest.mark.parametrize(
    ("output", "calls", "text"),
    [
        (CALL_F + END, F1, ""),
        (f"{CALL_F}\n{CALL_G}{END}", F1 + G, ""),
        (f"{CALL_F}{CALL_G}\n<|endoftext|>", F1 + G, ""),
        (f"Let me look.\n{CALL_F}{END}", F1, "Let me look.\n"),
        ('<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>' + END, F1, ""),
        ("It is 15." + END, (), "It is 15."),
        ("\n x < <tool_cal \n" + END, (), "\n x < <tool_cal \n"),
        ('{"f": {"a": 1}}' + END, (), '{"f": {"a": 1}}'),
        ("f(a=1)" + END, (), "f(a=1)"),
    ],
)
def test_what_the_grammar_says_is_accepted(output, calls, text):
    for lenient in (False, True):
        parsed = FORMAT.parse_text(output, lenient=lenient)
        assert (parsed.calls, parsed.text, parsed.error, parsed.stopped) == (calls, text, None, True)
        assert parsed.names == tuple(c.name for c in calls)
        assert parsed.reasoning == ""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (END, "the answer is empty"),
        (" \n" + END, "the answer is empty"),
        ("It is", "cut off before a stop token"),
        (CALL_F, "cut off before a stop token"),
        (CALL_F[:-1], "a call is not closed"),
        (CALL_F.removesuffix("</tool_call>") + END, "a call is not closed"),
        (f"{CALL_F.removesuffix('</tool_call>')}{CALL_G}{END}", "a call is not closed"),
        (f"{CALL_F}\nDone.{END}", "text after a call"),
        (f"{CALL_F}\nDone.\n{CALL_G}{END}", "text after a call"),
        (CALL_F + END + "x", "output goes on after a stop token"),
        (CALL_F + END + "<|endoftext|>", "output goes on after a stop token"),
        (f"{CALL_F}</tool_call>{END}", "</tool_call> outside a call"),
        (f"x</think>{END}", "</think> outside a call"),
        (f"<tool_response>\n1\n</tool_response>{END}", "<tool_response> outside a call"),
        (f"<think>\nLook.\n</think>\n\n{CALL_F}{END}", "thinking, which the prompt has closed"),
        (f"<think>\nLook.{END}", "thinking, which the prompt has closed"),
        (f"Well.<think>\nLook.\n</think>\n\nx{END}", "<think> after the start"),
        (call('{"name": "f", "arguments": {"a": <think>1}}'), "<think> inside a call"),
        (call('{"name": "f", "arguments": {"a": 1}'), "no JSON at character"),
        (call(""), "no JSON at character"),
        (call("f(a=1)"), "no JSON at character"),
        (call('[{"name": "f", "arguments": {}}]'), "the keys name and arguments"),
        (call('{"name": "f", "parameters": {}}'), "the keys name and arguments"),
        (call('{"name": "f"}'), "the keys name and arguments"),
        (call('{"name": "f", "arguments": {}, "id": 1}'), "the keys name and arguments"),
        (call('{"name": "f", "arguments": "{}"}'), "arguments are an object"),
        (call('{"name": "f", "arguments": [1]}'), "arguments are an object"),
        (call('{"name": "", "arguments": {}}'), "name is text"),
        (call('{"name": "two words", "arguments": {}}'), "'two words' is not a tool name"),
        (call('{"name": "f", "arguments": {"a": 1, "a": 2}}'), "a key stands twice"),
        (call('{"name": "f", "arguments": {"a": NaN}}'), "NaN is no number"),
        (call('{"name": "f", "arguments": {"a": 1e999}}'), "1e999 is no number"),
        (call('{"name": "f", "arguments": {"a": "\\ud800"}}'), "surrogate"),
        (call('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}"), "too many digits"),
        (call('{"name": "f", "arguments": {"a": ' + "[" * 99 + "]" * 99 + "}}"), f"more than {MAX_DEPTH} deep"),
    ],
)
def test_anything_else_is_an_error_without_calls(output, reason):
    parsed = FORMAT.parse_text(output)
    assert reason in str(parsed.error)
    assert parsed.calls == ()


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (call('{"name": "f", "arguments": {"a": '), ("f",)),
        ('<tool_call>\n{"name": "f", "argum', ("f",)),
        (call('{"name": "f", "arguments": {"name": "x"}'), ("f",)),
        (call("f(a=1)"), ("f",)),
        (call('{"name": "two words", "arguments": {}}'), ("two words",)),
        (f"{CALL_F}\n" + call('{"name": "g"'), ("f", "g")),
        ('{"name": "f", "arguments": {}}' + END, ("f",)),
        ('{"name": "f", "age": 3}' + END, ()),
    ],
)
def test_a_tool_cannot_hide_behind_a_syntax_error(output, names):
    for lenient in (False, True):
        assert FORMAT.parse_text(output, lenient=lenient).names == names


# --------------------------------------------------------------------------------------------- lenient


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "parameters": {"a": 1}}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        "{'name': 'f', 'arguments': {'a': 1,},}",
    ],
)
@pytest.mark.parametrize("end", ["\n</tool_call>" + END, "\n</tool_call>", END, "</tool_call>" + END + "<|endoftext|>"])
def test_what_models_write_instead_is_read_where_it_has_one_reading(body, end):
    parsed = FORMAT.parse_text(f"<tool_call>\n{body}{end}", lenient=True)
    assert (parsed.calls, parsed.error, parsed.names) == (F1, None, ("f",))
    assert FORMAT.parse_text(f"<tool_call>\n{body}{end}").calls == ()


@pytest.mark.parametrize(
    ("output", "calls", "text", "error"),
    [
        (f"{CALL_F}\nDone.\n{CALL_G}{END}", F1 + G, "\nDone.\n", "text after a call"),
        (f"{call('{')[: -len(END)]}{CALL_G}{END}", G, "", "no JSON at character"),
        (f"{CALL_F}\n<tool_call>\n{{", F1, "", "a call is not closed"),
        (f"{CALL_F.removesuffix('</tool_call>')}{CALL_G}{END}", F1 + G, "", None),
        (CALL_F.removesuffix("</tool_call>"), (), "", "a call is not closed"),
    ],
)
def test_calls_beyond_doubt_are_kept_beside_a_fault(output, calls, text, error):
    parsed = FORMAT.parse_text(output, lenient=True)
    assert (parsed.calls, parsed.text) == (calls, text)
    assert (error is None and parsed.error is None) or error in parsed.error


@pytest.mark.parametrize(
    ("thought", "reasoning"),
    [("<think>\n\n</think>\n\n", ""), ("<think>\nLook\n\nit up.\n</think>\n\n", "Look\n\nit up.")],
)
def test_a_thought_is_no_text(thought, reasoning):
    parsed = FORMAT.parse_text(f"{thought}{CALL_F}{END}", lenient=True)
    assert (parsed.calls, parsed.text, parsed.reasoning, parsed.error) == (F1, "", reasoning, None)
    parsed = FORMAT.parse_text(f"{thought}15.{END}", lenient=True)
    assert (parsed.text, parsed.reasoning, parsed.error) == ("15.", reasoning, None)


def test_a_marker_is_a_token_and_never_its_spelling():
    spelt = TOKENIZER.encode('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    parsed = FORMAT.parse([*spelt, TOKENIZER.token_id(END)], TOKENIZER)
    assert (parsed.calls, parsed.error) == ((), None)
    assert parsed.text.startswith("<tool_call>")


# --------------------------------------------------------------------------------- any output at all

FRAGMENTS = (
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "parameters": {}}', "{'name': 'h', 'arguments': {}}",
    '{"name": "f"', '"arguments": ', "{", "}", "[", "]", ":", ",", '"', "'", "\\", '"a"', "1", "1e5", "NaN", "null",
    "f(", ")", " ", "\n", "\n\n", "<", "<|", "|>", "<tool_call", "</think", "é", "🦙", "\x00", "\ufffd", "word",
)  # fmt: skip
outputs = st.lists(
    st.one_of(*map(st.sampled_from, (CONTROL_TOKENS, FRAGMENTS, (CALL_F, CALL_G))), st.text(max_size=4)),
    max_size=24,
).map("".join)


def ids_of(text):
    pieces = pieces_of_text(text, CONTROL_TOKENS)
    return [i for p, control in pieces for i in ([TOKENIZER.token_id(p)] if control else TOKENIZER.encode(p))]


def parts(data, whole):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])]


@settings(max_examples=1000, deadline=None)
@given(outputs, st.booleans(), st.data())
def test_a_stream_gives_the_parse_of_the_whole(text, lenient, data):
    whole = FORMAT.parse_text(text, lenient=lenient)
    assert FORMAT.parse(ids_of(text), TOKENIZER, lenient=lenient) == whole
    for by_ids, pieces in (False, parts(data, text)), (False, list(text)), (True, parts(data, ids_of(text))):
        stream = FORMAT.stream(lenient=lenient, tokenizer=TOKENIZER)
        events = [event for piece in pieces for event in (stream.feed_ids(piece) if by_ids else stream.feed(piece))]
        assert stream.close() == whole
        assert [e for e in events if isinstance(e, ToolCall)] == (list(whole.calls) if lenient else [])
        for kind, expected in (("text", whole.text), ("reasoning", whole.reasoning)):
            joined = "".join(e.text for e in events if isinstance(e, Delta) and e.kind == kind)
            assert expected.startswith(joined)
            rest = expected[len(joined) :].lstrip()
            assert not rest.strip("\ufffd") or any(token.startswith(rest) for token in CONTROL_TOKENS)


@settings(max_examples=1000, deadline=None)
@given(outputs)
def test_lenient_reads_whatever_strict_reads_and_the_same_way(text):
    strict, lenient = FORMAT.parse_text(text), FORMAT.parse_text(text, lenient=True)
    assert not strict.error or strict.calls == ()
    assert (strict.text, strict.reasoning, strict.names) == (lenient.text, lenient.reasoning, lenient.names)
    if not strict.error:
        assert lenient == strict


@settings(max_examples=1000, deadline=None)
@given(outputs)
def test_calls_that_strict_accepts_can_be_written_and_read_again(text):
    parsed = FORMAT.parse_text(text)
    if not parsed.calls:
        return
    messages = (Message(role="user", content="?"), Message(role="assistant", tool_calls=parsed.calls))
    try:
        segments = FORMAT.render(Conversation(id="c", messages=messages))
    except UserError as error:
        assert any(token in repr(parsed.calls) for token in REFUSED_TOKENS), error  # noqa: PT017
        return
    again = FORMAT.parse_text("".join(s.text for s in segments if s.loss))
    assert (again.error, again.calls) == (None, parsed.calls)


@settings(max_examples=1000, deadline=None)
@given(outputs, st.data())
def test_an_output_cut_off_anywhere_holds_no_call_that_the_whole_does_not(text, data):
    cut = data.draw(st.integers(0, len(text)))
    part, whole = (FORMAT.parse_text(t, lenient=True).calls for t in (text[:cut], text))
    assert part == whole[: len(part)]


HOSTILE = {
    "brackets": lambda n: call('{"name": "f", "arguments": {"a": ' + "[" * n),
    "braces": lambda n: call('{"a":' * (n // 5)),
    "quotes": lambda n: call('"' * n),
    "escaped quotes": lambda n: call('{"name": "' + '\\"' * (n // 2)),
    "apostrophes": lambda n: call("{'name': " + "'\\" * (n // 2)),
    "names": lambda n: call('{"name": ' * (n // 9)),
    "words before brackets": lambda n: call("f(" * (n // 2)),
    "digits": lambda n: call('{"name": "f", "arguments": {"a": ' + "1" * n + "}}"),
    "keys": lambda n: call('{"name": "f", "arguments": {' + ",".join(f'"k{i}": 0' for i in range(n // 12)) + "}}"),
    "call tokens": lambda n: "<tool_call>" * (n // 11),
    "calls": lambda n: CALL_G * (n // 50),
    "thoughts": lambda n: "<think>\n\n</think>\n\n" * (n // 19),
    "line ends in a thought": lambda n: "<think>" + "\n" * n,
    "almost a token": lambda n: "</tool_call" * (n // 11),
    "less-than": lambda n: "<" * n,
    "bare objects": lambda n: '{"name":' * (n // 8),
    "a bare long name": lambda n: '{"name": "' + "a" * n,
    "spaces": lambda n: " " * n + CALL_F,
    "stops": lambda n: END * (n // 10),
    "a long answer": lambda n: "x " * (n // 2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_output_takes_linear_time(name):
    def seconds(n):
        whole = HOSTILE[name](n)
        start = time.process_time()
        FORMAT.parse_text(whole, lenient=True)
        stream = FORMAT.stream(lenient=True)
        for at in range(0, len(whole), 64):
            stream.feed(whole[at : at + 64])
        stream.close()
        return time.process_time() - start

    n = 30_000
    assert any(seconds(4 * n) < max(8 * seconds(n), 0.02) for _ in range(3))
