"""A Garmin Connect account, through the garminconnect library (extra `garmin`).

Only tokens are kept, by the library, in `$GARMINTOKENS` or ~/.garminconnect; password and code are asked for once by
`fitnesscoach login` and stored nowhere. Answers of the service are kept in memory: those of past days for good,
those of today for a minute.
"""

import datetime as dt
import getpass
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fitnesscoach.providers.records import Beat, Day, NoDataError, Sleep, Workout
from fitnesscoach.providers.sports import sport_name
from portlab_spec.errors import UserError

TOKENS = "~/.garminconnect"
FRESH_SECONDS = 60.0
_WEIGHT_DAYS = 365


class Client(Protocol):
    """What is used of `garminconnect.Garmin`; dates are YYYY-MM-DD, answers are the service's JSON."""

    def get_user_summary(self, cdate: str) -> Any: ...
    def get_sleep_data(self, cdate: str) -> Any: ...
    def get_heart_rates(self, cdate: str) -> Any: ...
    def get_body_composition(self, startdate: str, enddate: str | None = None) -> Any: ...
    def get_activities_by_date(self, startdate: str, enddate: str | None = None) -> Any: ...
    def get_training_readiness(self, cdate: str) -> Any: ...


class Garmin:
    """An account as `FitnessData`. Safe to use from several threads: requests are made one after the other."""

    name = "garmin"

    def __init__(self, client: Client, clock: Callable[[], dt.datetime] = dt.datetime.now) -> None:
        self._client, self._clock = client, clock
        self._kept: dict[tuple[str, ...], tuple[float, Any]] = {}
        self._lock = threading.Lock()

    def now(self) -> dt.datetime:
        """See `FitnessData`."""
        return self._clock()

    def day(self, date: dt.date) -> Day:
        """See `FitnessData`."""
        if date > self.now().date():
            raise NoDataError(f"{date} is in the future")
        key = date.isoformat()
        summary = _object(self._get("get_user_summary", key))
        return Day(
            date=date,
            steps=_int(summary.get("totalSteps")),
            step_goal=_int(summary.get("dailyStepGoal")),
            energy=_int(summary.get("totalKilocalories")),
            distance=_int(summary.get("totalDistanceMeters")),
            floors=_int(summary.get("floorsAscended")),
            active_minutes=_minutes(summary.get("activeSeconds"), summary.get("highlyActiveSeconds")),
            resting_heart_rate=_int(summary.get("restingHeartRate")),
            weight=self._weights().get(key),
            body_battery=_int(summary.get("bodyBatteryMostRecentValue")),
            sleep=_sleep(_object(self._get("get_sleep_data", key))),
        )

    def beats(self, start: dt.datetime, end: dt.datetime) -> Sequence[Beat]:
        """See `FitnessData`."""
        if end - start > dt.timedelta(days=31):
            raise NoDataError("heart rate can be read for at most 31 days at once")
        dates = [start.date() + dt.timedelta(days=i) for i in range((end.date() - start.date()).days + 1)]
        found: list[Beat] = []
        for date in dates:
            if date <= self.now().date():
                found += _beats(_object(self._get("get_heart_rates", date.isoformat())))
        if not (found := [beat for beat in found if start <= beat.time < end]):
            raise NoDataError(f"no heart rate was recorded from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}")
        return found

    def workouts(self, start: dt.date, end: dt.date) -> Sequence[Workout]:
        """See `FitnessData`."""
        rows = self._get("get_activities_by_date", start.isoformat(), end.isoformat())
        found = [_workout(row) for row in rows or () if isinstance(row, Mapping) and row.get("startTimeLocal")]
        return sorted(found, key=lambda workout: workout.start)

    def goals(self) -> Mapping[str, int]:
        """See `FitnessData`. Only the step goal is known."""
        goal = self.day(self.now().date()).step_goal
        return {"steps": goal} if goal else {}

    def recovery_hours(self) -> int:
        """See `FitnessData`."""
        rows = self._get("get_training_readiness", self.now().date().isoformat()) or []
        rated = [row for row in rows if isinstance(row, Mapping) and row.get("recoveryTime") is not None]
        if not rated:
            raise NoDataError("no recovery time is known")
        latest = max(rated, key=lambda row: str(row.get("timestampLocal") or ""))
        if latest.get("recoveryTimeChangePhrase") == "REACHED_ZERO":  # the number is then the one last assigned
            return 0
        return round(latest["recoveryTime"] / 60)

    def _weights(self) -> dict[str, float]:
        """Kilograms by day, of the last year: one request for all."""
        today = self.now().date()
        first = today - dt.timedelta(days=_WEIGHT_DAYS)
        found = _object(self._get("get_body_composition", first.isoformat(), today.isoformat()))
        rows = [row for row in found.get("dateWeightList") or () if row.get("weight") and row.get("calendarDate")]
        return {row["calendarDate"]: round(row["weight"] / 1000, 1) for row in rows}  # the service counts grams

    def _get(self, method: str, *dates: str) -> Any:
        key = (method, *dates)
        with self._lock:
            kept = self._kept.get(key)
            past = all(date < self.now().date().isoformat() for date in dates)
            if kept and (past or time.monotonic() - kept[0] < FRESH_SECONDS):
                return kept[1]
            value = getattr(self._client, method)(*dates)
            self._kept[key] = time.monotonic(), value
            return value


