"""The seven tools of `fitness-213`: about today, without arguments."""

import datetime as dt

from fitnesscoach.providers import FitnessData, NoDataError
from fitnesscoach.tools.toolbox import Capability, Response, Toolbox
from portlab_spec.data import fitness

EXAMPLES = (
    "How many steps have I walked today?",
    "How close am I to my step goal?",
    "How long did I sleep last night?",
    "What is my heart rate?",
    "How much energy do I have left?",
)
RECENT = dt.timedelta(hours=24)  # a pulse older than that is not "current"

_WORDS = {
    "get_steps": "You have walked {steps:,} steps today.",
    "get_daily_step_goal": "Your goal is {goal_steps:,} steps a day.",
    "get_step_goal_progress": "You have reached {percent:.0f} % of your step goal.",
    "get_sleeping_minutes": "You slept {minutes} minutes last night.",
    "get_active_minutes": "You have been active for {minutes} minutes today.",
    "get_heart_rate": "Your heart rate was {beats_per_minute} beats per minute at {measured}.",
    "get_body_battery_level": "Your body battery is at {level} of 100.",
}


def toolbox(data: FitnessData) -> Toolbox:
    """The seven tools over a source of data."""
    answers = _Today(data)
    declared = {tool.name: tool for tool in fitness.tools()}
    return Toolbox(Capability(tool, getattr(answers, name), words=_WORDS[name]) for name, tool in declared.items())


class _Today:
    """The functions behind the declarations, by their names."""

    def __init__(self, data: FitnessData) -> None:
        self._data = data

    def get_steps(self) -> Response:
        return {"steps": self._today("steps", "steps")}

    def get_daily_step_goal(self) -> Response:
        return {"goal_steps": self._goal()}

    def get_step_goal_progress(self) -> Response:
        return {"percent": round(100 * self._today("steps", "steps") / self._goal(), 2)}

    def get_sleeping_minutes(self) -> Response:
        sleep = self._data.day(self._data.now().date()).sleep
        if sleep is None:
            raise NoDataError("no sleep was recorded last night")
        return {"minutes": sleep.minutes}

    def get_active_minutes(self) -> Response:
        return {"minutes": self._today("active_minutes", "activity")}

    def get_heart_rate(self) -> Response:
        now = self._data.now()
        latest = self._data.beats(now - RECENT, now + dt.timedelta(seconds=1))[-1]
        return {"beats_per_minute": latest.rate, "measured": f"{latest.time:%H:%M}"}

    def get_body_battery_level(self) -> Response:
        return {"level": self._today("body_battery", "body battery level")}

    def _goal(self) -> int:
        if goal := self._data.day(self._data.now().date()).step_goal or self._data.goals().get("steps"):
            return goal
        raise NoDataError("no step goal is set")

    def _today(self, field: str, words: str) -> int:
        value = getattr(self._data.day(self._data.now().date()), field)
        if value is None:
            raise NoDataError(f"no {words} recorded today")
        return int(value)
