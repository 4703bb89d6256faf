"""Expressions of time and what they mean, seen from a given moment.

Each function lists every expression of a kind with its meaning, so that a generator draws from the list and a test
looks an expression up. Conventions, where English leaves a choice:

- A weekday, with `last` or without, is the nearest one before today, never today; `on Friday` of something planned
  is the nearest one after today.
- A week runs from Monday to Sunday; `this week` and `this month` end today. The first week of a month is its days
  1 to 7.
- A date without a year is the nearest one before today (after today, if planned).
- Morning is 06:00-12:00, afternoon 12:00-18:00, evening 18:00-22:00, night 22:00-06:00.
- A night is dated by the day on which it ends: `last night` ended today.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta

MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

_DAY = timedelta(days=1)
_PARTS = {"morning": (6, 12), "afternoon": (12, 18), "evening": (18, 22)}


@dataclass(frozen=True)
class Span:
    """Days from `start` to `end`, both included, as an adverb ("in May") and as a noun ("May")."""

    adverb: str
    noun: str
    start: date
    end: date


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, ..."""
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def day_and_month(day: date) -> str:
    """As in `4 May`."""
    return f"{day.day} {MONTHS[day.month - 1]}"


def month_and_day(day: date) -> str:
    """As in `May 4th`."""
    return f"{MONTHS[day.month - 1]} {ordinal(day.day)}"


def past_days(today: date) -> dict[str, date]:
    """Adverbs that name one day up to today: `yesterday`, `last Tuesday`, `on 4 May`, ..."""
    out = {"today": today, "yesterday": today - _DAY, "the day before yesterday": today - 2 * _DAY}
    out |= {f"{NUMBERS[n]} days ago": today - n * _DAY for n in range(3, 7)}
    out["a week ago"] = today - 7 * _DAY
    for back in range(1, 8):
        day = today - back * _DAY
        out |= {f"on {WEEKDAYS[day.weekday()]}": day, f"last {WEEKDAYS[day.weekday()]}": day}
    for back in range(2, 61):
        day = today - back * _DAY
        out |= {f"on {day_and_month(day)}": day, f"on {month_and_day(day)}": day, f"on {day.isoformat()}": day}
        if day.month == today.month:
            out[f"on the {ordinal(day.day)}"] = day
    return out


def future_days(today: date) -> dict[str, date]:
    """Adverbs that name one day from today on: `tomorrow`, `on Friday`, `in three days`, ..."""
    out = {"today": today, "tomorrow": today + _DAY, "the day after tomorrow": today + 2 * _DAY}
    out |= {f"in {NUMBERS[n]} days": today + n * _DAY for n in range(3, 7)}
    out["a week from today"] = today + 7 * _DAY
    for ahead in range(1, 8):
        day = today + ahead * _DAY
        out |= {f"on {WEEKDAYS[day.weekday()]}": day, f"this coming {WEEKDAYS[day.weekday()]}": day}
    for ahead in range(2, 46):
        day = today + ahead * _DAY
        out |= {f"on {day_and_month(day)}": day, f"on {month_and_day(day)}": day, f"on {day.isoformat()}": day}
    return out


def as_nouns(days: dict[str, date]) -> dict[str, date]:
    """The expressions that also serve as a noun, as in `the steps of yesterday`: without `on`, without `ago`."""
    return {
        text.removeprefix("on "): day
        for text, day in days.items()
        if not text.startswith("in ") and "ago" not in text and "from" not in text
    }


def nights(today: date) -> dict[str, date]:
    """Names of nights by the day on which they end: `last night` is today's."""
    out = {"last night": today, "the night before last": today - _DAY}
    for back in range(1, 8):
        day = today - back * _DAY
        before = WEEKDAYS[(day - _DAY).weekday()]
        out[f"the night from {before} to {WEEKDAYS[day.weekday()]}"] = day
    for back in range(2, 41):
        day = today - back * _DAY
        out[f"the night to {day_and_month(day)}"] = day
        out[f"the night to {month_and_day(day)}"] = day
    return out


def past_spans(today: date) -> list[Span]:
    """Periods of several days that ended by today."""
    return [span for span in _spans(today) if span.start < span.end <= today]


