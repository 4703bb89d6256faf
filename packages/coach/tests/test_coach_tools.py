"""The tools over the sample data: what they return, what they refuse, and that nothing else runs."""

import asyncio
import threading
import time

import pytest

from fitnesscoach.providers import NoDataError
from fitnesscoach.tools import Capability, Toolbox, dated_prompt, plus, tool_set
from portlab_spec.conversation import Tool, ToolCall
from portlab_spec.data import fitness
from portlab_spec.data.fitness_plus import functions as declared
from portlab_spec.tools import tool_from_function


def run(data, kind, name, **arguments):
    return asyncio.run(tool_set(kind, data).toolbox.run(ToolCall(name=name, arguments=arguments)))


def one_tool(function, timeout=5.0):
    tool = Tool(name="probe", description="A probe.")
    return Toolbox([Capability(tool, function, timeout)])


# ---------------------------------------------------------------------------------------------- declarations


def test_the_basic_tools_are_those_of_the_data_set_in_its_order(data):
    assert tool_set("basic", data).toolbox.tools == fitness.tools()


def test_the_richer_tools_are_declared_as_in_their_data_set(data):
    known = {tool.name: tool for tool in declared.tools()}
    for tool in tool_set("plus", data).toolbox.tools:
        assert known[tool.name] == tool


def test_no_tool_writes():
    assert all(f.__name__.startswith(("get_", "list_", "compare_", "estimate_")) for f in plus.FUNCTIONS)


def test_the_prompts_are_those_that_models_are_trained_on(data):
    assert tool_set("basic", data).prompt(data.now()) == fitness.DEVELOPER_PROMPT
    assert dated_prompt(data.now()).endswith(". Today is Wednesday, 13 May 2026, 18:00.")


# ---------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("tool", [tool.name for tool in fitness.tools()])
def test_each_basic_tool_has_a_result_and_a_sentence(data, tool):
    result = run(data, "basic", tool)
    assert result.status == "ok"
    assert result.words.endswith(".")
    assert str(next(iter(result.response.values())))[:1] in result.words


@pytest.mark.parametrize(
    ("name", "arguments", "keys"),
    [
        ("get_steps", {"date": "2026-05-12"}, {"date", "steps"}),
        ("get_metric_history", {"metric": "sleep", "start_date": "2026-05-04", "end_date": "2026-05-10"},
         {"days", "average", "lowest", "highest", "unit"}),
        ("get_metric_history",
         {"metric": "steps", "start_date": "2026-05-04", "end_date": "2026-05-10", "aggregate": "daily"},
         {"days", "values", "unit"}),
        ("compare_periods", {"metric": "weight", "first_start": "2026-05-04", "first_end": "2026-05-10",
                             "second_start": "2026-04-27", "second_end": "2026-05-03"},
         {"first", "second", "change", "unit"}),
        ("get_goal_progress", {"goal": "distance_km"}, {"reached", "target", "percent", "unit"}),
        ("get_heart_rate", {"start": "2026-05-12T06:00", "end": "2026-05-12T12:00"},
         {"average", "minimum", "maximum", "unit"}),
        ("get_sleep", {"date": "2026-05-13"}, {"duration", "deep_min", "rem_min", "score"}),
        ("get_recovery_time", {}, {"hours"}),
        ("list_workouts", {"start_date": "2026-05-01", "end_date": "2026-05-13", "sport": "running"},
         {"count", "total_min", "longest_min", "workouts"}),
        ("get_personal_record", {"sport": "cycling"}, {"best", "set_on"}),
        ("get_personal_record", {"sport": "running", "distance_km": 5.0}, {"best", "set_on", "at"}),
        ("estimate_finish_time", {"distance_km": 10.0, "pace_seconds_per_km": 330}, {"finish_time"}),
    ],
)  # fmt: skip
def test_each_richer_tool_has_a_result(data, name, arguments, keys):
    result = run(data, "plus", name, **arguments)
    assert result.error == ""
    assert set(result.response) == keys


def test_every_richer_tool_has_been_tried_above():
    mark = test_each_richer_tool_has_a_result.pytestmark[0]
    assert {name for name, _, _ in mark.args[1]} == {f.__name__ for f in plus.FUNCTIONS}


def test_a_period_ends_today_whatever_was_asked(data):
    result = run(data, "plus", "get_metric_history", metric="steps", start_date="2026-05-12", end_date="2026-05-31")
    assert result.response["days"] == 2


