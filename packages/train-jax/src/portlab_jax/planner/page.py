"""Plans as one HTML file that needs nothing else: pictures, tables, and what each figure rests on."""

from collections.abc import Sequence
from datetime import date
from importlib import resources
from xml.etree.ElementTree import Element

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
from portlab_jax.planner.display import BOUNDS, assumptions, heading, hours
from portlab_jax.planner.markup import Bar, Column, bars, hatch, swatch, table
from portlab_jax.planner.plan import Planned
from portlab_jax.planner.program import Program
from portlab_jax.planner.runs import describe_changes
from portlab_spec.markup import node, page

SLICE = (Column("slice", text=True), Column("settings", text=True))
EVIDENCE = {
    "compiled": "the TPU compiler's own figures, or counted in the program that it made; no TPU ran it",
    "modelled": "calculated from compiled and published figures; no run took that time",
    "published": "from the maker's sheet or a price list, with its date",
    "counted": "from the run's data and settings",
    "this computer": "what compiling took, where that was done",
}


def html(planned: Sequence[Planned]) -> str:
    """A report of plans as one self-contained page: no network, no scripts.

    All plans are in its first table; pictures and details show the best eight.
    """
    shown = best(planned)
    recipe = planned[0].recipe
    title = f"Plan: {run_name(planned[0])} on {', '.join(dict.fromkeys(plan.part.name for plan in planned))}"
    return page(
        title,
        resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8") + _colors(),
        hatch(),
        node("h1", title),
        node(
            "p",
            f"Method {recipe.method}, {recipe.steps} steps of {recipe.batch_size} examples. "
            f"Planned on {date.today().isoformat()}. Nothing here was measured on a TPU.",
            class_="soft",
        ),
        *_answer(planned, len(shown)),
        *_memory(shown),
        *_time(shown),
        *_cost(shown),
        node("h2", "What was compiled"),
        *(part for plan in shown for part in _details(plan)),
        *_basis(planned),
        schemes="light dark",
    )


def _colors() -> str:
    colors = MEMORY_COLORS | TIME_COLORS
    return "".join(f".{kind.replace(' ', '-')} {{ fill: {color}; }}\n" for kind, color in colors.items())


def _answer(planned: Sequence[Planned], shown: int) -> list[Element]:
    fitting = [(plan, plan.estimate) for plan in planned if plan.estimate]
    lines = [f"{len(fitting)} of {len(planned)} plans fit." if fitting else "Nothing fits."]
    priced = [(guess.usd, plan) for plan, guess in fitting if guess.usd is not None]
    if priced:
        usd, plan = min(priced, key=lambda pair: pair[0])
        lines.append(f"Cheapest: {_name(plan)}, ${usd:,.2f}.")
    if fitting:
        plan, guess = min(fitting, key=lambda pair: pair[1].hours)
        lines.append(f"Fastest: {_name(plan)}, {hours(guess.hours)}.")
    columns = (
        *SLICE,
        Column("HBM per device, GiB", "compiled"),
        Column("step, ms", "modelled"),
        Column("tokens/s", "modelled"),
        Column("run", "modelled"),
        Column("cost", "modelled"),
    )
    rows = [(*label(plan), *_answer_cells(plan)) for plan in planned]
    found = [node("p", " ".join(lines), **({} if fitting else {"class_": "alarm"})), table(columns, rows)]
    if shown < len(planned):
        found.append(node("p", f"Below are the best {shown}.", class_="soft"))
    return found


def _answer_cells(plan: Planned) -> tuple[str, str, str, str, str]:
    if plan.result.error:
        return "refused", "", "", "", ""
    memory = f"{plan.needed / GIB:.2f} of {plan.usable / GIB:.2f}"
    if (guess := plan.estimate) is None:
        return f"{memory}: does not fit", "", "", "", ""
    cost = _dollars(guess.usd, 2) or "no price"
    return memory, f"{guess.step_seconds * 1000:,.0f}", f"{guess.tokens_per_second:,.0f}", hours(guess.hours), cost


