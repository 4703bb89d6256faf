"""Output as a message: complete calls with all their arguments, once each, however the text is cut."""

import json
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_conversations import Seeded, conversation, taste_of

from portlab_serve.tool_calls import OutputStream, Piece, read_output, split_thought
from portlab_spec.fixtures.cases import BODIES, output_of, spell
from portlab_spec.formats import find_format
from portlab_spec.formats.markers import FUNCTIONGEMMA, GEMMA4, Markers

FORMATS = ["functiongemma", "gemma3-json", "gemma3-python", "gemma4", "qwen3"]
CALL = "<start_function_call>call:f{a:1,b:true,c:[1.5,null],d:<escape>02134<escape>}<end_function_call>"
FG = find_format("functiongemma")


def whole(name: str, text: str) -> Piece:
    numbers = count()
    return read_output(find_format(name), text, lambda: f"id{next(numbers)}")


def streamed(name: str, pieces: list[str]) -> Piece:
    numbers = count()
    stream = OutputStream(find_format(name), lambda: f"id{next(numbers)}")
    seen = [*map(stream.feed, pieces), stream.finish()]
    calls = tuple(call for piece in seen for call in piece.calls)
    assert [call.index for call in calls] == list(range(len(calls)))
    return Piece("".join(p.content for p in seen), "".join(p.reasoning for p in seen), calls, seen[-1].fault)


def cut(text: str, rng: Random) -> list[str]:
    at = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def spelt(value: object, markers: Markers) -> object:
    return spell(value, markers) if isinstance(value, str) else value


def test_every_kind_of_argument_arrives():
    (call,) = whole("functiongemma", CALL).calls
    assert (call.index, call.id, call.name) == (0, "id0", "f")
    assert json.loads(call.arguments) == {"a": 1, "b": True, "c": [1.5, None], "d": "02134"}


def test_parallel_calls_are_numbered():
    assert [(call.index, call.id) for call in whole("functiongemma", CALL * 3).calls] == [
        (0, "id0"),
        (1, "id1"),
        (2, "id2"),
    ]


def test_ids_differ():
    first, second = read_output(FG, CALL * 2).calls
    assert first.id != second.id


def test_arguments_keep_their_letters():
    (call,) = whole("functiongemma", "<start_function_call>call:f{a:<escape>Tromsø<escape>}<end_function_call>").calls
    assert call.arguments == '{"a": "Tromsø"}'


def test_a_call_is_passed_on_when_it_is_complete_and_not_before():
    stream = OutputStream(FG)
    assert not stream.feed(CALL[:-1])
    assert [call.name for call in stream.feed(CALL[-1]).calls] == ["f"]
    assert not stream.finish()


def test_text_is_passed_on_as_it_arrives():
    stream = OutputStream(FG)
    assert [stream.feed(piece).content for piece in ("Hel", "lo ", "you <")] == ["Hel", "lo ", "you "]
    assert stream.finish().content == "<"


@pytest.mark.parametrize("text", [CALL[:-1], CALL[:40], "<start_function_call>call:f{a:007}<end_function_call>"])
def test_what_is_no_call_is_passed_on_as_text_with_the_reason(text: str):
    for piece in (whole("functiongemma", text), streamed("functiongemma", [text])):
        assert (piece.content, piece.calls) == (text, ())
        assert piece.fault


def test_a_call_that_was_cut_off_does_not_spoil_the_one_before():
    piece = whole("functiongemma", CALL + CALL[:40])
    assert ([call.name for call in piece.calls], piece.content) == (["f"], "")


def test_gemma_4_thinks_before_it_calls():
    text = "<|channel>thought\nRain?<channel|><|tool_call>call:f{}<tool_call|>"
    piece = whole("gemma4", text)
    assert (piece.reasoning, [call.name for call in piece.calls], piece.content) == ("Rain?", ["f"], "")


@pytest.mark.parametrize("markers", [FUNCTIONGEMMA, GEMMA4], ids=["functiongemma", "gemma4"])
@pytest.mark.parametrize("case", BODIES, ids=lambda case: case.reason[:40])
def test_the_cases_that_parsers_disagree_on(case, markers):
    text = spell(output_of(case), markers).removesuffix(markers.response)  # vLLM leaves the stop token out
    piece = whole("gemma4" if markers is GEMMA4 else "functiongemma", text)
    wanted = case.expected(markers, lenient=True)
    # A marker inside a string is spelt as the dialect does.
    written = [] if wanted is None else [{key: spelt(value, markers) for key, value in wanted.items()}]
    assert [json.loads(call.arguments) for call in piece.calls] == written


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(rng=st.integers(0, 2**40).map(Seeded))
def test_an_answer_comes_back_whole_and_streamed(name: str, rng: Random):
    fmt = find_format(name)
    conv = conversation(rng, taste_of(fmt))
    prompt = "".join(s.text for s in fmt.render(conv.prompt, generation_prompt=True))
    text = "".join(s.text for s in fmt.render(conv))[len(prompt) :]
    for stop in fmt.stop_tokens:
        text = text.partition(stop)[0]
    piece, answer = whole(name, text), conv.target
    wanted = [(call.name, call.arguments) for call in answer.tool_calls]
    assert [(call.name, json.loads(call.arguments)) for call in piece.calls] == wanted
    assert piece.content.strip() == (answer.content or "").strip()
    assert streamed(name, cut(text, rng)) == piece


@pytest.mark.parametrize(
    ("output", "thought"),
    [
        ("<|channel>thought\nHm.\n<channel|>Hello.", "<|channel>thought\nHm.\n<channel|>"),
        ("Hm.\n<channel|><|tool_call>call:f{}<tool_call|>", "Hm.\n<channel|>"),
        ("<|channel>thought\nCut", "<|channel>thought\nCut"),
        (
            "<|channel>thought\nI could <|tool_call>.\n<channel|>No.",
            "<|channel>thought\nI could <|tool_call>.\n<channel|>",
        ),
        ('<|tool_call>call:f{a:<|"|>a <channel|> b<|"|>}<tool_call|>', ""),
        ("<tool_call|><turn|>", ""),
        ("", ""),
    ],
    ids=["whole", "opened by the prompt", "cut off", "marker in a thought", "marker in an argument", "none", "empty"],
)
def test_a_thought_stands_before_everything_else(output, thought):
    assert split_thought(output) == (thought, output.removeprefix(thought))
