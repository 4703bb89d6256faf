"""Tables of what users measured: `serve.json` and `train.json` beside everything else.

A cell or run that a guard marks is left out, and the table says which and why.
"""

from collections.abc import Sequence
from pathlib import Path

from portlab_bench.costs import hourly, per_million, price_of
from portlab_bench.evidence import Figure
from portlab_bench.machines import Machine, parse_machine
from portlab_bench.records import as_record
from portlab_bench.schema import Cell as ServeCell
from portlab_bench.schema import Distribution, ServeRun
from portlab_bench.tables import Cell, Table, cell, text
from portlab_bench.train_schema import BackendRun, TrainRun
from portlab_spec.errors import UserError
from portlab_spec.files import read_json

Named = tuple[str, ServeRun | TrainRun]


def read_runs(paths: Sequence[Path]) -> list[Named]:
    """Runs with the names of their files, in the order given.

    Raises:
        UserError: no such file, no JSON, neither kind of run, or a key that is missing or wrong; the message names it.
    """
    found: list[Named] = []
    for path in paths:
        raw = read_json(path, "run")
        kinds: tuple[type[ServeRun] | type[TrainRun], ...] = (ServeRun, TrainRun)
        keys = ("cells", "runs")
        kind = next((kind for kind, key in zip(kinds, keys, strict=True) if isinstance(raw, dict) and key in raw), None)
        if kind is None:
            raise UserError(
                "is neither a serving run nor a training run",
                where=str(path),
                fix="Give serve.json or train.json of portlab-bench",
            )
        found.append((str(path), as_record(raw, kind, "run", path, "Write the run anew")))
    return found


def measured_tables(runs: Sequence[Named]) -> list[Table]:
    """A table of serving and one of training, as far as there are runs of each."""
    serving = [(name, run) for name, run in runs if isinstance(run, ServeRun)]
    training = [(name, run) for name, run in runs if isinstance(run, TrainRun)]
    return [*([_serving(serving)] if serving else []), *([_training(training)] if training else [])]


def _serving(runs: Sequence[tuple[str, ServeRun]]) -> Table:
    rows, notes = [], ["USD: at Google's on-demand list price, or the cheapest provider's if Google has none."]
    for name, run in runs:
        machine = _machine(run.hardware)
        for entry in run.cells:
            if entry.valid:
                rows.append(_serve_row(name, run, entry, machine))
            else:
                reasons = [f"{f.guard}: {f.what}" for f in entry.findings if not f.ok] or ["nothing was answered"]
                notes.append(f"Left out: {entry.name} of {name} ({'; '.join(reasons)}).")
    columns = (
        "hardware",
        "model",
        "load",
        "tokens/s out",
        "TTFT p50, ms",
        "TTFT p99, ms",
        "TPOT p50, ms",
        "goodput, 1/s",
        "USD a Mtoken out",
    )
    return Table("your-serving", "Serving, your runs", columns, tuple(rows), tuple(notes))


def _serve_row(name: str, run: ServeRun, entry: ServeCell, machine: Machine | None) -> tuple[Cell, ...]:
    f = entry.figures
    assert f

    def figure(value: float, unit: str, note: str = "") -> Figure:
        return Figure(
            value=value,
            unit=unit,
            evidence="measured",
            record=f"{name}#{entry.name}",
            date=run.when[:10],
            note="; ".join(filter(None, (run.source, note))),
        )

    def quantile(values: Distribution | None, which: str) -> Cell:
        if values is None or which not in values.quantiles:
            return text("-")
        q = values.quantiles[which]
        spread = "" if q.low is None or q.high is None else f"{q.low * 1e3:,.0f} to {q.high * 1e3:,.0f} ms (95 %)"
        return cell(figure(q.value * 1e3, "ms", spread), ",.1f")

    throughput = figure(f.output_throughput, "tokens/s")
    price = machine and (price_of(machine, provider="google") or price_of(machine))
    cost = per_million(throughput, hourly(machine, price)) if machine and price and f.output_throughput else None
    return (
        text(run.hardware or "not said"),
        text(run.model),
        text(entry.name),
        cell(throughput, ",.0f"),
        quantile(f.ttft, "p50"),
        quantile(f.ttft, "p99"),
        quantile(f.tpot, "p50"),
        cell(None if f.goodput is None else figure(f.goodput, "requests/s")),
        cell(cost),
    )


def _training(runs: Sequence[tuple[str, TrainRun]]) -> Table:
    rows, notes = [], []
    for name, run in runs:
        marked = [f"{f.guard}: {f.what}" for f in run.findings if not f.ok]
        for own in run.runs:
            reasons = [
                *marked,
                *(f"{f.guard}: {f.what}" for f in own.findings if not f.ok),
                *filter(None, [own.failure]),
            ]
            if own.valid and not marked:
                rows.append(_train_row(name, run, own))
            else:
                notes.append(f"Left out: {own.backend} of {name} ({'; '.join(reasons) or 'too few steps'}).")
    columns = ("trainer", "device", "model", "tokens/s", "step, s", "share of peak", "to the first step, s")
    return Table("your-training", "Fine-tuning, your runs", columns, tuple(rows), tuple(notes))


def _train_row(name: str, run: TrainRun, own: BackendRun) -> tuple[Cell, ...]:
    steady = own.steady
    assert steady

    def figure(value: float | None, unit: str, form: str) -> Cell:
        if value is None:
            return text("-")
        record, day = f"{name}#{own.backend}", run.when[:10]
        return cell(Figure(value=value, unit=unit, evidence="measured", record=record, date=day), form)

    device = " ".join(str(own.device[key]) for key in ("count", "kind") if key in own.device)
    return (
        text(own.backend),
        text(device or "not said"),
        text(run.recipe.get("model", "")),
        figure(steady.tokens_per_second, "tokens/s", ",.0f"),
        figure(steady.seconds.mean, "s", ",.3g"),
        figure(steady.mfu, "share", ".1%"),
        figure(own.first_step_seconds, "s", ",.1f"),
    )


def _machine(name: str) -> Machine | None:
    try:
        return parse_machine(name)
    except UserError:
        return None