def connect() -> Garmin:
    """The account whose tokens are stored.

    Raises:
        UserError: the extra is not installed, or there are no valid tokens.
    """
    library = _library()
    client = library.Garmin(retry_attempts=1)
    try:
        client.login(_tokens())
    except Exception as error:  # the library raises several kinds, and those of its HTTP client
        what = f"Garmin Connect refuses the stored tokens ({' '.join(str(error).split())[:160]})"
        raise UserError(what, where=_tokens(), fix="Run `fitnesscoach login`") from None
    return Garmin(client)


def login() -> str:
    """Ask for the password, log in, have the library store its tokens; where they are.

    Raises:
        UserError: the extra is not installed, or the login failed.
    """
    library = _library()
    email = input("Garmin Connect e-mail: ").strip()
    password = getpass.getpass("Password: ")
    client = library.Garmin(email, password, prompt_mfa=lambda: input("Code that Garmin sent you: ").strip())
    try:
        client.login(_tokens())
    except Exception as error:
        raise UserError(f"the login failed ({' '.join(str(error).split())[:160]})", fix="Try again later") from None
    return _tokens()


def _library() -> Any:
    try:
        import garminconnect
    except ImportError:
        raise UserError("--data garmin needs garminconnect", fix="Install fitnesscoach[garmin]") from None
    return garminconnect


def _tokens() -> str:
    return os.path.expanduser(os.environ.get("GARMINTOKENS") or TOKENS)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _int(value: Any) -> int | None:
    return None if value is None else round(value)


def _minutes(*seconds: Any) -> int | None:
    known = [part for part in seconds if part is not None]
    return round(sum(known) / 60) if known else None


def _sleep(answer: Mapping[str, Any]) -> Sleep | None:
    night = _object(answer.get("dailySleepDTO"))
    minutes = _minutes(night.get("sleepTimeSeconds"))
    if not minutes:  # a night without the watch is an object of nulls
        return None
    score = _object(_object(night.get("sleepScores")).get("overall")).get("value")
    return Sleep(minutes, _minutes(night.get("deepSleepSeconds")), _minutes(night.get("remSleepSeconds")), _int(score))


def _beats(answer: Mapping[str, Any]) -> list[Beat]:
    """Samples are [milliseconds since 1970 in UTC, rate or null]; the day's two start times give the zone."""
    offset = _offset(answer.get("startTimestampLocal"), answer.get("startTimestampGMT"))
    rows = [row for row in answer.get("heartRateValues") or () if row[1] is not None]
    return [Beat(_utc(row[0] / 1000) + offset, int(row[1])) for row in rows]


def _offset(local: Any, utc: Any) -> dt.timedelta:
    if isinstance(local, str) and isinstance(utc, str):
        return dt.datetime.fromisoformat(local) - dt.datetime.fromisoformat(utc)
    return dt.timedelta()


def _utc(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).replace(tzinfo=None)


def _workout(row: Mapping[str, Any]) -> Workout:
    return Workout(
        start=dt.datetime.fromisoformat(row["startTimeLocal"]),
        sport=sport_name(_object(row.get("activityType")).get("typeKey")),
        seconds=round(row.get("duration") or 0),
        metres=row.get("distance") or None,
        energy=_int(row.get("calories")),
        average_heart_rate=_int(row.get("averageHR")),
    )
