"""One structure for what is shown, and its forms: Markdown, CSV, and (in `page`) HTML.

A cell that holds a figure carries its evidence and its record: a sign and a colour tell the kind, a number points to
the list of sources. A column that puts figures of several kinds side by side says so under the table.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from portlab_bench.evidence import MEANING, ORDER, SIGNS, Evidence, Figure


@dataclass(frozen=True)
class Cell:
    """One cell: a figure as text, or text alone.

    Attributes:
        text: as printed.
        figure: what it shows; None for words.
    """

    text: str
    figure: Figure | None = None


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: over it.
        columns: with units.
        rows: of as many cells.
        notes: under it.
        key: short name, for CSV.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {self.key} has {len(row)} cells for {len(self.columns)} columns")

    def mixed(self) -> str:
        """Which columns hold figures of several kinds, as a sentence; "" if none does."""
        found = []
        for number, name in enumerate(self.columns):
            kinds = {row[number].figure.evidence for row in self.rows if row[number].figure}  # type: ignore[union-attr]
            if len(kinds) > 1:
                found.append(f"{name} ({' beside '.join(kind for kind in ORDER if kind in kinds)})")
        return f"Mixed: {'; '.join(found)}. Figures of different kinds are no race." if found else ""


@dataclass
class Sources:
    """Records in the order in which they are first named."""

    numbers: dict[tuple[str, str, Evidence], int] = field(default_factory=dict)

    def number(self, figure: Figure) -> int:
        """The number of a figure's source."""
        return self.numbers.setdefault((figure.record, figure.date, figure.evidence), len(self.numbers) + 1)

    def lines(self) -> list[tuple[int, str]]:
        """Number and text of each."""
        return [
            (number, f"{SIGNS[kind]} {kind}: {record}, {day}") for (record, day, kind), number in self.numbers.items()
        ]


def text(words: object) -> Cell:
    """A cell of words."""
    return Cell(str(words))


def cell(figure: Figure | None, form: str = ",.2f", missing: str = "-") -> Cell:
    """A cell of a figure, printed by a format specification."""
    return Cell(missing) if figure is None else Cell(format(figure.value, form), figure)


def markdown(title: str, intro: Sequence[str], tables: Sequence[Table]) -> str:
    """A document: tables, then what the signs mean, then the sources."""
    sources = Sources()
    parts = [f"# {title}", *intro]
    for table in tables:
        parts += [f"## {table.title}", _grid(table, sources), *_under(table)]
    parts += ["## Kinds of figures", "\n".join(f"- {SIGNS[kind]} **{kind}**: {MEANING[kind]}" for kind in ORDER)]
    parts += ["## Sources", "\n".join(f"{number}. {line}" for number, line in sources.lines())]
    return "\n\n".join(parts) + "\n"


def _grid(table: Table, sources: Sources) -> str:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"

    numeric = [all(r[i].figure or r[i].text in ("-", "") for r in table.rows) for i in range(len(table.columns))]
    rule = line("---:" if number else "---" for number in numeric)
    rows = [line(_printed(c, sources) for c in row) for row in table.rows]
    return "\n".join([line(table.columns), rule, *rows])


def _printed(cell: Cell, sources: Sources) -> str:
    if cell.figure is None:
        return cell.text
    return f"{SIGNS[cell.figure.evidence]} {cell.text} <sup>{sources.number(cell.figure)}</sup>"


def _under(table: Table) -> list[str]:
    lines = [*table.notes, *filter(None, [table.mixed()])]
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def to_csv(tables: Sequence[Table]) -> str:
    """All tables as one long list, a line a cell; cells of words have no value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("table", "row", "column", "text", "value", "unit", "evidence", "record", "date", "note"))
    for table in tables:
        for number, row in enumerate(table.rows, start=1):
            for column, entry in zip(table.columns, row, strict=True):
                f = entry.figure
                shown = (repr(f.value), f.unit, f.evidence, f.record, f.date, f.note) if f else ("",) * 6
                writer.writerow((table.key, number, column, entry.text, *shown))
    return out.getvalue()
