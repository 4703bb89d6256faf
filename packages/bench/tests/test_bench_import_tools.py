"""guidellm, aiperf and inference-perf: the same four requests in each tool's own form give the same figures.

The files in data/ have the shape that the code of the version in their name writes; inference-perf's were written by
its own functions, and guidellm-0.8.1-mock.json is what guidellm measured on our mock server (50 ms, then 10 ms each).
The others hold the same run: three answers (sent, events, tokens)

    0.0   0.1 0.12 0.16           3
    0.5   0.7 0.8 0.9 1.0 1.1     5
    1.0   1.3                     1

and a request that failed at 1.5. All times are in seconds.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_bench import metrics
from portlab_bench.commands_import import ImportCommand, run_import
from portlab_bench.importers import import_file
from portlab_bench.schema import CellFigures, RequestRecord, ServeRun
from portlab_spec.errors import UserError

DATA = Path(__file__).parent / "data"
RAW = ("guidellm-0.8.1.json", "aiperf-0.13.0.jsonl", "inference-perf-0.7.0-requests.json")
SUMMARIES = ("aiperf-0.13.0.json", "inference-perf-0.7.0-stage.json")


def figures_of(path: Path) -> CellFigures:
    (cell,) = import_file(path).run.cells
    assert cell.figures is not None
    assert cell.valid
    return cell.figures


def mean(figures: CellFigures, name: str) -> float | None:
    values = getattr(figures, name)
    return None if values is None else values.mean


@pytest.mark.parametrize("name", RAW)
def test_requests_give_our_figures(name: str) -> None:
    figures = figures_of(DATA / name)
    assert mean(figures, "ttft") == pytest.approx((0.1 + 0.2 + 0.3) / 3, rel=1e-5)
    assert mean(figures, "tpot") == pytest.approx((0.06 / 2 + 0.4 / 4) / 2, rel=1e-5)
    assert mean(figures, "e2e") == pytest.approx((0.16 + 0.6 + 0.3) / 3, rel=1e-5)
    assert mean(figures, "normalised") == pytest.approx((0.16 / 3 + 0.6 / 5 + 0.3) / 3, rel=1e-5)
    if not name.startswith("guidellm"):
        assert mean(figures, "itl") == pytest.approx(0.46 / 6, rel=1e-5)
    assert figures.duration == pytest.approx(1.3, rel=1e-5)
    assert figures.output_tokens == 9
    assert figures.outcomes["ok"] == 3
    assert figures.requests == 4
    assert figures.prompt_tokens == 30
    assert mean(figures, "failed_after") == pytest.approx(0.05, rel=1e-5)


@pytest.mark.parametrize("name", SUMMARIES)
def test_summaries_give_what_is_defined_alike(name: str) -> None:
    figures = figures_of(DATA / name)
    assert mean(figures, "tpot") == pytest.approx(0.065)
    assert figures.normalised is None
    assert figures.client_load is None
    assert figures.output_tokens == 9


def test_what_guidellm_measured_on_the_mock_server() -> None:
    (cell,) = import_file(DATA / "guidellm-0.8.1-mock.json").run.cells
    assert (cell.name, cell.concurrency) == ("poisson qps 8", None)
    assert cell.figures is not None
    assert cell.figures.outcomes == {"ok": 6}
    assert mean(cell.figures, "tpot") == pytest.approx(0.010, rel=0.02)
    assert mean(cell.figures, "ttft") == pytest.approx(0.050, abs=0.015)
    assert cell.figures.output_tokens == 6 * 16
    assert cell.figures.tokens_from == {"usage": 6}


def test_what_the_tool_cut_off_is_in_no_figure(tmp_path: Path) -> None:
    def cut(report: Any) -> None:
        groups = report["benchmarks"][0]["requests"]
        groups["incomplete"] = groups.pop("errored")
        groups["errored"] = []
        report["benchmarks"][0]["metrics"]["request_totals"] |= {"errored": 0, "incomplete": 1}

    (cell,) = import_file(changed(tmp_path, GUIDE, cut)).run.cells
    assert cell.figures is not None
    assert cell.figures.outcomes == {"ok": 3}
    assert [finding.guard for finding in cell.findings if not finding.ok] == ["cut off"]  # 1 of 4 is too many


def test_what_guidellm_does_not_keep_is_not_made_up(tmp_path: Path) -> None:
    run = import_file(DATA / "guidellm-0.8.1.json").run
    (cell,) = run.cells
    assert run.model == "google/gemma-3-1b-it"
    assert run.url == "http://localhost:8000"
    assert run.client["tool"] == "guidellm 0.8.1"
    assert (cell.name, cell.mode, cell.rate, cell.arrivals, cell.seed) == ("poisson qps 2", "open", 2.0, "poisson", 42)
    assert cell.figures is not None
    assert cell.figures.itl is None
    assert cell.figures.lag is not None
    assert cell.figures.lag.mean == pytest.approx(0.002, rel=1e-3)
    assert cell.figures.prefix_hits == 0

    def sampled(report: Any) -> None:
        report["benchmarks"][0]["config"]["sample_size"] = 0
        report["benchmarks"][0]["requests"] = {"successful": [], "errored": [], "incomplete": [], "total": None}

    figures = figures_of(changed(tmp_path, "guidellm-0.8.1.json", sampled))
    assert mean(figures, "ttft") == pytest.approx(0.2)
    assert (figures.tpot, figures.e2e, figures.normalised, figures.itl) == (None,) * 4
    assert figures.duration == pytest.approx(1.55)


def test_what_came_before_the_measurement_is_warm_up(tmp_path: Path) -> None:
    def later(report: Any) -> None:
        window = report["benchmarks"][0]["scheduler_metrics"]
        window["measure_start_time"] += 0.4
        report["benchmarks"][0]["metrics"]["request_totals"]["successful"] = 2

    figures = figures_of(changed(tmp_path, "guidellm-0.8.1.json", later))
    assert figures.outcomes == {"ok": 2, "server_error": 1}
    assert mean(figures, "ttft") == pytest.approx(0.25)

    def first_is_warm_up(lines: Any) -> None:
        lines[0]["metadata"]["benchmark_phase"] = "warmup"

    assert figures_of(changed(tmp_path, "aiperf-0.13.0.jsonl", first_is_warm_up)).outcomes["ok"] == 2


def test_aiperfs_summary_says_model_load_and_seed(tmp_path: Path) -> None:
    run = import_file(DATA / "aiperf-0.13.0.json").run
    (cell,) = run.cells
    assert (run.model, run.url, run.when) == ("google/gemma-3-1b-it", "http://localhost:8000", "2026-11-20T10:00:00")
    assert (cell.name, cell.mode, cell.concurrency, cell.seed) == ("concurrency 2", "closed", 2, 7)
    assert cell.figures is not None
    assert mean(cell.figures, "e2e") == pytest.approx((0.16 + 0.6 + 0.3) / 3)
    assert mean(cell.figures, "itl") == pytest.approx(0.46 / 6)
    assert cell.figures.ttft is not None
    assert cell.figures.ttft.count == 3
    assert cell.figures.ttft.maximum == pytest.approx(0.3)

    def failures(said: Any) -> None:
        said["error_request_count"] = {"unit": "requests", "avg": 2.0}

    figures = figures_of(changed(tmp_path, "aiperf-0.13.0.json", failures))
    assert figures.e2e is None
    assert figures.requests == 5


def test_inference_perfs_events_come_back_out_of_its_tokens(tmp_path: Path) -> None:
    def bundled(requests: Any) -> None:
        # Two tokens in each event: inference-perf gives both the event's time, and a gap of zero.
        times = requests[1]["info"]["response_metrics"]["output_token_times"]
        requests[1]["info"]["response_metrics"]["output_token_times"] = [time for time in times for _ in range(2)]

    figures = figures_of(changed(tmp_path, "inference-perf-0.7.0-requests.json", bundled))
    assert mean(figures, "itl") == pytest.approx(0.46 / 6)

    def computed_only(requests: Any) -> None:
        del requests[2]
        for request in requests[:2]:
            del request["info"]

    figures = figures_of(changed(tmp_path, "inference-perf-0.7.0-requests.json", computed_only))
    assert mean(figures, "tpot") == pytest.approx(0.065)
    assert figures.tokens_from == {"tool": 2}


def test_inference_perfs_summary_leaves_out_what_ends_with_the_stream() -> None:
    (cell,) = import_file(DATA / "inference-perf-0.7.0-stage.json").run.cells
    assert (cell.name, cell.mode, cell.rate) == ("qps 2", "open", 2.0)
    figures = cell.figures
    assert figures is not None
    assert (figures.e2e, figures.itl, figures.normalised) == (None, None, None)
    assert mean(figures, "lag") == pytest.approx(0.0025)
    assert figures.outcomes == {"ok": 3, "http_error": 1}
    assert "1 answers counted by the client's tokenizer" in cell.findings[0].what


def changed(folder: Path, name: str, change: Callable[[Any], None]) -> Path:
    """A copy of a fixture with a change made to its JSON."""
    text = (DATA / name).read_text()
    lines = name.endswith("l")
    value = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    change(value)
    path = folder / name
    path.write_text("\n".join(map(json.dumps, value)) if lines else json.dumps(value))
    return path


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


GUIDE, AIPERF, LINES = "guidellm-0.8.1.json", "aiperf-0.13.0.json", "aiperf-0.13.0.jsonl"
STAGE, REQUESTS = "inference-perf-0.7.0-stage.json", "inference-perf-0.7.0-requests.json"
BENCH = ("benchmarks", 0)
TIMES = (*BENCH, "requests", "successful", 0, "info", "timings")
EMPTY = {"successful": 0, "errored": 0, "incomplete": 0, "total": 0}
REFUSED: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "guidellm, version 1": (GUIDE, put("metadata", "version", value=1), "report version 1"),
    "guidellm, no benchmark": (GUIDE, put("benchmarks", value=[]), "no benchmark"),
    "guidellm, no request": (GUIDE, put(*BENCH, "metrics", "request_totals", value=EMPTY), "no request"),
    "guidellm, not streamed": (GUIDE, put(*TIMES, "first_token_iteration", value=None), "not streamed"),
    "guidellm, order": (GUIDE, put(*TIMES, "first_token_iteration", value=1.0), "wrong order"),
    "guidellm, negative": (GUIDE, put(*TIMES, "request_start", value=-1.0), "request_start"),
    "guidellm, edited": (
        GUIDE,
        put(*BENCH, "metrics", "time_to_first_token_ms", "successful", "mean", value=20.0),
        "contradicts itself",
    ),
    "aiperf, schema 2": (AIPERF, put("schema_version", value="2.0"), "schema 2.0"),
    "aiperf, no request": (AIPERF, put("request_count", "avg", value=0.0), "no request"),
    "aiperf, cancelled": (AIPERF, put("was_cancelled", value=True), "not finished"),
    "aiperf, unit of a time": (AIPERF, put("time_to_first_token", "unit", value="hours"), "'hours'"),
    "aiperf, unit of a rate": (AIPERF, put("request_throughput", "unit", value="requests/min"), "requests/min"),
    "aiperf, negative": (AIPERF, put("time_to_first_token", "p50", value=-1.0), "negative"),
    "aiperf, no duration": (AIPERF, put("benchmark_duration", value=None), "benchmark_duration"),
    "aiperf, date": (AIPERF, put("start_time", value="yesterday"), "yesterday"),
    "aiperf lines, not streamed": (LINES, put(0, "metrics", value={}), "not streamed"),
    "aiperf lines, negative": (LINES, put(0, "metrics", "time_to_first_token", "value", value=-1), "not positive"),
    "aiperf lines, ends first": (LINES, put(0, "metadata", "request_end_ns", value=1), "not positive"),
    "aiperf lines, half a token": (LINES, put(0, "metrics", "output_sequence_length", "value", value=2.5), "2.5"),
    "inference-perf, sums": (STAGE, put("successes", "count", value=2), "contradicts itself"),
    "inference-perf, no time": (STAGE, put("benchmark_time_seconds", value=0.0), "no time"),
    "inference-perf, negative": (
        STAGE,
        put("successes", "latency", "time_per_output_token", "min", value=-1.0),
        "negative",
    ),
    "inference-perf, ends first": (REQUESTS, put(0, "end_time", value=0.0), "ends before"),
    "inference-perf, not streamed": (
        REQUESTS,
        put(2, "info", "response_metrics", "output_token_times", value=[]),
        "no times of its tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    file, change, says = REFUSED[name]
    with pytest.raises(UserError, match=says) as error:
        import_file(changed(tmp_path, file, change))
    assert file in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [*RAW, *SUMMARIES])
def test_cut_off_anywhere_it_is_refused(tmp_path: Path, name: str) -> None:
    text = (DATA / name).read_text().rstrip()
    path = tmp_path / name
    for cut in (1, 2, 20, len(text) // 2):
        path.write_text(text[:-cut])
        with pytest.raises(UserError):
            import_file(path)


@st.composite
def answers(draw: st.DrawFn) -> list[RequestRecord]:
    """Requests of whole microseconds, so that no tool's form rounds them."""
    micros = st.integers(100, 10_000_000)
    records = []
    for index in range(draw(st.integers(1, 8))):
        sent = draw(micros) if index else 0
        times = np.cumsum([sent, draw(micros), *draw(st.lists(micros, max_size=5))])[1:]
        chunks = tuple((times / 1e6).tolist())
        records.append(
            RequestRecord(
                index=index,
                sent=sent / 1e6,
                chunks=chunks,
                done=chunks[-1],
                prompt_tokens=draw(st.integers(1, 99)),
                output_tokens=len(chunks) + draw(st.integers(0, 3)),
                tokens_from="tool",
            )
        )
    return sorted(records, key=lambda record: record.sent)


