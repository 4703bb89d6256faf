"""The tools of `fitness-plus`: 28 functions of a fitness watch and its coach.

Signatures and docstrings are the declarations; the bodies return sample values that depend on the arguments
alone, so that the results and answers in the data come from calling them. Dates are `YYYY-MM-DD`, times `HH:MM`
on a 24-hour clock. Docstrings state the conventions a model needs, and stay short: every prompt repeats them.
"""

import datetime
import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypedDict

from pydantic import JsonValue

from portlab_spec.conversation import Tool
from portlab_spec.tools import tool_from_function

Result = dict[str, JsonValue]
Metric = Literal[
    "steps", "calories", "distance", "floors", "active_minutes", "resting_heart_rate", "weight", "sleep"
]  # fmt: skip
Goal = Literal["steps", "distance_km", "active_minutes", "calories", "sleep_minutes", "water_ml"]
Sport = Literal["running", "cycling", "swimming", "walking", "hiking", "rowing", "yoga", "strength"]
Weekday = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]

# What a day's value of a metric may be, and its unit.
_METRIC_RANGE: dict[str, tuple[int, int, str]] = {
    "steps": (4200, 14800, "steps"),
    "calories": (1800, 2900, "kcal"),
    "distance": (3, 14, "km"),
    "floors": (2, 24, "floors"),
    "active_minutes": (15, 95, "min"),
    "resting_heart_rate": (51, 63, "bpm"),
    "weight": (70, 74, "kg"),
    "sleep": (360, 500, "min"),
}
_GOAL_TARGET = {
    "steps": 10000, "distance_km": 40, "active_minutes": 45, "calories": 2400, "sleep_minutes": 480, "water_ml": 2000,
}  # fmt: skip


class Reminder(TypedDict):
    """Notice before a workout starts."""

    minutes_before: Annotated[int, "Minutes before the start."]
    channel: Annotated[Literal["watch", "phone", "email"], "Where the notice appears."]


