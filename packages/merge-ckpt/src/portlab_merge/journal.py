"""What a merge has finished, kept beside it in the staging folder, so that another process can go on.

A file counts as finished if its record is of the very same merge and its bytes still have the sha256 of the record:
that a file exists says nothing.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from portlab_merge.arithmetic import ChangeStats
from portlab_merge.streaming import Written
from portlab_spec.files import sha256_file, write_json

FOLDER = ".finished"


class Journal:
    """Records of finished files in a staging folder.

    Args:
        staging: the folder.
        job: names the merge: base, adapter, options and versions; records of another are ignored.
    """

    def __init__(self, staging: Path, job: dict[str, Any]) -> None:
        self._staging, self._job = staging, json.loads(json.dumps(job))

    def finished(self) -> dict[Path, Written]:
        """Files that need not be written again; everything else in the staging folder is removed."""
        written: dict[Path, Written] = {}
        for record in (self._staging / FOLDER).glob("*.json"):
            path = self._staging / record.name.removesuffix(".json")
            if found := self._read(record, path):
                written[path] = found
        for path in self._staging.iterdir():
            if path.is_file() and path not in written:
                path.unlink()
        return written

    def add(self, path: Path, written: Written) -> None:
        """Record a file that is on disk."""
        stats = {name: asdict(change) for name, change in written.stats.items()}
        record = {"job": self._job, "sha256": written.sha256, "stats": stats}
        write_json(self._staging / FOLDER / f"{path.name}.json", record)

    def remove(self) -> None:
        """Leave no trace in the folder."""
        for record in (self._staging / FOLDER).glob("*"):
            record.unlink()
        (self._staging / FOLDER).rmdir()

    def _read(self, record: Path, path: Path) -> Written | None:
        try:
            value = json.loads(record.read_text(encoding="utf-8"))
            stats = {name: ChangeStats(**change) for name, change in value["stats"].items()}
            same = value["job"] == self._job and path.is_file() and sha256_file(path) == value["sha256"]
            return Written(value["sha256"], stats) if same else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None  # cut short by the kill: the file is written again
