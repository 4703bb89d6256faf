"""A decision in words and tables."""

from collections.abc import Sequence

from portlab_bench.decide import Answer, BreakEven
from portlab_bench.tables import Cell, Table, cell, markdown, text


def to_text(answer: Answer) -> str:
    """Markdown: advice first, then the tables that it rests on."""
    q = answer.question
    asked = (
        f"Asked: {q['train_runs']:g} runs of {q['job']} a month; {_count(float(q['tokens_per_day']))} output tokens "
        f"a day, {q['work']}, 99 of 100 first tokens within {float(q['ttft_p99']) * 1e3:,.0f} ms; load "
        f"{q['utilisation']:g} of what a machine bears; paid {q['plan']}, provider {q['provider']}."
    )
    advice = "\n".join(f"- {line}" for line in answer.advice)
    tables = [_platforms(answer), _train(answer), _serve(answer), _even(answer.break_even), _sensitivity(answer)]
    if answer.left_out:
        rows = tuple((text(line),) for line in answer.left_out)
        tables.append(Table("left-out", "Left out", ("machine and reason",), rows))
    return markdown("What to rent", (asked, advice), tables)


def _platforms(answer: Answer) -> Table:
    rows = tuple(
        (text(p.name), text(p.train), cell(p.run), text(p.serve), cell(p.million), cell(p.month, ",.0f"))
        for p in answer.platforms
    )
    columns = ("platform", "trains on", "USD a run", "serves on", "USD a Mtoken", "USD a month")
    return Table("platforms", "TPU against GPU", columns, rows, ("The best machines of each.",))


def _train(answer: Answer) -> Table:
    rows = tuple(
        (
            text(o.machine),
            text(o.hour.note),
            cell(o.hour),
            cell(o.hours, ",.2f"),
            cell(o.start, ",.0f"),
            cell(o.run),
            cell(o.month),
            text(o.memory),
        )
        for o in answer.train
    )
    columns = ("machine", "price", "USD/h", "steps, h", "start, s", "USD a run", "USD a month", "memory")
    return Table("train", "Fine-tuning", columns, rows)


def _serve(answer: Answer) -> Table:
    rows = tuple(
        (
            text(o.machine),
            text(o.hour.note),
            cell(o.hour),
            cell(o.rate),
            cell(o.throughput, ",.0f"),
            cell(o.ttft_p99.model_copy(update={"value": o.ttft_p99.value * 1e3, "unit": "ms"}), ",.0f"),
            text(o.copies),
            text(f"{o.load:.0%}"),
            cell(o.day, ",.0f"),
            cell(o.month, ",.0f"),
            cell(o.million),
        )
        for o in answer.serve
    )
    columns = (
        "machine",
        "price",
        "USD/h",
        "requests/s",
        "tokens/s out",
        "TTFT p99, ms",
        "copies",
        "load",
        "USD a day",
        "USD a month",
        "USD a Mtoken",
    )
    notes = (
        "A copy never stops; starting one takes about ten minutes (published), which scaling to the load must bear.",
    )
    return Table("serve", "Serving", columns, rows, notes)


def _even(pairs: Sequence[BreakEven]) -> Table:
    rows = tuple(
        (
            text(f"{p.other} against {p.machine}"),
            Cell("never" if p.first is None else _count(p.first)),
            Cell("not" if p.always is None else _count(p.always)),
            Cell(f"{p.chip_price:.2f}"),
            Cell(f"{p.chip_price_now:.2f}"),
        )
        for p in pairs
    )
    columns = ("serving", "cheaper above, tokens a day", "stays so above", "even at USD/h a chip", "now")
    return Table("break-even", "Break-even", columns, rows, ("Modelled; costs go in steps of whole copies.",))


def _sensitivity(answer: Answer) -> Table:
    rows = tuple(
        (
            text(s.what),
            text(s.machine or "none has a price or fits"),
            text("-" if s.month is None else f"{s.month:,.0f}"),
        )
        for s in answer.sensitivity
    )
    return Table("sensitivity", "If it were otherwise", ("change", "cheapest to serve on", "USD a month"), rows)


def _count(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.4g}{letter}"
    return f"{value:,.4g}"
