"""Where metrics go: always `<run>/metrics.jsonl`, and what the recipe names beside it.

A line of metrics.jsonl is an object with `step` and the metrics of that step, numbers or null where one is not
finite. A run that goes on from step n first removes what a lost part of the run wrote about later steps.
"""

import contextlib
import importlib.util
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from portlab_spec.errors import UserError
from portlab_spec.files import write_text

METRICS_FILE = "metrics.jsonl"
MODULES = {"tensorboard": "tensorboardX", "trackio": "trackio"}  # by the recipe's name


class Tracker(Protocol):
    """Takes the metrics of steps, in their order."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step, counted from 1."""

    def close(self) -> None:
        """Write what is pending; nothing is logged afterwards."""


class JsonLines:
    """One JSON object a line, each written as it comes."""

    def __init__(self, path: Path, *, step: int) -> None:
        """Append to a file, from which lines past `step` and a last line that was cut off are removed first."""
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if (at := _step_of(line)) is not None and at <= step]
            if kept != lines:
                write_text(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step} | finite) + "\n")

    def close(self) -> None:
        self._file.close()


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


class TensorBoard:
    """TensorBoard's event files, by tensorboardX."""

    def __init__(self, folder: Path, *, step: int) -> None:
        from tensorboardX import SummaryWriter

        # TensorBoard hides points from the purged step on that earlier event files hold.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """trackio, in its local database; a resumed run goes on under its name, with repeated steps in it twice."""

    def __init__(self, project: str, run: str, config: Mapping[str, Any]) -> None:
        import trackio

        with contextlib.redirect_stdout(sys.stderr):  # it greets on stdout, which may carry the report
            self._run = trackio.init(project=project, name=run, config=dict(config), resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


class Trackers:
    """All trackers of a run as one, a context manager."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes all, also when one fails
            for tracker in self._trackers:
                stack.callback(tracker.close)


def require_trackers(names: Sequence[str], trainer: str) -> None:
    """Refuse trackers that are not installed, before anything long has begun.

    Args:
        names: of the recipe.
        trainer: whose package has an extra for each, "train-jax" say.

    Raises:
        UserError: gives the command that installs them.
    """
    if missing := [name for name in names if importlib.util.find_spec(MODULES[name]) is None]:
        extras = ",".join(missing)
        raise UserError(
            f"{MODULES[missing[0]]} is not installed",
            where=f"trackers: {missing[0]}",
            fix=f'Run: pip install "portlab-{trainer}[{extras}]"',
        )


def open_trackers(
    names: Sequence[str],
    folder: Path,
    *,
    step: int,
    name: str,
    config: Mapping[str, Any],
    trainer: str,
    leads: bool = True,
) -> Trackers:
    """The trackers of a run.

    Args:
        names: of the recipe.
        folder: the run's.
        step: steps that the run goes on from; later ones are forgotten.
        name: of the recipe: trackio's project.
        config: the resolved recipe.
        trainer: see `require_trackers`.
        leads: false in all processes but one, which then track nothing.

    Raises:
        UserError: one is not installed.
    """
    if not leads:
        return Trackers(())
    require_trackers(names, trainer)
    trackers: list[Tracker] = [JsonLines(folder / METRICS_FILE, step=step)]
    if "tensorboard" in names:
        trackers.append(TensorBoard(folder / "tensorboard", step=step))
    if "trackio" in names:
        trackers.append(Trackio(name, folder.resolve().name, config))
    return Trackers(trackers)
