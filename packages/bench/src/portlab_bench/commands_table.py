"""`portlab-bench table` and `portlab-bench decide`: what they are asked, and where the answer goes."""

import dataclasses
import math
import re
import sys
from datetime import date
from pathlib import Path
from typing import Literal

from portlab_bench import decide, report
from portlab_bench.costs import PLANS
from portlab_bench.decide import Question
from portlab_bench.decide_text import to_text
from portlab_bench.machines import Machine
from portlab_bench.measured import measured_tables, read_runs
from portlab_bench.page import html
from portlab_bench.serve_model import Workload
from portlab_bench.tables import markdown, to_csv
from portlab_spec.errors import UserError
from portlab_spec.files import write_text
from portlab_spec.prices import Plan, load_prices

# Between these, a document's tables are written anew.
BEGIN = "<!-- portlab-bench table: begin -->"
END = "<!-- portlab-bench table: end -->"


@dataclasses.dataclass(frozen=True)
class TableCommand:
    """Print what fine-tuning and serving Gemma takes and costs on TPUs and GPUs, each figure with its kind and source.

    Everything comes from data that ship with the package: no network, and the same text every time.
    """

    slices: tuple[str, ...] = report.DEFAULT_SLICES
    """Slices by their Cloud names, and GPUs such as 2xH100."""
    prompt: int = 1024
    """Tokens of a prompt in the serving tables."""
    output: int = 256
    """Tokens of an answer."""
    ttft_p99: str = "500ms"
    """What 99 of 100 first tokens must take at most, such as 500ms or 1.5s."""
    runs: tuple[Path, ...] = ()
    """Your own serve.json and train.json, to stand before the others."""
    md: Path | None = None
    """Write Markdown here instead of printing it; where the file has the marks for it, between them."""
    csv: Path | None = None
    """Write a long list of all cells here."""
    html: Path | None = None
    """Write one page with plots here."""


@dataclasses.dataclass(frozen=True)
class DecideCommand:
    """Say what to rent for fine-tuning and for serving Gemma 4 31B, why, and what would change that."""

    train_runs: float = 1
    """Fine-tuning runs in a month."""
    tokens_per_day: str = "50M"
    """Output tokens to serve in a day, such as 50M or 1.2B."""
    ttft_p99: str = "500ms"
    """What 99 of 100 first tokens must take at most."""
    slices: tuple[str, ...] = report.DEFAULT_SLICES
    """Slices and GPUs to choose from."""
    job: Literal["gemma3-270m", "gemma3-1b", "gemma4-31b", "gemma4-31b-fitness"] = "gemma4-31b"
    """What a run trains, as in the table."""
    prompt: int = 1024
    """Tokens of a prompt."""
    output: int = 256
    """Tokens of an answer."""
    utilisation: float = 0.5
    """Mean load over the load at the objective, between 0 and 1: machines are paid for at night too."""
    pay: Plan = "on_demand"
    """Way of paying."""
    provider: str = ""
    """Whose prices count; by default the cheapest provider's."""
    json: bool = False
    """Print JSON instead of text."""


def run_table(command: TableCommand) -> int:
    """Build the tables and print or write them; 0."""
    machines = _machines(command.slices)
    work, objective = _work(command.prompt, command.output), parse_seconds(command.ttft_p99, "--ttft-p99")
    tables = [*measured_tables(read_runs(command.runs)), *report.build(machines, work, objective)]
    text = markdown(report.TITLE, report.INTRO, tables)
    if command.md:
        write_text(command.md, _into(command.md, text))
    if command.csv:
        write_text(command.csv, to_csv(tables))
    if command.html:
        write_text(command.html, html(report.TITLE, report.INTRO, tables, machines, work))
    if not (command.md or command.csv or command.html):
        print(text, end="")
    _warn(machines)
    return 0


def _into(path: Path, text: str) -> str:
    """What a file is to hold: the tables, or its own words with the tables between its marks."""
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in old and END not in old:
        return text
    if (old.count(BEGIN), old.count(END)) != (1, 1) or old.index(END) < old.index(BEGIN):
        raise UserError("needs one begin and one end of the tables", where=str(path), fix=f"Put {BEGIN} and {END}")
    before, _, rest = old.partition(BEGIN)
    body = text.split("\n\n", 1)[1]  # the document has a title of its own
    return f"{before}{BEGIN}\n\n{body}\n{END}{rest.partition(END)[2]}"


def run_decide(command: DecideCommand) -> int:
    """Decide and print; 1 if no machine meets the objective."""
    if not (0 < command.utilisation <= 1):
        raise UserError("must lie between 0 and 1", where="--utilisation", fix="0.5 is half of what a machine bears")
    if not (0 <= command.train_runs < math.inf):
        raise UserError("must be 0 or more", where="--train-runs")
    machines = _machines(command.slices)
    question = Question(
        job=command.job,
        train_runs=command.train_runs,
        tokens_per_day=parse_count(command.tokens_per_day, "--tokens-per-day"),
        ttft_p99=parse_seconds(command.ttft_p99, "--ttft-p99"),
        work=_work(command.prompt, command.output),
        utilisation=command.utilisation,
        plan=command.pay,
        provider=command.provider or None,
    )
    answer = decide.decide(question, machines)
    print(decide.to_json(answer) if command.json else to_text(answer), end="")
    _warn(machines)
    return 0 if answer.serve else 1


def parse_count(text: str, where: str) -> float:
    """A count with an optional k, M, B or T: "50M" is 50,000,000.

    Raises:
        UserError: not a positive number.
    """
    match = re.fullmatch(r"(\d+(?:[_,]\d{3})*(?:\.\d+)?)\s*([kKmMbBgGtT]?)", text.strip())
    power = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
    value = float(re.sub("[_,]", "", match[1])) * 10 ** power[match[2].lower()] if match else 0.0
    if not 0 < value < math.inf:
        raise UserError("is not a positive count", where=f"{where} {text}", fix="Use a number such as 50M or 1.2B")
    return value


def parse_seconds(text: str, where: str) -> float:
    """A time with its unit, in seconds: "500ms", "1.5s".

    Raises:
        UserError: no unit, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", text.strip().lower())
    value = float(match[1]) * (1e-3 if match[2] == "ms" else 1) if match else 0.0
    if not 0 < value < math.inf:
        raise UserError("is not a time", where=f"{where} {text}", fix="Give it with its unit, such as 500ms or 1.5s")
    return value


def _machines(names: tuple[str, ...]) -> list[Machine]:
    if not names:
        raise UserError("no machine is named", where="--slices", fix="Give some, such as v6e-8 2xH100")
    return report.parse_machines(names)


def _work(prompt: int, output: int) -> Workload:
    for name, value in (("--prompt", prompt), ("--output", output)):
        if not 1 <= value <= 262_144:
            raise UserError("must lie between 1 and 262,144 tokens", where=f"{name} {value}")
    return Workload(prompt, output)


def _warn(machines: list[Machine]) -> None:
    """Say on stderr which prices are old: the one thing here that depends on today."""
    names = {machine.chip.name for machine in machines}
    old = [p for p in load_prices() if p.sku in names and p.plan in PLANS and p.stale_warning(date.today())]
    if old:
        oldest = min(old, key=lambda price: price.as_of)
        print(
            f"{len(old)} prices are older than half a year, the oldest of {oldest.as_of} ({oldest.sku}, "
            f"{oldest.plan}): read them again before you decide",
            file=sys.stderr,
        )
