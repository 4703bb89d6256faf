"""A recipe on a slice: compiled in a process of its own, priced, and what to change if it does not fit."""

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from portlab_jax.planner.estimate import Estimate, estimate
from portlab_jax.planner.program import Program
from portlab_jax.planner.records import Job, Result
from portlab_spec.errors import CheckFailed
from portlab_spec.files import read_json
from portlab_spec.hardware import Slice
from portlab_spec.prices import Price
from portlab_spec.recipe import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """A recipe on a slice.

    Attributes:
        part: the slice.
        recipe: as it was compiled.
        changes: to the recipe that was given, by dotted key; empty if it is that.
        result: of compiling.
        estimate: of the run; None if it does not fit or is refused.
        price: of a chip; None if none is known.
        advice: changes that would make it fit, by the analytic model, with the bytes that they need.
    """

    part: Slice
    recipe: Recipe
    result: Result
    changes: dict[str, Any] = field(default_factory=dict)
    estimate: Estimate | None = None
    price: Price | None = None
    advice: tuple[tuple[str, float], ...] = ()

    @cached_property
    def shapes(self) -> list[tuple[int, Program]]:
        """Steps and program of each shape of the step."""
        shapes = self.result.programs.get("shapes", [])
        return [(shape["steps"], Program.from_json(shape["program"])) for shape in shapes]

    @property
    def fits(self) -> bool:
        """Whether every shape of the step fits."""
        return not self.result.error and all(program.fits for _, program in self.shapes)

    @property
    def needed(self) -> int:
        """Bytes of HBM of a device that the largest shape needs."""
        return max((program.needed for _, program in self.shapes), default=0)

    @property
    def usable(self) -> int:
        """Bytes of HBM of a device that programs can have."""
        limits = [program.limit for _, program in self.shapes if program.limit]
        return limits[0] if limits else self.part.device_memory

    def to_json(self) -> dict[str, Any]:
        """Everything about a plan, for machines. `evidence` says which figures are compiled and which modelled."""
        return {
            "slice": {
                "name": self.part.name,
                "explained": self.part.explain(),
                "chips": self.part.chips,
                "devices": self.part.devices,
                "hosts": self.part.hosts,
            },
            "recipe": self.recipe.model_dump(mode="json"),
            "changes": self.changes,
            "fits": self.fits,
            "error": self.result.error,
            "data": self.result.source,
            "hbm": {"needed": self.needed, "usable": self.usable},
            "compiled": self.result.programs,
            "modelled": None if self.estimate is None else asdict(self.estimate),
            "price": None if self.price is None else self.price.model_dump(mode="json"),
            "advice": [{"change": change, "memory": memory} for change, memory in self.advice],
            "versions": self.result.versions,
            "evidence": {"compiled": "the TPU compiler's figures", "modelled": "roofline over a fitted efficiency"},
            "when": date.today().isoformat(),
        }


def compile_job(job: Job) -> Result:
    """Run a job in a process of its own.

    Raises:
        CheckFailed: the compiler died, or refuses the program for another reason than memory.
    """
    with tempfile.TemporaryDirectory(prefix="plan-tpu-") as folder:
        question, answer = Path(folder, "job.json"), Path(folder, "result.json")
        question.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "portlab_jax.planner.worker", str(question), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not answer.is_file():
            log.debug("%s", done.stderr)
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            telling = next((line for line in lines if "Check failed" in line), lines[-1])
            raise CheckFailed(
                f"the compiler stopped with exit code {done.returncode} ({telling.strip()})",
                where=job.slice,
                fix="It may have run out of memory (a large model takes 12 GiB); --debug shows all it said",
            )
        return Result(**read_json(answer, "result"))


def plan(job: Job, part: Slice, price: Price | None, changes: Mapping[str, Any] | None = None) -> Planned:
    """Compile a recipe's step for a slice and estimate the run.

    Args:
        job: what to compile, of kind "train".
        part: the slice.
        price: of a chip for an hour, None if none is known.
        changes: what a search set in the recipe.

    Raises:
        CheckFailed: as `compile_job`.
    """
    recipe = Recipe.model_validate(job.recipe)
    planned = Planned(part, recipe, compile_job(job), dict(changes or {}), price=price)
    if not planned.fits:
        return planned
    programs = planned.result.programs
    guess = estimate(
        planned.shapes, part, rows=programs["rows"], tokens=programs["tokens"], steps=recipe.steps, price=price
    )
    return replace(planned, estimate=guess)
