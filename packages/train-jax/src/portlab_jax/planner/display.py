"""What `plan-tpu` prints."""

from collections.abc import Sequence
from datetime import date

from rich.console import Console
from rich.table import Table
from rich.text import Text

from portlab_jax.planner.estimate import EFFICIENCY, WORST_FACTOR
from portlab_jax.planner.plan import Planned
from portlab_jax.planner.program import Program
from portlab_jax.planner.runs import InferencePlan, describe_changes

GIB = 2**30
BOUNDS = {"compute": "compute", "hbm": "HBM", "ici": "ICI"}


def show(planned: Sequence[Planned], *, searched: bool) -> None:
    """Print every slice, then the comparison and what it rests on."""
    console = Console(soft_wrap=True)
    for plan in planned:
        console.print(Text(heading(plan), style="bold"))
        for line in details(plan):
            console.print(Text(f"  {line}"))
        console.print()
    if len(planned) > 1:
        console.print(comparison(planned, searched=searched))
    for line in assumptions(planned):
        console.print(Text(line))


def heading(plan: Planned) -> str:
    """Slice, mesh, and whether it fits."""
    text = plan.part.explain()
    if plan.result.error:
        return f"{text}: refused"
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.result.programs["mesh"].items())
    return f"{text}; mesh {mesh}{'' if plan.fits else ': DOES NOT FIT'}"


def details(plan: Planned) -> list[str]:
    """Everything about one slice, a line each."""
    if plan.result.error:
        return [plan.result.error]
    lines = [f"data: {plan.result.source}"]
    if plan.changes:
        lines.append(f"settings: {describe_changes(plan.changes)}")
    programs = plan.result.programs
    kinds = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in programs["arguments"].items())
    for raw, (steps, program) in zip(programs["shapes"], plan.shapes, strict=True):
        lines += _program(plan, steps, program)
        attention = ", ".join(f"{kind} {name}" for kind, name in raw["attention"].items())
        lines.append(
            f"    {raw['positions']:,} token positions, {raw['slots']:,} logit positions; attention: {attention}"
        )
    lines.append(f"arguments per device, GiB: {kinds}")
    shapes = len(plan.shapes)
    lines.append(f"the data make {shapes} shape{'s' if shapes > 1 else ''} of the step: it compiles {_times(shapes)}")
    lines += [f"would fit by the analytic model: {change} ({memory / GIB:.1f} GiB)" for change, memory in plan.advice]
    if guess := plan.estimate:
        bound = guess.roofline
        times = ", ".join(f"{BOUNDS[n]} {getattr(bound, n) * 1000:,.1f} ms" for n in BOUNDS)
        lines += [
            f"modelled: bound by {BOUNDS[bound.bound]} ({times}); a step takes {guess.step_seconds * 1000:,.0f} ms",
            f"modelled: {guess.examples_per_second:,.1f} examples/s, {guess.tokens_per_second:,.0f} tokens/s; "
            f"{plan.recipe.steps} steps in {hours(guess.hours)}{money(plan)}",
        ]
    return lines


def _program(plan: Planned, steps: int, program: Program) -> list[str]:
    took = f"lowered in {program.lower_seconds:.0f} s, compiled in {program.compile_seconds:.0f} s"
    lines = [f"compiled: the step's shape of {steps} steps, {took}"]
    if program.memory is None:
        over = (program.needed - plan.usable) / GIB
        lines.append(
            f"    HBM per device: {program.needed / GIB:.2f} GiB needed of {plan.usable / GIB:.2f}: {over:.2f} too much"
        )
    else:
        m = program.memory
        lines.append(
            f"    HBM per device: {m.peak / GIB:.2f} GiB of {plan.usable / GIB:.2f} "
            f"(arguments {m.arguments / GIB:.2f}, temporaries {m.temporaries / GIB:.2f}, output {m.output / GIB:.2f}, "
            f"program {m.code / GIB:.2f})"
        )
        lines.append(
            f"    per device and step: {program.flops / 1e12:,.2f} TFLOP, {program.bytes / 1e9:,.1f} GB to and from HBM"
        )
        sent = ", ".join(
            f"{program.collectives[kind]:,} {kind} ({size / 1e9:.2f} GB)" for kind, size in program.sent.items()
        )
        lines.append(f"    collectives over ICI: {sent or 'none'}")
        if program.kernels:
            kernels = ", ".join(f"{name} ({runs:,} runs)" for name, runs in program.kernels.items())
            lines.append(f"    not counted: FLOPs of the kernels {kernels}")
        if program.unknown_loops:
            lines.append(f"    counted once: {program.unknown_loops} loops whose rounds the compiler does not know")
    lines += [f"    {b.bytes / GIB:6.2f} GiB  {b.shape}  {b.op}  {b.source}".rstrip() for b in program.largest[:5]]
    return lines


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def hours(value: float) -> str:
    """A duration for people."""
    if value < 1 / 60:
        return f"{value * 3600:.1f} s"
    if value < 1:
        return f"{value * 60:.1f} min"
    return f"{value:.1f} h"


