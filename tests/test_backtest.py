"""The planner's efficiency is what the committed back-test gives, and no run judged itself."""

import json
import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from portlab_jax.planner.estimate import EFFICIENCY, WORST_FACTOR

FILE = Path(__file__).parents[1] / "bench" / "results" / "bench_backtest.json"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture
def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return result["figures"]


@pytest.fixture
def reached(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Bound over published seconds of the runs that are fitted."""
    return {
        name: row["bound_seconds"] / row["published"]["seconds"]
        for name, row in rows.items()
        if row["published"]["step_time"]
    }


def test_efficiency_is_the_geometric_mean_of_bound_over_published(result, reached):
    assert result["ratios"]["efficiency"] == pytest.approx(geometric_mean(reached.values()))


def test_constants_are_those_of_the_file(result):
    assert tuple(round(result["ratios"][name], 2) for name in ("efficiency", "worst factor")) == (
        EFFICIENCY,
        WORST_FACTOR,
    )


def test_each_run_is_estimated_from_the_others(rows, reached):
    for name, row in rows.items():
        others = [value for other, value in reached.items() if other != name]
        assert row["estimate"]["seconds"] == pytest.approx(row["bound_seconds"] / geometric_mean(others)), name


def test_worst_factor_covers_every_run_in_both_directions(result, rows):
    ratios = [row["estimate"]["seconds"] / row["published"]["seconds"] for row in rows.values()]
    assert result["ratios"]["worst factor"] == pytest.approx(max(max(r, 1 / r) for r in ratios))


def test_no_bound_is_above_the_time_that_was_published(rows):
    assert {name: row["efficiency"] for name, row in rows.items() if row["efficiency"] >= 1} == {}


def test_bounds_are_of_the_compiled_program_where_there_is_one(rows):
    for name, row in rows.items():
        basis = "compiled" if row["compiled"] and row["compiled"]["fits"] else "analytic"
        assert (row["basis"], row["bound_seconds"]) == (basis, row[basis]["bound_seconds"]), name


def test_every_published_figure_says_where_it_stands_and_of_when(rows):
    for name, row in rows.items():
        assert row["published"]["source"].startswith("https://"), name
        assert re.search(r"20\d\d-\d\d-\d\d", row["published"]["dated"]), name


def test_file_does_not_call_its_figures_measured(result):
    assert "measured" not in result["evidence"]
