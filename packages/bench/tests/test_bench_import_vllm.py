"""`vllm bench serve` results: rebuilt from arrays where they are, taken over where only a summary is left."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_bench import metrics
from portlab_bench.importers import import_file
from portlab_bench.schema import RequestRecord
from portlab_spec.errors import UserError

DATA = Path(__file__).parent / "data"


def detailed(**changes: Any) -> dict[str, Any]:
    """Three answers and a refusal, as vLLM 0.32.0 writes them with --save-detailed; all means by hand below."""
    result: dict[str, Any] = {
        "date": "20261120-101112",
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": None,
        "model_id": "google/gemma-3-1b-it",
        "tokenizer_id": "google/gemma-3-1b-it",
        "num_prompts": 4,
        "hardware": "v6e-1",
        "request_rate": 2.0,
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": 2.5,
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 9,
        "request_throughput": 1.2,
        "request_goodput": None,
        "output_throughput": 3.6,
        "total_token_throughput": 15.6,
        "input_lens": [10, 10, 10, 8],
        "output_lens": [3, 5, 1, 0],
        "ttfts": [0.1, 0.2, 0.3, 0.0],
        "itls": [[0.02, 0.04], [0.1, 0.1, 0.1, 0.1], [], []],
        "latencies": [0.16, 0.6, 0.3, 0.0],
        "start_times": [100.0, 100.5, 101.0, 101.5],
        "queue_times": [0.001, 0.002, 0.003, 0.004],
        "generated_texts": ["a", "b", "c", ""],
        "errors": ["", "", "", "Service Unavailable"],
        "max_output_tokens_per_s": 5.0,
        "max_concurrent_requests": 2,
        "rtfx": 0.0,
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "std_ttft_ms": 81.6,
        "p99_ttft_ms": 298.0,
        "mean_tpot_ms": 65.0,
        "median_tpot_ms": 65.0,
        "std_tpot_ms": 35.0,
        "p99_tpot_ms": 99.3,
        "mean_itl_ms": 76.66666666666667,
        "median_itl_ms": 100.0,
        "std_itl_ms": 33.0,
        "p99_itl_ms": 100.0,
    }
    return result | changes


def summarised(**changes: Any) -> dict[str, Any]:
    """The same without --save-detailed, which leaves latencies and queue_times."""
    gone = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
    return {key: value for key, value in detailed().items() if key not in gone} | changes


def write(folder: Path, *results: Any) -> Path:
    path = folder / "result.json"
    path.write_text("\n".join(json.dumps(result) for result in results))
    return path


def test_arrays_give_our_figures(tmp_path: Path) -> None:
    run, records = import_file(write(tmp_path, detailed()))
    (cell,) = run.cells
    figures = cell.figures
    assert figures is not None
    assert run.model == "google/gemma-3-1b-it"
    assert run.when == "2026-11-20T10:11:12"
    assert run.client["metadata"] == {"hardware": "v6e-1"}
    assert run.source.startswith("vllm bench serve: result.json, sha256 ")
    assert (cell.name, cell.mode, cell.rate, cell.arrivals, cell.seed) == ("qps 2", "open", 2.0, "poisson", None)
    assert figures.outcomes == {"ok": 3, "http_error": 1}
    assert figures.output_tokens == 9
    assert figures.ttft is not None
    assert figures.ttft.mean == pytest.approx(0.2)
    assert figures.tpot is not None
    assert figures.tpot.mean == pytest.approx((0.06 / 2 + 0.4 / 4) / 2)
    assert figures.tpot.count == 2
    assert figures.itl is not None
    assert figures.itl.mean == pytest.approx(0.46 / 6)
    assert figures.e2e is not None
    assert figures.e2e.mean == pytest.approx((0.16 + 0.6 + 0.3) / 3)
    assert figures.lag is not None
    assert figures.lag.maximum == pytest.approx(0.004)
    # From the first request's sending to the last token, 101.3 - 100; vLLM waits for the failure too.
    assert figures.duration == pytest.approx(1.3)
    assert figures.output_throughput == pytest.approx(9 / 1.3)
    assert figures.client_load is None
    assert len(records["qps 2"]) == 4
    assert records["qps 2"][3].error == "Service Unavailable"
    assert cell.valid


def test_a_summary_is_taken_over_with_its_gaps_named(tmp_path: Path) -> None:
    run, records = import_file(write(tmp_path, summarised()))
    (cell,) = run.cells
    assert not records
    assert cell.figures is not None
    assert cell.figures.ttft is not None
    assert cell.figures.ttft.mean == pytest.approx(0.2)
    assert cell.figures.ttft.quantiles["p99"].value == pytest.approx(0.298)
    assert cell.figures.ttft.quantiles["p50"].low is None
    assert cell.figures.ttft.minimum is None
    assert cell.figures.e2e is None  # latencies hold a zero for the failure
    assert cell.figures.normalised is None
    assert cell.figures.duration == 2.5
    what = cell.findings[0].what
    assert "e2el" in what
    assert "failures" in what


def test_latencies_without_failures_give_e2e_with_intervals(tmp_path: Path) -> None:
    result = summarised(failed=0, num_prompts=3, latencies=[0.16, 0.6, 0.3], queue_times=[0.0, 0.0, 0.0])
    run, _ = import_file(write(tmp_path, result))
    figures = run.cells[0].figures
    assert figures is not None
    assert figures.e2e is not None
    assert figures.e2e.count == 3
    assert figures.e2e.maximum == 0.6
    assert figures.concurrency == pytest.approx((0.16 + 0.6 + 0.3) / 2.5)


def test_appended_results_are_cells_of_one_run(tmp_path: Path) -> None:
    closed = detailed(request_rate="inf", max_concurrency=8)
    at_once = detailed(request_rate="inf")
    run, records = import_file(write(tmp_path, detailed(), closed, at_once, detailed()))
    assert [cell.name for cell in run.cells] == ["qps 2", "concurrency 8", "concurrency 4", "qps 2 (2)"]
    assert [cell.mode for cell in run.cells] == ["open", "closed", "closed", "open"]
    assert [cell.arrivals for cell in run.cells] == ["poisson", "closed", "all at once", "poisson"]
    assert records["concurrency 8"][0].scheduled is None
    assert records.keys() == {cell.name for cell in run.cells}


def test_an_open_loop_that_queues_in_its_own_client_is_marked(tmp_path: Path) -> None:
    queued = detailed(max_concurrency=2, queue_times=[0.0, 0.0, 1.5, 1.2])
    (cell,) = import_file(write(tmp_path, queued))[0].cells
    assert not cell.valid
    assert [finding.guard for finding in cell.findings if not finding.ok] == ["client_queue"]
    (cell,) = import_file(write(tmp_path, detailed(max_concurrency=2, queue_times=[0.0, 0.0, 0.0, 0.0])))[0].cells
    assert cell.valid


def test_nothing_answered_is_a_cell_without_figures(tmp_path: Path) -> None:
    failed = detailed(
        completed=0,
        failed=4,
        total_output_tokens=0,
        output_lens=[0] * 4,
        ttfts=[0.0] * 4,
        itls=[[]] * 4,
        errors=["Traceback ...\nTimeoutError", "", "Not Found", "Never received a valid chunk"],
    )
    run, records = import_file(write(tmp_path, failed))
    assert run.cells[0].figures is None
    assert [r.outcome for r in records["qps 2"]] == ["timeout", "http_error", "http_error", "malformed"]


REFUSED = {
    "no request": (summarised(completed=0, failed=0), "holds no request"),
    "empty arrays": (
        detailed(completed=1, **{k: [] for k, v in detailed().items() if isinstance(v, list)}),
        "holds no request",
    ),
    "arrays of mixed length": (detailed(ttfts=[0.1, 0.2, 0.3]), "different lengths"),
    "a negative time": (detailed(ttfts=[-0.1, 0.2, 0.3, 0.0]), "ttfts.0"),
    "a negative mean": (summarised(mean_ttft_ms=-1.0), "mean_ttft_ms"),
    "answered in no time": (detailed(ttfts=[0.0, 0.2, 0.3, 0.0]), "in no time"),
    "text for a number": (detailed(duration="2.5"), "duration"),
    "no duration": (detailed(duration=0.0), "duration"),
    "a date of another form": (detailed(date="2026-11-20"), "its date"),
    "an edited summary": (detailed(mean_ttft_ms=20.0), "mean ttft"),
    "tokens that do not add up": (detailed(total_output_tokens=900), "900 output tokens"),
    "answers that do not add up": (detailed(completed=4, failed=0), "4 requests completed"),
    "another tool": ({"hello": 1}, "no tool that is read here"),
    "a list": ([1], "no tool that is read here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    result, says = REFUSED[name]
    with pytest.raises(UserError, match=says) as error:
        import_file(write(tmp_path, result))
    assert "result.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [1, 50, 400])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path, detailed())
    path.write_text(path.read_text()[:-cut])
    with pytest.raises(UserError, match="not whole, valid JSON"):
        import_file(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, number: str) -> None:
    path = write(tmp_path, detailed())
    path.write_text(path.read_text().replace('"mean_ttft_ms": 200.0', f'"mean_ttft_ms": {number}'))
    with pytest.raises(UserError, match="not whole, valid JSON"):
        import_file(path)


def test_an_empty_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text(" \n")
    with pytest.raises(UserError, match="is empty"):
        import_file(tmp_path / "empty.json")
    with pytest.raises(UserError, match="not found"):
        import_file(tmp_path / "none.json")


def test_results_of_two_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="several models"):
        import_file(write(tmp_path, detailed(), detailed(model_id="other")))


times = st.floats(1e-4, 30, allow_nan=False)


@st.composite
def requests(draw: st.DrawFn) -> list[RequestRecord]:
    records = []
    for index in range(draw(st.integers(1, 12))):
        sent = draw(st.floats(0, 100))
        gaps = draw(st.lists(times, max_size=6))
        chunks = tuple(np.cumsum([sent + draw(times), *gaps]).tolist())
        tokens = draw(st.integers(1, 20))
        ok = index == 0 or draw(st.booleans())
        records.append(
            RequestRecord(
                index=index,
                sent=sent,
                chunks=chunks if ok else (),
                done=chunks[-1] if ok else None,
                prompt_tokens=draw(st.integers(1, 500)),
                output_tokens=tokens if ok else 0,
                tokens_from="tool",
                outcome="ok" if ok else "http_error",
                error="" if ok else "Bad Gateway",
            )
        )
    return records


def as_vllm(records: list[RequestRecord], clock: float) -> dict[str, Any]:
    """Records as vLLM would have kept them: all that it makes of its outputs, written anew from its source."""
    good = [r for r in records if r.outcome == "ok"]
    gaps = [np.diff(r.chunks).tolist() if r.chunks else [] for r in records]
    ttfts = [r.chunks[0] - r.sent if r.chunks else 0.0 for r in records]
    latencies = [r.chunks[-1] - r.sent if r.chunks else 0.0 for r in records]
    tpots = [(r.chunks[-1] - r.chunks[0]) / (r.output_tokens - 1) for r in good if r.output_tokens > 1]
    pooled = [gap for row in gaps for gap in row]
    return detailed(
        request_rate="inf",
        max_concurrency=None,
        num_prompts=len(records),
        completed=len(good),
        failed=len(records) - len(good),
        total_output_tokens=sum(r.output_tokens for r in good),
        input_lens=[r.prompt_tokens for r in records],
        output_lens=[r.output_tokens for r in records],
        ttfts=ttfts,
        itls=gaps,
        latencies=latencies,
        start_times=[clock + r.sent for r in records],
        queue_times=[0.0] * len(records),
        generated_texts=[""] * len(records),
        errors=[r.error for r in records],
        mean_ttft_ms=float(np.mean([t for t, r in zip(ttfts, records, strict=True) if r.outcome == "ok"])) * 1000,
        mean_tpot_ms=float(np.mean(tpots or 0)) * 1000,
        mean_itl_ms=float(np.mean(pooled or 0)) * 1000,
    )


@settings(max_examples=150, deadline=None)
@given(requests(), st.floats(0, 1e5))
def test_records_survive_the_way_through_vllms_file(
    tmp_path_factory: pytest.TempPathFactory, records: list[RequestRecord], clock: float
) -> None:
    path = write(tmp_path_factory.mktemp("vllm"), as_vllm(records, clock))
    run, back = import_file(path)
    ours, theirs = metrics.figures(records), run.cells[0].figures
    assert ours is not None
    assert theirs is not None
    assert theirs.model_dump(exclude={"lag"}) == approximately(ours.model_dump(exclude={"lag"}))
    assert [r.outcome for r in back[run.cells[0].name]] == [r.outcome for r in records]


def approximately(value: Any) -> Any:
    """Equal but for the rounding of a clock that started elsewhere."""
    if isinstance(value, dict):
        return {key: approximately(inner) for key, inner in value.items()}
    return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