def as_aiperf(records: list[RequestRecord]) -> str:
    lines = []
    for r in records:
        gaps = np.diff(r.chunks) * 1e3
        values: dict[str, Any] = {
            "time_to_first_token": {"value": (r.chunks[0] - r.sent) * 1e3, "unit": "ms"},
            "output_sequence_length": {"value": r.output_tokens, "unit": "tokens"},
            "input_sequence_length": {"value": r.prompt_tokens, "unit": "tokens"},
        }
        if len(gaps):
            values["inter_chunk_latency"] = {"value": gaps.tolist(), "unit": "ms"}
        start, end = (10**18 + round(t * 1e9) for t in (r.sent, r.chunks[-1]))
        metadata = {"request_start_ns": start, "request_end_ns": end, "benchmark_phase": "profiling"}
        lines.append(json.dumps({"metadata": metadata, "metrics": values}))
    return "\n".join(lines)


def as_inference_perf(records: list[RequestRecord]) -> str:
    entries = [
        {
            "start_time": 7 + r.sent,
            "end_time": 7 + r.chunks[-1],
            "info": {
                "response_metrics": {
                    "server_usage": {"completion_tokens": r.output_tokens},
                    "output_token_times": [7 + t for t in r.chunks for _ in range(1 + r.index % 2)],
                }
            },
            "computed_metrics": {"input_tokens": r.prompt_tokens},
            "error": None,
        }
        for r in records
    ]
    return json.dumps(entries)


