"""What a merge has finished, kept beside it in the staging folder, so that another process can go on.

A file counts as finished if its record is of the very same merge and its bytes still have the sha256 of the record:
that a file exists says nothing. Whether the base is the same shows when it is read again.
"""

import json
import shutil
from collections.abc import Collection
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
        job: names the merge: adapter, options and versions; records of another are ignored.
    """

    def __init__(self, staging: Path, job: dict[str, Any]) -> None:
        self._staging, self._job = staging, json.loads(json.dumps(job))

    def finished(self, names: Collection[str]) -> dict[Path, Written]:
        """Those of the files `names` that need not be written again; everything else in the folder is removed."""
        written: dict[Path, Written] = {}
        for name in names:
            if found := self._read(self._record(name), self._staging / name):
                written[self._staging / name] = found
        self._remove_all_but({*written, self._staging / FOLDER})
        return written

    def forget(self) -> None:
        """Remove everything: nothing is finished."""
        self._remove_all_but(())

    def add(self, path: Path, written: Written) -> None:
        """Record a file that is on disk."""
        stats = {name: asdict(change) for name, change in written.stats.items()}
        digests = {"sha256": written.sha256, "base_sha256": written.base_sha256}
        write_json(self._record(path.name), {"job": self._job, **digests, "stats": stats})

    def remove(self) -> None:
        """Leave no trace in the folder."""
        shutil.rmtree(self._staging / FOLDER)

    def _record(self, name: str) -> Path:
        return self._staging / FOLDER / f"{name}.json"

    def _remove_all_but(self, kept: Collection[Path]) -> None:
        # JSON first: without its config no library takes what is left for a model.
        for path in sorted(self._staging.iterdir(), key=lambda path: path.suffix != ".json"):
            if path not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _read(self, record: Path, path: Path) -> Written | None:
        try:
            value = json.loads(record.read_text(encoding="utf-8"))
            stats = {name: ChangeStats(**change) for name, change in value["stats"].items()}
            same = value["job"] == self._job and path.is_file() and sha256_file(path) == value["sha256"]
            return Written(value["sha256"], value["base_sha256"], stats) if same else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # not there, or cut short by the kill: the file is written again
