"""The tools of `fitness-plus` that read: days, periods, heart rate, sleep, workouts, goals.

Names, parameters and descriptions are those of the data set, so that a model trained on it knows them. Its tools
that record, plan or set something are left out: this application never writes to anybody's account.
"""

import datetime as dt
from collections.abc import Callable, Iterable
from statistics import fmean

from fitnesscoach.providers import Day, FitnessData, NoDataError, Workout
from fitnesscoach.tools.toolbox import BadArgumentError, Capability, Response, Toolbox
from portlab_spec.data.fitness_plus import functions as declared
from portlab_spec.tools import tool_from_function

EXAMPLES = (
    "How many steps did I walk yesterday?",
    "Compare my sleep this week with last week.",
    "What was my lowest resting heart rate this month?",
    "Which workouts did I do in the last seven days?",
    "What is my fastest 10 km run?",
)
MAX_DAYS = 366  # of a period

# What each metric is of a day, and its unit.
_METRICS: dict[str, tuple[Callable[[Day], float | None], str]] = {
    "steps": (lambda day: day.steps, "steps"),
    "calories": (lambda day: day.energy, "kcal"),
    "distance": (lambda day: None if day.distance is None else round(day.distance / 1000, 2), "km"),
    "floors": (lambda day: day.floors, "floors"),
    "active_minutes": (lambda day: day.active_minutes, "min"),
    "resting_heart_rate": (lambda day: day.resting_heart_rate, "bpm"),
    "weight": (lambda day: day.weight, "kg"),
    "sleep": (lambda day: day.sleep.minutes if day.sleep else None, "min"),
}
# The metric that a goal is about, whether it counts the week rather than the day, and the unit.
_GOALS = {
    "steps": ("steps", False, "steps"),
    "distance_km": ("distance", True, "km"),
    "active_minutes": ("active_minutes", False, "min"),
    "calories": ("calories", False, "kcal"),
    "sleep_minutes": ("sleep", False, "min"),
}


def toolbox(data: FitnessData) -> Toolbox:
    """The reading tools over a source of data."""
    answers = _Records(data)
    return Toolbox(Capability(tool_from_function(f), getattr(answers, f.__name__)) for f in FUNCTIONS)


FUNCTIONS: tuple[Callable[..., Response], ...] = (
    declared.get_steps,
    declared.get_metric_history,
    declared.compare_periods,
    declared.get_goal_progress,
    declared.get_heart_rate,
    declared.get_sleep,
    declared.get_recovery_time,
    declared.list_workouts,
    declared.get_personal_record,
    declared.estimate_finish_time,
)


