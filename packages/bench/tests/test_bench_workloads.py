"""No two prompts of a run are the same; what they share is what the workload means them to share."""

import orjson
import pytest

from portlab_bench.load.workloads import shared_share, workload
from portlab_spec.assets import default_model
from portlab_spec.errors import UserError
from portlab_spec.tokenizer import Tokenizer

NAMES = ("tool-calls", "chat", "prefill-heavy", "random")


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_all_cells_differ_and_seeds_repeat_them(name):
    asked = workload(name)
    first, second = asked.bodies("m", 50, 0), asked.bodies("m", 50, 1)
    messages = [orjson.dumps(orjson.loads(body)["messages"]) for body in first + second]
    assert len(set(messages)) == 100
    assert first == asked.bodies("m", 50, 0)


@pytest.mark.parametrize("name", NAMES[1:])
def test_made_up_prompts_share_nothing(name):
    assert shared_share(workload(name).bodies("m", 50, 0)) < 0.05


def test_tool_calls_share_their_tools_unless_they_are_cold():
    warm, cold = workload("tool-calls"), workload("tool-calls", cold=True)
    assert 0.8 < shared_share(warm.bodies("m", 50, 0)) < 1
    assert shared_share(cold.bodies("m", 50, 0)) < 0.1


def test_what_a_request_holds():
    body = orjson.loads(workload("tool-calls").bodies("m", 1, 0)[0])
    assert body["model"] == "m"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["temperature"], body["max_tokens"]) == (0, 128)
    assert "ignore_eos" not in body
    assert [m["role"] for m in body["messages"]] == ["developer", "user"]
    assert len(body["tools"]) == 7
    fixed = orjson.loads(workload("random", output_tokens=9).bodies("m", 1, 0)[0])
    assert (fixed["max_tokens"], fixed["ignore_eos"]) == (9, True)


@pytest.mark.parametrize(("name", "tokens"), [("prefill-heavy", 4096), ("random", 512), ("random", 64)])
def test_a_made_up_prompt_is_as_long_as_it_says(name, tokens):
    tokenizer = Tokenizer.load(default_model().path)
    bodies = workload(name, input_tokens=tokens).bodies("m", 5, 0)
    for body in bodies:
        count = len(tokenizer.encode(orjson.loads(body)["messages"][0]["content"]))
        assert count == pytest.approx(tokens, rel=0.08, abs=8)


def test_lengths_of_a_chat_vary_around_their_median():
    lengths = sorted(orjson.loads(body)["max_tokens"] for body in workload("chat").bodies("m", 500, 0))
    assert lengths[250] == pytest.approx(192, rel=0.15)
    assert lengths[450] / lengths[250] == pytest.approx(2.16, rel=0.2)  # exp(0.6 x 1.28)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("random", {"input_tokens": 0}, "--input-tokens 0 is no length"),
        ("random", {"output_tokens": -1}, "--output-tokens -1 is no length"),
        ("tool-calls", {"input_tokens": 5}, "--input-tokens does not fit tool-calls"),
        ("chat", {"data": "fitness-213"}, "--data and --cold do not fit chat"),
        ("random", {"cold": True}, "--data and --cold do not fit random"),
    ],
)
def test_options_that_do_not_fit(name, options, message):
    with pytest.raises(UserError, match=message):
        workload(name, **options)
