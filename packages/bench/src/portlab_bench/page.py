"""The tables as one HTML page with plots, which needs nothing outside itself."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from portlab_bench.compiled import load_compiled
from portlab_bench.costs import hourly, per_million, price_of
from portlab_bench.evidence import COLORS, MEANING, ORDER, SIGNS, Evidence
from portlab_bench.machines import Machine, parse_machine
from portlab_bench.plots import Series, bars, scatter
from portlab_bench.published import load_published
from portlab_bench.serve_model import FITTED_CONTEXT, MODEL, ServeModel, Workload
from portlab_bench.serve_rows import config_of, curve, modelled
from portlab_bench.tables import Cell, Sources, Table
from portlab_bench.train_cost import GIB
from portlab_spec.markup import Content, node, page

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem }
body { color: #222; background: #fff }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.number { text-align: right; white-space: nowrap } sup a { color: inherit; text-decoration: none }
figure { margin: 1rem 0 } svg { max-width: 46rem; width: 100%; font-size: 12px } figcaption { font-weight: 600 }
.notes, .sources { color: #555; font-size: 13px } .sources { word-break: break-word }
""" + "\n".join(f".{kind} {{ color: {COLORS[kind]} }}" for kind in ORDER)


def html(title: str, intro: Sequence[str], tables: Sequence[Table], machines: Sequence[Machine], work: Workload) -> str:
    """The page."""
    sources = Sources()
    body: list[Content] = [node("h1", title), *(node("p", line) for line in intro)]
    body.append(node("ul", *(node("li", node("b", f"{SIGNS[k]} {k}", class_=k), f": {MEANING[k]}") for k in ORDER)))
    body += plots(machines, work)
    for table in tables:
        body += _section(table, sources)
    listed = [node("li", line, id=f"source-{number}", value=str(number)) for number, line in sources.lines()]
    body += [node("h2", "Sources"), node("ol", *listed, class_="sources")]
    return page(title, _STYLE, *body)


def plots(machines: Sequence[Machine], work: Workload) -> list[Element]:
    """Cost against the first token, throughput against rate and against batch, memory by slice."""
    cost, rate = [], []
    for machine in machines:
        points = curve(machine, work)
        rate.append(
            Series(
                machine.name,
                "modelled",
                tuple((p.rate, p.ttft_p99 * 1e3) for p in points),
                tuple(
                    f"{p.rate:.2f} requests/s, {p.output_throughput:,.0f} tokens/s, TTFT p99 {p.ttft_p99 * 1e3:,.0f} ms"
                    for p in points
                ),
                line=True,
            )
        )
        if (price := price_of(machine, provider="google")) and points:
            hour = hourly(machine, price)
            usd = [per_million(modelled(p.output_throughput, "tokens/s"), hour).value for p in points]
            cost.append(
                Series(
                    machine.name,
                    "modelled",
                    tuple((p.ttft_p99 * 1e3, u) for p, u in zip(points, usd, strict=True)),
                    tuple(
                        f"TTFT p99 {p.ttft_p99 * 1e3:,.0f} ms, {u:,.2f} USD, {p.rate:.2f} requests/s"
                        for p, u in zip(points, usd, strict=True)
                    ),
                    line=True,
                )
            )
    return [
        scatter(
            f"Cost of a million output tokens against the first token, {MODEL}, {work}, Google on demand",
            "TTFT p99, ms",
            "USD per million output tokens",
            cost,
        ),
        scatter(
            f"First token against rate, {work}; lines end where memory is full",
            "requests/s",
            "TTFT p99, ms",
            rate,
            log=(False, True),
        ),
        scatter(
            f"Throughput against batch: published, and the model at {FITTED_CONTEXT} tokens of context",
            "sequences at a time",
            "output tokens/s",
            [*_by_batch(), *_modelled_by_batch()],
        ),
        bars("Memory of a device that a fine-tuning step needs; the line is what there is", "GiB", _memory()),
    ]


def _by_batch() -> list[Series]:
    groups: dict[str, list[tuple[float, float, str]]] = {}
    for r in load_published():
        if r.metric == "output_throughput" and r.batch and not r.refused and r.model == MODEL:
            kernel = ", stock" if "block2048" in r.id else ""
            groups.setdefault(f"{r.machine} {r.precision}{kernel}", []).append(
                (r.batch, r.value, f"{r.workload}: {r.value:,.0f}")
            )
    return [
        Series(name, "published", tuple((b, v) for b, v, _ in sorted(rows)), tuple(says for *_, says in sorted(rows)))
        for name, rows in groups.items()
    ]


def _modelled_by_batch() -> list[Series]:
    found = []
    for name in ("v6e-8", "2xH100"):
        serving = ServeModel(config_of(MODEL), parse_machine(name))
        points = tuple((float(b), b / serving.step_seconds(b, FITTED_CONTEXT)) for b in (2**n for n in range(11)))
        says = tuple(f"{b:g} sequences: {rate:,.0f}" for b, rate in points)
        found.append(Series(f"{name} bf16", "modelled", points, says, line=True))
    return found


def _memory() -> list[tuple[str, float, float | None, Evidence]]:
    return [
        (f"{run.job} on {run.slice}", run.hbm_needed / GIB, run.hbm_usable / GIB, "compiled")
        for run in load_compiled().runs
    ]


def _section(table: Table, sources: Sources) -> list[Element]:
    heads = node("tr", *(node("th", name) for name in table.columns))
    rows = [node("tr", *(_cell(entry, sources) for entry in row)) for row in table.rows]
    grid = node("div", node("table", node("thead", heads), node("tbody", *rows)), class_="wide")
    found = [node("h2", table.title, id=table.key), grid]
    if lines := [*table.notes, *filter(None, [table.mixed()])]:
        found.append(node("ul", *(node("li", line) for line in lines), class_="notes"))
    return found


def _cell(entry: Cell, sources: Sources) -> Element:
    if entry.figure is None:
        return node("td", entry.text)
    f = entry.figure
    number = str(sources.number(f))
    says = "; ".join(filter(None, (f.evidence, f.unit, f.record, f.date, f.note)))
    link = node("sup", node("a", number, href=f"#source-{number}"))
    return node(
        "td", node("span", f"{SIGNS[f.evidence]} ", class_=f.evidence), entry.text, link, class_="number", title=says
    )