@settings(max_examples=60, deadline=None)
@given(answers(), st.sampled_from([(as_aiperf, "x.jsonl"), (as_inference_perf, "x.json")]))
def test_requests_survive_the_way_through_a_tools_file(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[RequestRecord],
    form: tuple[Callable[[list[RequestRecord]], str], str],
) -> None:
    write, name = form
    path = tmp_path_factory.mktemp("tool") / name
    path.write_text(write(records))
    ours, theirs = metrics.figures(records), figures_of(path)
    assert ours is not None
    for metric in ("ttft", "tpot", "itl", "e2e", "normalised"):
        expected = mean(ours, metric)
        assert mean(theirs, metric) == (None if expected is None else pytest.approx(expected, rel=1e-4))
    assert theirs.output_throughput == pytest.approx(ours.output_throughput, rel=1e-4)
    assert theirs.concurrency == pytest.approx(ours.concurrency, rel=1e-4)


def test_the_command_writes_runs_and_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    files = (DATA / GUIDE, DATA / AIPERF)
    assert run_import(ImportCommand(files=files, out=out, hardware="v6e-1")) == 1  # one of four failed
    run = ServeRun.model_validate_json((out / "guidellm-0.8.1/serve.json").read_text())
    assert run.hardware == "v6e-1"
    assert run.cells[0].records == ""
    printed = capsys.readouterr().out
    assert "| poisson qps 2 | 4 | 200.00 | 65.00 | not comparable | 300.00 |" in printed
    assert "definitions: gaps between events (itl) are not kept" in printed
    assert "poisson qps 2: **REFUSED** failures: 1 of 4 failed" in printed
    assert [finding.guard for finding in run.cells[0].findings if not finding.ok] == ["failures"]
    with pytest.raises(UserError, match="is there already"):
        run_import(ImportCommand(files=files, out=out))


