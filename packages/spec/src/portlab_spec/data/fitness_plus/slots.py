"""What the blanks of a phrasing may hold: a text as a user says it, with the arguments that it means.

`SLOTS` maps the name of a slot to a function of the dialogue's moment that lists all its fillings. A filling
states arguments by name, so that one slot can set several (`between 3 and 9 May`) or none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from itertools import product

from pydantic import JsonValue

from portlab_spec.data.fitness_plus import dates
from portlab_spec.data.fitness_plus.dates import NUMBERS, WEEKDAYS


@dataclass(frozen=True)
class Filling:
    """A text and the arguments it means, as pairs of name and value."""

    text: str
    arguments: tuple[tuple[str, JsonValue], ...] = ()


Slot = Callable[[datetime], list[Filling]]


def one_decimal(number: str, factor: str = "1") -> float:
    """number x factor to one decimal, halves up, in decimal arithmetic: what a person would compute."""
    return float((Decimal(number) * Decimal(factor)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def _listing(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _values(argument: str, meanings: dict[str, JsonValue]) -> list[Filling]:
    return [Filling(text, ((argument, value),)) for text, value in meanings.items()]


# ------------------------------------------------------------------------------------------------ quantities


def distances() -> dict[str, JsonValue]:
    """Distances in km, one decimal."""
    out: dict[str, JsonValue] = {}
    for tenths in (30, 42, 50, 58, 65, 75, 80, 84, 100, 105, 120, 150, 164, 180, 200, 250):
        km = tenths / 10
        out |= {f"{km:g} km": km, f"{km:g}k": km, f"{km:g} kilometres": km}
    out |= {f"{NUMBERS[n]} kilometres": float(n) for n in range(3, 13)}
    out |= {
        f"{miles} miles": one_decimal(miles, "1.609") for miles in ("2", "3", "3.5", "4", "5", "6", "6.2", "8", "10")
    }
    out |= {f"{NUMBERS[n]} miles": one_decimal(str(n), "1.609") for n in (2, 4, 5, 7)}
    return out


def races() -> dict[str, JsonValue]:
    """Race distances in km, as nouns with an article."""
    return {
        "a half marathon": 21.1, "a marathon": 42.2, "a 10-mile race": 16.1, "a 5-mile race": 8.0, "a 5k": 5.0,
        "an 8k": 8.0, "a 10k": 10.0, "a 12k": 12.0, "a 15k": 15.0, "a 25k": 25.0, "a 30k": 30.0,
    }  # fmt: skip


def durations() -> dict[str, JsonValue]:
    """Durations in minutes."""
    out: dict[str, JsonValue] = {
        "half an hour": 30,
        "an hour": 60,
        "an hour and a half": 90,
        "three quarters of an hour": 45,
        "two hours": 120,
        "two and a half hours": 150,
        "1.5 hours": 90,
        "an hour and ten minutes": 70,
        "an hour and a quarter": 75,
        "2 h": 120,
        "twenty minutes": 20,
        "forty minutes": 40,
    }
    out |= {f"{n} minutes": n for n in (15, 18, 20, 25, 28, 32, 35, 38, 42, 45, 47, 50, 53, 55, 65, 70, 75, 80, 95)}
    out |= {f"{n} min": n for n in (20, 25, 30, 40, 45, 50, 55, 65)}
    out |= {f"1 h {n}": 60 + n for n in (5, 10, 20, 25, 40)}
    return out


def short_durations() -> dict[str, JsonValue]:
    """Durations in seconds."""
    out: dict[str, JsonValue] = {
        "a minute": 60,
        "half a minute": 30,
        "a minute and a half": 90,
        "two and a half minutes": 150,
        "a quarter of an hour": 900,
        "half an hour": 1800,
        "an hour": 3600,
    }
    out |= {f"{n} seconds": n for n in (20, 30, 40, 45, 50, 75, 90, 100)}
    out |= {f"{n} minutes": 60 * n for n in (2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 25)}
    out |= {f"{NUMBERS[n]} minutes": 60 * n for n in range(2, 12)}
    out |= {f"{m}:{s} min": 60 * m + s for m in (1, 2, 3, 4) for s in (15, 30, 45)}
    return out


def weights() -> dict[str, JsonValue]:
    """Body weights in kg, one decimal."""
    out: dict[str, JsonValue] = {}
    for tenths in range(612, 948, 7):
        number = f"{tenths / 10:g}"
        unit = ("kg", "kilos", "kilograms")[tenths % 3]
        out[f"{number} {unit}"] = tenths / 10
    out |= {f"{kilos} kilos": float(kilos) for kilos in (64, 68, 71, 75, 79, 82, 88)}
    out |= {f"{pounds} {unit}": one_decimal(str(pounds), "0.4536")
            for pounds, unit in zip(range(141, 208, 6), ("lbs", "pounds") * 6, strict=True)}  # fmt: skip
    return out


def waters() -> dict[str, JsonValue]:
    """Amounts of water in ml."""
    out: dict[str, JsonValue] = {
        "half a litre": 500,
        "a litre": 1000,
        "a litre and a half": 1500,
        "a quarter of a litre": 250,
        "three quarters of a litre": 750,
        "two glasses of 200 ml": 400,
        "three 250 ml glasses": 750,
        "two half-litre bottles": 1000,
        "one 330 ml can": 330,
        "a 700 ml bottle": 700,
        "two cups of 150 ml": 300,
    }
    out |= {f"{ml} ml": ml for ml in range(150, 1000, 50)}
    out |= {f"{ml / 1000:g} litres": ml for ml in (300, 400, 600, 800, 1200, 1250)}
    out |= {f"{ml / 1000:g} l": ml for ml in (200, 330, 500, 700, 750, 900)}
    return out


def paces() -> dict[str, JsonValue]:
    """Paces in seconds per km."""
    out: dict[str, JsonValue] = {
        "five minutes a kilometre": 300,
        "six minutes per km": 360,
        "five and a half minutes per kilometre": 330,
        "four and a half minutes a kilometre": 270,
        "seven minutes a kilometre": 420,
    }
    out |= {f"{s // 60}:{s % 60:02d} per km": s for s in range(240, 421, 10)}
    out |= {f"{s // 60}:{s % 60:02d} min/km": s for s in range(245, 421, 25)}
    return out


# ------------------------------------------------------------------------------------------------ choices

# sport: noun, plural, -ing form, past tense
SPORTS = {
    "running": ("run", "runs", "running", "ran"),
    "cycling": ("bike ride", "rides", "cycling", "cycled"),
    "swimming": ("swim", "swims", "swimming", "swam"),
    "walking": ("walk", "walks", "walking", "walked"),
    "hiking": ("hike", "hikes", "hiking", "hiked"),
    "rowing": ("rowing session", "rowing sessions", "rowing", "rowed"),
    "yoga": ("yoga session", "yoga sessions", "yoga", ""),
    "strength": ("strength workout", "strength workouts", "strength training", ""),
}
METRICS: dict[str, JsonValue] = {
    "step count": "steps", "daily step count": "steps", "calorie burn": "calories", "daily distance": "distance",
    "floor count": "floors", "active time": "active_minutes", "resting heart rate": "resting_heart_rate",
    "resting pulse": "resting_heart_rate", "body weight": "weight", "sleep duration": "sleep",
    "stair climbing": "floors", "calorie expenditure": "calories",
}  # fmt: skip
GOALS: dict[str, JsonValue] = {
    "step goal": "steps", "distance goal": "distance_km", "active minutes goal": "active_minutes",
    "calorie goal": "calories", "sleep goal": "sleep_minutes", "water goal": "water_ml", "step target": "steps",
    "hydration target": "water_ml", "kilometre goal": "distance_km", "activity goal": "active_minutes",
}  # fmt: skip
FOODS = {
    "oatmeal": "oatmeal", "a banana": "banana", "two eggs": "two eggs", "toast": "toast", "a bowl of soup": "soup",
    "chicken salad": "chicken salad", "rice": "rice", "an apple": "apple", "yoghurt": "yoghurt", "lentils": "lentils",
    "a cheese sandwich": "cheese sandwich", "grilled salmon": "grilled salmon", "pasta": "pasta", "nuts": "nuts",
    "a protein shake": "protein shake", "orange juice": "orange juice", "a pizza": "pizza", "hummus": "hummus",
}  # fmt: skip
TASKS = (
    "stretch my calves", "take my vitamins", "charge the watch", "do my back exercises", "drink a glass of water",
    "book the massage", "wash my running kit", "meditate", "call the physio", "weigh myself", "pack the swim bag",
    "foam roll", "pump up the bike tyres", "sign up for the race", "prepare a snack", "ice my knee",
)  # fmt: skip
LABELS = ("plank", "pasta", "stretching", "tea", "rest", "wall sit", "breathing", "foam roller", "headstand", "warm-up")
PLACES = (
    "Lisbon", "Oslo", "Graz", "Leeds", "Lyon", "Porto", "Ghent", "Turin", "Bergen", "Utrecht", "Zurich", "Galway",
    "Malmo", "Girona", "Innsbruck", "Boulder", "Denver", "Austin", "Kyoto", "Perth",
)  # fmt: skip
NAMES = (
    "Anna",
    "Ben",
    "Chloe",
    "David",
    "Emre",
    "Fatima",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kemal",
    "Lena",
    "Mia",
    "Noah",
)
TAGS = ("work", "family", "sleep", "training", "travel", "weather", "stress", "friends", "pain", "food")
MOODS: dict[str, JsonValue] = {
    "great": "great", "good": "good", "okay": "okay", "bad": "bad", "awful": "awful",
}  # fmt: skip


def _sports(form: int) -> list[Filling]:
    return [Filling(forms[form], (("sport", sport),)) for sport, forms in SPORTS.items() if forms[form]]


def _record_distances() -> list[Filling]:
    """Sport and distance that are held records in, as one noun."""
    kms = (1, 3, 5, 10, 12, 15, 20, 30, 40)
    out = [
        Filling(f"{km} km {noun}", (("sport", sport), ("distance_km", float(km))))
        for km in kms
        for noun, sport in (("run", "running"), ("bike ride", "cycling"), ("walk", "walking"))
    ]
    out += [
        Filling(f"{m} metre swim", (("sport", "swimming"), ("distance_km", m / 1000))) for m in (400, 1000, 1500, 2000)
    ]
    out.append(Filling("half marathon run", (("sport", "running"), ("distance_km", 21.1))))
    return out


def _targets() -> list[Filling]:
    """What a goal is set to: goal, value in its unit, and period."""
    out: dict[str, tuple[str, int, str]] = {}
    for value in range(6000, 15001, 500):
        out[f"{value:,} steps a day"] = ("steps", value, "daily")
        if value % 1000 == 0:
            out[f"{value // 1000}k steps per day"] = ("steps", value, "daily")
    for value in range(15, 61, 5):
        out[f"{value} km a week"] = ("distance_km", value, "weekly")
        out[f"{value + 10} active minutes a day"] = ("active_minutes", value + 10, "daily")
    for value in range(100, 301, 25):
        out[f"{value} active minutes per week"] = ("active_minutes", value, "weekly")
    for value in range(1800, 3001, 100):
        out[f"{value} kcal a day"] = ("calories", value, "daily")
    for hours, minutes in (("seven", 420), ("seven and a half", 450), ("eight", 480), ("eight and a half", 510)):
        out[f"{hours} hours of sleep a night"] = ("sleep_minutes", minutes, "daily")
    for litres in (15, 18, 20, 25, 30):
        out[f"{litres / 10:g} litres of water a day"] = ("water_ml", litres * 100, "daily")
    return [Filling(t, (("goal", g), ("value", v), ("period", p))) for t, (g, v, p) in out.items()]


def _weekdays() -> list[Filling]:
    names = [name.lower() for name in WEEKDAYS]
    out = {
        "on weekdays": names[:5], "every weekday": names[:5], "at weekends": names[5:], "every day": names,
        "from Monday to Thursday": names[:4], "on Saturdays": names[5:6], "on Sundays": names[6:],
    }  # fmt: skip
    for first, second in ((0, 3), (1, 4), (0, 2), (1, 3), (5, 6), (2, 4), (0, 4), (3, 5)):
        out[f"every {WEEKDAYS[first]} and {WEEKDAYS[second]}"] = [names[first], names[second]]
    return [Filling(text, (("days", list(days)),)) for text, days in out.items()]


def _intervals() -> list[Filling]:
    works = {"30 seconds": 30, "40 seconds": 40, "45 s": 45, "a minute": 60, "90 seconds": 90, "two minutes": 120,
             "three minutes": 180, "4 min": 240}  # fmt: skip
    rests = {"15 seconds": 15, "20 seconds": 20, "half a minute": 30, "a minute": 60, "90 seconds": 90}
    return [
        Filling(text, (("work_seconds", works[work]), ("rest_seconds", rests[rest])))
        for work, rest in product(works, rests)
        for text in (f"{work} hard and {rest} easy", f"{work} on, {rest} off")
    ]


def _rounds() -> list[Filling]:
    counts = {f"{NUMBERS[n]} rounds": n for n in range(4, 13)} | {f"{n} rounds": n for n in (5, 6, 8, 10, 15, 20)}
    return _values("rounds", dict(counts))


def _reminders() -> list[Filling]:
    """The nested argument of `schedule_workout`."""
    befores = {"ten minutes": 10, "a quarter of an hour": 15, "20 minutes": 20, "half an hour": 30, "an hour": 60,
               "two hours": 120, "45 minutes": 45, "5 minutes": 5}  # fmt: skip
    channels = {"on my watch": "watch", "on my phone": "phone", "by email": "email"}
    return [
        Filling(f"{channel} {before} before", (("reminder", {"minutes_before": befores[before], "channel": name}),))
        for before in befores
        for channel, name in channels.items()
    ]


def _zones() -> list[Filling]:
    out: list[list[int]] = [
        [low, low + step, low + 2 * step, low + 3 * step][:count]
        for low in (108, 112, 115, 120, 124)
        for step in (14, 17, 19, 20)
        for count in (3, 4)
    ]
    return [Filling(_listing([str(bound) for bound in bounds]), (("bounds", list(bounds)),)) for bounds in out]


def _pressures() -> list[Filling]:
    pairs = [(s, d) for s in range(108, 149, 3) for d in (68, 71, 74, 77, 79, 82, 85, 88, 93)]
    return [Filling(f"{s}{(' over ', '/')[(s + d) % 2]}{d}", (("systolic", s), ("diastolic", d))) for s, d in pairs]


def _lists(argument: str, items: dict[str, str]) -> list[Filling]:
    """One to three of the items, as a listing."""
    texts = list(items)
    size = len(texts)
    picks = [[i] for i in range(size)]
    picks += [[i, (i + k) % size] for k in (1, 3, 5) for i in range(size)]
    picks += [[i, (i + k) % size, (i + k + 4) % size] for k in (2, 5) for i in range(size)]
    return [Filling(_listing([texts[i] for i in p]), ((argument, [items[texts[i]] for i in p]),)) for p in picks]


# ------------------------------------------------------------------------------------------------ the table


def _days(argument: str, days: dict[str, date]) -> list[Filling]:
    return [Filling(text, ((argument, day.isoformat()),)) for text, day in days.items()]


def _without_today(days: dict[str, date]) -> dict[str, date]:
    """Where the date may be left out, `today` could mean either."""
    return {text: day for text, day in days.items() if text != "today"}


def _spans(now: datetime, form: str, start: str = "start_date", end: str = "end_date") -> list[Filling]:
    return [
        Filling(getattr(span, form), ((start, span.start.isoformat()), (end, span.end.isoformat())))
        for span in dates.past_spans(now.date())
    ]


def _windows(now: datetime) -> list[Filling]:
    return [
        Filling(text, (("start", start.isoformat("T", "minutes")), ("end", end.isoformat("T", "minutes"))))
        for text, (start, end) in dates.windows(now).items()
    ]


def _adverbs_of_night(now: datetime) -> list[Filling]:
    return [
        Filling(text if text == "last night" or text.endswith("last") else f"in {text}", (("date", day.isoformat()),))
        for text, day in dates.nights(now.date()).items()
    ]


def _fixed(argument: str, meanings: dict[str, JsonValue]) -> Slot:
    fillings = _values(argument, meanings)
    return lambda now: fillings


def _constant(fillings: list[Filling]) -> Slot:
    return lambda now: fillings


SLOTS: dict[str, Slot] = {
    "day": lambda now: _days("date", dates.past_days(now.date())),
    "day_noun": lambda now: _days("date", dates.as_nouns(dates.past_days(now.date()))),
    "past_day": lambda now: _days("date", _without_today(dates.past_days(now.date()))),
    "past_noun": lambda now: _days("date", _without_today(dates.as_nouns(dates.past_days(now.date())))),
    "later_day": lambda now: _days("date", _without_today(dates.future_days(now.date()))),
    "later_noun": lambda now: _days("date", _without_today(dates.as_nouns(dates.future_days(now.date())))),
    "night": _adverbs_of_night,
    "night_noun": lambda now: _days("date", dates.nights(now.date())),
    "span": lambda now: _spans(now, "adverb"),
    "span_noun": lambda now: _spans(now, "noun"),
    "first": lambda now: _spans(now, "noun", "first_start", "first_end"),
    "second": lambda now: _spans(now, "noun", "second_start", "second_end"),
    "window": _windows,
    "time": _fixed("time", dict(dates.times(range(6, 22)))),
    "morning": _fixed("time", dict(dates.times(range(5, 10)))),
    "until": _fixed("until", dict(dates.times(range(8, 23)))),
    "weekdays": _constant(_weekdays()),
    "distance": _fixed("distance_km", distances()),
    "at_least": _fixed("min_distance_km", distances()),
    "race": _fixed("distance_km", races()),
    "pace": _fixed("pace_seconds_per_km", paces()),
    "duration": _fixed("duration_min", durations()),
    "seconds": _fixed("seconds", short_durations()),
    "weight": _fixed("weight_kg", weights()),
    "water": _fixed("amount_ml", waters()),
    "effort": _fixed("effort", {str(n): n for n in range(2, 11)}),
    "sport": _constant(_sports(0)),
    "sports": _constant(_sports(1)),
    "doing": _constant(_sports(2)),
    "going": _constant([filling for filling in _sports(2) if filling.arguments[0][1] not in ("yoga", "strength")]),
    "did": _constant(_sports(3)),
    "record": _constant(_record_distances()),
    "metric": _fixed("metric", METRICS),
    "goal": _fixed("goal", GOALS),
    "target": _constant(_targets()),
    "pressure": _constant(_pressures()),
    "pulse": _fixed("pulse", {str(n): n for n in range(49, 92, 3)}),
    "foods": _constant(_lists("foods", FOODS)),
    "meal": _fixed("meal", {meal: meal for meal in ("breakfast", "lunch", "dinner")}),
    "mood": _fixed("mood", MOODS),
    "tags": _constant(_lists("tags", dict(zip(TAGS, TAGS, strict=True)))),
    "task": _fixed("text", dict(zip(TASKS, TASKS, strict=True))),
    "label": _fixed("label", dict(zip(LABELS, LABELS, strict=True))),
    "intervals": _constant(_intervals()),
    "rounds": _constant(_rounds()),
    "zones": _constant(_zones()),
    "place": _fixed("place", dict(zip(PLACES, PLACES, strict=True))),
    "surface": _fixed("surface", {"road": "road", "trail": "trail", "track": "track"}),
    "names": _constant(_lists("recipients", dict(zip(NAMES, NAMES, strict=True)))),
    "reminder": _constant(_reminders()),
}


@cache
def fillings(slot: str, now: datetime) -> list[Filling]:
    """All fillings of a slot at a moment."""
    return SLOTS[slot](now)