class _Records:
    """The functions behind the declarations, by their names and parameters."""

    def __init__(self, data: FitnessData) -> None:
        self._data = data

    def get_steps(self, date: str) -> Response:
        steps = self._data.day(_date("date", date)).steps
        if steps is None:
            raise NoDataError(f"no steps were recorded on {date}")
        return {"date": date, "steps": steps}

    def get_metric_history(self, metric: str, start_date: str, end_date: str, aggregate: str | None = None) -> Response:
        days = self._values(metric, _period(start_date, end_date, "start_date", "end_date"))
        values, unit = list(days.values()), _METRICS[metric][1]
        summary: dict[str, Callable[[], Response]] = {
            "daily": lambda: {"values": {date.isoformat(): value for date, value in days.items()}},
            "average": lambda: {"average": _mean(values)},
            "minimum": lambda: {"lowest": min(values)},
            "maximum": lambda: {"highest": max(values)},
        }
        if aggregate:
            return {"days": len(values), **summary[aggregate](), "unit": unit}
        return {
            "days": len(values), "average": _mean(values), "lowest": min(values), "highest": max(values), "unit": unit,
        }  # fmt: skip

    def compare_periods(
        self, metric: str, first_start: str, first_end: str, second_start: str, second_end: str
    ) -> Response:
        first = _mean(self._values(metric, _period(first_start, first_end, "first_start", "first_end")).values())
        second = _mean(self._values(metric, _period(second_start, second_end, "second_start", "second_end")).values())
        return {"first": first, "second": second, "change": round(first - second, 1), "unit": _METRICS[metric][1]}

    def get_goal_progress(self, goal: str) -> Response:
        target = self._data.goals().get(goal)
        if not target:
            raise NoDataError(f"no goal for {goal} is set")
        if goal not in _GOALS:
            raise NoDataError(f"what counts towards the goal {goal} is not recorded")
        metric, weekly, unit = _GOALS[goal]
        today = self._data.now().date()
        first = today - dt.timedelta(days=today.weekday() if weekly else 0)
        reached = round(sum(self._values(metric, (first, today)).values()), 1)
        return {"reached": reached, "target": target, "percent": round(100 * reached / target), "unit": unit}

    def get_heart_rate(self, start: str, end: str) -> Response:
        first, last = _time("start", start), _time("end", end)
        if last <= first:
            raise BadArgumentError(f"end {end} is not after start {start}")
        rates = [beat.rate for beat in self._data.beats(first, last)]
        return {"average": round(fmean(rates)), "minimum": min(rates), "maximum": max(rates), "unit": "bpm"}

    def get_sleep(self, date: str) -> Response:
        sleep = self._data.day(_date("date", date)).sleep
        if sleep is None:
            raise NoDataError(f"no sleep was recorded in the night to {date}")
        found = {"deep_min": sleep.deep_minutes, "rem_min": sleep.rem_minutes, "score": sleep.score}
        return {"duration": _clock(sleep.minutes), **{k: v for k, v in found.items() if v is not None}}

    def get_recovery_time(self) -> Response:
        return {"hours": self._data.recovery_hours()}

    def list_workouts(
        self, start_date: str, end_date: str, sport: str | None = None, min_distance_km: float | None = None
    ) -> Response:
        first, last = _period(start_date, end_date, "start_date", "end_date")
        found = [
            workout
            for workout in self._data.workouts(first, last)
            if (sport is None or workout.sport == sport)
            and (min_distance_km is None or (workout.metres or 0) >= 1000 * min_distance_km)
        ]
        minutes = [round(workout.seconds / 60) for workout in found]
        return {
            "count": len(found),
            "total_min": sum(minutes),
            "longest_min": max(minutes, default=0),
            "workouts": [_described(workout) for workout in found[-10:]],
        }

    def get_personal_record(self, sport: str, distance_km: float | None = None) -> Response:
        today = self._data.now().date()
        sessions = self._data.workouts(today - dt.timedelta(days=MAX_DAYS - 1), today)
        found = [workout for workout in sessions if workout.sport == sport]
        if distance_km is None:
            best = max(found, key=lambda workout: workout.seconds, default=None)
            if best is None:
                raise NoDataError(f"no {sport} was recorded in the last year")
            return {"best": f"{best.seconds // 60} minutes", "set_on": best.start.date().isoformat()}
        if distance_km <= 0:
            raise BadArgumentError(f"distance_km is {distance_km}, which is no distance")
        long_enough = [workout for workout in found if (workout.metres or 0) >= 1000 * distance_km]
        fastest = max(long_enough, key=lambda workout: (workout.metres or 0) / workout.seconds, default=None)
        if fastest is None:
            raise NoDataError(f"no {sport} of {distance_km:g} km or more was recorded in the last year")
        seconds = round(fastest.seconds * 1000 * distance_km / (fastest.metres or 1))
        return {"best": f"{_clock(seconds // 60)} h", "set_on": fastest.start.date().isoformat(), "at": "average pace"}

    def estimate_finish_time(self, distance_km: float, pace_seconds_per_km: int) -> Response:
        if not (0 < distance_km <= 1000 and 0 < pace_seconds_per_km <= 3600):
            raise BadArgumentError("distance_km must be up to 1000, pace_seconds_per_km up to 3600, both above 0")
        return declared.estimate_finish_time(distance_km, pace_seconds_per_km)

    def _values(self, metric: str, period: tuple[dt.date, dt.date]) -> dict[dt.date, float]:
        """The value of each day that has one."""
        read, _ = _METRICS[metric]
        found: dict[dt.date, float] = {}
        for ordinal in range(period[0].toordinal(), min(period[1], self._data.now().date()).toordinal() + 1):
            date = dt.date.fromordinal(ordinal)
            try:
                value = read(self._data.day(date))
            except NoDataError:
                continue
            if value is not None:
                found[date] = value
        if not found:
            raise NoDataError(f"no {metric} recorded from {period[0]} to {period[1]}")
        return found


def _date(name: str, text: str) -> dt.date:
    try:
        return dt.datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise BadArgumentError(f"{name} is {text[:40]!r}, not a date YYYY-MM-DD") from None


def _time(name: str, text: str) -> dt.datetime:
    try:
        return dt.datetime.strptime(text, "%Y-%m-%dT%H:%M")
    except ValueError:
        raise BadArgumentError(f"{name} is {text[:40]!r}, not a time YYYY-MM-DDTHH:MM") from None


def _period(start: str, end: str, start_name: str, end_name: str) -> tuple[dt.date, dt.date]:
    first, last = _date(start_name, start), _date(end_name, end)
    if last < first:
        raise BadArgumentError(f"{end_name} {end} is before {start_name} {start}")
    if (last - first).days >= MAX_DAYS:
        raise BadArgumentError(f"{start_name} to {end_name} is more than {MAX_DAYS} days")
    return first, last


def _mean(values: Iterable[float]) -> float:
    return round(fmean(values), 1)


def _clock(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02d}"


def _described(workout: Workout) -> Response:
    found: Response = {
        "date": workout.start.date().isoformat(),
        "sport": workout.sport,
        "min": round(workout.seconds / 60),
    }
    return {**found, "km": round(workout.metres / 1000, 1)} if workout.metres else found
