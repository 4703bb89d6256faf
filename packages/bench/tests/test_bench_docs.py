"""The figures on docs/bench.md are those of the committed runs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
TOOLS = ("portlab-bench", "vllm bench serve", "guidellm")


def load_rows() -> Iterator[str]:
    """Of each tool and rate: answered, processor time, and how far its figures are off the server's own."""
    run = json.loads((ROOT / "bench/results/bench_load.json").read_text())
    for rate in (50, 500):
        for tool in TOOLS:
            f = run["figures"][f"{tool}, {rate}/s"]
            sending = f"{f['sending'] * 1e3:.2f}" if "sending" in f else "-"
            off = (
                f"{f['errors'][m]['p50'] * 1e3:+.1f} / {f['errors'][m]['p99'] * 1e3:+.1f}"
                for m in ("ttft", "tpot", "e2e")
            )
            yield f"| {tool} | {rate} | {f['answered']:.0f} | {sending} | {' | '.join(off)} |"


def real_rows() -> Iterator[str]:
    """Of each tool: means beside those of the server's histograms, milliseconds."""
    run = json.loads((ROOT / "bench/results/bench_load.json").read_text())
    for tool in TOOLS:
        f = run["figures"][f"{tool}, real server"]
        own = f["server's own means"]
        cells = (f"{f['figures'][m]['mean'] * 1e3:,.0f} / {own[m] * 1e3:,.0f}" for m in ("ttft", "tpot", "e2e"))
        yield f"| {tool} | {f['requests']} | {' | '.join(cells)} |"


def sweep_rows() -> Iterator[str]:
    """Of each cell of the sweep over the real server."""
    for name in ("tool-calls", "random"):
        run = json.loads((ROOT / f"bench/results/bench_serve/{name}/serve.json").read_text())
        for cell in run["cells"]:
            f = cell["figures"]
            again = " again" if cell["anchor"] else ""
            spans = (
                f"{f[m]['quantiles']['p50']['value'] * 1e3:,.0f}" if f[m] else "-" for m in ("ttft", "tpot", "e2e")
            )
            marks = ", ".join(dict.fromkeys(x["guard"] for x in cell["findings"] if not x["ok"])) or "-"
            yield (
                f"| {name}, {cell['name']}{again} | {f['requests']} | {f['request_throughput']:.2f} | "
                f"{' | '.join(spans)} | {f['output_throughput']:.1f} | {marks} |"
            )


@pytest.mark.parametrize("rows", [load_rows, real_rows, sweep_rows])
def test_the_tables_are_those_of_the_runs(rows):
    found = list(rows())
    assert found
    for row in found:
        assert row in PAGE


def test_the_client_costs_at_most_half_of_the_best_other():
    ratios = json.loads((ROOT / "bench/results/bench_load.json").read_text())["ratios"]
    assert ratios["sending, portlab-bench over vllm bench serve"] <= 0.5
    assert f"{ratios['sending, portlab-bench over vllm bench serve']:.2f} of vLLM's" in PAGE


@pytest.mark.parametrize("rate", [50, 500])
def test_our_figures_are_the_servers_within_a_millisecond_or_a_hundredth(rate):
    """All but p99, of which the page says how far it is off."""
    f = json.loads((ROOT / "bench/results/bench_load.json").read_text())["figures"][f"portlab-bench, {rate}/s"]
    for metric, errors in f["errors"].items():
        for name in ("mean", "p50", "p90"):
            truth = f["figures"][metric][name] - errors[name]
            assert abs(errors[name]) <= max(1e-3, 0.01 * truth), (metric, name)


def test_the_trainers_side_by_side_are_those_of_the_run():
    made = (ROOT / "bench/results/portlab_bench_train/train.md").read_text(encoding="utf-8").strip()
    assert made in (ROOT / "docs" / "bench-train.md").read_text(encoding="utf-8")
