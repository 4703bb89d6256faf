"""Tool-call parsers side by side: ours, strict and lenient, vLLM's, mlx-lm's and the published regular expression.

    nox -s bench_parsers              prints the tables and writes bench/results/bench_parsers.json
    nox -s bench_parsers -- --all     every row, not only those on which the parsers differ

The outputs are the tables of `portlab_spec.fixtures.cases` and two sets of fixtures: ours for FunctionGemma and
canitoolcall's for Gemma 4. The others' real code runs; their wheels (vLLM's is 336 MB) are downloaded once. Last, our
parsers' time for a megabyte of hostile output.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from other_parsers import OTHERS, Calls, Parser
from portlab_spec.errors import UserError
from portlab_spec.fixtures.cases import BODIES, OUTPUTS, output_of, spell
from portlab_spec.formats import find_format
from portlab_spec.formats.markers import FUNCTIONGEMMA, GEMMA4, Markers
from result_file import write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from hostile_outputs import HOSTILE, hostile

OURS = Path(__file__).parents[1] / "packages/spec/src/portlab_spec/fixtures/functiongemma"
NAMES = {FUNCTIONGEMMA.call: "functiongemma", GEMMA4.call: "gemma4"}
MEGABYTE = 1_000_000
Kind = Literal["grammar", "deviation", "refusal"]


@dataclass(frozen=True)
class Row:
    """An output and what is to be read in it.

    Attributes:
        kind: "grammar" if the grammar covers it, "deviation" if not and there is one reading, "refusal" if none.
        strict: the calls under the grammar; `calls` are those with the one reading.
    """

    output: str
    shown: str
    reason: str
    kind: Kind
    calls: Calls
    strict: Calls


def rows(markers: Markers) -> list[Row]:
    """Both tables in a dialect."""
    out = []
    for case in BODIES:
        strict, lenient = (case.expected(markers, lenient=lenient) for lenient in (False, True))
        kind: Kind = "refusal" if lenient is None else "deviation" if strict is None else "grammar"
        calls = [[] if a is None else [(case.name, _spelt(a, markers))] for a in (lenient, strict)]
        out.append(Row(spell(output_of(case), markers), spell(case.body, markers), case.reason, kind, *calls))
    for whole in OUTPUTS:
        calls_ = list(whole.calls)
        kind = "grammar" if whole.strict else "deviation" if calls_ else "refusal"
        text = spell(whole.output, markers)
        out.append(Row(text, text, whole.reason, kind, calls_, calls_ if whole.strict else []))
    return out


def _spelt(arguments: dict[str, Any], markers: Markers) -> dict[str, Any]:
    """Arguments whose strings may quote a marker, in a dialect."""
    return {key: spell(value, markers) if isinstance(value, str) else value for key, value in arguments.items()}


def ours(markers: Markers, *, lenient: bool) -> Parser:
    """Our parser as the others are called."""
    fmt = find_format(NAMES[markers.call])
    return lambda text: [(c.name, c.arguments) for c in fmt.parse_text(text, lenient=lenient).calls]


def contenders(markers: Markers) -> tuple[dict[str, Parser], dict[str, str]]:
    """The parsers of a dialect, and why those that could not run did not."""
    name = NAMES[markers.call]
    parsers = {f"portlab {name} {mode}": ours(markers, lenient=mode == "lenient") for mode in ("strict", "lenient")}
    failed = {}
    for other, (dialect, load) in OTHERS.items():
        if dialect is not markers:
            continue
        try:
            parsers[other] = load()
        except (UserError, ImportError, OSError) as error:
            failed[other] = str(error)
    return parsers, failed


def read(parser: Parser, output: str) -> Calls | str:
    """The calls, or the name of the exception."""
    try:
        return parser(output)
    except Exception as error:  # whatever a contender raises is its result
        return type(error).__name__


def same(a: Calls | str, b: Calls | str) -> bool:
    """Equality that keeps 1, 1.0, true and "1" apart."""
    return json.dumps(a) == json.dumps(b)


def tally(found: Sequence[tuple[Row, Calls | str]]) -> dict[str, Any]:
    """How often a parser is right, and how often it returns calls that nobody wrote."""

    def of(kind: Kind) -> list[tuple[Row, Calls | str]]:
        return [(row, calls) for row, calls in found if row.kind == kind]

    def right(row: Row, calls: Calls | str) -> bool:
        return same(calls, row.calls) or (isinstance(calls, str) and not row.calls)

    return {
        "grammar": {"right": sum(right(*f) for f in of("grammar")), "count": len(of("grammar"))},
        "deviations": {"read": sum(right(*f) for f in of("deviation")), "count": len(of("deviation"))},
        "refusals": {"refused": sum(right(*f) for f in of("refusal")), "count": len(of("refusal"))},
        "wrong calls": sum(
            bool(calls) and not isinstance(calls, str) and not right(row, calls) for row, calls in found
        ),
    }


def fixtures(markers: Markers) -> list[tuple[str, Calls]] | None:
    """(output, calls) of the dialect's fixtures; None where their package is not installed."""
    if markers is FUNCTIONGEMMA:
        lines = [
            line for file in sorted(OURS.glob("*.jsonl")) for line in file.read_text(encoding="utf-8").splitlines()
        ]
        records = [json.loads(line) for line in lines]
    else:
        try:
            from canitoolcall.fixtures import load_fixtures
        except ImportError:
            return None
        records = [fixture.to_dict() for fixture in load_fixtures(families=["gemma4"])]
    return [
        (r["raw_output"], [(c["name"], c["arguments"]) for c in r.get("expected", {}).get("tool_calls", [])])
        for r in records
    ]


