"""Settings worth trying, best first by the analytic model."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from portlab_jax.planner.analytic import Analytic, analyse
from portlab_jax.planner.estimate import bound_of
from portlab_jax.planner.training import batches_of, draw
from portlab_jax.planner.workload import Workload
from portlab_spec.errors import UserError
from portlab_spec.hardware import Slice
from portlab_spec.recipe import Recipe

REMAT = ("none", "dots", "block")
CHUNKS = (None, 128)

Changes = dict[str, Any]  # dotted recipe key -> value


@dataclass(frozen=True)
class Candidate:
    """A setting by the analytic model.

    Attributes:
        changes: to the recipe.
        seconds: lower bound of a step.
        memory: bytes that a device needs, roughly.
        analytic: the counts behind them.
    """

    changes: Changes
    seconds: float
    memory: float
    analytic: Analytic

    def to_json(self) -> dict[str, Any]:
        """For the process that asked."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> "Candidate":
        """The inverse of `to_json`."""
        return Candidate(**{**raw, "analytic": Analytic(**raw["analytic"])})


def variants(recipe: Recipe, devices: int) -> Iterator[Changes]:
    """Every setting that the search considers: mesh, share of the batch at a time, remat, packing, size of a chunk.

    The batch, the model and what is trained stay as they are: every variant takes the same steps.
    """
    accumulates = [a for a in (1, 2, 4, 8, 16, 32) if recipe.batch_size % a == 0]
    packs = (True, False) if not recipe.pack else (True,)
    for (data, fsdp, tp), accumulate, remat, chunk, pack in itertools.product(
        meshes(devices), accumulates, REMAT, CHUNKS, packs
    ):
        # Devices without rows would only wait.
        if recipe.batch_size // accumulate < data * fsdp:
            continue
        mesh = {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.tp": tp}
        yield mesh | {"accumulate": accumulate, "remat": remat, "chunk": chunk, "pack": pack}


def meshes(devices: int) -> list[tuple[int, int, int]]:
    """All ways to write a number of devices as data x fsdp x tp."""
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    return [(devices // (fsdp * tp), fsdp, tp) for fsdp in divisors for tp in divisors if devices % (fsdp * tp) == 0]


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some keys set.

    Raises:
        pydantic.ValidationError: no such key, or an impossible combination.
    """
    raw = recipe.model_dump()
    for key, value in changes.items():
        section, _, leaf = key.rpartition(".")
        (raw[section] if section else raw)[leaf] = value
    return Recipe.model_validate(raw)


def rank(
    recipe: Recipe, work: Workload, part: Slice, devices: Sequence[Any], wanted: Sequence[Mapping[str, Any]]
) -> list[Candidate]:
    """Candidates by the analytic model, fastest first; settings that training would refuse are left out.

    Args:
        recipe: the run.
        work: its rows.
        part: the slice.
        devices: of the slice.
        wanted: settings to look at.
    """
    # Variants take the same batches, and the first stand for all, since batches are drawn alike.
    batches = list(itertools.islice(batches_of(recipe, work), 4))
    found = []
    for changes in wanted:
        variant = changed(recipe, changes)
        try:
            drawn = draw(variant, work, part, devices)
            with jax.set_mesh(drawn.mesh.mesh):
                plan = drawn.plan(batches, accumulate=variant.accumulate)
                analytic = analyse(drawn, plan.layout(0))
        except UserError:
            continue
        found.append(Candidate(dict(changes), lower_bound(analytic, part), analytic.total_memory, analytic))
    return sorted(found, key=lambda candidate: candidate.seconds)


def lower_bound(analytic: Analytic, part: Slice) -> float:
    """Seconds that a step takes at least, by the analytic counts."""
    return bound_of(analytic.total_flops, analytic.traffic, analytic.sent, part).seconds


def within(candidates: Sequence[Candidate], part: Slice, margin: float = 1.25) -> list[Candidate]:
    """Candidates whose memory may fit; the analytic figure may be off by the margin."""
    return [candidate for candidate in candidates if candidate.memory <= margin * part.device_memory]


def without_repeats(candidates: Sequence[Candidate]) -> list[Candidate]:
    """One candidate for each choice of mesh, accumulation and remat: the first with its other settings."""
    seen: dict[tuple[Any, ...], Candidate] = {}
    for candidate in candidates:
        key = tuple(value for name, value in sorted(candidate.changes.items()) if name not in ("chunk", "pack"))
        seen.setdefault(key, candidate)
    return list(seen.values())
