"""`portlab-bench serve` from end to end: a sweep over the mock server, its record, its table, its exit code."""

import contextlib
import json

import pytest
from mock_process import mock_server

from portlab_bench.cli import main
from portlab_bench.commands_serve import ServeCommand, loads, parse_numbers, parse_objectives, parse_seconds
from portlab_bench.load.server import parse_metrics
from portlab_bench.schema import RequestRecord, ServeRun
from portlab_bench.sweep import cell_seed
from portlab_spec.errors import CheckFailed, UserError

# One process: on a busy machine a second would be tried, and its cell kept beside the first.
QUICK = ("--seconds", "1", "--warm-up", "0.2", "--workload", "random", "--no-anchor", "--processes", "1")


def sweep(url, out, *more):
    return main(["serve", "--url", url, "--out", str(out), *QUICK, *more])


def read(out) -> ServeRun:
    return ServeRun.model_validate(json.loads((out / "serve.json").read_text()))


def test_a_sweep_leaves_everything_behind(tmp_path, capsys):
    with mock_server("--ttft", "40ms", "--itl", "10ms", "--tokens", "4") as url:
        # Machines that run tests are busy: here it is about the record, not about lateness.
        sweep_or_marked(url, tmp_path / "run", "--qps", "10,20", "--slo", "ttft=1s,tpot=200ms")
    run = read(tmp_path / "run")
    assert (run.model, run.server["version"], run.workload["name"]) == ("mock", "mock", "random")
    assert [cell.name for cell in run.cells] == ["qps 10", "qps 20"]
    for cell in run.cells:
        records = [
            RequestRecord.model_validate_json(line)
            for line in (tmp_path / "run" / cell.records).read_text().splitlines()
        ]
        assert sum(not r.warm_up for r in records) == cell.figures.requests
        assert cell.figures.ttft.quantiles["p50"].value == pytest.approx(0.04, abs=0.02)
        assert cell.figures.tpot.quantiles["p50"].value == pytest.approx(0.01, abs=0.005)
        assert cell.figures.tokens_from == {"usage": cell.figures.requests}
        assert cell.figures.prefix_hits == 0
    assert len({cell.seed for cell in run.cells}) == 2
    assert "qps 10" in capsys.readouterr().out


def sweep_or_marked(*args):
    """A sweep on a machine that may be busy: lateness of the client is marked, and not what is tested."""
    with contextlib.suppress(CheckFailed):
        sweep(*args)


def test_a_warm_prefix_cache_marks_a_cell(tmp_path):
    with (
        mock_server("--ttft", "1ms", "--tokens", "2", "--itl", "1ms", "--cached", "0.9") as url,
        pytest.raises(CheckFailed, match="the prefix cache held 90% of the prompts, which share"),
    ):
        sweep(url, tmp_path / "run", "--concurrency", "2")
    (cell,) = read(tmp_path / "run").cells
    assert not cell.valid
    assert cell.figures.prefix_hits == pytest.approx(0.9, abs=0.01)


def test_a_saturated_server_shows_its_knee(tmp_path):
    """Two slots of 100 ms answer 20 requests a second: 10 a second meet the objective, 40 do not."""
    with mock_server("--ttft", "100ms", "--tokens", "1", "--slots", "2") as url:
        sweep_or_marked(
            *(url, tmp_path / "run", "--seconds", "4", "--warm-up", "0.5", "--qps", "4,40"),
            *("--slo", "ttft=400ms", "--arrivals", "constant"),
        )
    few, many = read(tmp_path / "run").cells
    assert few.figures.attainment > 0.95
    assert many.figures.attainment < 0.3
    assert many.figures.request_throughput == pytest.approx(20, rel=0.15)  # of the 40 that were sent
    assert many.figures.ttft.quantiles["p99"].value > 2


def test_failures_mark_a_cell_and_are_kept(tmp_path):
    with (
        mock_server("--ttft", "1ms", "--tokens", "1", "--fail-every", "5") as url,
        pytest.raises(CheckFailed, match="failed"),
    ):
        sweep(url, tmp_path / "run", "--concurrency", "1")
    (cell,) = read(tmp_path / "run").cells
    assert cell.figures.outcomes["http_error"] > 0
    assert cell.figures.failed_after.count == cell.figures.outcomes["http_error"]


