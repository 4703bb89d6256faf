"""What a run has seen so far, as its checkpoints keep it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainLog:
    """Losses, measurements and time of a run.

    Attributes:
        losses: of every step from the first.
        seconds: spent on these steps, over all the processes that took part.
        evals: (steps taken, monitored loss) of every measurement.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    evals: list[tuple[int, float]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"loss": list(self.losses), "seconds": self.seconds, "evals": [list(pair) for pair in self.evals]}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "TrainLog":
        return TrainLog(list(value["loss"]), value["seconds"], [(step, loss) for step, loss in value["evals"]])


def best_step(evals: Iterable[tuple[int, float]], saved: Iterable[int]) -> int | None:
    """The saved step of the lowest monitored loss, the first of equals; None if none was measured."""
    steps = set(saved)
    known = [(loss, step) for step, loss in evals if step in steps]
    return min(known)[1] if known else None
