"""`portlab-bench import`: results of other tools in our terms."""

import dataclasses
import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import orjson
import tyro

from portlab_bench import roofline
from portlab_bench.guards import Expected, check
from portlab_bench.importers import Imported, import_file
from portlab_bench.machines import Precision
from portlab_bench.schema import Cell, Distribution, Finding, RequestRecord
from portlab_spec.errors import EXIT_FAILED_CHECK, UserError
from portlab_spec.files import new_file, write_json

RUN_FILE = "serve.json"
RECORDS_FILE = "requests.jsonl"
METRICS = ("ttft", "tpot", "itl", "e2e", "normalised")


@dataclasses.dataclass(frozen=True)
class ImportCommand:
    """Read results of vllm bench serve, guidellm, aiperf or inference-perf; the tool is recognised by the content.

    For each file a folder of its name with serve.json and, where the tool kept its requests, requests.jsonl.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Result files."""
    out: Path
    """Folder for what is imported."""
    hardware: str = ""
    """Slice or GPUs that served, such as v6e-8 or 2xH100: no tool's file says so reliably."""
    architecture: str = ""
    """Published model whose size bounds what the hardware can do, such as gemma-4-31b; figures above are refused."""
    precision: Precision = "bf16"
    """Type in which it was served."""
    model: str = ""
    """Model that was served, where the file does not say."""
    date: str = ""
    """Day of the measurement, YYYY-MM-DD, where the file does not say."""


def run_import(command: ImportCommand) -> int:
    """Import every file and print what is comparable; 1 if a guard refuses a cell.

    Raises:
        UserError: no file, one that cannot be read, or two of one name; nothing is written then.
    """
    if not command.files:
        raise UserError("no file is named", where="import", fix="Give the result files")
    peaks = roofline.peaks(command.hardware, command.architecture, command.precision)
    folders: dict[Path, Imported] = {}
    for file in command.files:
        folder = command.out / file.stem
        if folder in folders or (folder / RUN_FILE).exists():
            raise UserError("is there already", where=str(folder), fix="Choose another --out")
        folders[folder] = judged(completed(import_file(file), command, file), peaks)
    for folder, imported in folders.items():
        write(imported, folder)
    runs = list(folders.values())
    print("\n".join(line for folder, imported in folders.items() for line in described(imported, folder)))
    return 0 if all(cell.valid for imported in runs for cell in imported.run.cells) else EXIT_FAILED_CHECK


def completed(imported: Imported, command: ImportCommand, file: Path) -> Imported:
    """Add what the file does not say; what it says stands.

    Raises:
        UserError: neither says which model or when, or they disagree.
    """
    if command.date:
        try:
            datetime.date.fromisoformat(command.date)
        except ValueError:
            raise UserError("is no date", where=f"--date {command.date}", fix="Give YYYY-MM-DD") from None
    run = imported.run
    found = {"model": (run.model, command.model), "when": (run.when, command.date)}
    for field, (said, given) in found.items():
        option = "--date" if field == "when" else "--model"
        if not said and not given:
            raise UserError(f"does not say the {option[2:]}", where=str(file), fix=f"Give {option}")
        if said and given and not said.startswith(given):
            raise UserError(f"says {said}, not {given}", where=str(file), fix=f"Leave out {option}")
    cells = tuple(
        cell.model_copy(update={"records": RECORDS_FILE}) if cell.name in imported.records else cell
        for cell in run.cells
    )
    update = {field: said or given for field, (said, given) in found.items()}
    update["hardware"] = command.hardware or run.hardware
    return Imported(run.model_copy(update={**update, "cells": cells}), imported.records)


def judged(imported: Imported, peaks: tuple[float, float] | None) -> Imported:
    """Add what the guards say of each cell, as far as an imported one can be looked at.

    Args:
        imported: a run.
        peaks: prompt and output tokens per second that its hardware cannot pass; None if it is not known.
    """
    cells = tuple(
        cell.model_copy(update={"findings": (*cell.findings, *_looked_at(cell, peaks))}) for cell in imported.run.cells
    )
    return Imported(imported.run.model_copy(update={"cells": cells}), imported.records)


def _looked_at(cell: Cell, peaks: tuple[float, float] | None) -> Iterable[Finding]:
    # How alike the prompts were, and whether answers were to end at a length, no file says, and few who counted their
    # tokens: what would be judged by that is told instead.
    skipped = {"prefix cache", "finish reasons"}
    if cell.figures is not None and "tool" in cell.figures.tokens_from:
        skipped.add("token count")
        yield Finding(guard="token count", ok=True, what="by the server's usage, or by the tool's own tokenizer")
    for finding in check(cell.figures, Expected(shared=1.0, fixed=True, peaks=peaks)):
        if finding.guard not in skipped:
            yield finding
    if cell.figures is not None:
        hits = cell.figures.prefix_hits
        what = "not in the file: prompts of a repeated seed may have been in it" if hits is None else f"held {hits:.0%}"
        yield Finding(guard="prefix cache", ok=True, what=what)


def write(imported: Imported, folder: Path) -> None:
    """Write serve.json and, if there are requests, requests.jsonl: an object a line, each with its `cell`."""
    if imported.records:
        with new_file(folder / RECORDS_FILE) as stream:
            stream.writelines(_lines(imported.records.items()))
    write_json(folder / RUN_FILE, imported.run.model_dump(mode="json"))


def _lines(records: Iterable[tuple[str, tuple[RequestRecord, ...]]]) -> Iterable[bytes]:
    for cell, requests in records:
        for record in requests:
            yield orjson.dumps({"cell": cell} | record.model_dump(mode="json")) + b"\n"


def described(imported: Imported, folder: Path) -> list[str]:
    """A Markdown table of the cells, and below it what differs from our definitions."""
    run = imported.run
    lines = [f"{run.source} -> {folder}", f"model {run.model}, {run.when}", ""]
    lines += [f"| cell | requests | {' | '.join(f'{name}, ms (median)' for name in METRICS)} | output tokens/s |"]
    lines += ["|---|---:|" + "---:|" * (len(METRICS) + 1)]
    lines += [_row(cell) for cell in run.cells]
    lines.append("")
    for cell in run.cells:
        for finding in cell.findings:
            lines.append(f"- {cell.name}: {'' if finding.ok else '**REFUSED** '}{finding.guard}: {finding.what}")
    return [*lines, ""]


def _row(cell: Cell) -> str:
    figures = cell.figures
    if figures is None:
        return f"| {cell.name} | none answered |" + " |" * (len(METRICS) + 1)
    cells = [_median(getattr(figures, name)) for name in METRICS]
    kept = "" if figures.requests is None else str(figures.requests)
    return f"| {cell.name} | {kept} | {' | '.join(cells)} | {figures.output_throughput:.1f} |"


def _median(values: Distribution | None) -> str:
    if values is None:
        return "not comparable"
    median = values.quantiles.get("p50")
    return f"mean {values.mean * 1e3:.2f}" if median is None else f"{median.value * 1e3:.2f}"