def test_nobody_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match="gives no list of models"):
        sweep("http://127.0.0.1:9", tmp_path / "run", "--qps", "1")
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_served(tmp_path):
    with mock_server() as url, pytest.raises(UserError, match=r"serves no x.*one of mock"):
        sweep(url, tmp_path / "run", "--qps", "1", "--model", "x")


def test_a_folder_that_exists_is_not_written_into(tmp_path):
    with pytest.raises(UserError, match="exists"):
        sweep("http://127.0.0.1:9", tmp_path, "--qps", "1")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "give one of --qps"),
        (("--qps", "1", "--concurrency", "1"), "give one of"),
        (("--qps", "1,x"), "'x' is no positive number"),
        (("--qps", "nan"), "no positive number"),
        (("--qps", "0"), "no positive number"),
        (("--qps", "1,1"), "named twice"),
        (("--concurrency", "1.5"), "not whole"),
        (("--qps", "1", "--slo", "ttft=5"), "is no duration"),
        (("--qps", "1", "--slo", "itl=5ms"), "no such metric"),
        (("--qps", "1", "--slo", "ttft=1s,ttft=2s"), "named twice"),
        (("--qps", "1", "--hardware", "v9-8"), "v9"),
        (("--qps", "1", "--hardware", "v6e-8", "--architecture", "gpt-2"), "no published model"),
        (("--qps", "1", "--architecture", "gemma-4-31B"), "without --hardware"),
        (("--qps", "1", "--header", "x"), "is none"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        sweep("http://127.0.0.1:9", tmp_path / "run", *more)
    assert not (tmp_path / "run").exists()


def test_the_first_cell_is_asked_again_at_the_end():
    command = ServeCommand(url="u", out="o", qps="1,2")
    assert [(cell.rate, cell.anchor) for cell in loads(command)] == [(1, False), (2, False), (1, True)]
    assert len(loads(ServeCommand(url="u", out="o", qps="1"))) == 1


def test_seeds_of_cells_repetitions_and_neighbouring_runs_all_differ():
    seeds = [cell_seed(s, number, again) for s in range(5) for number in range(5) for again in range(3)]
    assert len(set(seeds)) == 75
    assert seeds[0] == cell_seed(0, 0, 0)


@pytest.mark.parametrize("text", ["", "1\nx\n"])
def test_a_bad_trace_leaves_nothing_behind(tmp_path, text):
    trace = tmp_path / "trace"
    trace.write_text(text)
    with mock_server() as url, pytest.raises(UserError, match="trace"):
        sweep(url, tmp_path / "run", "--trace", str(trace))
    assert not (tmp_path / "run").exists()


def test_numbers_durations_objectives():
    assert parse_numbers("1, 2.5", "--qps") == [1, 2.5]
    assert parse_seconds("500ms", "x") == pytest.approx(0.5)
    assert parse_seconds("2s", "x") == 2
    assert parse_objectives("ttft=500ms, tpot=50ms") == {"ttft": 0.5, "tpot": 0.05}
    assert parse_objectives(None) == {}


def test_counters_of_prometheus_text():
    text = (
        "# HELP vllm:prompt_tokens_total x\n"
        'vllm:prompt_tokens_total{engine="0",model_name="a"} 10.0\n'
        'vllm:prompt_tokens_total{engine="1",model_name="a"} 5\n'
        'vllm:prefix_cache_hits_total{engine="0"} 1e2\n'
        'vllm:prefix_cache_hits_created{engine="0"} 7\n'
        'vllm:cache_config_info{block_size="128",enable_prefix_caching="True"} 1.0\n'
    )
    counters, settings = parse_metrics(text)
    assert counters.values == {"prompt_tokens": 15, "prefix_hits": 100}
    assert settings == {"block_size": "128", "enable_prefix_caching": "True"}
