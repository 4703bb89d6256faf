"""The bench tables: fine-tuning, serving, what others published, prices, and one paper taken apart."""

from collections.abc import Sequence

from portlab_bench import paper
from portlab_bench.compiled import JOBS, load_compiled
from portlab_bench.costs import PLAN_NAMES, PLANS, for_hours, hourly, per_million, price_of
from portlab_bench.evidence import Figure
from portlab_bench.machines import Machine, disagreements, parse_machine
from portlab_bench.published import Published, find_published, load_published
from portlab_bench.serve_model import MODEL, Point, Workload, fitted
from portlab_bench.serve_rows import ServeRow, checks, modelled, serve_row
from portlab_bench.tables import Cell, Table, cell, text
from portlab_bench.train_cost import GIB, TrainRow, train_rows
from portlab_spec.prices import Price

DEFAULT_SLICES = ("v5p-8", "v6e-8", "v5e-8", "tpu7x-8", "2xH100", "4xH100", "2xH200")
TITLE = "TPU against GPU: fine-tuning and serving Gemma"
INTRO = (
    "Which platform to pay for, from figures whose kind and source stand at each of them. "
    "The signs: ● measured here, ◆ compiled by the TPU compiler, ■ published by others, ○ modelled. "
    "A modelled figure is a rough one; docs/bench-tables.md says how far the models are off published runs.",
)


def build(machines: Sequence[Machine], work: Workload, ttft_p99: float) -> list[Table]:
    """All tables.

    Args:
        machines: columns' hardware, in this order.
        work: requests of the serving tables.
        ttft_p99: objective on the first token, seconds.
    """
    serving = [serve_row(machine, work, ttft_p99) for machine in machines]
    return [
        hardware_table(machines),
        training_table(train_rows(machines)),
        published_training(),
        measured_table(),
        serving_table(serving, ttft_p99),
        token_cost_table(serving),
        published_serving_table(),
        price_table(machines),
        checks_table(),
        paper_table(),
        refused_table(),
        disagreement_table(),
    ]


def parse_machines(names: Sequence[str]) -> list[Machine]:
    """Machines by their names, each once."""
    return list({machine.name: machine for machine in map(parse_machine, names)}.values())


def _published(record: Published, value: float | None = None, unit: str = "") -> Figure:
    return Figure(
        value=record.value if value is None else value,
        unit=unit or record.unit,
        evidence="published",
        record=f"{record.record} ({record.source})",
        date=record.as_of if record.dated != "read" else f"{record.as_of} (read)",
        note=record.note,
    )


def hardware_table(machines: Sequence[Machine]) -> Table:
    """Peaks and an hour's list price: what any comparison starts from."""

    def sheet(machine: Machine, value: float, unit: str) -> Figure:
        return Figure(
            value=value, unit=unit, evidence="published", record="; ".join(machine.chip.sources), date="2026-11"
        )

    rows = []
    for m in machines:
        price = price_of(m, provider="google")
        hour = hourly(m, price) if price else None
        rows.append(
            (
                text(m.name),
                text(m.chips),
                cell(sheet(m, m.bf16_flops / 1e15, "PFLOP/s")),
                cell(sheet(m, m.hbm_bytes / GIB, "GiB"), ",.0f"),
                cell(sheet(m, m.hbm_bandwidth / 1e12, "TB/s")),
                cell(sheet(m, m.link_bandwidth / 1e9, "GB/s") if m.link_bandwidth else None, ",.0f"),
                cell(hour),
                cell(hour and hour.model_copy(update={"value": hour.value / m.bf16_flops * 1e15, "unit": "USD/PFLOP"})),
            )
        )
    notes = (
        "The suffix of v5p and TPU7x counts cores: two a chip. HBM is what programs can have of all chips.",
        "Links: both directions, those that the slice uses. Where sources differ: the last table.",
    )
    columns = (
        "machine",
        "chips",
        "bf16, PFLOP/s",
        "HBM, GiB",
        "HBM, TB/s",
        "links of a chip, GB/s",
        "USD/h, Google on demand",
        "USD/h a PFLOP/s",
    )
    return Table("hardware", "Hardware", columns, tuple(rows), notes)


