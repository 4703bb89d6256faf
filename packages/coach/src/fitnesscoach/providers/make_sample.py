"""Writes sample.sqlite: a made-up month of one person's data.

python -m fitnesscoach.providers.make_sample [FILE]

Dates are whole days before a reference day and minutes of that day, so that whoever reads the file can lay it on
any calendar; the reference day itself is recorded up to 18:00. The same seed gives the same rows.
"""

import math
import random
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

SEED = 20260501
DAYS = 42  # the reference day and the six weeks before it
STEP_GOAL = 7640
UNTIL = 18 * 60  # minute of the reference day at which recording stops
EVERY = 10  # minutes between heart rate samples
GOALS = {
    "steps": STEP_GOAL,
    "distance_km": 30,
    "active_minutes": 45,
    "calories": 2400,
    "sleep_minutes": 465,
    "water_ml": 2000,
}
RECOVERY_HOURS = 19

# Per weekday pattern: sport, start minute, minutes (low, high), metres per minute, heart rate.
_PLAN = {
    1: ("running", 7 * 60 + 5, (31, 44), 185, 152),
    3: ("strength", 17 * 60 + 40, (35, 50), None, 118),
    4: ("cycling", 16 * 60 + 10, (48, 75), 390, 138),
    6: ("running", 9 * 60 + 20, (55, 82), 172, 147),
}
_SCHEMA = """
create table reference (until_minute integer, recovery_hours integer);
create table goal (name text primary key, target integer);
create table day (
  age integer primary key, steps integer, step_goal integer, energy integer, distance integer, floors integer,
  active_minutes integer, resting_heart_rate integer, weight real, body_battery integer,
  sleep integer, deep integer, rem integer, score integer
);
create table workout (
  age integer, minute integer, sport text, seconds integer, metres real, energy integer, heart integer
);
create table beat (age integer, minute integer, rate integer, primary key (age, minute)) without rowid;
"""


def write(path: Path) -> None:
    """Write the file, replacing it."""
    path.unlink(missing_ok=True)
    rng = random.Random(SEED)
    connection = sqlite3.connect(path)
    with connection:
        connection.executescript(_SCHEMA)
        connection.execute("insert into reference values (?, ?)", (UNTIL, RECOVERY_HOURS))
        connection.executemany("insert into goal values (?, ?)", GOALS.items())
        for age in reversed(range(DAYS)):
            workout = _workout(age, rng)
            if workout:
                connection.execute("insert into workout values (?, ?, ?, ?, ?, ?, ?)", workout)
            resting = round(57 - 3 * (DAYS - age) / DAYS + rng.gauss(0, 1))
            day = _day(age, workout, resting, rng)
            connection.execute(f"insert into day values ({', '.join('?' * len(day))})", day)
            connection.executemany("insert into beat values (?, ?, ?)", _beats(age, workout, resting, rng))
    connection.execute("vacuum")
    connection.close()


def _workout(age: int, rng: random.Random) -> tuple | None:
    """A workout on four days of the week, now and then skipped."""
    plan = _PLAN.get(age % 7)
    if plan is None or rng.random() < 0.12:
        return None
    sport, minute, (low, high), pace, heart = plan
    seconds = rng.randint(low, high) * 60 + rng.randint(0, 59)
    metres = round(seconds / 60 * pace * rng.gauss(1, 0.03), 1) if pace else None
    return (
        age,
        minute + rng.randint(-10, 10),
        sport,
        seconds,
        metres,
        round(seconds / 60 * 9.4),
        heart + rng.randint(-4, 4),
    )


def _day(age: int, workout: tuple | None, resting: int, rng: random.Random) -> tuple:
    steps = max(2100, round(rng.gauss(6900, 1900)))
    minutes = rng.randint(18, 46)
    if workout:
        minutes += workout[3] // 60
        if workout[2] == "running":
            steps += round(workout[4] / 1.05)
    share = 0.72 if age == 0 else 1.0  # today is not over
    sleep = round(min(540, max(325, rng.gauss(441, 38))))
    weight = round(73.4 - 1.1 * (DAYS - age) / DAYS + rng.gauss(0, 0.25), 1) if age % 3 != 2 else None
    return (
        age,
        round(steps * share),
        STEP_GOAL,
        round((1750 + minutes * 8.5 + rng.gauss(0, 60)) * share),
        round(steps * share * 0.74),
        max(0, round(rng.gauss(9, 4) * share)),
        round(minutes * share),
        resting,
        weight,
        rng.randint(52, 78) if age == 0 else rng.randint(14, 45),
        sleep,
        round(sleep * rng.uniform(0.14, 0.22)),
        round(sleep * rng.uniform(0.18, 0.26)),
        round(min(97, max(41, (sleep - 300) / 2.4 + rng.gauss(22, 6)))),
    )


def _beats(age: int, workout: tuple | None, resting: int, rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """A pulse that is low at night, higher by day, and high in a workout."""
    for minute in range(0, UNTIL if age == 0 else 24 * 60, EVERY):
        if workout and 0 <= minute - workout[1] < workout[3] / 60:
            rate = workout[6] + rng.gauss(0, 7)
        elif 7 * 60 <= minute < 23 * 60:
            rate = resting + 16 + 7 * math.sin(minute / 97) + rng.gauss(0, 5)
        else:
            rate = resting - 2 + rng.gauss(0, 2.5)
        yield age, minute, round(rate)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("sample.sqlite"))
