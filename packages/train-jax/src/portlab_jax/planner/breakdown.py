"""What the pictures of plans show: where a device's memory and a step's time go."""

from collections.abc import Sequence

from portlab_jax.planner.display import settings
from portlab_jax.planner.plan import Planned

GIB = 2**30
MOST = 8  # plans in a picture

# Okabe and Ito's palette, whose colours differ to colour-blind eyes too, its yellow darkened.
MEMORY_COLORS = {
    "weights": "#0072b2",
    "trained": "#e69f00",
    "optimizer": "#cc79a7",
    "batch": "#56b4e9",
    "temporaries": "#009e73",
    "output": "#d9c51e",
    "program": "#d55e00",
    "not split": "#8a8f98",
}
TIME_COLORS = {"compute": "#0072b2", "hbm": "#009e73", "ici": "#e69f00"}


def best(planned: Sequence[Planned], count: int = MOST) -> list[Planned]:
    """The first plans, those that fit before the others."""
    return sorted(planned, key=lambda plan: not plan.fits)[:count]


def label(plan: Planned) -> tuple[str, str]:
    """Name of the slice, and the settings in short, "" if there are none because the plan was refused."""
    return plan.part.name, settings(plan) if plan.shapes else ""


def run_name(plan: Planned) -> str:
    """Recipe and model, for titles."""
    return f"{plan.recipe.name} ({plan.recipe.model})"


def memory_by_kind(plan: Planned) -> dict[str, int]:
    """Bytes of a device by kind, for the shape of the step that needs most; nothing if the plan was refused.

    "not split" is what the compiler counts and does not tell apart: padding, and of a program that does not fit all
    but its arguments.
    """
    if not plan.shapes:
        return {}
    fullest = max((program for _, program in plan.shapes), key=lambda program: program.needed)
    kinds: dict[str, int] = dict(plan.result.programs["arguments"])
    if parts := fullest.memory:
        kinds |= {"temporaries": parts.temporaries, "output": parts.output, "program": parts.code}
    return kinds | {"not split": max(fullest.needed - sum(kinds.values()), 0)}


def time_by_bound(plan: Planned) -> dict[str, float]:
    """Seconds for which a step keeps each resource busy at its published peak; nothing if it does not fit."""
    if plan.estimate is None:
        return {}
    bound = plan.estimate.roofline
    return {name: getattr(bound, name) for name in TIME_COLORS}
