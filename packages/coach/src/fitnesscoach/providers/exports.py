"""Workouts from files that watches and apps export: FIT, TCX, GPX (extra `exports`).

Such a file holds one workout and the pulse during it; steps of a day, sleep and goals are not in it, and questions
about them are answered with "nothing was recorded".
"""

import datetime as dt
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from fitnesscoach.providers.records import Beat, Day, Recorded, Workout
from fitnesscoach.providers.sports import sport_name
from portlab_spec.errors import UserError

MAX_BYTES = 100_000_000  # of one file
_SAME = dt.timedelta(seconds=90)  # two files that start within this hold the same workout
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Export:
    """What one file holds; times in UTC without zone."""

    workout: Workout
    beats: tuple[Beat, ...] = ()


def load(folder: Path, now: dt.datetime | None = None, zone: dt.tzinfo | None = None) -> Recorded:
    """All workouts under a folder. A file that cannot be read is passed over with a warning.

    Args:
        now: local time that "today" refers to; the clock's if None.
        zone: in which days are counted; the machine's if None.

    Raises:
        UserError: no file could be read, or the extra is not installed.
    """
    readers = _readers()
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in readers and file.is_file())
    if not files:
        raise UserError("no .fit, .tcx or .gpx file is in it", where=str(folder), fix="Choose a folder of exports")
    # FIT first: where the same workout was exported twice, it says most.
    files.sort(key=lambda file: list(readers).index(file.suffix.lower()))
    found: list[_Export] = []
    for file in files:
        try:
            found += _read(file, readers[file.suffix.lower()])
        except Exception as error:  # three libraries, each with its own
            _log.warning("passed over %s: %s", file, " ".join(str(error).split())[:160] or type(error).__name__)
    if not found:
        raise UserError(f"none of its {len(files)} files could be read", where=str(folder), fix="Export them again")
    unique = [_local(export, zone) for export in _without_twins(found)]
    return _recorded(str(folder), unique, now or dt.datetime.now())


def _recorded(name: str, exports: list[_Export], now: dt.datetime) -> Recorded:
    workouts = sorted((export.workout for export in exports), key=lambda workout: workout.start)
    beats = sorted((beat for export in exports for beat in export.beats), key=lambda beat: beat.time)
    days = {date: _day(date, list(same)) for date, same in groupby(workouts, key=lambda w: w.start.date())}
    return Recorded(name, now, days, beats, workouts)


def _day(date: dt.date, workouts: list[Workout]) -> Day:
    """What workouts alone tell of a day."""
    metres = sum(workout.metres or 0 for workout in workouts)
    return Day(
        date,
        distance=round(metres) if metres else None,
        active_minutes=round(sum(workout.seconds for workout in workouts) / 60),
    )


def _read(file: Path, reader: Callable[[Path], Iterable[_Export]]) -> list[_Export]:
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES // 1_000_000} MB")
    return list(reader(file))


def _without_twins(exports: list[_Export]) -> list[_Export]:
    kept: list[_Export] = []
    for export in exports:
        if all(abs(export.workout.start - other.workout.start) > _SAME for other in kept):
            kept.append(export)
    return kept


def _local(export: _Export, zone: dt.tzinfo | None) -> _Export:
    def local(time: dt.datetime) -> dt.datetime:
        return time.replace(tzinfo=dt.UTC).astimezone(zone).replace(tzinfo=None)

    workout = export.workout
    moved = Workout(
        local(workout.start), workout.sport, workout.seconds, workout.metres, workout.energy, workout.average_heart_rate
    )
    return _Export(moved, tuple(Beat(local(beat.time), beat.rate) for beat in export.beats))


def _readers() -> Mapping[str, Callable[[Path], Iterable[_Export]]]:
    try:
        import garmin_fit_sdk  # noqa: F401 -- asked for all at once, before any file is read
        import gpxpy  # noqa: F401
        import tcxreader  # noqa: F401
    except ImportError as error:
        fix = "Install fitnesscoach[exports]"
        raise UserError(f"reading exported files needs {error.name}", fix=fix) from None
    return {".fit": _read_fit, ".tcx": _read_tcx, ".gpx": _read_gpx}


def _read_fit(file: Path) -> Iterable[_Export]:
    """A FIT activity. Its sessions are the workouts (a triathlon has several), its records the samples."""
    from garmin_fit_sdk import Decoder, Stream

    stream = Stream.from_file(str(file))
    try:
        decoded: tuple[Any, list[Exception]] = Decoder(stream).read()
    finally:
        stream.close()
    messages, errors = decoded
    sessions = [row for row in messages.get("session_mesgs", ()) if row.get("start_time")]
    if not sessions:
        raise ValueError(str(errors[0]) if errors else "holds no workout")
    rows = [row for row in messages.get("record_mesgs", ()) if row.get("heart_rate") and row.get("timestamp")]
    beats = [Beat(_naive(row["timestamp"]), int(row["heart_rate"])) for row in rows]
    for row in sessions:
        start, seconds = _naive(row["start_time"]), round(row.get("total_timer_time") or 0)
        workout = Workout(
            start,
            sport_name(row.get("sport")),
            seconds,
            row.get("total_distance"),
            row.get("total_calories"),
            row.get("avg_heart_rate"),
        )
        end = start + dt.timedelta(seconds=row.get("total_elapsed_time") or seconds)
        yield _Export(workout, tuple(beat for beat in beats if start <= beat.time <= end))


def _read_tcx(file: Path) -> Iterable[_Export]:
    from tcxreader.tcxreader import TCXReader

    exercise = TCXReader().read(str(file), only_gps=False)
    points = [point for point in exercise.trackpoints if point.time]
    beats = [Beat(_naive(point.time), int(point.hr_value)) for point in points if point.hr_value]
    yield _Export(
        Workout(
            _naive(exercise.start_time),
            sport_name(exercise.activity_type),
            round(exercise.duration or 0),
            exercise.distance,
            exercise.calories,
            round(exercise.hr_avg) if exercise.hr_avg else None,
        ),
        tuple(beats),
    )


def _read_gpx(file: Path) -> Iterable[_Export]:
    """A GPX file: a workout for each track that has times; the pulse is in Garmin's extension of points."""
    import gpxpy

    with file.open(encoding="utf-8") as stream:
        tracks = gpxpy.parse(stream).tracks
    for track in tracks:
        bounds = track.get_time_bounds()
        if not (bounds.start_time and bounds.end_time):
            continue
        points = [point for segment in track.segments for point in segment.points]
        beats = tuple(
            Beat(_naive(point.time), rate) for point in points if point.time and (rate := _gpx_pulse(point.extensions))
        )
        yield _Export(
            Workout(
                _naive(bounds.start_time),
                sport_name(track.type),
                round((bounds.end_time - bounds.start_time).total_seconds()),
                round(track.length_2d(), 1) or None,
                average_heart_rate=round(fmean(beat.rate for beat in beats)) if beats else None,
            ),
            beats,
        )


def _gpx_pulse(extensions: Iterable[Any]) -> int:
    for extension in extensions:
        for element in extension.iter():
            if str(element.tag).endswith("}hr") and (element.text or "").strip().isdigit():
                return int(element.text)
    return 0


def _naive(time: dt.datetime) -> dt.datetime:
    """UTC without zone; a file's time without zone is UTC."""
    return time.astimezone(dt.UTC).replace(tzinfo=None) if time.tzinfo else time
