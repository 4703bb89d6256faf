"""Tables: their forms, their marks, and that documents hold what the code says."""

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree.ElementTree import tostring

import pytest

from portlab_bench import report
from portlab_bench.commands_table import BEGIN, END, TableCommand, run_table
from portlab_bench.evidence import Figure
from portlab_bench.machines import parse_machine
from portlab_bench.page import html
from portlab_bench.plots import Series, bars, scatter
from portlab_bench.serve_model import Workload
from portlab_bench.tables import Cell, Table, cell, markdown, text, to_csv
from portlab_spec.errors import UserError

DOCS = Path(__file__).parents[3] / "docs" / "bench-tables.md"
NAMES = ("v5p-8", "v6e-8", "2xH100")


def figure(value: float, evidence: str = "published", record: str = "https://example.org") -> Figure:
    return Figure.model_validate(
        {"value": value, "unit": "s", "evidence": evidence, "record": record, "date": "2026-01-02"}
    )


TABLE = Table(
    "small",
    "A small table",
    ("name", "time, s"),
    ((text("a|b"), cell(figure(1.5))), (text("c"), cell(figure(2.0, "modelled", "a <model>")))),
    ("A note.",),
)


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    return report.build(report.parse_machines(NAMES), Workload(), 0.5)


def test_markdown_marks_every_figure_and_lists_its_source() -> None:
    lines = markdown("Title", ["Intro."], [TABLE]).splitlines()
    assert "| a\\|b | ■ 1.50 <sup>1</sup> |" in lines
    assert "| c | ○ 2.00 <sup>2</sup> |" in lines
    assert "1. ■ published: https://example.org, 2026-01-02" in lines
    assert "- Mixed: time, s (published beside modelled). Figures of different kinds are no race." in lines


def test_a_column_of_one_kind_is_not_mixed() -> None:
    assert replace(TABLE, rows=TABLE.rows[:1]).mixed() == ""


def test_csv_holds_every_cell_with_its_evidence() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv([TABLE]))))
    assert len(rows) == 4
    assert rows[3] == {
        "table": "small",
        "row": "2",
        "column": "time, s",
        "text": "2.00",
        "value": "2.0",
        "unit": "s",
        "evidence": "modelled",
        "record": "a <model>",
        "date": "2026-01-02",
        "note": "",
    }


def test_a_ragged_table_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="1 cells for 2"):
        Table("x", "X", ("a", "b"), ((Cell("1"),),))


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.tags: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name == "href":
                self.links.add(value or "")
            if name in ("src", "srcset", "xlink:href") or name.startswith("on"):
                self.loads.append(name)


def test_the_page_stands_alone_and_its_links_lead_somewhere(tables: list[Table]) -> None:
    machines = report.parse_machines(NAMES)
    made = html(report.TITLE, report.INTRO, [*tables, TABLE], machines, Workload())
    page = _Page()
    page.feed(made)
    assert page.loads == []
    assert not page.tags & {"script", "link", "iframe", "img", "object"}
    assert {link.removeprefix("#") for link in page.links} <= page.ids
    assert all(link.startswith("#") for link in page.links)
    assert "default-src 'none'" in made
    assert "a &lt;model&gt;" in made
    assert "@import" not in made
    assert "url(" not in made
    assert made.count("<svg") == 4
    assert made == html(report.TITLE, report.INTRO, [*tables, TABLE], machines, Workload())


def test_every_number_in_the_tables_has_its_kind_and_source(tables: list[Table]) -> None:
    figures = [entry.figure for table in tables for row in table.rows for entry in row if entry.figure]
    assert len(figures) > 300
    assert {f.evidence for f in figures} == {"measured", "compiled", "published", "modelled"}
    assert all(f.record and re.match(r"20\d\d-\d\d", f.date) for f in figures)


def test_compiled_and_modelled_are_never_taken_for_measured(tables: list[Table]) -> None:
    by_key = {table.key: table for table in tables}
    serving = {e.figure.evidence for row in by_key["serving"].rows for e in row if e.figure}
    assert serving == {"modelled"}
    costs = {e.figure.evidence for row in by_key["token-cost"].rows for e in row if e.figure}
    assert costs == {"modelled"}
    published = {e.figure.evidence for row in by_key["published-serving"].rows for e in row if e.figure}
    assert published == {"published"}
    memory = [row[2].figure for row in by_key["training"].rows if row[2].figure]
    assert {f.evidence for f in memory} == {"compiled"}


def test_refused_figures_stand_in_one_table_alone(tables: list[Table]) -> None:
    refused = next(table for table in tables if table.key == "refused")
    values = {row[5].text for row in refused.rows}
    assert {"463,345", "0.4"} <= values
    for table in tables:
        if table.key not in ("refused", "paper"):
            assert not any("463,345" in entry.text for row in table.rows for entry in row)


def test_a_machine_that_is_too_small_has_no_figures() -> None:
    made = report.training_table(report.train_rows([parse_machine("1xL4")], ["gemma4-31b"]))
    assert made.rows[0][2].text == "weights do not fit"
    (row,) = report.serving_table([report.serve_row(parse_machine("1xL4"), Workload())], 0.5).rows
    assert row[4].text == "-"


def test_plots_place_values_where_they_belong() -> None:
    drawn = tostring(
        scatter("t", "x", "y", [Series("a", "published", ((1, 10), (100, 1000)), ("one", "two"))])
    ).decode()
    places = [(float(x), float(y)) for x, y in re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="10', drawn)]
    assert places[0][0] < places[1][0]  # further right
    assert places[0][1] > places[1][1]  # further up
    assert "one" in drawn
    with pytest.raises(ValueError, match="no place for zero"):
        scatter("t", "x", "y", [Series("a", "published", ((0, 1),), ("zero",))])
    assert "nothing to show" in tostring(scatter("t", "x", "y", [])).decode()
    assert "nothing to show" in tostring(bars("t", "GiB", [])).decode()


def test_the_command_prints_or_writes_the_same_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = TableCommand(slices=NAMES)
    assert run_table(command) == 0
    printed = capsys.readouterr().out
    written = replace(command, md=tmp_path / "t.md", csv=tmp_path / "t.csv", html=tmp_path / "t.html")
    assert run_table(written) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "t.md").read_text() == printed
    assert all((tmp_path / f"t.{kind}").stat().st_size > 1000 for kind in ("csv", "html"))


def test_markdown_goes_between_the_marks_of_a_document(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"# Mine\n\nWords.\n\n{BEGIN}\nold\n{END}\n\nMore words.\n")
    assert run_table(TableCommand(slices=NAMES, md=path)) == 0
    written = path.read_text()
    assert written.startswith(f"# Mine\n\nWords.\n\n{BEGIN}\n")
    assert written.endswith(f"\n{END}\n\nMore words.\n")
    assert "old" not in written.split(BEGIN)[1].split("\n")
    assert "## Hardware" in written
    assert written.count("# TPU against GPU") == 0
    path.write_text(f"{BEGIN}\nno end\n")
    with pytest.raises(UserError, match="one begin and one end"):
        run_table(TableCommand(slices=NAMES, md=path))


def test_the_document_holds_what_the_command_writes(tmp_path: Path) -> None:
    copy = tmp_path / DOCS.name
    copy.write_text(DOCS.read_text())
    assert run_table(TableCommand(md=copy)) == 0
    assert copy.read_text() == DOCS.read_text(), "regenerate: portlab-bench table --md docs/bench-tables.md"
