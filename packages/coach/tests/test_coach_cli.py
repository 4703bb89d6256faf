"""The commands: output, exit codes, one line for what the user got wrong."""

import json
from typing import get_args

import pytest
from fake_openai import call, chunk, in_thread, last_role, make_calls, say, stream

from fitnesscoach.cli import Dataset, main
from portlab_spec.data.rows import BUILT_IN
from portlab_spec.errors import CheckFailed, UserError


async def coach(body, request):
    """`tuned` finds the right tool, `base` makes one up."""
    if last_role(body) == "tool":
        return await say(request, "A fair amount.")
    names = {tool["function"]["name"] for tool in body["tools"]}
    question = body["messages"][-1]["content"].lower()
    if body["model"] == "base":
        return await make_calls(request, call("get_sleep_metrics"))
    for word, name in (("goal", "get_daily_step_goal"), ("step", "get_steps"), ("sle", "get_sleeping_minutes")):
        if word in question and name in names:
            return await make_calls(request, call(name))
    return await make_calls(request, call("get_heart_rate"))


async def failing(body, request):
    return await stream(request, {"error": {"message": "engine died"}})


async def cut_off(body, request):
    return await stream(request, chunk(content="I think"), chunk("length"))


def test_summary_shows_today(capsys):
    assert main(["summary"]) == 0
    out = capsys.readouterr().out
    assert "Steps" in out
    assert "h" in out


def test_summary_as_json_has_a_value_for_each_tool(capsys):
    main(["summary", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["missing"] == {}
    assert {"steps", "daily_step_goal", "heart_rate", "body_battery_level"} <= set(found)


def test_ask_prints_the_answer_and_its_calls_as_json(capsys):
    with in_thread(coach) as fake:
        code = main(["ask", "How many steps?", "--json", "--endpoint", fake.url, "--model", "tuned"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (found["outcome"], found["answer"]) == ("answered", "A fair amount.")
    assert found["calls"][0]["name"] == "get_steps"
    assert found["calls"][0]["status"] == "ok"


def test_ask_without_words_of_the_model_tells_the_result(capsys):
    with in_thread(coach) as fake:
        main(["ask", "How many steps?", "--words", "data", "--endpoint", fake.url, "--model", "tuned"])
        assert len(fake.requests) == 1
    assert "You have walked" in capsys.readouterr().out


def test_ask_without_an_answer_is_exit_code_one(capsys):
    with in_thread(failing) as fake:
        assert main(["ask", "x", "--endpoint", fake.url, "--model", "m"]) == 1
    assert "m: the server reports: engine died" in capsys.readouterr().out


def test_the_only_model_of_an_endpoint_need_not_be_named():
    with in_thread(coach) as fake, pytest.raises(UserError, match="one of: base, tuned"):
        main(["ask", "x", "--endpoint", fake.url])


def test_eval_compares_two_models_with_paired_intervals(capsys, tmp_path):
    with in_thread(coach) as fake:
        out = tmp_path / "scores.json"
        args = ["--endpoint", fake.url, "--model", "base", "--model", "tuned", "--compare", "--out", str(out)]
        assert main(["eval", *args]) == 0
    table = capsys.readouterr().out
    assert "fitness-213, test split, 63 examples" in table
    assert "tuned − base" in table
    (found,) = json.loads(out.read_text())
    base, tuned = found["models"]["base"]["metrics"], found["models"]["tuned"]["metrics"]
    assert base["hallucinated_tool_rate"]["value"] == 1
    assert tuned["hallucinated_tool_rate"]["value"] == 0
    change = found["differences"]["tuned - base"]["call_exact"]
    assert change["value"] == tuned["call_exact"]["value"]
    assert change["low"] < change["value"] < change["high"]
    assert len(found["models"]["tuned"]["answers"]) == 63


def test_eval_sends_what_the_data_set_holds(capsys):
    with in_thread(coach) as fake:
        args = ["--endpoint", fake.url, "--model", "tuned", "--dataset", "fitness-plus", "--limit", "5", "--json"]
        assert main(["eval", *args]) == 0
        assert len(fake.requests) == 5
        assert all("Today is" in r["messages"][0]["content"] or "date" in r["messages"][0]["content"].lower()
                   for r in fake.requests)  # fmt: skip
    assert json.loads(capsys.readouterr().out)[0]["dataset"] == "fitness-plus"


def test_eval_counts_a_cut_off_answer_as_malformed(capsys):
    with in_thread(cut_off) as fake:
        main(["eval", "--endpoint", fake.url, "--model", "m", "--limit", "3", "--json"])
    metrics = json.loads(capsys.readouterr().out)[0]["models"]["m"]["metrics"]
    assert metrics["parse_rate"]["value"] == metrics["stopped_rate"]["value"] == 0


def test_eval_scores_nothing_when_requests_fail():
    with in_thread(failing) as fake, pytest.raises(CheckFailed, match="3 of 3 requests got no answer"):
        main(["eval", "--endpoint", fake.url, "--model", "m", "--limit", "3"])


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["ask", "x"], "no model is given"),
        (["ask", "x", "--data", "strava", "--model", "m"], "no data source 'strava'"),
        (["ask", "x", "--model", "/nowhere"], "no such model"),
        (["ask", "x", "--endpoint", "http://127.0.0.1:9/v1"], "nothing answers"),
        (["ask", "x", "--endpoint", "nonsense", "--model", "m", "--timeout", "0"], "above 0"),
        (["ask", "x", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--rounds", "0"], "--rounds at least 1"),
        (["eval", "--compare", "--model", "m"], "needs two models"),
        (["eval", "--model", "m", "--model", "m"], "given twice"),
        (["eval", "--model", "m", "--concurrency", "0"], "at least 1"),
    ],
)
def test_a_users_mistake_is_one_line(args, reason):
    with pytest.raises(UserError, match=reason) as caught:
        main(args)
    assert "\n" not in str(caught.value)


def test_an_address_that_is_none_is_one_line(capsys):
    assert main(["ask", "x", "--endpoint", "nonsense", "--model", "m"]) == 1
    assert "nonsense" in capsys.readouterr().out


def test_every_built_in_data_set_can_be_scored():
    """The command line names them without loading them."""
    assert set(get_args(Dataset)) == set(BUILT_IN)
