"""Plans as a picture: how full a device's memory is, and what a step's time is bound by."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portlab_jax.planner.breakdown import (
    GIB,
    MEMORY_COLORS,
    TIME_COLORS,
    best,
    label,
    memory_by_kind,
    run_name,
    time_by_bound,
)
from portlab_jax.planner.display import BOUNDS
from portlab_jax.planner.page import html
from portlab_jax.planner.plan import Planned
from portlab_spec.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["draw", "html"]

BAR = 0.6  # of the room of a row
HATCH = "////"


def draw(planned: Sequence[Planned], path: Path) -> None:
    """Write a PNG of the best plans, a row each: memory by kind on the left, time by bound on the right."""
    from matplotlib.figure import Figure

    shown = best(planned)
    figure = Figure(figsize=(13, 2.4 + 0.75 * len(shown)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True, width_ratios=(6, 5))
    for axes in (memory, time):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    style: dict[str, Any] = {"fontsize": "small", "frameon": False}
    figure.legend(handles=_draw_memory(memory, shown), loc="outside lower left", ncols=5, **style)
    figure.legend(handles=_draw_time(time, shown), loc="outside lower right", ncols=4, **style)
    memory.set_yticks(range(len(shown)), ["\n".join(filter(None, label(plan))) for plan in shown])
    memory.set_ylim(len(shown) - 0.5, -0.5)  # the first on top
    omitted = f" ({len(shown)} of {len(planned)} plans)" if len(shown) < len(planned) else ""
    figure.suptitle(f"{run_name(shown[0])} on TPU slices that were compiled for, not run on{omitted}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_bytes(path, buffer.getvalue())


def _draw_memory(axes: "Axes", shown: Sequence[Planned]) -> "list[Artist]":
    """Draw, and give what the legend explains."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen: set[str] = set()
    for row, plan in enumerate(shown):
        if plan.result.error:
            axes.annotate(" refused", (0, row), va="center")
            continue
        left = 0.0
        for kind, size in memory_by_kind(plan).items():
            if size:
                seen.add(kind)
                hatch = None if plan.fits else HATCH
                color = MEMORY_COLORS[kind]
                axes.barh(row, size / GIB, BAR, left=left, fc=color, ec="white", linewidth=0, hatch=hatch)
                left += size / GIB
        axes.annotate(f" {plan.needed / GIB:.1f}", (max(left, plan.needed / GIB), row), va="center")
        axes.plot([plan.usable / GIB] * 2, [row - 0.42, row + 0.42], color="crimson", linewidth=2)
    axes.set(xlabel="GiB per device, compiled", title="memory by kind (compiled)")
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    handles: list[Artist] = [Patch(color=color, label=kind) for kind, color in MEMORY_COLORS.items() if kind in seen]
    handles.append(Line2D([], [], color="crimson", linewidth=2, label="usable HBM"))
    if not all(plan.fits for plan in shown):
        handles.append(Patch(facecolor="gray", edgecolor="white", hatch=HATCH, label="does not fit"))
    return handles


def _draw_time(axes: "Axes", shown: Sequence[Planned]) -> "list[Artist]":
    """Draw, and give what the legend explains."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    height = BAR / len(TIME_COLORS)
    for row, plan in enumerate(shown):
        if plan.estimate is None:
            axes.annotate(" refused" if plan.result.error else " does not fit", (0, row), va="center")
            continue
        for number, (name, seconds) in enumerate(time_by_bound(plan).items()):
            at = row + (number - 1) * height
            axes.barh(at, seconds * 1000, height, color=TIME_COLORS[name])
        step = plan.estimate.step_seconds * 1000
        axes.plot(step, row, "D", color="black")
        axes.annotate(f"{step:,.0f}", (step, row), (7, 0), textcoords="offset points", va="center")
    axes.set(xlabel="ms per step, modelled", title="time by bound, at published peaks (modelled)")
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    handles = [Patch(color=color, label=BOUNDS[name]) for name, color in TIME_COLORS.items()]
    marker = Line2D([], [], color="black", marker="D", linestyle="", label="step, modelled")
    return [*handles, marker]