def _memory(shown: Sequence[Planned]) -> list[Element]:
    split = [(plan, memory_by_kind(plan)) for plan in shown]
    present = [kind for kind in MEMORY_COLORS if any(kinds.get(kind) for _, kinds in split)]
    scale = 1.03 * max(max(sum(kinds.values()), plan.usable) for plan, kinds in split)
    rows = []
    for plan, kinds in split:
        parts, at = [], 0
        for kind, size in kinds.items():
            if size:
                parts.append(Bar(kind, at, size, f"{kind}: {size / GIB:.2f} GiB, compiled"))
                at += size
        value = "refused" if plan.result.error else f"{plan.needed / GIB:.2f} GiB"
        says = f"{_name(plan)}: {value} of {plan.usable / GIB:.2f} GiB"
        drawn = bars(parts, scale, says, [("limit", plan.usable)], hatched=not plan.fits)
        note = "" if plan.result.error else f"of {plan.usable / GIB:.2f}" + ("" if plan.fits else ", does not fit")
        rows.append(_row(plan, drawn, value, note))
    squares = [(swatch(kind), kind) for kind in present]
    squares.append((swatch("limit"), "usable HBM"))
    if not all(plan.fits for plan, _ in split):
        squares.append((swatch("plain", hatched=True), "does not fit"))
    columns = (*SLICE, *(Column(kind) for kind in present), Column("needed"), Column("usable"))
    cells = [
        (
            *label(plan),
            *(f"{kinds[kind] / GIB:.3f}" if kind in kinds else "" for kind in present),
            f"{plan.needed / GIB:.3f}" if kinds else "refused",
            f"{plan.usable / GIB:.3f}",
        )
        for plan, kinds in split
    ]
    caption = "Compiled: GiB per device, for the shape of the step that needs most."
    return [node("h2", "Memory by kind, compiled"), *rows, _legend(squares), table(columns, cells, caption)]


def _time(shown: Sequence[Planned]) -> list[Element]:
    guesses = [(plan, plan.estimate) for plan in shown]
    scale = 1.03 * max((guess.step_seconds for _, guess in guesses if guess), default=1.0)
    rows, cells = [], []
    for plan, guess in guesses:
        if guess is None:
            cells.append((*label(plan), *[""] * len(BOUNDS), _no_estimate(plan), "", "", ""))
            continue
        times = time_by_bound(plan)
        parts = [
            Bar(name, 0, seconds, f"{BOUNDS[name]}: {seconds * 1000:,.1f} ms, modelled", 2 + 9 * number, 8)
            for number, (name, seconds) in enumerate(times.items())
        ]
        value, bound = f"{guess.step_seconds * 1000:,.0f} ms", BOUNDS[guess.roofline.bound]
        drawn = bars(parts, scale, f"{_name(plan)}: a step takes {value}", [("step", guess.step_seconds)])
        rows.append(_row(plan, drawn, value, f"bound by {bound}"))
        cells.append(
            (
                *label(plan),
                *(f"{seconds * 1000:,.1f}" for seconds in times.values()),
                bound,
                f"{guess.step_seconds * 1000:,.1f}",
                f"{guess.examples_per_second:,.1f}",
                f"{guess.tokens_per_second:,.0f}",
            )
        )
    columns = (
        *SLICE,
        *(Column(f"{name}, ms") for name in BOUNDS.values()),
        Column("bound by", text=True),
        *(Column(name) for name in ("step, ms", "examples/s", "tokens/s")),
    )
    squares = [(swatch(name), BOUNDS[name]) for name in TIME_COLORS]
    legend = _legend([*squares, (swatch("step"), "step")])
    caption = (
        "Modelled: how long a step keeps each resource of a device busy at its published peak, and what it then takes."
    )
    return [node("h2", "Time by bound, modelled"), *rows, legend, table(columns, cells, caption)]


def _cost(shown: Sequence[Planned]) -> list[Element]:
    columns = (
        *SLICE,
        Column("chips"),
        Column("chip and hour", "published"),
        Column("steps"),
        Column("run", "modelled"),
        Column("cost", "modelled"),
        Column("per million tokens", "modelled"),
    )
    rows = []
    for plan in shown:
        price = _dollars(plan.price.usd_per_hour, 2) if plan.price else "not known"
        if (guess := plan.estimate) is None:
            figures = [_no_estimate(plan), "", ""]
        else:
            figures = [hours(guess.hours), _dollars(guess.usd, 2), _dollars(guess.usd_per_million_tokens, 3)]
        rows.append((*label(plan), str(plan.part.chips), price, f"{plan.recipe.steps:,}", *figures))
    return [node("h2", "Cost, modelled"), table(columns, rows)]


