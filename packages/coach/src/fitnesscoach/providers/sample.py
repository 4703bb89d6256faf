"""The built-in sample data (`make_sample`), laid on the calendar so that its last day is today."""

import datetime as dt
import sqlite3
from contextlib import closing
from importlib import resources

from fitnesscoach.providers.records import Beat, Day, Recorded, Sleep, Workout


def load(today: dt.date | None = None) -> Recorded:
    """The sample data; `now` is 18:00 of `today` whatever the clock says, so that one day gives the same answers."""
    today = today or dt.date.today()
    with (
        resources.as_file(resources.files("fitnesscoach.providers") / "sample.sqlite") as path,
        closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection,
    ):
        connection.row_factory = sqlite3.Row
        ((until, recovery_hours),) = connection.execute("select * from reference")
        days = [_day(row, today) for row in connection.execute("select * from day order by age desc")]
        workouts = [_workout(row, today) for row in connection.execute("select * from workout order by age desc")]
        beats = [_beat(row, today) for row in connection.execute("select * from beat order by age desc, minute")]
        goals = dict(connection.execute("select name, target from goal").fetchall())
    return Recorded(
        name="sample",
        at=_time(today, 0, until),
        days={day.date: day for day in days},
        heart=beats,
        sessions=workouts,
        targets=goals,
        rest_hours=recovery_hours,
    )


def _day(row: sqlite3.Row, today: dt.date) -> Day:
    return Day(
        date=today - dt.timedelta(days=row["age"]),
        steps=row["steps"],
        step_goal=row["step_goal"],
        energy=row["energy"],
        distance=row["distance"],
        floors=row["floors"],
        active_minutes=row["active_minutes"],
        resting_heart_rate=row["resting_heart_rate"],
        weight=row["weight"],
        body_battery=row["body_battery"],
        sleep=Sleep(row["sleep"], row["deep"], row["rem"], row["score"]),
    )


def _workout(row: sqlite3.Row, today: dt.date) -> Workout:
    start = _time(today, row["age"], row["minute"])
    return Workout(start, row["sport"], row["seconds"], row["metres"], row["energy"], row["heart"])


def _beat(row: sqlite3.Row, today: dt.date) -> Beat:
    return Beat(_time(today, row["age"], row["minute"]), row["rate"])


def _time(today: dt.date, age: int, minute: int) -> dt.datetime:
    return dt.datetime.combine(today - dt.timedelta(days=age), dt.time()) + dt.timedelta(minutes=minute)
