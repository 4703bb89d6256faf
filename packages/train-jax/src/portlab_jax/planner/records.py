"""What the planner hands to the process that compiles, and gets back; both travel as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Job:
    """What to compile.

    Attributes:
        kind: the training step, a step of inference, or nothing: to rank variants by the analytic model.
        recipe: resolved, as JSON.
        slice: Cloud name.
        backend: the trainer whose step it is.
        length, supervised: plan for made-up rows of so many tokens; None for the recipe's data.
        batch, context: of inference: sequences, and tokens that each has.
        variants: of "rank": changes to the recipe.
    """

    kind: Literal["train", "rank", "prefill", "decode"]
    recipe: Mapping[str, Any]
    slice: str
    backend: str = "jax"
    length: int | None = None
    supervised: int | None = None
    batch: int = 0
    context: int = 0
    variants: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Result:
    """What became of a job.

    Attributes:
        error: the line for the user if the job was refused, else "".
        programs: `TrainingPrograms` or `InferenceProgram` as JSON.
        candidates: of "rank": variants that are possible, as JSON, fastest first.
        source: where the rows are from.
        compiled: programs that were compiled now, the others were remembered.
        versions: of the compiler.
    """

    error: str = ""
    programs: dict[str, Any] = field(default_factory=dict)
    candidates: list[dict[str, Any]] = field(default_factory=list)
    source: str = ""
    compiled: int = 0
    versions: dict[str, str] = field(default_factory=dict)