def _sample(low: int, high: int, *key: Any) -> int:
    """A whole number from low to high that depends on the key alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return low + int.from_bytes(digest[:4], "big") % (high - low + 1)


def _days(start: str, end: str) -> int:
    return (datetime.date.fromisoformat(end) - datetime.date.fromisoformat(start)).days + 1


def _clock(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02d}"


def _values(metric: str, start: str, end: str) -> list[int]:
    """A value per day: the same day has the same value whatever the period."""
    low, high, _ = _METRIC_RANGE[metric]
    first = datetime.date.fromisoformat(start).toordinal()
    return [_sample(low, high, metric, day) for day in range(first, first + _days(start, end))]


def _mean(metric: str, start: str, end: str) -> int:
    values = _values(metric, start, end)
    return round(sum(values) / len(values))


# ------------------------------------------------------------------------------------------------ activity


def get_steps(date: str) -> Result:
    """Steps walked on one day.

    Args:
        date: Day, YYYY-MM-DD.
    """
    return {"date": date, "steps": _mean("steps", date, date)}


def get_metric_history(
    metric: Metric,
    start_date: str,
    end_date: str,
    aggregate: Literal["daily", "average", "minimum", "maximum"] | None = None,
) -> Result:
    """Values of one metric over several days.

    Args:
        metric: What was measured.
        start_date: First day, YYYY-MM-DD.
        end_date: Last day, YYYY-MM-DD.
        aggregate: How to sum up the days, if asked for.
    """
    values, unit = _values(metric, start_date, end_date), _METRIC_RANGE[metric][2]
    average = _mean(metric, start_date, end_date)
    return {"days": len(values), "average": average, "lowest": min(values), "highest": max(values), "unit": unit}


def compare_periods(metric: Metric, first_start: str, first_end: str, second_start: str, second_end: str) -> Result:
    """Compare the daily average of one metric between two periods.

    Args:
        metric: What was measured.
        first_start: First day of the first period, YYYY-MM-DD.
        first_end: Last day of the first period.
        second_start: First day of the second period.
        second_end: Last day of the second period.
    """
    first, second = _mean(metric, first_start, first_end), _mean(metric, second_start, second_end)
    return {"first": first, "second": second, "change": first - second, "unit": _METRIC_RANGE[metric][2]}


def get_goal_progress(goal: Goal) -> Result:
    """Progress towards a goal that is set.

    Args:
        goal: Which goal.
    """
    percent = _sample(12, 118, "progress", goal)
    return {"reached": _GOAL_TARGET[goal] * percent // 100, "target": _GOAL_TARGET[goal], "percent": percent}


# ------------------------------------------------------------------------------------------------ vitals


def get_heart_rate(start: str, end: str) -> Result:
    """Heart rate in a span of time. Morning 06:00-12:00, afternoon 12:00-18:00, evening 18:00-22:00, night to 06:00.

    Args:
        start: Start, YYYY-MM-DDTHH:MM.
        end: End, YYYY-MM-DDTHH:MM.
    """
    average = _sample(58, 96, "heart", start, end)
    return {"average": average, "minimum": average - 11, "maximum": average + _sample(20, 70, start), "unit": "bpm"}


def get_sleep(date: str) -> Result:
    """Sleep of one night: duration, phases and score.

    Args:
        date: Day on which the night ended, YYYY-MM-DD.
    """
    minutes = _sample(322, 521, "sleep", date)
    return {
        "duration": _clock(minutes),
        "deep_min": minutes * 18 // 100,
        "rem_min": minutes * 22 // 100,
        "score": _sample(52, 94, "score", date),
    }


def get_recovery_time() -> Result:
    """Hours of rest advised before the next hard workout."""
    return {"hours": _sample(6, 40, "recovery")}


def log_blood_pressure(systolic: int, diastolic: int, pulse: int | None = None) -> Result:
    """Record a blood pressure reading.

    Args:
        systolic: Upper value, mmHg.
        diastolic: Lower value, mmHg.
        pulse: Pulse, beats per minute.
    """
    return {"saved": True, "category": "elevated" if systolic >= 130 or diastolic >= 85 else "normal"}


# ------------------------------------------------------------------------------------------------ workouts


def list_workouts(
    start_date: str, end_date: str, sport: Sport | None = None, min_distance_km: float | None = None
) -> Result:
    """List recorded workouts of a period.

    Args:
        start_date: First day, YYYY-MM-DD.
        end_date: Last day, YYYY-MM-DD.
        sport: Only this sport.
        min_distance_km: Only workouts of at least this distance, km.
    """
    count = _sample(2, 9, "workouts", start_date, end_date, sport, min_distance_km)
    return {"count": count, "total_min": count * _sample(31, 64, start_date), "longest_min": _sample(65, 118, end_date)}


def get_personal_record(sport: Sport, distance_km: float | None = None) -> Result:
    """Personal best in a sport.

    Args:
        sport: Sport.
        distance_km: Distance of the record, km; the longest session if left out.
    """
    set_on = datetime.date(2024, _sample(1, 12, sport, distance_km), _sample(1, 28, sport)).isoformat()
    if distance_km is None:
        return {"best": f"{_sample(61, 190, sport)} minutes", "set_on": set_on}
    pace = {"cycling": 2.2, "swimming": 21, "walking": 10.5, "hiking": 13, "rowing": 4.6}.get(sport, 5.1)
    return {"best": f"{_clock(max(1, round(distance_km * pace)))} h", "set_on": set_on}


def log_workout(
    sport: Sport,
    duration_min: int,
    distance_km: float | None = None,
    date: str | None = None,
    effort: int | None = None,
) -> Result:
    """Record a workout that is already done.

    Args:
        sport: Sport.
        duration_min: Duration in minutes.
        distance_km: Distance in km, one decimal; 1 mile is 1.609 km.
        date: Day, YYYY-MM-DD; today if left out.
        effort: Perceived effort, 1 to 10.
    """
    return {"saved": True, "calories": duration_min * _sample(6, 11, sport)}


def delete_workout(sport: Sport, date: str) -> Result:
    """Delete a recorded workout.

    Args:
        sport: Sport.
        date: Day of the workout, YYYY-MM-DD.
    """
    return {"deleted": 1}


def schedule_workout(
    sport: Sport, date: str, time: str, duration_min: int | None = None, reminder: Reminder | None = None
) -> Result:
    """Plan a workout in the calendar.

    Args:
        sport: Sport.
        date: Day, YYYY-MM-DD.
        time: Start, HH:MM.
        duration_min: Planned duration in minutes.
        reminder: Notice before the start.
    """
    return {"scheduled": True, "conflicts": _sample(0, 1, date, time)}


# ------------------------------------------------------------------------------------------------ body and food


def log_weight(weight_kg: float, date: str | None = None) -> Result:
    """Record body weight.

    Args:
        weight_kg: Weight in kg, one decimal; 1 pound is 0.4536 kg.
        date: Day, YYYY-MM-DD; today if left out.
    """
    return {"saved": True, "change_kg": _sample(-12, 12, weight_kg) / 10}


def log_food(
    foods: list[str], meal: Literal["breakfast", "lunch", "dinner", "snack"], date: str | None = None
) -> Result:
    """Record what was eaten.

    Args:
        foods: Foods, one entry each, without article.
        meal: Meal.
        date: Day, YYYY-MM-DD; today if left out.
    """
    return {"saved": len(foods), "calories": sum(_sample(70, 420, food) for food in foods)}


def log_water(amount_ml: int) -> Result:
    """Record water that was drunk.

    Args:
        amount_ml: Amount in millilitres.
    """
    return {"saved": True, "total_today_ml": amount_ml + 50 * _sample(4, 30, "water", amount_ml)}


def log_mood(mood: Literal["great", "good", "okay", "bad", "awful"], tags: list[str] | None = None) -> Result:
    """Record the mood.

    Args:
        mood: Mood.
        tags: What it has to do with, single words.
    """
    return {"saved": True, "entries_this_week": _sample(1, 9, mood, tags)}


# ------------------------------------------------------------------------------------------------ time


def set_alarm(time: str, days: list[Weekday] | None = None, smart_wake: bool | None = None) -> Result:
    """Set a wake-up alarm on the watch.

    Args:
        time: Time, HH:MM.
        days: Weekdays on which it repeats; once if left out.
        smart_wake: Wake in light sleep, up to 20 minutes earlier.
    """
    return {"set": True, "alarms_active": _sample(1, 4, time)}


def start_timer(seconds: int, label: str | None = None) -> Result:
    """Start a countdown.

    Args:
        seconds: Length in seconds.
        label: Name shown with it.
    """
    return {"running": True, "ends_in_s": seconds}


def set_reminder(
    text: str, time: str, date: str | None = None, repeat: Literal["daily", "weekly", "monthly"] | None = None
) -> Result:
    """Set a reminder to do something.

    Args:
        text: What to do, as said.
        time: Time, HH:MM.
        date: Day, or first day, YYYY-MM-DD; the next time it is that late if left out.
        repeat: How often it repeats.
    """
    return {"set": True, "reminders_active": _sample(1, 6, text, time)}


def start_intervals(work_seconds: int, rest_seconds: int, rounds: int, warm_up: bool | None = None) -> Result:
    """Start an interval session of work and rest.

    Args:
        work_seconds: Work per round in seconds.
        rest_seconds: Rest per round in seconds.
        rounds: Number of rounds.
        warm_up: Begin with a warm-up.
    """
    return {"running": True, "total_s": (work_seconds + rest_seconds) * rounds}


# ------------------------------------------------------------------------------------------------ settings


def set_goal(goal: Goal, value: int, period: Literal["daily", "weekly"]) -> Result:
    """Set or change a goal.

    Args:
        goal: Which goal; it names the unit.
        value: New target.
        period: Day or week.
    """
    return {"set": True, "previous": value * _sample(70, 95, goal, value, period) // 100}


def set_heart_rate_zones(bounds: list[int]) -> Result:
    """Set the upper bounds of the heart rate zones.

    Args:
        bounds: Beats per minute, ascending.
    """
    return {"set": True, "zones": len(bounds) + 1}


def set_do_not_disturb(enabled: bool, until: str | None = None) -> Result:
    """Switch notifications of the watch off or on again.

    Args:
        enabled: true silences the watch.
        until: End of the silence, HH:MM.
    """
    return {"enabled": enabled}


# ------------------------------------------------------------------------------------------------ outside


def get_weather(place: str, date: str | None = None) -> Result:
    """Weather forecast for training outdoors.

    Args:
        place: Town.
        date: Day, YYYY-MM-DD; today if left out.
    """
    sky = ("sunny", "cloudy", "rainy", "windy")[_sample(0, 3, place, date)]
    return {"sky": sky, "temperature_c": _sample(4, 27, date, place), "rain_percent": _sample(0, 90, place, date, sky)}


def find_routes(
    distance_km: float,
    surface: Literal["road", "trail", "track"] | None = None,
    avoid_hills: bool | None = None,
) -> Result:
    """Suggest routes nearby.

    Args:
        distance_km: Length in km, one decimal; 1 mile is 1.609 km.
        surface: Kind of ground.
        avoid_hills: Only flat routes.
    """
    names = ("River Loop", "Castle Round", "Old Mill Path", "Lake Circuit", "Heath Trail")
    pick = _sample(0, len(names) - 1, distance_km, surface)
    return {"found": _sample(2, 7, distance_km), "best": names[pick], "climb_m": _sample(12, 240, names[pick])}


def share_summary(recipients: list[str], start_date: str, end_date: str, include_map: bool | None = None) -> Result:
    """Send a summary of a period to friends.

    Args:
        recipients: First names.
        start_date: First day, YYYY-MM-DD.
        end_date: Last day, YYYY-MM-DD.
        include_map: Add a map of the routes.
    """
    return {"sent_to": len(recipients), "days": _days(start_date, end_date)}


def estimate_finish_time(distance_km: float, pace_seconds_per_km: int) -> Result:
    """Finish time of a race at a steady pace.

    Args:
        distance_km: Distance in km, one decimal; half marathon 21.1, marathon 42.2.
        pace_seconds_per_km: Pace in seconds per kilometre.
    """
    seconds = round(distance_km * pace_seconds_per_km)
    return {"finish_time": f"{seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"}


# Functions of one line can stand in for each other, more or less: the distractors of one another, and all left out
# where a question is meant to have no answer.
GROUPS: tuple[tuple[Callable[..., Result], ...], ...] = (
    (get_steps, get_metric_history, compare_periods, get_goal_progress),
    (get_heart_rate, get_sleep, get_recovery_time, log_blood_pressure),
    (list_workouts, get_personal_record, log_workout, delete_workout, schedule_workout),
    (log_weight, log_food, log_water, log_mood),
    (set_alarm, start_timer, set_reminder, start_intervals),
    (set_goal, set_heart_rate_zones, set_do_not_disturb),
    (get_weather, find_routes, share_summary, estimate_finish_time),
)
FUNCTIONS: dict[str, Callable[..., Result]] = {f.__name__: f for group in GROUPS for f in group}


@cache
def tools() -> tuple[Tool, ...]:
    """The 28 tools, in declaration order."""
    return tuple(tool_from_function(function) for function in FUNCTIONS.values())


def call(name: str, arguments: Mapping[str, Any]) -> Result:
    """The sample result of a call; the name is looked up in a table."""
    return FUNCTIONS[name](**arguments)