def training_table(rows: Sequence[TrainRow]) -> Table:
    """Runs of the recipes."""
    made = []
    for row in rows:
        if not row.fits:
            memory = (cell(row.hbm), cell(row.usable)) if row.hbm else (text("weights do not fit"), text("-"))
            made.append((text(row.job), text(row.machine.name), *memory, *[text("-")] * 5))
            continue
        price = price_of(row.machine, provider="google")
        hour = hourly(row.machine, price) if price else None
        made.append(
            (
                text(row.job),
                text(row.machine.name),
                cell(row.hbm),
                cell(row.usable),
                cell(row.step, _digits(row.step.value)),
                cell(row.tokens_per_second, ",.0f"),
                cell(row.hours, _digits(row.hours.value)),
                cell(hour and (steps := for_hours(row.hours, hour)), _digits(steps.value) if hour else ""),
                cell(hour and for_hours(row.hours, hour, row.overhead)),
            )
        )
    columns = (
        "run",
        "machine",
        "HBM a device, GiB",
        "usable, GiB",
        "step, s",
        "tokens/s",
        "steps, h",
        "steps, USD",
        "with start, USD",
    )
    jobs = {row.job: next(run for run in load_compiled().runs if run.job == row.job) for row in rows}
    notes = (
        *(
            f"{job}: {JOBS[job][0]}, {JOBS[job][1]}, {run.steps} steps of {run.rows:g} rows, {run.tokens:,.0f} tokens."
            for job, run in jobs.items()
        ),
        "A step is compiled for the machine where its memory stands; elsewhere the products and bytes of the step of "
        "another slice are held against this machine's peaks, and whether it fits is not known.",
        "A step that needs more than is usable was refused by the compiler; plan-tpu --search finds what fits.",
        "USD at Google's on-demand list price; start: booting, loading and, on TPUs, compiling, about 10 minutes.",
        "The model knows peaks and no software. The one published pair (next table) has v5p-8 1.61x as fast as 2xH100; "
        f"their peaks alone would make it {paper.findings()[1].value:.2f}x.",
    )
    return Table("training", "Fine-tuning", columns, tuple(made), notes)


def _digits(value: float) -> str:
    return ",.2f" if value >= 0.1 else ",.2g"


def published_training() -> Table:
    """Training figures of others."""
    kinds = ("hours", "train_throughput", "run_cost", "step", "mfu", "chip_train_throughput")
    rows = [r for r in load_published() if r.metric in kinds and not r.refused]
    return _list("published-training", "Fine-tuning and training, published", rows)


def _list(key: str, title: str, records: Sequence[Published], notes: tuple[str, ...] = ()) -> Table:
    rows = tuple(
        (
            text(r.model.rpartition("/")[2]),
            text(r.machine),
            text(r.precision or ""),
            text(r.workload),
            text(f"{r.metric.replace('_', ' ')}, {r.unit}"),
            cell(_published(r), ",.4g" if r.value < 1000 else ",.0f"),
            text(r.verdict.why or "not checked: model, machine or workload is not known here"),
            text(r.note),
        )
        for r in records
    )
    return Table(
        key, title, ("model", "machine", "precision", "workload", "metric", "value", "guard", "note"), rows, notes
    )


def measured_table() -> Table:
    """What ran on this project's machines."""
    rows = []
    for run in load_compiled().measured:

        def figure(value: float, unit: str, key: str = run.key, day: str = run.when[:10]) -> Figure:
            return Figure(value=value, unit=unit, evidence="measured", record=key, date=day)

        first = None if run.first_step is None else figure(run.first_step, "s")
        speed = cell(figure(run.tokens_per_second, "tokens/s"), ",.0f")
        rows.append((text(run.job), text(run.device), speed, cell(first, ",.1f")))
    notes = ("No TPU was rented: nothing here ran on one.",)
    columns = ("run", "machine", "tokens/s", "to the first step, s")
    return Table("measured", "Fine-tuning, measured here", columns, tuple(rows), notes)


def serving_table(rows: Sequence[ServeRow], ttft_p99: float) -> Table:
    """The model's rows at the objective."""
    made = []
    for row in rows:
        made.append(
            (
                text(row.machine.name),
                cell(row.weights),
                cell(row.cache),
                cell(modelled(row.max_batch, "sequences"), ",.0f"),
                *(_at_objective(row.point)),
            )
        )
    columns = (
        "machine",
        "weights a device, GiB",
        "cache a device, GiB",
        "sequences in memory",
        "requests/s",
        "sequences",
        "tokens/s out",
        "TTFT p50, ms",
        "TTFT p99, ms",
        "TPOT, ms",
    )
    e = fitted()
    work = rows[0].work if rows else Workload()
    notes = (
        f"{MODEL}, bfloat16, {work}, at the highest rate with 99 of 100 first tokens within {ttft_p99 * 1e3:,.0f} ms.",
        f"The model (portlab_bench.serve_model): t(B) = W/bw/{e.weights:.2f} + B (K/bw + 2N/peak)/{e.sequences:.2f}, "
        f"fitted on five published batches on v6e-8; prefill at {e.prefill:.2f} of the peak; one queue.",
        "v5p serving is experimental in vLLM's TPU backend, and no published figure of it was found.",
    )
    return Table("serving", "Serving Gemma 4 31B", columns, tuple(made), notes)


def _at_objective(point: Point | None) -> list[Cell]:
    if point is None:
        return [text("-")] * 6
    return [
        cell(modelled(point.rate, "requests/s")),
        cell(modelled(point.batch, "sequences"), ",.0f"),
        cell(modelled(point.output_throughput, "tokens/s"), ",.0f"),
        cell(modelled(point.ttft * 1e3, "ms"), ",.0f"),
        cell(modelled(point.ttft_p99 * 1e3, "ms"), ",.0f"),
        cell(modelled(point.tpot * 1e3, "ms"), ",.1f"),
    ]