def loose(calls: Calls | str) -> str:
    """Comparable text of calls, in which 1 and 1.0 are one number and the order of keys does not matter."""
    if isinstance(calls, str):
        return "[]"

    def plain(value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else value

    hook: Callable[[Any], Any] = lambda text: plain(float(text))  # noqa: E731
    return json.dumps(json.loads(json.dumps([list(c) for c in calls]), parse_float=hook), sort_keys=True)


def fixtures_right(parser: Parser, known: Sequence[tuple[str, Calls]], markers: Markers | None = None) -> int:
    """How many fixtures' calls a parser reads right; with `markers`, outputs get their stop token back."""

    def stop(calls: Calls) -> str:
        return "" if markers is None else markers.response if calls else markers.end_turn

    return sum(loose(read(parser, output + stop(calls))) == loose(calls) for output, calls in known)


def show(found: dict[str, list[tuple[Row, Calls | str]]], console: Console, *, everything: bool) -> None:
    """The table: what each parser makes of each output."""
    table = Table(
        "output", "right", *found, title="✓ as written   – no call   otherwise what was read", show_lines=False
    )
    for results in zip(*found.values(), strict=True):
        row = results[0][0]
        marks = [_cell(row, calls) for _, calls in results]
        if everything or len(set(marks[1:])) > 1:
            table.add_row(
                escape(_short(row.shown)), escape(_short(json.dumps([a for _, a in row.calls])[1:-1] or "–")), *marks
            )
    console.print(table)


def _cell(row: Row, calls: Calls | str) -> str:
    if isinstance(calls, str):
        return f"[green]{calls}[/]" if not row.calls else f"[yellow]{calls}[/]"
    if same(calls, row.calls):
        return "[green]✓[/]"
    if not calls:
        return "[yellow]–[/]"
    arguments = json.dumps([arguments for _, arguments in calls], ensure_ascii=False)[1:-1]
    return f"[red]{escape(_short(arguments))}[/]"


def _short(text: str, width: int = 44) -> str:
    text = text.replace("\n", "↵")
    return text if len(text) <= width else text[: width - 1] + "…"


def megabyte(markers: Markers) -> dict[str, float]:
    """Seconds of processor time for a megabyte of each hostile output."""
    fmt, out = find_format(NAMES[markers.call]), {}
    for name in HOSTILE:
        text = hostile(name, markers, MEGABYTE)
        start = time.process_time()
        fmt.parse_text(text, lenient=True)
        out[name] = round(time.process_time() - start, 3)
    return out


def main() -> None:
    """Run every contender, print the tables and write the result; 1 if one could not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="show the rows on which all agree, too")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 200)
    figures: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for markers in (FUNCTIONGEMMA, GEMMA4):
        parsers, missing = contenders(markers)
        failed |= missing
        found = {name: [(row, read(parse, row.output)) for row in rows(markers)] for name, parse in parsers.items()}
        show(found, console, everything=args.all)
        known = fixtures(markers)
        for name, parse in parsers.items():
            figures[name] = tally(found[name])
            if known is not None:
                right = fixtures_right(parse, known, markers if name.endswith("strict") else None)
                figures[name]["fixtures"] = {"right": right, "count": len(known)}
        figures[f"portlab {NAMES[markers.call]} lenient"]["seconds for a megabyte"] = megabyte(markers)
        tables[NAMES[markers.call]] = [
            {
                "output": row.output,
                "reason": row.reason,
                "kind": row.kind,
                "right": row.calls,
                # Parsers may return NaN, which JSON has not.
                "read": {n: json.loads(json.dumps(results[i][1]), parse_constant=str) for n, results in found.items()},
            }
            for i, row in enumerate(rows(markers))
        ]
    summary(figures, console)
    write_result("bench_parsers", ("portlab-spec", "canitoolcall", "regex"), figures, {}, not_run=failed, tables=tables)
    for name, reason in failed.items():
        print(f"{name} could not run: {reason}", file=sys.stderr)
    raise SystemExit(bool(failed))


def summary(figures: dict[str, Any], console: Console) -> None:
    """The totals."""
    table = Table("parser", "of the grammar", "deviations read", "refused rightly", "wrong calls", "fixtures")
    for name, f in figures.items():
        counts = [[f.get(key, {}).get(k, "–") for k in (hit, "count")] for key, hit in _COLUMNS]
        cells = [f"{hit} of {count}" for hit, count in counts]
        table.add_row(name, *cells[:3], str(f["wrong calls"]), cells[3])
    console.print(table)
    slow = [(s, n) for f in figures.values() for n, s in f.get("seconds for a megabyte", {}).items()]
    console.print(f"slowest megabyte: {max(slow)[0]} s of processor time ({max(slow)[1]})")


_COLUMNS = (("grammar", "right"), ("deviations", "read"), ("refusals", "refused"), ("fixtures", "right"))

if __name__ == "__main__":
    main()
