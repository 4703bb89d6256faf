"""What a source of fitness data knows: days, heart rate, workouts, goals."""

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class NoDataError(Exception):
    """The source has no such record; the message is one sentence for the model and the user."""


@dataclass(frozen=True)
class Sleep:
    """One night, dated by the day on which it ended. All but `score` in minutes; the score is 0 to 100."""

    minutes: int
    deep_minutes: int | None = None
    rem_minutes: int | None = None
    score: int | None = None


@dataclass(frozen=True)
class Day:
    """One day; what was not recorded is None.

    Attributes:
        energy: kilocalories burnt.
        distance: metres.
        resting_heart_rate: beats per minute.
        weight: kilograms.
        body_battery: latest level, 0 to 100.
    """

    date: dt.date
    steps: int | None = None
    step_goal: int | None = None
    energy: int | None = None
    distance: int | None = None
    floors: int | None = None
    active_minutes: int | None = None
    resting_heart_rate: int | None = None
    weight: float | None = None
    body_battery: int | None = None
    sleep: Sleep | None = None


@dataclass(frozen=True)
class Workout:
    """One recorded workout: `sport` in English, lower case; duration in seconds, distance in metres."""

    start: dt.datetime
    sport: str
    seconds: int
    metres: float | None = None
    energy: int | None = None
    average_heart_rate: int | None = None


@dataclass(frozen=True)
class Beat:
    """One heart rate sample: local time without zone, beats per minute."""

    time: dt.datetime
    rate: int


class FitnessData(Protocol):
    """A source of one person's data. Times are local and carry no zone.

    Every method may be called from any thread, and raises NoDataError where nothing was recorded.
    """

    @property
    def name(self) -> str:
        """What the user calls the source."""

    def now(self) -> dt.datetime:
        """The time that "today" refers to."""

    def day(self, date: dt.date) -> Day:
        """One day."""

    def beats(self, start: dt.datetime, end: dt.datetime) -> Sequence[Beat]:
        """Heart rate samples from `start` up to and without `end`, oldest first; never empty."""

    def workouts(self, start: dt.date, end: dt.date) -> Sequence[Workout]:
        """Workouts of a period, both days included, oldest first; empty if there was none."""

    def goals(self) -> Mapping[str, int]:
        """Targets that are set, by the names of `fitness-plus`' goals."""

    def recovery_hours(self) -> int:
        """Hours of rest advised before the next hard workout."""


@dataclass(frozen=True)
class Recorded:
    """Data that is all in memory, as `FitnessData`."""

    name: str
    at: dt.datetime
    days: Mapping[dt.date, Day]
    heart: Sequence[Beat] = ()
    sessions: Sequence[Workout] = ()
    targets: Mapping[str, int] = field(default_factory=dict)
    rest_hours: int | None = None

    def now(self) -> dt.datetime:
        """See `FitnessData`."""
        return self.at

    def day(self, date: dt.date) -> Day:
        """See `FitnessData`."""
        try:
            return self.days[date]
        except KeyError:
            raise NoDataError(f"nothing was recorded on {date}") from None

    def beats(self, start: dt.datetime, end: dt.datetime) -> Sequence[Beat]:
        """See `FitnessData`."""
        if not (found := [beat for beat in self.heart if start <= beat.time < end]):
            raise NoDataError(f"no heart rate was recorded from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}")
        return found

    def workouts(self, start: dt.date, end: dt.date) -> Sequence[Workout]:
        """See `FitnessData`."""
        return [workout for workout in self.sessions if start <= workout.start.date() <= end]

    def goals(self) -> Mapping[str, int]:
        """See `FitnessData`."""
        return self.targets

    def recovery_hours(self) -> int:
        """See `FitnessData`."""
        if self.rest_hours is None:
            raise NoDataError("no recovery time is known")
        return self.rest_hours
