"""What a run prints."""

import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from portlab_spec.report import METRIC_ORDER, Report
from portlab_spec.run.outcome import Outcome


def stage_printer(*, quiet: bool) -> Callable[[str], None]:
    """A printer of one line per stage: on stdout, or on stderr when stdout carries JSON."""

    def say(line: str) -> None:
        print(line, file=sys.stderr if quiet else sys.stdout, flush=True)

    return say


def show(outcome: Outcome) -> None:
    """Print the example, the before/after table and where the time went."""
    console = Console(soft_wrap=True)
    question = next(m.content for m in outcome.example.messages if m.role == "user")
    console.print()
    console.print(Text(f"Question: {question}"))
    console.print(Text(f"  before: {_one_line(outcome.before)}"))
    console.print(Text(f"  after:  {_one_line(outcome.after)}"))
    console.print()
    console.print(_table(outcome.report))
    console.print(Text(_footer(outcome.report)))


def _table(report: Report) -> Table:
    table = Table(title=f"{report.before.examples} held-out questions ({report.before.split} split), measured")
    table.add_column("metric", no_wrap=True, min_width=22)
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_column("95 % interval", justify="right")
    for name in METRIC_ORDER:
        before, after = report.before.metrics.get(name), report.after.metrics.get(name)
        if before is None or after is None:
            continue
        cells = (f"{m.value:.1%} ({m.hits}/{m.count})" for m in (before, after))
        table.add_row(name, *cells, f"{after.low:.1%} to {after.high:.1%}")
    if report.before.loss is not None and report.after.loss is not None:
        table.add_row("loss", f"{report.before.loss:.4f}", f"{report.after.loss:.4f}", "")
        table.add_row("perplexity", f"{report.before.perplexity:.4g}", f"{report.after.perplexity:.4g}", "")
    return table


def _footer(report: Report) -> str:
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.model_dump().items())
    total = sum(report.seconds.model_dump().values())
    device = report.device
    # Full fine-tuning leaves no adapter.
    results = {"merged model": "merged", "PEFT adapter": "adapter", "report": "report"}
    lines = [
        f"time: {stages}; {total:.0f} s in all on {device['count']} {device['kind']} device(s), "
        f"peak memory {report.peak_rss_bytes / 2**30:.2f} GiB"
    ]
    lines += [f"{what + ':':<13} {report.paths[key]}" for what, key in results.items() if key in report.paths]
    return "\n".join(lines)


def _one_line(text: str, limit: int = 160) -> str:
    flat = text.replace("\n", "\\n")
    return flat if len(flat) <= limit else flat[:limit] + "..."
