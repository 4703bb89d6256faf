"""Users' own runs in the tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from portlab_bench.commands_table import TableCommand, run_table
from portlab_bench.measured import measured_tables, read_runs
from portlab_bench.metrics import figures
from portlab_bench.schema import Cell, Finding, RequestRecord, ServeRun
from portlab_spec.errors import UserError


def serving(hardware: str = "v6e-8", ok: bool = True) -> dict[str, Any]:
    # Ten requests a second apart, each with its first token after 0.1 s and nine more, 0.01 s apart.
    records = [
        RequestRecord(
            index=i,
            scheduled=float(i),
            sent=float(i),
            chunks=tuple(i + 0.1 + 0.01 * n for n in range(10)),
            done=i + 0.2,
            output_tokens=10,
            finish="length",
        )
        for i in range(10)
    ]
    cell = Cell(
        name="qps 1",
        mode="open",
        rate=1.0,
        arrivals="constant",
        seed=1,
        processes=1,
        figures=figures(records),
        findings=(Finding(guard="prefix cache", ok=ok, what="62 % of prompt tokens were cached"),),
    )
    run = ServeRun(
        when="2026-11-20T10:00:00+00:00",
        url="http://localhost:8000",
        model="google/gemma-4-31B-it",
        server={},
        workload={},
        hardware=hardware,
        client={},
        cells=(cell,),
    )
    return run.model_dump(mode="json")


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_a_serving_run_is_a_row_with_its_cost(tmp_path: Path) -> None:
    (table,) = measured_tables(read_runs([write(tmp_path / "serve.json", serving())]))
    (row,) = table.rows
    # 100 tokens in 9 + 0.1 + 0.09 seconds.
    throughput = 100 / 9.19
    assert row[3].figure
    assert row[3].figure.value == pytest.approx(throughput)
    assert row[3].figure.evidence == "measured"
    assert row[3].figure.date == "2026-11-20"
    assert row[4].text == "100.0"
    assert row[6].text == "10.0"
    assert row[8].figure
    assert row[8].figure.value == pytest.approx(21.60 / (throughput * 3600 / 1e6))
    assert "21.60" in row[8].figure.note


def test_a_marked_cell_is_left_out_and_named(tmp_path: Path) -> None:
    (table,) = measured_tables(read_runs([write(tmp_path / "serve.json", serving(ok=False))]))
    assert table.rows == ()
    assert "prefix cache: 62 % of prompt tokens were cached" in table.notes[-1]


def test_unknown_hardware_has_no_cost(tmp_path: Path) -> None:
    for hardware in ("", "a box under the desk"):
        (table,) = measured_tables(read_runs([write(tmp_path / "serve.json", serving(hardware))]))
        assert table.rows[0][8].text == "-"


def test_the_command_puts_them_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "serve.json", serving())
    assert run_table(TableCommand(slices=("v6e-8",), runs=(path,))) == 0
    out = capsys.readouterr().out
    assert out.index("Serving, your runs") < out.index("## Hardware")
    assert "● 100.0" in out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not valid JSON"),
        ("[]", "neither"),
        ('{"kind": "else"}', "neither"),
        ('{"cells": []}', "when"),
        ('{"runs": 1}', "when"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UserError, match=says):
        read_runs([path])
    with pytest.raises(UserError, match="not found"):
        read_runs([tmp_path / "none.json"])


def test_a_training_run_is_a_row(tmp_path: Path) -> None:
    spread = {"count": 3, "mean": 2.0, "minimum": 1.9, "maximum": 2.1, "quantiles": {}}
    steady = {"steps": [2, 3, 4], "seconds": spread, "examples_per_second": 16, "tokens_per_second": 5000, "mfu": 0.31}
    run = {
        "when": "2026-11-21T00:00:00+00:00",
        "recipe": {"model": "google/gemma-3-1b-it"},
        "recipe_digest": "",
        "rows_digest": "",
        "warm_up": 1,
        "client": {},
        "runs": [
            {
                "backend": "jax",
                "device": {"count": 8, "kind": "TPU v6 lite"},
                "steady": steady,
                "first_step_seconds": 61,
            },
            {"backend": "trl", "failure": "CUDA out of memory"},
        ],
    }
    for entry in run["runs"]:  # type: ignore[attr-defined]
        if "steady" in entry:
            entry["steady"]["seconds"] |= {"mean_low": None, "mean_high": None}
    (table,) = measured_tables(read_runs([write(tmp_path / "train.json", run)]))
    (row,) = table.rows
    assert [entry.text for entry in row] == [
        "jax",
        "8 TPU v6 lite",
        "google/gemma-3-1b-it",
        "5,000",
        "2",
        "31.0%",
        "61.0",
    ]
    assert row[3].figure
    assert row[3].figure.evidence == "measured"
    assert "trl of" in table.notes[0]
    assert "CUDA out of memory" in table.notes[0]
