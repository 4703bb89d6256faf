"""Planning several slices, and the search over settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from portlab_jax.planner.estimate import EFFICIENCY, Roofline, roofline
from portlab_jax.planner.plan import Planned, compile_job, plan
from portlab_jax.planner.program import Program
from portlab_jax.planner.records import Job
from portlab_jax.planner.search import Candidate, changed, variants, within, without_repeats
from portlab_spec.errors import UserError
from portlab_spec.hardware import Slice
from portlab_spec.prices import Price
from portlab_spec.progress import Advance, bar
from portlab_spec.recipe import Recipe


@dataclass(frozen=True)
class Wishes:
    """What is planned.

    Attributes:
        recipe: the run.
        backend: the trainer.
        length, supervised: of made-up rows; None for the recipe's data.
        by: what a search makes small.
        tries: settings of a slice that a search compiles at most.
    """

    recipe: Recipe
    backend: str = "jax"
    length: int | None = None
    supervised: int | None = None
    by: Literal["cost", "time"] = "cost"
    tries: int = 4

    def job(
        self, part: Slice, recipe: Recipe | None = None, kind: Literal["train", "rank"] = "train", **more: Any
    ) -> Job:
        """The job of a slice."""
        resolved = (recipe or self.recipe).model_dump(mode="json")
        return Job(kind, resolved, part.name, self.backend, self.length, self.supervised, **more)


def plan_all(
    wishes: Wishes, parts: Sequence[Slice], priced: Mapping[str, Price | None], *, search: bool
) -> list[Planned]:
    """Plan every slice, best first if the settings are searched.

    Raises:
        CheckFailed: the compiler failed.
        UserError: the recipe cannot be planned on any of the slices.
    """
    planned: list[Planned] = []
    with bar("compile", float(len(parts) * (wishes.tries if search else 1))) as advance:
        for number, part in enumerate(parts):
            advance(number * (wishes.tries if search else 1), part.name)
            price = priced[part.name]
            if search:
                before = number * wishes.tries
                planned += search_slice(wishes, part, price, partial(_advance_from, advance, before, part.name))
            else:
                planned.append(advised(wishes, plan(wishes.job(part), part, price)))
    refused = [p for p in planned if p.result.error]
    if planned and len(refused) == len(planned):
        raise UserError(refused[0].result.error)
    return sorted(planned, key=lambda p: worth(p, wishes.by)) if search else planned


def _advance_from(advance: Advance, before: float, note: str, done: float) -> None:
    advance(before + done, note)


def search_slice(wishes: Wishes, part: Slice, price: Price | None, advance: Callable[[float], None]) -> list[Planned]:
    """Compile the settings that the analytic model likes best, until none that is left could win.

    Compiled programs are remembered, so that a search that was stopped goes on where it was.
    """
    candidates = rank(wishes, part)
    possible = without_repeats(within(candidates, part))
    if not possible:
        return [advised(wishes, plan(wishes.job(part), part, price))]
    tried: list[Planned] = []
    for done, candidate in enumerate(possible[: wishes.tries]):
        best = min((p.estimate.roofline.seconds for p in tried if p.estimate), default=None)
        # The bound by analytic counts is as good as the compiled one to about a fifth.
        if best is not None and candidate.seconds > 1.2 * best:
            break
        recipe = changed(wishes.recipe, candidate.changes)
        tried.append(plan(wishes.job(part, recipe), part, price, candidate.changes))
        advance(done + 1.0)
    return tried


def rank(wishes: Wishes, part: Slice) -> list[Candidate]:
    """All settings for a slice by the analytic model, fastest first."""
    wanted = tuple(variants(wishes.recipe, part.devices))
    result = compile_job(wishes.job(part, kind="rank", variants=wanted))
    if result.error:
        raise UserError(result.error)
    return [Candidate.from_json(raw) for raw in result.candidates]


def worth(planned: Planned, by: Literal["cost", "time"]) -> tuple[bool, float, float]:
    """Key for sorting: what fits first, then the cheapest or the fastest."""
    if planned.estimate is None:
        return True, 0.0, 0.0
    cost = planned.estimate.usd if planned.estimate.usd is not None else float("inf")
    hours = planned.estimate.hours
    return (False, cost, hours) if by == "cost" else (False, hours, cost)


def advised(wishes: Wishes, planned: Planned, count: int = 3) -> Planned:
    """A plan that does not fit, with changes that would: few changes first, then the fastest.

    Another trainer's gets none: the analytic model counts train-jax's step.
    """
    if planned.fits or planned.result.error or wishes.backend != "jax":
        return planned
    mesh = planned.result.programs["mesh"]
    now = {f"mesh.{axis}": size for axis, size in mesh.items()}
    now |= {key: getattr(planned.recipe, key) for key in ("accumulate", "remat", "chunk", "pack")}
    fitting = within(rank(wishes, planned.part), planned.part, margin=0.9)

    def differences(candidate: Candidate) -> dict[str, Any]:
        return {key: value for key, value in candidate.changes.items() if now[key] != value}

    best = sorted(fitting, key=lambda c: (len(differences(c)), c.seconds))[:count]
    lines = tuple((describe_changes(differences(candidate)), candidate.memory) for candidate in best)
    return replace(planned, advice=lines)


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Changes as options of the command line."""

    def option(key: str, value: Any) -> str:
        name = key.replace("_", "-")
        if isinstance(value, bool):
            return f"--{name}" if value else f"--no-{name}"
        return f"--{name} {value}"

    return " ".join(option(key, value) for key, value in changes.items())


@dataclass(frozen=True)
class InferencePlan:
    """A step of inference on a slice.

    Attributes:
        part: the slice.
        kind: prefill or decode.
        batch, context: sequences, and tokens of each.
        mesh: size of each axis.
        arguments: bytes of a device by kind.
        program: as compiled.
    """

    part: Slice
    kind: str
    batch: int
    context: int
    mesh: dict[str, int]
    arguments: dict[str, int]
    program: Program

    @property
    def roofline(self) -> Roofline | None:
        """Its bound; None if it does not fit."""
        return roofline(self.program, self.part) if self.program.fits else None

    @property
    def seconds(self) -> float | None:
        """Modelled: the bound over the efficiency that training showed."""
        return self.roofline.seconds / EFFICIENCY if self.roofline else None

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        bound = self.roofline
        return {
            "slice": self.part.name,
            "step": self.kind,
            "sequences": self.batch,
            "context": self.context,
            "mesh": self.mesh,
            "arguments": self.arguments,
            "compiled": self.program.to_json(),
            "bound_seconds": bound and bound.seconds,
            "bound": bound and bound.bound,
            "modelled_seconds": self.seconds,
        }


def plan_inference(
    wishes: Wishes, parts: Sequence[Slice], kinds: Sequence[Literal["prefill", "decode"]], batch: int, context: int
) -> list[InferencePlan]:
    """Compile steps of inference.

    Raises:
        UserError: the model or the mesh is refused.
    """
    steps = []
    with bar("compile", float(len(parts) * len(kinds))) as advance:
        for part in parts:
            for kind in kinds:
                job = Job(kind, wishes.recipe.model_dump(mode="json"), part.name, batch=batch, context=context)
                result = compile_job(job)
                if result.error:
                    raise UserError(result.error)
                raw = dict(result.programs)
                program = Program.from_json(raw.pop("program"))
                steps.append(InferencePlan(part=part, kind=kind, program=program, **raw))
                advance(float(len(steps)), f"{part.name} {kind}")
    return steps