def _details(plan: Planned) -> list[Element]:
    """One plan: whether it fits, what would, and the program of each shape of the step."""
    parts = [node("h3", heading(plan), **({} if plan.fits else {"class_": "alarm"}))]
    if plan.result.error:
        return [*parts, node("p", plan.result.error)]
    shapes = len(plan.shapes)
    made = "one shape of the step, which compiles once" if shapes == 1 else f"{shapes} shapes of the step"
    parts.append(node("p", f"Data: {plan.result.source}. They make {made}."))
    if plan.changes:
        parts.append(node("p", "Settings: ", node("code", describe_changes(plan.changes))))
    if plan.advice:
        fixes = [
            node("li", node("code", change), f" ({memory / GIB:.1f} GiB, modelled)") for change, memory in plan.advice
        ]
        parts += [node("p", "By the analytic model it would fit with"), node("ul", *fixes)]
    columns = (Column("figure", text=True), Column("value", text=True), Column("evidence", text=True))
    for raw, (steps, program) in zip(plan.result.programs["shapes"], plan.shapes, strict=True):
        attention = ", ".join(f"{kind} {name}" for kind, name in raw["attention"].items())
        rows = [
            ("token positions, all devices", f"{raw['positions']:,}", "counted"),
            ("logit positions, all devices", f"{raw['slots']:,}", "counted"),
            ("attention kernels", attention, "counted"),
            *_program(plan, program),
        ]
        parts.append(table(columns, rows, f"The step's shape of {steps:,} steps; figures are per device and step."))
        if program.largest:
            parts.append(_largest(program))
    return parts


def _program(plan: Planned, program: Program) -> list[tuple[str, str, str]]:
    rows = [("HBM", f"{program.needed / GIB:.2f} GiB needed of {plan.usable / GIB:.2f}", "compiled")]
    if program.memory:
        sent = [f"{program.collectives[kind]:,} {kind} ({size / 1e9:.2f} GB)" for kind, size in program.sent.items()]
        rows += [
            ("matrix products", f"{program.flops / 1e12:,.2f} TFLOP", "compiled"),
            ("to and from HBM", f"{program.bytes / 1e9:,.1f} GB", "compiled"),
            ("collectives over ICI", ", ".join(sent) or "none", "compiled"),
        ]
    if program.kernels:
        kernels = ", ".join(f"{name} ({runs:,} runs)" for name, runs in program.kernels.items())
        rows.append(("kernels whose FLOPs are not counted", kernels, "compiled"))
    if program.unknown_loops:
        rows.append(("loops of unknown length, counted once", f"{program.unknown_loops:,}", "compiled"))
    return [
        *rows,
        ("lowering", f"{program.lower_seconds:.1f} s", "this computer"),
        ("compiling", f"{program.compile_seconds:.1f} s", "this computer"),
        ("memory of the compiling process", f"{program.peak_rss_bytes / GIB:.1f} GiB", "this computer"),
    ]


def _largest(program: Program) -> Element:
    columns = (Column("GiB", "compiled"), *(Column(name, text=True) for name in ("array", "operation", "line")))
    rows = [(f"{b.bytes / GIB:.3f}", b.shape, b.op, b.source) for b in program.largest]
    return table(columns, rows, "The largest arrays of a device when its memory is fullest.")


def _basis(planned: Sequence[Planned]) -> list[Element]:
    prices = [
        (str(price), price.as_of.isoformat(), price.source)
        for price in dict.fromkeys(plan.price for plan in planned if plan.price)
    ]
    price_columns = [Column(name, text=True) for name in ("price", "as of", "source")]
    peaks = [
        (
            chip.label,
            f"{chip.bf16_flops / 1e12:,.0f}",
            f"{chip.hbm_bandwidth / 1e9:,.0f}",
            f"{chip.ici_bandwidth / 1e9:,.0f}" if chip.ici_bandwidth else "not published",
            ", ".join(chip.sources),
        )
        for chip in dict.fromkeys(plan.part.chip for plan in planned)
    ]
    peak_columns = [
        Column("chip", text=True),
        *map(Column, ("bf16, TFLOP/s", "HBM, GB/s", "ICI, GB/s")),
        Column("source", text=True),
    ]
    found = [
        node("h2", "What this rests on"),
        node("ul", *(node("li", line) for line in assumptions(planned))),
        table([Column("evidence", text=True), Column("means", text=True)], list(EVIDENCE.items())),
        table(peak_columns, peaks, "Published: peaks of one chip. ICI counts both directions."),
    ]
    if prices:
        found.append(table(price_columns, prices, "Published: prices of one chip for an hour."))
    return found


def _row(plan: Planned, drawn: Element, value: str, note: str) -> Element:
    name, chosen = label(plan)
    return node(
        "div",
        node("div", name, node("small", chosen)),
        drawn,
        node("div", value, node("small", note), class_="value"),
        class_="row",
    )


def _legend(squares: Sequence[tuple[Element, str]]) -> Element:
    return node("ul", *(node("li", square, text) for square, text in squares), class_="legend")


def _name(plan: Planned) -> str:
    return " ".join(filter(None, label(plan)))


def _dollars(usd: float | None, digits: int) -> str:
    return "" if usd is None else f"${usd:,.{digits}f}"


def _no_estimate(plan: Planned) -> str:
    return "refused" if plan.result.error else "does not fit"