def _spans(today: date) -> Iterator[Span]:
    monday, first = today - today.weekday() * _DAY, today.replace(day=1)
    yield Span("this week", "this week", monday, today)
    yield Span("last week", "last week", monday - 7 * _DAY, monday - _DAY)
    yield Span("the week before last", "the week before last", monday - 14 * _DAY, monday - 8 * _DAY)
    yield Span("this month", "this month", first, today)
    yield Span("last month", "last month", (first - _DAY).replace(day=1), first - _DAY)
    yield Span("so far this year", "the year so far", today.replace(month=1, day=1), today)
    if today.weekday() < 5:  # at the weekend itself, `last weekend` is ambiguous
        yield Span("last weekend", "last weekend", monday - 2 * _DAY, monday - _DAY)
    for text, days in (("7 days", 7), ("two weeks", 14), ("30 days", 30), ("three days", 3), ("ten days", 10)):
        for word in ("last", "past"):
            yield Span(f"over the {word} {text}", f"the {word} {text}", today - (days - 1) * _DAY, today)
    for weekday in range(today.weekday()):
        yield Span(f"since {WEEKDAYS[weekday]}", f"the days since {WEEKDAYS[weekday]}", monday + weekday * _DAY, today)
    for back in range(1, 11):
        start, end = _month_before(today, back)
        name = MONTHS[start.month - 1]
        yield Span(f"in {name}", name, start, end)
        yield Span(f"in the first week of {name}", f"the first week of {name}", start, start.replace(day=7))
        yield Span(f"in the first half of {name}", f"the first half of {name}", start, start.replace(day=15))
    for back in range(4, 60, 3):
        start = today - back * _DAY
        for length in (2, 4, 6, 9):
            end = start + length * _DAY
            same_month = start.month == end.month
            begin = str(start.day) if same_month else day_and_month(start)
            yield Span(f"from {begin} to {day_and_month(end)}", f"{begin} to {day_and_month(end)}", start, end)
            begin, until = month_and_day(start), month_and_day(end)
            yield Span(f"between {begin} and {until}", f"{begin} to {until}", start, end)


def _month_before(today: date, back: int) -> tuple[date, date]:
    """First and last day of the month that lies `back` months before this one."""
    first = today.replace(day=1)
    for _ in range(back):
        first = (first - _DAY).replace(day=1)
    return first, (first + 31 * _DAY).replace(day=1) - _DAY


def windows(now: datetime) -> dict[str, tuple[datetime, datetime]]:
    """Adverbs for a span of hours that has passed: `yesterday evening`, `in the last hour`, ..."""
    today = now.date()
    out = {
        "in the last hour": (now - timedelta(hours=1), now),
        "in the past two hours": (now - timedelta(hours=2), now),
        "in the last 30 minutes": (now - timedelta(minutes=30), now),
        "last night": (_at(today - _DAY, 22), _at(today, 6)),
    }
    for part, (opens, closes) in _PARTS.items():
        if now.hour >= closes:
            out[f"this {part}"] = (_at(today, opens), _at(today, closes))
        out[f"yesterday {part}"] = (_at(today - _DAY, opens), _at(today - _DAY, closes))
        for back in range(2, 8):
            day = today - back * _DAY
            name = WEEKDAYS[day.weekday()]
            out[f"on {name} {part}"] = out[f"last {name} {part}"] = (_at(day, opens), _at(day, closes))
        for back in range(8, 15):
            day = today - back * _DAY
            out[f"on the {part} of {day_and_month(day)}"] = (_at(day, opens), _at(day, closes))
    for hour in range(6, 21):
        for minutes in (0, 15, 30):
            start = _at(today - _DAY, hour, minutes)
            end = start + timedelta(minutes=45 if minutes else 60)
            out[f"yesterday between {start:%H:%M} and {end:%H:%M}"] = (start, end)
            start, end = start - _DAY, end - _DAY
            out[f"from {start:%H:%M} to {end:%H:%M} on {WEEKDAYS[start.weekday()]}"] = (start, end)
    return out


def _at(day: date, hour: int, minute: int = 0) -> datetime:
    return datetime.combine(day, time(hour, minute))


def times(hours: range) -> dict[str, str]:
    """Times of day within these hours, as `HH:MM`: `6:30 am`, `half past six in the morning`, `18:15`, ..."""
    out: dict[str, str] = {}
    for hour in hours:
        twelve, half = hour % 12 or 12, "am" if hour < 12 else "pm"
        part = "in the morning" if hour < 12 else "in the afternoon" if hour < 18 else "in the evening"
        following = NUMBERS[(hour + 1) % 12 or 12]
        for minute in range(0, 60, 5):
            value = f"{hour:02d}:{minute:02d}"
            out[value] = value
            out[f"{twelve}:{minute:02d} {half}"] = value
        if hour == 12:
            out["noon"] = "12:00"
            continue
        out[f"{twelve} {half}"] = f"{hour:02d}:00"
        out[f"{NUMBERS[twelve]} {part}"] = f"{hour:02d}:00"
        out[f"half past {NUMBERS[twelve]} {part}"] = f"{hour:02d}:30"
        out[f"quarter past {NUMBERS[twelve]} {part}"] = f"{hour:02d}:15"
        if hour + 1 in hours and hour not in (11, 17):  # else the part of the day would change under way
            out[f"quarter to {following} {part}"] = f"{hour:02d}:45"
    return out
