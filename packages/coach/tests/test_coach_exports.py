"""Exported files, each written in its format for the test."""

import asyncio
import datetime as dt
from zoneinfo import ZoneInfo

import pytest

from fitnesscoach.providers import exports
from fitnesscoach.tools import tool_set
from portlab_spec.conversation import ToolCall
from portlab_spec.errors import UserError

fit = pytest.importorskip("garmin_fit_sdk")
pytest.importorskip("gpxpy")
pytest.importorskip("tcxreader")

VIENNA = ZoneInfo("Europe/Vienna")
NOW = dt.datetime(2026, 5, 13, 18, 20)
START = dt.datetime(2026, 5, 11, 22, 30, tzinfo=dt.UTC)  # 0:30 on the 12th in Vienna


def write_fit(path, start=START, sport="running"):
    encoder = fit.Encoder()
    nums = fit.Profile["mesg_num"]
    encoder.write_mesg({"mesg_num": nums["FILE_ID"], "type": "activity", "time_created": start})
    for minute in range(30):
        row = {
            "mesg_num": nums["RECORD"],
            "timestamp": start + dt.timedelta(minutes=minute),
            "heart_rate": 120 + minute,
        }
        encoder.write_mesg(row)
    encoder.write_mesg(
        {
            "mesg_num": nums["SESSION"], "timestamp": start + dt.timedelta(minutes=30), "start_time": start,
            "sport": sport, "total_timer_time": 1800.0, "total_elapsed_time": 1800.0, "total_distance": 5000.0,
            "total_calories": 320, "avg_heart_rate": 134,
        }
    )  # fmt: skip
    path.write_bytes(bytes(encoder.close()))


def write_tcx(path, start=START):
    points = "".join(
        f"<Trackpoint><Time>{start + dt.timedelta(minutes=i):%Y-%m-%dT%H:%M:%SZ}</Time>"
        f"<DistanceMeters>{i * 200}</DistanceMeters><HeartRateBpm><Value>{110 + i}</Value></HeartRateBpm></Trackpoint>"
        for i in range(11)
    )
    path.write_text(
        '<?xml version="1.0"?><TrainingCenterDatabase '
        'xmlns="http://www.garmin.com/xmlschemas/TrainingCenterDatabase/v2"><Activities><Activity Sport="Biking">'
        f'<Id>{start:%Y-%m-%dT%H:%M:%SZ}</Id><Lap StartTime="{start:%Y-%m-%dT%H:%M:%SZ}">'
        "<TotalTimeSeconds>600</TotalTimeSeconds><DistanceMeters>2000</DistanceMeters><Calories>90</Calories>"
        f"<Track>{points}</Track></Lap></Activity></Activities></TrainingCenterDatabase>"
    )


def write_gpx(path, start=START, timed=True):
    points = "".join(
        f'<trkpt lat="48.2{i:02d}" lon="16.3">'
        + (f"<time>{start + dt.timedelta(minutes=i):%Y-%m-%dT%H:%M:%SZ}</time>" if timed else "")
        + f"<extensions><t:TrackPointExtension><t:hr>{100 + i}</t:hr></t:TrackPointExtension></extensions></trkpt>"
        for i in range(11)
    )
    path.write_text(
        '<?xml version="1.0"?><gpx version="1.1" creator="test" xmlns="http://www.topografix.com/GPX/1/1" '
        'xmlns:t="http://www.garmin.com/xmlschemas/TrackPointExtension/v1">'
        f"<trk><type>hiking</type><trkseg>{points}</trkseg></trk></gpx>"
    )


def load(folder):
    return exports.load(folder, NOW, VIENNA)


def test_a_fit_file_is_a_workout_on_the_local_day(tmp_path):
    write_fit(tmp_path / "a.fit")
    (workout,) = load(tmp_path).workouts(dt.date(2026, 5, 12), dt.date(2026, 5, 12))
    assert workout.start == dt.datetime(2026, 5, 12, 0, 30)
    assert (workout.sport, workout.seconds, workout.metres, workout.energy) == ("running", 1800, 5000.0, 320)
    assert workout.average_heart_rate == 134


def test_the_pulse_of_a_fit_file_is_in_local_time(tmp_path):
    write_fit(tmp_path / "a.fit")
    beats = load(tmp_path).beats(dt.datetime(2026, 5, 12, 0, 30), dt.datetime(2026, 5, 12, 0, 40))
    assert [beat.rate for beat in beats] == list(range(120, 130))


def test_a_tcx_file_is_a_workout(tmp_path):
    write_tcx(tmp_path / "a.TCX")
    data = load(tmp_path)
    (workout,) = data.workouts(dt.date(2026, 5, 12), dt.date(2026, 5, 12))
    assert (workout.sport, workout.seconds, workout.metres, workout.energy) == ("cycling", 600, 2000.0, 90)
    assert len(data.heart) == 11


def test_a_gpx_file_is_a_workout_as_long_as_its_track(tmp_path):
    write_gpx(tmp_path / "a.gpx")
    data = load(tmp_path)
    (workout,) = data.workouts(dt.date(2026, 5, 12), dt.date(2026, 5, 12))
    assert (workout.sport, workout.seconds, workout.average_heart_rate) == ("hiking", 600, 105)
    assert 1100 < workout.metres < 1120  # a hundredth of a degree of latitude


def test_a_workout_that_was_exported_twice_is_counted_once(tmp_path):
    write_gpx(tmp_path / "a.gpx")
    write_tcx(tmp_path / "a.tcx")
    write_fit(tmp_path / "z.fit")
    (workout,) = load(tmp_path).sessions
    assert workout.sport == "running"  # as FIT has it


def test_files_that_cannot_be_read_are_passed_over(tmp_path, caplog):
    write_fit(tmp_path / "good.fit")
    whole = (tmp_path / "good.fit").read_bytes()
    (tmp_path / "cut.fit").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.fit").write_bytes(b"")
    (tmp_path / "noise.tcx").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "open.gpx").write_text("<gpx><trk>")
    write_gpx(tmp_path / "untimed.gpx", timed=False)
    assert len(load(tmp_path).sessions) == 1
    assert sum("passed over" in record.message for record in caplog.records) >= 3


def test_a_folder_of_broken_files_is_an_error(tmp_path):
    (tmp_path / "a.fit").write_bytes(b"no")
    with pytest.raises(UserError, match="none of its 1 files could be read"):
        load(tmp_path)


def test_a_folder_without_exports_is_an_error(tmp_path):
    with pytest.raises(UserError, match="file is in it"):
        load(tmp_path)


def test_what_no_export_holds_is_said_not_to_be_recorded(tmp_path):
    write_fit(tmp_path / "a.fit")
    toolbox = tool_set("plus", load(tmp_path)).toolbox
    result = asyncio.run(toolbox.run(ToolCall(name="get_sleep", arguments={"date": "2026-05-12"})))
    assert result.error == "no sleep was recorded in the night to 2026-05-12"