def money(plan: Planned) -> str:
    """What a run costs, or that it is not known."""
    guess = plan.estimate
    if guess is None or guess.usd is None:
        return f"; no price of {plan.part.chip.name} is known"
    return f", ${guess.usd:,.2f} (${guess.usd_per_million_tokens:,.3f} per million tokens)"


def comparison(planned: Sequence[Planned], *, searched: bool) -> Table:
    """One row for each plan."""
    table = Table(
        title="best first; compiled memory, modelled time and cost"
        if searched
        else "compiled memory, modelled time and cost"
    )
    for name in ("slice", "settings", "HBM, GiB", "bound", "step, ms", "tokens/s", "run", "cost"):
        table.add_column(name, justify="left" if name in ("slice", "settings", "bound") else "right")
    for plan in planned:
        memory = "refused" if plan.result.error else f"{plan.needed / GIB:.1f} of {plan.usable / GIB:.1f}"
        if guess := plan.estimate:
            cost = "" if guess.usd is None else f"${guess.usd:,.2f}"
            cells = (
                BOUNDS[guess.roofline.bound],
                f"{guess.step_seconds * 1000:,.0f}",
                f"{guess.tokens_per_second:,.0f}",
                hours(guess.hours),
                cost,
            )
        else:
            cells = ("does not fit", "", "", "", "")
        table.add_row(plan.part.name, settings(plan), memory, *cells)
    return table


def settings(plan: Planned) -> str:
    """Mesh, remat and accumulation, in short."""
    mesh = plan.result.programs.get("mesh", {})
    shape = "x".join(str(size) for size in mesh.values())
    return f"{shape} {plan.recipe.remat}, accumulate {plan.recipe.accumulate}"


def assumptions(planned: Sequence[Planned]) -> list[str]:
    """What the figures rest on."""
    lines = [
        "compiled: by the TPU compiler, without a TPU; loops multiplied in. Nothing here was measured.",
        f"modelled: the slowest of compute, HBM and ICI at published peaks, divided by {EFFICIENCY:.2f}, the "
        f"efficiency that published runs had; single ones are off by up to {WORST_FACTOR:.1f}x (docs/planning.md).",
        "not included: starting the machines, compiling, scoring, checkpoints, preemption.",
    ]
    versions = next((p.result.versions for p in planned if p.result.versions), {})
    if versions:
        lines.append("versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    for price in dict.fromkeys(plan.price for plan in planned if plan.price):
        lines.append(f"price: {price}, as of {price.as_of}, {price.source}")
        if warning := price.stale_warning(date.today()):
            lines.append(f"warning: {warning}")
    return lines


def show_inference(steps: Sequence[InferencePlan]) -> None:
    """Print a table of inference steps."""
    console = Console(soft_wrap=True)
    table = Table(title="inference steps: compiled counts, modelled time")
    for name in (
        "slice",
        "step",
        "sequences",
        "context",
        "HBM, GiB",
        "TFLOP",
        "HBM traffic, GB",
        "bound",
        "bound, ms",
        "modelled, ms",
    ):
        table.add_column(name, justify="left" if name in ("slice", "step", "bound") else "right")
    for step in steps:
        program, bound = step.program, step.roofline
        cells = (
            (
                f"{program.flops / 1e12:.3f}",
                f"{program.bytes / 1e9:.2f}",
                BOUNDS[bound.bound],
                f"{bound.seconds * 1000:.2f}",
                f"{(step.seconds or 0) * 1000:.2f}",
            )
            if bound
            else ("", "", "does not fit", "", "")
        )
        table.add_row(
            step.part.name, step.kind, str(step.batch), f"{step.context:,}", f"{program.needed / GIB:.2f}", *cells
        )
    console.print(table)
    console.print(
        Text("compiled for one step of our own model, per device; a serving engine's kernels and scheduler differ.")
    )
    console.print(
        Text(f"modelled: the bound divided by {EFFICIENCY:.2f}, the efficiency that published training runs had.")
    )
