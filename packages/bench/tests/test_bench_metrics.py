"""Definitions, by hand; intervals, by simulation."""

import math

import numpy as np
import pytest

from portlab_bench import metrics
from portlab_bench.schema import RequestRecord


def record(index=0, sent=0.0, chunks=(), tokens=None, **more) -> RequestRecord:
    tokens = len(chunks) if tokens is None else tokens
    done = more.pop("done", (chunks[-1] if chunks else sent) + 0.1)
    return RequestRecord(index=index, sent=sent, chunks=chunks, output_tokens=tokens, done=done, **more)


A = record(0, 1.0, (1.5, 1.6, 1.8), tokens=5, prompt_tokens=10, scheduled=0.9, finish="stop", tokens_from="usage")
B = record(1, 2.0, (2.25,), tokens=1, prompt_tokens=30, scheduled=2.0, finish="length", tokens_from="usage")
C = record(2, 2.5, (), outcome="http_error", done=3.0, scheduled=2.5)
D = record(3, 0.0, (0.1, 0.2), warm_up=True, scheduled=0.0)


def test_every_definition_by_hand():
    f = metrics.figures([A, B, C, D], objectives={"ttft": 0.3}, client_load=0.25)
    assert f is not None
    assert f.duration == pytest.approx(2.25 - 1.0)
    assert (f.requests, f.outcomes, f.finishes) == (3, {"ok": 2, "http_error": 1}, {"stop": 1, "length": 1})
    assert f.ttft.mean == pytest.approx((0.5 + 0.25) / 2)
    assert (f.tpot.count, f.tpot.mean) == (1, pytest.approx(0.3 / 4))  # B has one token and no TPOT
    assert f.itl.count == 2
    assert f.itl.mean == pytest.approx(0.15)
    assert f.e2e.maximum == pytest.approx(0.8)
    assert f.normalised.maximum == pytest.approx(0.25)  # B: 0.25 s for one token; A: 0.16
    assert f.lag.maximum == pytest.approx(0.1)
    assert f.failed_after.mean == pytest.approx(0.5)
    assert f.request_throughput == pytest.approx(2 / 1.25)
    assert f.output_throughput == pytest.approx(6 / 1.25)
    assert f.prompt_throughput == pytest.approx(40 / 1.25)
    assert f.goodput == pytest.approx(1 / 1.25)  # B alone meets 0.3 s
    assert f.attainment == pytest.approx(1 / 3)  # the failure does not
    assert f.concurrency == pytest.approx((0.9 + 0.35 + 0.5) / 1.25)
    assert f.tokens_from == {"usage": 2}
    assert f.prefix_hits is None


def test_tokens_that_came_in_one_event_say_nothing_of_the_time_between_them():
    whole = record(0, 1.0, (1.5,), tokens=20, tokens_from="usage")
    assert metrics.tpot(whole) is None
    assert metrics.meets(whole, {"tpot": 1e-9})  # nothing to hold against it


def test_an_answer_without_tokens_is_no_answer():
    f = metrics.figures([A, record(1, 2.0, (), finish="stop")])
    assert f.outcomes == {"ok": 1, "empty": 1}
    assert f.request_throughput == pytest.approx(1 / 0.8)


def test_nothing_answered_has_no_figures():
    assert metrics.figures([C]) is None
    assert metrics.figures([D]) is None
    assert metrics.figures([]) is None


def test_prompt_tokens_are_unknown_if_one_answer_does_not_say():
    f = metrics.figures([A, B.model_copy(update={"prompt_tokens": None})])
    assert (f.prompt_tokens, f.prompt_throughput) == (None, None)


def test_cached_tokens_of_answers_stand_in_for_the_servers_metrics():
    said = [r.model_copy(update={"cached_tokens": 5}) for r in (A, B)]
    assert metrics.figures(said).prefix_hits == pytest.approx(10 / 40)
    assert metrics.figures([said[0], B]).prefix_hits is None  # one does not say
    assert metrics.figures(said, prefix_hits=0.5).prefix_hits == 0.5


def test_one_token_meets_any_tpot_and_a_failure_meets_nothing():
    assert metrics.meets(B, {"tpot": 1e-9})
    assert not metrics.meets(A, {"tpot": 1e-9})
    assert not metrics.meets(C, {"ttft": 100.0})


def test_quantiles_are_numpys():
    values = np.random.default_rng(0).exponential(1, 1000)
    found = metrics.distribution(values).quantiles
    for name, q in metrics.QUANTILES.items():
        assert found[name].value == pytest.approx(np.quantile(values, q))


def test_intervals_hold_the_truth_in_95_of_100_samples():
    rng = np.random.default_rng(1)
    covered = dict.fromkeys(("mean", "p50", "p90", "p99"), 0)
    truth = {"mean": 1.0, **{f"p{q}": -math.log(1 - q / 100) for q in (50, 90, 99)}}
    rounds = 400
    for _ in range(rounds):
        d = metrics.distribution(rng.exponential(1, 600))
        covered["mean"] += d.mean_low <= truth["mean"] <= d.mean_high
        for name in ("p50", "p90", "p99"):
            covered[name] += d.quantiles[name].low <= truth[name] <= d.quantiles[name].high
    for name, count in covered.items():
        assert 0.92 <= count / rounds <= 0.995, name


def test_a_sample_too_small_for_an_interval_has_none():
    d = metrics.distribution([1.0, 2.0, 3.0])
    assert d.quantiles["p99"].low is None
    assert metrics.distribution([1.0]).mean_low is None
    assert metrics.distribution([]) is None
    # Student's t of two degrees: 4.303 s / sqrt(3)
    assert d.mean_high - d.mean == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)


@pytest.mark.parametrize(("freedom", "t"), [(3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1000, 1.9623)])
def test_students_t_of_the_tables(freedom, t):
    assert metrics._t95(freedom) == pytest.approx(t, rel=5e-3)


def test_the_knee_is_the_last_rate_before_the_first_failure():
    assert metrics.knee([(4, 0.5), (1, 1.0), (2, 0.995), (8, 1.0)]) == 2
    assert metrics.knee([(1, 0.5)]) is None
    assert metrics.knee([]) is None
