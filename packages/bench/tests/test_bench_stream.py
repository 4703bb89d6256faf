"""Events are read wherever they are cut, and every event with tokens counts, whatever kind they are of."""

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_bench.load.stream import Answer


def event(delta=None, finish=None, **more) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


WHOLE = [
    event({"role": "assistant", "content": ""}),
    event({"reasoning": "hm"}),
    event({"reasoning_content": "hm"}),
    b": ping\n\n",
    event({"content": "grüße\n\n"}),
    event({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}),
    event({"content": "x", "tool_calls": [{"index": 0}]}),
    event({}, "tool_calls"),
    event(usage={"prompt_tokens": 9, "completion_tokens": 7}),
    b"data: [DONE]\n\n",
]


@given(st.randoms(use_true_random=False), st.sampled_from([b"\n", b"\r\n"]))
@settings(max_examples=200)
def test_any_cut_reads_the_same(rng: Random, newline: bytes):
    data = b"".join(WHOLE).replace(b"\n", newline)
    cuts = sorted(rng.sample(range(len(data) + 1), rng.randint(0, 40)))
    answer = Answer()
    for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
        answer.feed(data[a:b], float(b))
    answer.end(float(len(data)))
    assert (answer.kinds, answer.finish, answer.done) == ({"reasoning": 2, "text": 2, "calls": 2}, "tool_calls", True)
    assert answer.usage == {"prompt_tokens": 9, "completion_tokens": 7}
    assert len(answer.chunks) == 5  # the one that holds text and a call counts once
    assert answer.chunks == sorted(answer.chunks)
    assert not answer.malformed


def test_the_event_of_the_role_alone_is_no_token():
    answer = Answer()
    answer.feed(WHOLE[0], 1.0)
    answer.feed(event({"content": "x"}), 2.0)
    assert answer.chunks == [2.0]


def test_a_last_event_without_an_empty_line_counts():
    answer = Answer()
    answer.feed(event({"content": "x"})[:-2], 1.0)
    assert answer.chunks == []
    answer.end(2.0)
    assert answer.chunks == [2.0]


def test_plain_completions_count_too():
    answer = Answer()
    answer.feed(b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}\n\n', 1.0)
    assert (answer.kinds, answer.finish) == ({"text": 1}, "length")


@pytest.mark.parametrize("said", [b"{oops", b"[]", b"3", b'"x"'])
def test_what_is_no_object_is_malformed(said):
    answer = Answer()
    answer.feed(b"data: " + said + b"\n\n", 1.0)
    assert answer.malformed == said.decode()


@pytest.mark.parametrize("error", [{"message": "out of memory"}, "out of memory"])
def test_an_error_inside_the_stream_is_kept(error):
    answer = Answer()
    answer.feed(event({"content": "x"}) + event(error=error), 1.0)
    assert answer.error == "out of memory"


def test_data_over_several_lines_is_one_event():
    answer = Answer()
    answer.feed(b'event: message\ndata: {"choices": [{"delta":\ndata: {"content": "x"}}]}\n\n', 1.0)
    assert answer.kinds == {"text": 1}
