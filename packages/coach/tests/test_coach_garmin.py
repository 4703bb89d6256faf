"""A Garmin account, over answers in the shape that the service gives."""

import datetime as dt
import threading

import pytest

from fitnesscoach.providers import NoDataError
from fitnesscoach.providers.garmin import Garmin, connect
from fitnesscoach.tools import tool_set
from portlab_spec.conversation import ToolCall
from portlab_spec.errors import UserError

NOW = dt.datetime(2026, 5, 13, 18, 20)
SUMMARY = {
    "userProfileId": 1, "calendarDate": "2026-05-13", "totalSteps": 2400, "dailyStepGoal": 7640,
    "totalDistanceMeters": 1888.0, "totalKilocalories": 1432.0, "activeSeconds": 3000, "highlyActiveSeconds": 780,
    "floorsAscended": 7.3, "restingHeartRate": 54, "bodyBatteryMostRecentValue": 69, "privacyProtected": False,
}  # fmt: skip
SLEEP = {
    "dailySleepDTO": {
        "calendarDate": "2026-05-13", "sleepTimeSeconds": 25980, "deepSleepSeconds": 4800, "remSleepSeconds": 5700,
        "sleepScores": {"overall": {"value": 81, "qualifierKey": "GOOD"}},
    }
}  # fmt: skip
HEART = {
    "startTimestampGMT": "2026-05-12T22:00:00.0", "startTimestampLocal": "2026-05-13T00:00:00.0",
    "heartRateValues": [[1778688000000, 61], [1778688120000, None], [1778688240000, 63]],
}  # fmt: skip
ACTIVITIES = [
    {"startTimeLocal": "2026-05-12 18:03:21", "activityType": {"typeKey": "trail_running"}, "duration": 2412.7,
     "distance": 6820.4, "calories": 431.0, "averageHR": 149.0},
    {"startTimeLocal": "2026-05-10 09:00:00", "activityType": {"typeKey": "strength_training"}, "duration": 1800.0,
     "distance": 0.0, "calories": None, "averageHR": None},
]  # fmt: skip


class Recording:
    """A client that answers from recordings and notes what it was asked."""

    def __init__(self, **answers):
        self.asked = []
        self.answers = {
            "get_user_summary": SUMMARY,
            "get_sleep_data": SLEEP,
            "get_heart_rates": HEART,
            "get_body_composition": {"dateWeightList": [{"calendarDate": "2026-05-13", "weight": 72050.0}]},
            "get_activities_by_date": ACTIVITIES,
            "get_training_readiness": [{"timestampLocal": "2026-05-13T07:00:00.0", "recoveryTime": 1110}],
            **answers,
        }

    def __getattr__(self, method):
        def answer(*dates):
            self.asked.append((method, *dates))
            found = self.answers[method]
            if isinstance(found, Exception):
                raise found
            return found

        return answer


def garmin(**answers):
    client = Recording(**answers)
    return Garmin(client, lambda: NOW), client


def run(data, kind, name, **arguments):
    import asyncio

    return asyncio.run(tool_set(kind, data).toolbox.run(ToolCall(name=name, arguments=arguments)))


@pytest.mark.parametrize(
    ("tool", "response"),
    [
        ("get_steps", {"steps": 2400}),
        ("get_daily_step_goal", {"goal_steps": 7640}),
        ("get_step_goal_progress", {"percent": 31.41}),
        ("get_sleeping_minutes", {"minutes": 433}),
        ("get_active_minutes", {"minutes": 63}),
        ("get_heart_rate", {"beats_per_minute": 63, "measured": "18:04"}),
        ("get_body_battery_level", {"level": 69}),
    ],
)
def test_the_seven_tools_read_the_service_answers(tool, response):
    assert run(garmin()[0], "basic", tool).response == response


def test_a_night_holds_its_phases_and_score():
    assert run(garmin()[0], "plus", "get_sleep", date="2026-05-13").response == {
        "duration": "7:13", "deep_min": 80, "rem_min": 95, "score": 81,
    }  # fmt: skip


def test_workouts_come_oldest_first_under_common_names():
    found = garmin()[0].workouts(dt.date(2026, 5, 1), dt.date(2026, 5, 13))
    assert [(w.sport, w.seconds, w.metres) for w in found] == [("strength", 1800, None), ("running", 2413, 6820.4)]


def test_weight_is_in_kilograms_and_recovery_in_hours():
    data, _ = garmin()
    assert data.day(NOW.date()).weight == 72.0  # 72.05, rounded to even in binary
    assert data.recovery_hours() == 18


def test_a_recovery_that_has_reached_zero_is_zero():
    rows = [
        {"timestampLocal": "2026-05-13T15:00:00.0", "recoveryTime": 600, "recoveryTimeChangePhrase": "REACHED_ZERO"}
    ]
    assert garmin(get_training_readiness=rows)[0].recovery_hours() == 0


@pytest.mark.parametrize("answer", [None, {}, {"totalSteps": None}, [], "no"])
def test_a_day_without_the_watch_has_no_steps(answer):
    result = run(garmin(get_user_summary=answer)[0], "basic", "get_steps")
    assert (result.status, result.error) == ("no_data", "no steps recorded today")


def test_a_night_without_the_watch_has_no_sleep():
    empty = {"dailySleepDTO": {"sleepTimeSeconds": None, "deepSleepSeconds": None}}
    assert run(garmin(get_sleep_data=empty)[0], "basic", "get_sleeping_minutes").status == "no_data"


def test_a_fault_of_the_service_is_a_failed_call_in_one_line():
    result = run(garmin(get_user_summary=RuntimeError("API Error 503\n<html>"))[0], "basic", "get_steps")
    assert (result.status, result.error) == ("failed", "the tool failed: API Error 503")


def test_a_past_day_is_asked_for_once():
    data, client = garmin()
    for _ in range(3):
        data.day(dt.date(2026, 5, 1))
    assert client.asked.count(("get_user_summary", "2026-05-01")) == 1


def test_the_future_is_not_asked_for():
    data, client = garmin()
    with pytest.raises(NoDataError, match="in the future"):
        data.day(dt.date(2026, 5, 14))
    assert not client.asked


def test_threads_share_what_was_asked():
    data, client = garmin()
    threads = [threading.Thread(target=data.day, args=(dt.date(2026, 5, 1),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(client.asked) == 3


def test_without_tokens_the_user_is_told_to_log_in(tmp_path, monkeypatch):
    pytest.importorskip("garminconnect")
    monkeypatch.setenv("GARMINTOKENS", str(tmp_path / "none"))
    with pytest.raises(UserError, match="Run `fitnesscoach login`"):
        connect()
