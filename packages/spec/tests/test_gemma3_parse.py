"""Gemma 3 parsing: what is a call, what is text, and that no input can break, slow down or fool the parser."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.conversation import ToolCall
from portlab_spec.formats.gemma3 import JSON, PYTHON
from portlab_spec.formats.segments import Delta
from portlab_spec.formats.values import MAX_DEPTH

FORMATS = [JSON, PYTHON]
END = "<end_of_turn>"
F1 = (ToolCall(name="f", arguments={"a": 1}),)


# --------------------------------------------------------------------------------------------- strict


@pytest.mark.parametrize(
    ("fmt", "text"),
    [
        (JSON, '{"name": "f", "parameters": {"a": 1}}'),
        (JSON, ' [\n  {"parameters": {"a": 1}, "name": "f"}\n] \n'),
        (PYTHON, "[f(a=1)]"),
        (PYTHON, "[ f(\n  a = 1,\n), ]\n"),
    ],
)
@pytest.mark.parametrize("stop", [END, "<eos>"])
def test_a_turn_of_calls_is_accepted(fmt, text, stop):
    parsed = fmt.parse_text(text + stop)
    assert (parsed.calls, parsed.text, parsed.error, parsed.stopped, parsed.names) == (F1, "", None, True, ("f",))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it\"s'", 'it"s'),
        (r'"\x41\u00e9\U0001f999\101\'\"\\\a\n"', "Aé🦙A'\"\\\a\n"),
        (r'"\ud83e\udd99"', "🦙"),
        ("-2.5e-3", -0.0025),
        ("[None, True, False, {'k': []}]", [None, True, False, {"k": []}]),
        ("1e5", 100000.0),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_python_literals_are_read_as_python_reads_them(text, value):
    (call,) = PYTHON.parse_text(f"[f(a={text})]{END}").calls
    assert call.arguments == {"a": value}
    assert type(call.arguments["a"]) is type(value)


@pytest.mark.parametrize(
    "text", ["It is 15.", "I would use f(a=1).", "Use:\n```python\nprint(f(a=1))\n```", "a [f(a=1)]"]
)
@pytest.mark.parametrize("fmt", FORMATS)
def test_text_that_only_mentions_a_call_is_an_answer(fmt, text):
    for lenient in (False, True):
        parsed = fmt.parse_text(text + END, lenient=lenient)
        assert (parsed.calls, parsed.text, parsed.error, parsed.names) == ((), text, None, ())


@pytest.mark.parametrize(
    ("fmt", "text", "reason"),
    [
        (JSON, '{"name": "f", "parameters": {"a": 1}}', "cut off before a stop token"),
        (JSON, '{"name": "f", "parameters": {"a": 1}' + END, "no JSON at character"),
        (JSON, '{"name": "f", "arguments": {"a": 1}}' + END, "the keys name and parameters"),
        (JSON, '{"name": "f"}' + END, "the keys name and parameters"),
        (JSON, '{"name": "f", "parameters": [1]}' + END, "parameters are an object"),
        (JSON, '{"name": "", "parameters": {}}' + END, "name is text"),
        (JSON, '{"name": "f", "parameters": {"a": 1, "a": 2}}' + END, "a key stands twice"),
        (JSON, '{"name": "f", "parameters": {"a": NaN}}' + END, "NaN is no number"),
        (JSON, '{"name": "f", "parameters": {"a": 1e999}}' + END, "1e999 is no number"),
        (JSON, '{"name": "f", "parameters": {"a": "\\ud800"}}' + END, "surrogate"),
        (JSON, '{"name": "f", "parameters": {"a": ' + "9" * 5000 + "}}" + END, "too many digits"),
        (JSON, "[]" + END, "a list without calls"),
        (JSON, "[f(a=1)]" + END, "no JSON at character"),
        (JSON, '```json\n{"name": "f", "parameters": {"a": 1}}\n```' + END, "in a code fence"),
        (JSON, '```json\n{"name": "f"}\n```' + END, "the code fence holds no calls"),
        (JSON, 'Sure.\n{"name": "f", "parameters": {"a": 1}}' + END, "beside text"),
        (JSON, '{"name": "f", "parameters": {"a": 1}} Done.' + END, "no JSON at character"),
        (JSON, '{"name": "f", "parameters": {"a": 1}}' + END + "\n", "goes on after a stop token"),
        (JSON, '{"name": "f", "parameters": {"a": 1}}<start_of_turn>', "<start_of_turn> in the model's turn"),
        (JSON, END, "the answer is empty"),
        (PYTHON, "[f(a=1)" + END, ", or ] was expected"),
        (PYTHON, "[f(1)]" + END, "'1' is no name of an argument"),
        (PYTHON, "[f(a=g())]" + END, "'g' is no value"),
        (PYTHON, "[f(a=true)]" + END, "'true' is no value"),
        (PYTHON, "[f(a=1, a=2)]" + END, "'a' stands twice"),
        (PYTHON, "[f(a={'k': 1, 'k': 2})]" + END, "'k' stands twice"),
        (PYTHON, "[f(a={1: 2})]" + END, "the key of an object is a string"),
        (PYTHON, "[f(**{'a': 1})]" + END, "'**' is no name"),
        (PYTHON, "[f(a='x' 'y')]" + END, ", or ) was expected"),
        (PYTHON, r"[f(a='\d')]" + END, "the escape '\\\\d' is unknown"),
        (PYTHON, r"[f(a='\udfff')]" + END, "surrogate"),
        (PYTHON, "[f(a=1e999)]" + END, "1e999 is no number"),
        (PYTHON, "[f(a=007)]" + END, "'007' is no value"),
        (PYTHON, "[f(a=r'x')]" + END, "'r' is no value"),
        (PYTHON, "[get-weather()]" + END, "'get-weather' is no name of a function"),
        (PYTHON, "[lambda()]" + END, "'lambda' is no name of a function"),
        (PYTHON, "[f]" + END, "( was expected"),
        (PYTHON, "[1] says so" + END, "'1' is no name of a function"),
        (PYTHON, '{"name": "f", "parameters": {"a": 1}}' + END, "[ was expected"),
        (PYTHON, "```tool_code\nf(a=1)\n```" + END, "in a code fence"),
    ],
)  # fmt: skip
def test_anything_else_is_an_error_without_calls(fmt, text, reason):
    parsed = fmt.parse_text(text)
    assert parsed.error is not None
    assert reason in parsed.error
    assert parsed.calls == ()


# --------------------------------------------------------------------------------------------- lenient


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        ("[f(a=1)]", ""),
        ('{"name": "f", "parameters": {"a": 1}}', ""),
        ('{"name": "f", "arguments": {"a": 1}}', ""),
        ("{'name': 'f', 'parameters': {'a': 1,},}", ""),
        ('```json\n[{"name": "f", "parameters": {"a": 1}}]\n```', ""),
        ("```\n[f(a=1)]\n```", ""),
        ("```python\n[f(a=1)]\n```\n", ""),
        ("```tool_code\nf(a=1)\n```", ""),
        ("Let me look.\n```tool_code\n[f(a=1)]\n```\nDone.", "Let me look.\n\nDone."),
        ("Let me look.\n\n[f(a=1)]", "Let me look.\n\n"),
        ("[f(a=1)] That is it.", " That is it."),
        ("It's [1, 2].\n[f(a=1)]", "It's [1, 2].\n"),
        ("[don't]\n[f(a=1)]", "[don't]\n"),
        ("```python\nprint(1)\n```\n[f(a=1)]", "```python\nprint(1)\n```\n"),
        ("[1, 2\n```json\n[f(a=1)]\n```", "[1, 2\n"),
    ],
)
@pytest.mark.parametrize("end", ["", END])
@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_of_calls_are_read_in_any_spelling_that_has_one_reading(fmt, text, beside, end):
    parsed = fmt.parse_text(text + end, lenient=True)
    assert (parsed.calls, parsed.text, parsed.stopped) == (F1, beside, bool(end))
    assert parsed.names == ("f",)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("null", None),
        (".5", 0.5),
        ("5.", 5.0),
        ("+1", 1),
        (r"'\d'", r"\d"),
        ("{'k': false}", {"k": False}),
    ],
)
def test_values_are_read_in_either_spelling(text, value):
    (call,) = PYTHON.parse_text(f"[get-weather(a={text})]{END}", lenient=True).calls
    assert (call.name, call.arguments) == ("get-weather", {"a": value})


def test_each_line_may_be_a_call():
    two = '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}'
    for text in (two, f"```json\n{two}\n```", "```tool_code\nf()\ng()\n```", "[f()]\n[g()]"):
        assert [c.name for c in JSON.parse_text(text + END, lenient=True).calls] == ["f", "g"]


@pytest.mark.parametrize(
    "text",
    [
        "f(a=1)",
        "I call [f(a=1)] now",
        "```python\nf(a=1)\n```",
        "```python\n[f(a=1)]\nprint(1)\n```",
        "```text\n[f(a=1)]\n```",
        '```tool_code\nprint(open("x"))\n```',
        '```json\n[1, 2]\n{"name": "f", "parameters": {}}\n```',
        '{"name": "Bob"}',
        '{"name": "f", "parameters": {}, "more": 1}',
        '{"name": "f", "parameters": {}, "arguments": {}}',
        '{"name": "f", "parameters": {"a": 1, "a": 2}}',
        '{"name": "f", "parameters": {"a": }}',
        r"[f(a='\/')]",
        "[f(a='x\ny')]",
        "[f(a=g(b=1))]",
        "[f(a=1), 2]",
    ],
)
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_no_block_of_calls_stays_text(fmt, text):
    parsed = fmt.parse_text(text + END, lenient=True)
    assert (parsed.calls, parsed.text) == ((), text)


@pytest.mark.parametrize(
    "whole", ['{"name": "f", "parameters": {"a": "x"}}', "[f(a='x', b=[1, 2])]", "```json\n[f(a={'k': 1})]\n```"]
)
@pytest.mark.parametrize("fmt", FORMATS)
def test_output_that_was_cut_off_yields_no_call_and_no_debris(fmt, whole):
    for end in range(len(whole)):
        parsed = fmt.parse_text(whole[:end], lenient=True)
        assert (parsed.calls, parsed.text, parsed.stopped) == ((), "", False)


def test_an_open_block_is_text_if_the_model_ended_its_turn():
    assert PYTHON.parse_text("So:\n[f(a=1" + END, lenient=True).text == "So:\n[f(a=1"


# --------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[f(a=), evil()]", ("f", "evil")),
        ('[f(a="x), evil()]', ("f", "evil")),
        ("[f(a=1, evil(b=2", ("f", "evil")),
        ("```tool_code\nmath.add(1, 2)\n```", ("math.add",)),
        ('{"name": "evil", "parameters": {"name": "Bob"', ("evil",)),
        ("[{'name': 'f'}, {'name': 'evil', 'parameters': }]", ("f", "evil")),
        ('{"name": "f", "parameters": {"a": 1}, {"name": "evil", "parameters": {}}', ("f", "evil")),
        ('{"name": "get_wea', ()),
        ("Fine:\n[evil(a=)]", ("evil",)),
        ("A plain (very plain) answer with \"name\": 'x'", ()),
    ],
)
@pytest.mark.parametrize("end", ["", END])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_name_in_call_position_cannot_hide_behind_a_syntax_error(fmt, text, names, end):
    for lenient in (False, True):
        assert fmt.parse_text(text + end, lenient=lenient).names == names


# --------------------------------------------------------------------------------------------- hostile input

MEGABYTE = 10**6
HOSTILE = {
    "open lists": "[" * MEGABYTE,
    "open objects": '{"a":' * (MEGABYTE // 5),
    "open calls": "[" + "f(" * (MEGABYTE // 2),
    "nested arguments": "[f(a=" + "[" * MEGABYTE,
    "quotes": '"' * MEGABYTE,
    "quotes in a call": "[f(a=" + "\"'" * (MEGABYTE // 2),
    "backslashes": '[f(a="' + "\\" * MEGABYTE,
    "escaped quotes": '{"name": "' + '\\"' * (MEGABYTE // 2),
    "escapes": '[f(a="' + "\\\\" * (MEGABYTE // 2) + '",',
    "spaces": " " * MEGABYTE + "x",
    "spaces in a call": "[f(" + " " * MEGABYTE,
    "spaces in a fence": "```json\n" + " " * MEGABYTE,
    "lines that open": "[\n" * (MEGABYTE // 2),
    "lines that open a string": '["\n' * (MEGABYTE // 3),
    "lines of calls": "[f()]\n" * (MEGABYTE // 60),
    "fences": "```\n" * (MEGABYTE // 4),
    "call fences": "```json\n[\n```\n" * (MEGABYTE // 14),
    "backticks": "`" * MEGABYTE,
    "commas": "[f(a=1)" + "," * MEGABYTE,
    "digits": "[f(a=" + "9" * MEGABYTE + ")]",
    "names": '[{"name":' * (MEGABYTE // 9),
    "minus": "[f(a=" + "-" * MEGABYTE + "1)]",
    "almost control": "<end_of_turn" * (MEGABYTE // 12),
    "nul": "[f(a=\x00)]" + "\x00" * MEGABYTE,
    "halves of characters": "[f(a='\ud800')]\udfff" * (MEGABYTE // 100),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_megabyte_of_malice_is_read_in_linear_time(fmt, what):
    text = HOSTILE[what] + END
    start = time.process_time()
    parsed = fmt.parse_text(text, lenient=True)
    assert time.process_time() - start < 10  # about one second; a quadratic reader takes hours
    assert what == "lines of calls" or not parsed.calls


@pytest.mark.parametrize("fmt", FORMATS)
def test_depth_is_limited_alike_in_both_forms_and_in_both_ways(fmt):
    def output(depth):
        value = "[" * depth + "]" * depth
        return (f'{{"name": "f", "parameters": {{"a": {value}}}}}' if fmt is JSON else f"[f(a={value})]") + END

    for lenient in (False, True):
        assert fmt.parse_text(output(MAX_DEPTH), lenient=lenient).calls
        parsed = fmt.parse_text(output(MAX_DEPTH + 1), lenient=lenient)
        assert (parsed.calls, parsed.names) == ((), ("f",))
        assert "nested" in (parsed.error or "")


# --------------------------------------------------------------------------------------------- streams

fragments = st.sampled_from(
    ["[f(a=1)]", '{"name": "f", "parameters": {"a": "x"}}', "```json\n", "```tool_code\n", "\n```\n", "```", "`",
     "f(a=1)", "[", "]", "{", "}", "(", ")", '"', "'", "\\", "\n", " ", ",", "f", "(a=1)", "a", "Sure", END,
     "<end_of", "<eos>", "<"]
)  # fmt: skip
outputs = st.lists(fragments | st.text(max_size=3), max_size=12).map("".join)


@settings(max_examples=600, deadline=None)
@given(outputs, st.lists(st.integers(1, 9), min_size=1), st.booleans(), st.sampled_from(FORMATS))
def test_a_stream_cut_anywhere_is_the_whole(text, sizes, lenient, fmt):
    stream, events, at, turn = fmt.stream(lenient=lenient), [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        events += stream.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    whole = fmt.parse_text(text, lenient=lenient)
    assert stream.close() == whole
    assert "".join(e.text for e in events if isinstance(e, Delta)) == whole.text
    assert tuple(e for e in events if isinstance(e, ToolCall)) == (whole.calls if lenient else ())


@settings(max_examples=400, deadline=None)
@given(outputs, st.sampled_from(FORMATS))
def test_lenient_reads_all_that_strict_reads(text, fmt):
    strict, lenient = fmt.parse_text(text + END), fmt.parse_text(text + END, lenient=True)
    assert (strict.text, strict.stopped, strict.names) == (lenient.text, lenient.stopped, lenient.names)
    assert strict.error is not None or lenient.error is None
    assert strict.calls == (lenient.calls if strict.error is None else ())
    assert {call.name for call in lenient.calls} <= set(lenient.names)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_stream_tells_text_at_once_and_a_call_with_its_last_character(fmt):
    stream = fmt.stream(lenient=True)
    told = [stream.feed(c) for c in "Hi\n[f(a=1)]"]
    assert told[0] == [Delta("text", "H")]
    assert told[-1] == list(F1)
    assert told[3:-1] == [[]] * 7
