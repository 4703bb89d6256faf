"""The built-in data: made by the committed script, plausible, and always up to today."""

import datetime as dt
import sqlite3
from importlib import resources

from fitnesscoach.providers import make_sample, sample


def rows(path):
    connection = sqlite3.connect(path)
    tables = ["reference", "goal", "day", "workout", "beat"]
    found = {table: connection.execute(f"select * from {table}").fetchall() for table in tables}
    connection.close()
    return found


def test_the_file_is_what_the_script_writes(tmp_path):
    make_sample.write(tmp_path / "again.sqlite")
    shipped = resources.files("fitnesscoach.providers") / "sample.sqlite"
    assert rows(tmp_path / "again.sqlite") == rows(shipped)


def test_every_day_of_six_weeks_is_recorded_up_to_today():
    data = sample.load(dt.date(2027, 1, 3))
    assert max(data.days) == dt.date(2027, 1, 3)
    assert len(data.days) == 42
    assert data.now() == dt.datetime(2027, 1, 3, 18, 0)


def test_nothing_is_recorded_in_the_future(data):
    assert max(beat.time for beat in data.heart) < data.now()
    assert max(workout.start for workout in data.sessions) < data.now()


def test_values_are_those_of_a_person(data):
    for day in data.days.values():
        assert 0 < day.steps < 30_000
        assert 40 < day.resting_heart_rate < 80
        assert day.sleep.deep_minutes + day.sleep.rem_minutes < day.sleep.minutes < 600
        assert 0 <= day.body_battery <= 100
    assert all(35 < beat.rate < 200 for beat in data.heart)


def test_some_days_lack_a_weight(data):
    assert {day.weight is None for day in data.days.values()} == {True, False}