def test_what_no_file_says_must_be_given(tmp_path: Path) -> None:
    out = tmp_path / "out"
    wrong: list[tuple[str, dict[str, str], str]] = [
        (REQUESTS, {}, "Give --model"),
        (REQUESTS, {"model": "google/gemma-3-1b-it"}, "Give --date"),
        (REQUESTS, {"model": "google/gemma-3-1b-it", "date": "20.11.2026"}, "is no date"),
        (LINES, {"model": "google/gemma-3-1b-it", "date": "2026-11-19"}, "says 2026-11-2"),
        (AIPERF, {"model": "google/gemma-3-4b-it"}, "says google/gemma-3-1b-it"),
    ]
    for file, options, says in wrong:
        with pytest.raises(UserError, match=says):
            run_import(ImportCommand(files=(DATA / file,), out=out, **options))
    assert not out.exists()
    given_all = ImportCommand(files=(DATA / REQUESTS,), out=out, model="google/gemma-3-1b-it", date="2026-11-20")
    assert run_import(given_all) == 1
    folder = out / "inference-perf-0.7.0-requests"
    run = ServeRun.model_validate_json((folder / "serve.json").read_text())
    assert (run.model, run.when, run.cells[0].records) == ("google/gemma-3-1b-it", "2026-11-20", "requests.jsonl")
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    records = [RequestRecord.model_validate({k: v for k, v in line.items() if k != "cell"}) for line in lines]
    assert metrics.figures(records) == run.cells[0].figures
    with pytest.raises(UserError, match="no file is named"):
        run_import(ImportCommand(files=(), out=out))


def test_what_no_hardware_can_do_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def impossible(said: Any) -> None:
        said["output_token_throughput"]["avg"] = 4e6

    fast = changed(tmp_path, AIPERF, impossible)
    options: dict[str, Any] = {"hardware": "v6e-1", "architecture": "gemma-3-1b"}
    assert run_import(ImportCommand(files=(DATA / AIPERF,), out=tmp_path / "true", **options)) == 0
    assert run_import(ImportCommand(files=(fast,), out=tmp_path / "fast", **options)) == 1
    assert "**REFUSED** roofline" in capsys.readouterr().out
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"architecture": "gemma-9"}, "no published model"),
        ({"architecture": "gemma-3-1b"}, "bounds nothing"),
        ({"hardware": "v9z-1"}, "v9z-1"),
    ]
    for changes, says in wrong:
        with pytest.raises(UserError, match=says):
            run_import(ImportCommand(files=(fast,), out=tmp_path / "none", **changes))
    assert not (tmp_path / "none").exists()