def _hour(machine: Machine, price: Price | None) -> Figure | None:
    return None if price is None else hourly(machine, price)


def token_cost_table(rows: Sequence[ServeRow]) -> Table:
    """Dollars for a million output tokens by way of paying."""
    made = []
    for row in rows:
        cells = [text(row.machine.name)]
        for plan in PLANS:
            price = price_of(row.machine, plan, provider="google")
            cells.append(_token_cost(row, _hour(row.machine, price)))
        cheapest = price_of(row.machine)
        cells.append(_token_cost(row, _hour(row.machine, cheapest)))
        cells.append(text(cheapest.provider if cheapest else "-"))
        made.append(tuple(cells))
    columns = (
        "machine",
        *(f"Google {PLAN_NAMES[plan]}, USD" for plan in PLANS),
        "cheapest on demand, USD",
        "of",
    )
    notes = (
        "Prompts included, at the rate of the table above all day: at half that load a token costs twice as much.",
        "The cheapest region of a price list counts; spot and flex-start can be taken away or made to wait.",
    )
    return Table("token-cost", "A million output tokens", columns, tuple(made), notes)


def _token_cost(row: ServeRow, hour: Figure | None) -> Cell:
    if hour is None or row.point is None:
        return Cell("-")
    return cell(per_million(modelled(row.point.output_throughput, "tokens/s"), hour))


def published_serving_table() -> Table:
    """Serving figures of others that passed the guards."""
    kinds = (
        "output_throughput",
        "total_throughput",
        "ttft_median",
        "ttft_p99",
        "ttft_batch",
        "tpot_median",
        "itl_mean",
    )
    more = ("kv_capacity", "start")
    rows = [r for r in load_published() if r.metric in kinds + more and not r.refused]
    notes = ("Workloads differ from row to row: no two rows here are a comparison unless one source made both.",)
    return _list("published-serving", "Serving, published", rows, notes)


def price_table(machines: Sequence[Machine]) -> Table:
    """An hour of a machine by way of paying."""
    rows = []
    for m in machines:
        cells = [text(m.name)]
        for plan in PLANS:
            price = price_of(m, plan, provider="google")
            cells.append(cell(_hour(m, price)))
        cheapest = price_of(m)
        cells += [cell(_hour(m, cheapest)), text(cheapest.provider if cheapest else "-")]
        rows.append(tuple(cells))
    columns = ("machine", *(f"Google {PLAN_NAMES[plan]}, USD/h" for plan in PLANS), "cheapest on demand, USD/h", "of")
    notes = ("Cheapest region; what is not in the dated list is not known here.",)
    return Table("prices", "Prices of an hour", columns, tuple(rows), notes)


def checks_table() -> Table:
    """The serving model beside published figures."""
    rows = tuple(
        (
            text(check.record.machine),
            text(check.record.workload),
            text(f"{check.record.metric.replace('_', ' ')}, {check.record.unit}"),
            cell(_published(check.record), ",.4g"),
            cell(modelled(check.value, check.record.unit), ",.4g"),
            text(f"{check.factor:.2f}"),
            text("yes" if check.fitted else "no"),
        )
        for check in checks()
    )
    free = [check.factor for check in checks() if not check.fitted]
    columns = ("machine", "workload", "metric", "published", "model", "factor", "fitted to it")
    notes = (f"Rows that it was not fitted to: model over published from {min(free):.2f} to {max(free):.2f}.",)
    return Table("serving-checks", "How far the serving model is off", columns, rows, notes)


def paper_table() -> Table:
    """arXiv:2605.25645, claim by claim."""
    made = []
    for f in paper.findings():
        records = [find_published(identity) for identity in f.records]
        figure = Figure(
            value=f.value,
            unit=f.unit,
            evidence=f.evidence,
            record=", ".join(record.record for record in records),
            date=max(record.as_of for record in records),
        )
        claimed = None
        if f.published is not None:
            claimed = figure.model_copy(
                update={"value": f.published, "evidence": "published", "record": "arXiv:2605.25645"}
            )
        form = ",.4g" if f.value < 1000 else ",.0f"
        made.append((text(f.claim), cell(claimed, form), cell(figure, form), text(f.unit), text(f.follows)))
    columns = ("claim", "published", "recomputed", "unit", "what it follows from")
    return Table("paper", "arXiv:2605.25645 recomputed", columns, tuple(made))


def refused_table() -> Table:
    """What the guards refuse, and why."""
    refused = [r for r in load_published() if r.refused]
    return _list("refused", "Published and refused", refused, ("In no other table, and in no comparison.",))


def disagreement_table() -> Table:
    """Where sheets of hardware differ."""
    rows = tuple(
        (text(d.chip), text(d.quantity), text(d.used), text("; ".join(d.others)), text(d.why)) for d in disagreements()
    )
    return Table(
        "disagreements", "Where sources of hardware differ", ("chip", "figure", "here", "elsewhere", "why"), rows
    )
