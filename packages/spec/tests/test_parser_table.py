"""Every output that parsers in use are known to disagree on, read right, in both native dialects.

The tables are data of the package (`portlab_spec.fixtures.cases`), so that plugins and benchmarks use the same.
"""

import json

import pytest

from portlab_spec.fixtures.cases import BODIES, OUTPUTS, Case, Output, output_of, spell
from portlab_spec.formats import find_format
from portlab_spec.formats.markers import FUNCTIONGEMMA, GEMMA4

DIALECTS = [
    pytest.param("functiongemma", FUNCTIONGEMMA, id="functiongemma"),
    pytest.param("gemma4", GEMMA4, id="gemma4"),
]
dialects = pytest.mark.parametrize(("name", "markers"), DIALECTS)


def typed(value: object) -> str:
    """Text that keeps 1, 1.0, true and "1" apart, and the order of keys."""
    return json.dumps(value, ensure_ascii=False)


def translated(value, markers):
    """Arguments in a dialect's spelling: a string may hold a marker."""
    return json.loads(spell(typed(value).replace('\\"', "\0"), markers).replace("\0", '\\"'))


def read(name: str, output: str, *, lenient: bool) -> tuple[str, bool]:
    parsed = find_format(name).parse_text(output, lenient=lenient)
    return typed([[call.name, call.arguments] for call in parsed.calls]), parsed.error is not None


@dialects
@pytest.mark.parametrize("lenient", [False, True], ids=["strict", "lenient"])
@pytest.mark.parametrize("case", BODIES, ids=lambda case: case.body[:40])
def test_body(name, markers, case: Case, lenient):
    arguments = case.expected(markers, lenient=lenient)
    calls = [] if arguments is None else [[case.name, translated(arguments, markers)]]
    assert read(name, spell(output_of(case), markers), lenient=lenient) == (typed(calls), arguments is None), (
        case.reason
    )


@dialects
@pytest.mark.parametrize("case", OUTPUTS, ids=lambda case: case.reason)
def test_whole_output(name, markers, case: Output):
    output, calls = spell(case.output, markers), typed(case.calls)
    assert read(name, output, lenient=True)[0] == calls, case.reason
    assert read(name, output, lenient=False) == (calls if case.strict else "[]", not case.strict), case.reason
    parsed = find_format(name).parse_text(output, lenient=True)
    assert parsed.text == spell(case.text, markers)
    if case.names is not None:
        assert parsed.names == case.names


@dialects
@pytest.mark.parametrize("case", [c for c in BODIES if c.strict is None], ids=lambda case: case.body[:40])
def test_a_refused_call_still_names_its_tool(name, markers, case: Case):
    """So that an invented tool cannot hide behind a syntax error."""
    parsed = find_format(name).parse_text(spell(output_of(case), markers))
    assert parsed.names == (() if case.body == "call:{a:1}" else ("f",))


@pytest.mark.parametrize("body", ["call:f{a:1}", 'call:f{a:[<|"|>x<|"|>]}', "call:f{}"])
def test_thinking_before_a_call_is_reasoning(body):
    """vllm#45834: nor does a thought swallow what follows it."""
    output = f"<|channel>thought\nI call f.\n<channel|><|tool_call>{body}<tool_call|><|tool_response>"
    parsed = find_format("gemma4").parse_text(output)
    assert (parsed.error, parsed.reasoning, parsed.text, len(parsed.calls)) == (None, "I call f.", "", 1)


def test_an_answer_without_a_thought_is_text():
    """vllm#45834, vllm#48217: thinking may be on and the model may still answer at once."""
    parsed = find_format("gemma4-thinking").parse_text("It is 20 degrees.<turn|>")
    assert (parsed.error, parsed.reasoning, parsed.text) == (None, "", "It is 20 degrees.")


def test_a_call_inside_a_thought_is_not_a_call():
    output = "<|channel>thought\nShould I <|tool_call>call:f{}<tool_call|>?\n<channel|>No.<turn|>"
    parsed = find_format("gemma4").parse_text(output, lenient=True)
    assert (parsed.calls, parsed.text) == ((), "No.")
    assert parsed.error


def test_each_dialect_reads_its_own_markers_only():
    output = "<start_function_call>call:f{}<end_function_call>"
    assert find_format("gemma4").parse_text(output + "<turn|>", lenient=True).calls == ()
    assert find_format("functiongemma").parse_text(spell(output, GEMMA4) + "<end_of_turn>", lenient=True).calls == ()
