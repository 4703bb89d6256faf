"""The repository's results as they travel with the wheel, and what a run costs."""

import json
from pathlib import Path

import pytest

from portlab_bench.compiled import collect, load_compiled, write_collected
from portlab_bench.costs import for_hours, hourly, per_million, price_of
from portlab_bench.evidence import Figure
from portlab_bench.machines import parse_machine
from portlab_bench.report import training_table
from portlab_bench.train_cost import train_row
from portlab_spec.errors import UserError

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def test_the_shipped_file_is_what_the_results_say() -> None:
    assert collect(RESULTS) == load_compiled(), "run: portlab-bench collect"


def test_compiled_figures_are_those_of_the_results() -> None:
    raw = json.loads((RESULTS / "bench_slices.json").read_text())["figures"]["gemma4-31b on v6e-8"]
    row = train_row("gemma4-31b", parse_machine("v6e-8"))
    assert row.hbm
    assert (row.hbm.value, row.hbm.evidence) == (raw["hbm_needed"] / 2**30, "compiled")
    assert row.step.value == raw["modelled"]["step_seconds"]
    assert row.step.evidence == "modelled"
    assert row.tokens_per_second.value == pytest.approx(32 * 2048 / raw["modelled"]["step_seconds"])
    hour = hourly(row.machine, price_of(row.machine, provider="google"))  # type: ignore[arg-type]
    assert for_hours(row.hours, hour).value == pytest.approx(raw["modelled"]["usd"])


def test_elsewhere_the_same_work_meets_other_peaks() -> None:
    raw = json.loads((RESULTS / "bench_slices.json").read_text())["figures"]["gemma4-31b on v5p-8"]
    row = train_row("gemma4-31b", parse_machine("2xH100"))
    flops = 4 * raw["shapes"][0]["program"]["flops"]
    efficiency = json.loads((RESULTS / "bench_backtest.json").read_text())["ratios"]["efficiency"]
    assert row.step.value == pytest.approx(flops / (2 * 989e12) / efficiency)
    assert row.hbm is None
    assert row.basis == "v5p-8"
    assert "compiled for v5p-8" in row.step.note


def test_starting_counts() -> None:
    row = train_row("gemma3-270m", parse_machine("v5e-8"))
    assert row.paid_hours > 100 * row.hours.value
    assert "assumed" in train_row("gemma3-270m", parse_machine("2xH100")).overhead.note


def test_weights_that_do_not_fit() -> None:
    assert not train_row("gemma4-31b", parse_machine("1xL4")).fits
    assert train_row("gemma4-31b", parse_machine("2xH100")).fits


def test_a_step_that_the_compiler_refused_has_its_memory_and_no_price() -> None:
    raw = json.loads((RESULTS / "bench_slices.json").read_text())["figures"]["gemma4-31b on v5e-8"]
    row = train_row("gemma4-31b", parse_machine("v5e-8"))
    assert raw["hbm_needed"] > raw["hbm_usable"]
    assert row.hbm is not None
    assert row.hbm.value == pytest.approx(raw["hbm_needed"] / 2**30)
    assert not row.fits
    (line,) = training_table([row]).rows
    assert [cell.text for cell in line[4:]] == ["-"] * 5


def test_a_million_tokens_by_hand() -> None:
    def figure(value: float, unit: str) -> Figure:
        return Figure(value=value, unit=unit, evidence="published", record="r", date="2026-01-01")

    cost = per_million(figure(1000, "tokens/s"), figure(3.6, "USD/h"))
    assert cost.value == pytest.approx(1.0)  # 3.6 million tokens an hour
    assert cost.unit == "USD/Mtoken"
    assert for_hours(figure(2, "h"), figure(3, "USD/h"), figure(1800, "s")).value == pytest.approx(7.5)


def test_missing_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"bench_slices\.json"):
        collect(tmp_path)
    for name in ("bench_slices", "bench_backtest"):
        (tmp_path / f"{name}.json").write_text("{}")
    with pytest.raises(UserError, match="'when' is missing"):
        collect(tmp_path)


def test_collecting_writes_the_same_bytes_twice(tmp_path: Path) -> None:
    write_collected(RESULTS, tmp_path / "a.json")
    write_collected(RESULTS, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