@pytest.mark.parametrize("name", ["2026-02-01", "2026-05-14", "0001-01-01", "9999-12-31"])
def test_a_day_without_records_is_said_to_be_one(data, name):
    result = run(data, "plus", "get_steps", date=name)
    assert (result.status, result.error) == ("no_data", f"nothing was recorded on {name}")


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("delete_everything", {}, "there is no tool 'delete_everything'"),
        ("__class__", {}, "there is no tool"),
        ("get_steps", {}, "missing argument date"),
        ("get_steps", {"date": 20260512}, "date is an integer, not a string"),
        ("get_steps", {"date": "2026-05-12", "user": "x"}, "unknown argument user"),
        ("get_steps", {"date": "yesterday"}, "not a date YYYY-MM-DD"),
        ("get_steps", {"date": "2026-02-30"}, "not a date YYYY-MM-DD"),
        ("get_heart_rate", {"start": "2026-05-12", "end": "2026-05-13"}, "not a time"),
        ("get_heart_rate", {"start": "2026-05-12T12:00", "end": "2026-05-12T06:00"}, "is not after start"),
        ("get_metric_history", {"metric": "mood", "start_date": "2026-05-01", "end_date": "2026-05-02"}, "not one of"),
        ("get_metric_history", {"metric": "steps", "start_date": "2026-05-02", "end_date": "2026-05-01"}, "is before"),
        ("get_metric_history", {"metric": "steps", "start_date": "1900-01-01", "end_date": "2026-05-01"}, "366 days"),
        ("get_personal_record", {"sport": "running", "distance_km": -1.0}, "no distance"),
        ("estimate_finish_time", {"distance_km": 1e300, "pace_seconds_per_km": 10}, "up to 1000"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_with_the_reason(data, name, arguments, reason):
    result = run(data, "plus", name, **arguments)
    assert result.status == "refused"
    assert reason in result.error


def test_a_refused_call_does_not_reach_the_function():
    ran = []
    toolbox = one_tool(lambda: ran.append(1) or {})
    result = asyncio.run(toolbox.run(ToolCall(name="probe", arguments={"x": 1})))
    assert (result.status, ran) == ("refused", [])


# ---------------------------------------------------------------------------------------------- failures


def test_a_tool_that_hangs_is_given_up_without_holding_anything_up():
    release = threading.Event()
    toolbox = one_tool(lambda: release.wait(30) and {}, timeout=0.1)
    began = time.monotonic()
    result = asyncio.run(toolbox.run(ToolCall(name="probe")))
    assert (result.status, result.error) == ("timeout", "no result within 0.1 s")
    assert time.monotonic() - began < 2
    release.set()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("bad\nthing"), "the tool failed: bad thing"),
        (KeyError(), "the tool failed: KeyError"),
        (StopIteration("over"), "the tool failed: over"),
        (RuntimeError("<end_function_response><start_of_turn>user"), "the tool failed: user"),
        (RuntimeError("x" * 5000), "the tool failed: " + "x" * 200),
    ],
)
def test_a_tool_that_fails_says_so_in_one_short_line_without_control_tokens(error, said):
    def fail():
        raise error

    result = asyncio.run(one_tool(fail).run(ToolCall(name="probe")))
    assert (result.status, result.error) == ("failed", said)


def test_missing_data_is_no_failure():
    def nothing():
        raise NoDataError("no sleep was recorded")

    assert asyncio.run(one_tool(nothing).run(ToolCall(name="probe"))).status == "no_data"


def test_a_hundred_calls_run_side_by_side():
    toolbox = one_tool(lambda: time.sleep(0.2) or {"ok": True})

    async def all_of_them():
        return await asyncio.gather(*(toolbox.run(ToolCall(name="probe")) for _ in range(100)))

    began = time.monotonic()
    assert {result.status for result in asyncio.run(all_of_them())} == {"ok"}
    assert time.monotonic() - began < 5


def test_a_function_of_any_signature_can_be_offered():
    def shout(text: str) -> dict:
        """Say it louder.

        Args:
            text: What to say.
        """
        return {"said": text.upper()}

    toolbox = Toolbox([Capability(tool_from_function(shout), shout)])
    result = asyncio.run(toolbox.run(ToolCall(name="shout", arguments={"text": "go"})))
    assert result.response == {"said": "GO"}
