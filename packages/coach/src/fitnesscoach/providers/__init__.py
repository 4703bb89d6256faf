"""Where the data comes from.

records.py      the protocol `FitnessData` and its records
sample.py       built-in data of a made-up person; make_sample.py wrote it
exports.py      FIT, TCX and GPX files in a folder (extra `exports`)
garmin.py       a Garmin Connect account (extra `garmin`)
"""

from pathlib import Path

from fitnesscoach.providers.records import Beat, Day, FitnessData, NoDataError, Recorded, Sleep, Workout
from portlab_spec.errors import UserError


def open_data(name: str) -> FitnessData:
    """The data of a name: `sample`, `garmin`, or a folder of exported files.

    Raises:
        UserError: no such source, or it cannot be used.
    """
    if name == "sample":
        from fitnesscoach.providers import sample

        return sample.load()
    if name == "garmin":
        from fitnesscoach.providers import garmin

        return garmin.connect()
    folder = Path(name).expanduser()
    if folder.is_dir():
        from fitnesscoach.providers import exports

        return exports.load(folder)
    raise UserError(f"no data source {name!r}", fix="Give `sample`, `garmin`, or a folder of .fit, .tcx and .gpx files")


__all__ = ["Beat", "Day", "FitnessData", "NoDataError", "Recorded", "Sleep", "Workout", "open_data"]
