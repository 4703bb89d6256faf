"""The serving model: by hand, against a simulated queue, and against the figures that it was fitted to."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_bench.machines import parse_machine
from portlab_bench.published import find_published
from portlab_bench.serve_model import (
    FITTED_ON,
    MODEL,
    Efficiencies,
    ServeModel,
    Workload,
    fitted,
    kv_bytes,
    wait,
    weight_bytes,
)
from portlab_bench.serve_rows import checks, config_of
from portlab_spec.models.published import published_config

CONFIG = config_of(MODEL)
IDEAL = Efficiencies(1, 1, 1)


def test_cache_by_hand() -> None:
    sliding, full = 50 * 2 * 16 * 256 * 2, 10 * 2 * 4 * 512 * 2
    assert kv_bytes(CONFIG, 1000) == 1000 * (sliding + full)
    assert kv_bytes(CONFIG, 4000) == 1024 * sliding + 4000 * full  # the window is 1,024
    assert kv_bytes(CONFIG, 4000, windowed=False) == 4000 * (sliding + full)
    assert kv_bytes(CONFIG, 1000, ways=8) == 1000 * (sliding + 2 * full)  # 4 heads on 8 chips: each twice
    shared = published_config("google/gemma-4-E2B-it")
    assert shared
    own = sum(not kind.shares_kv for kind in shared.layers)
    assert 0 < own < len(shared.layers)
    assert kv_bytes(shared, 100) < kv_bytes(shared, 100, ways=8)


def test_weights_are_those_of_the_text_model() -> None:
    assert weight_bytes(CONFIG) == 2 * 30_697_345_340
    assert weight_bytes(CONFIG, "w4a16") == weight_bytes(CONFIG) / 4


def test_step_and_prefill_by_hand() -> None:
    machine = parse_machine("2xH100")
    serving = ServeModel(CONFIG, machine, efficiencies=IDEAL)
    weights = 29_286_727_680 + 262144 * 5376
    assert serving.step_seconds(0, 100) == pytest.approx(2 * weights / 6.7e12)
    each = serving.step_seconds(1, 100) - serving.step_seconds(0, 100)
    assert each == pytest.approx(kv_bytes(CONFIG, 100, 2) / 6.7e12 + 2 * weights / 1.978e15)
    # Two tokens see three pairs in every layer; 32 heads of 256 in 50 layers and of 512 in 10.
    attention = 4 * 3 * 32 * (50 * 256 + 10 * 512)
    assert serving.prefill_flops(2) == pytest.approx(2 * 2 * 29_286_727_680 + attention + 2 * 262144 * 5376)


def test_the_fit_meets_what_it_was_fitted_to() -> None:
    serving = ServeModel(CONFIG, parse_machine("v6e-8"))
    for identity in FITTED_ON:
        record = find_published(identity)
        assert record.batch
        assert serving.step_seconds(record.batch, 128) == pytest.approx(record.value, rel=0.02), identity
    found = fitted()
    assert 0 < found.sequences < found.weights < 1
    assert 0 < found.prefill < 1


def test_published_figures_that_it_never_saw_are_within_what_the_docs_say() -> None:
    free = [check for check in checks() if not check.fitted]
    assert len(free) >= 10
    assert {check.record.machine for check in free} == {"v6e-8", "2xH100"}
    for check in free:
        assert 0.45 < check.factor < 1.4, check.record.id


def test_the_published_cache_is_one_without_windows() -> None:
    """187,136 tokens on v6e-8: every layer holds every token, and the four global heads are there twice."""
    serving = ServeModel(CONFIG, parse_machine("v6e-8"))
    published = find_published("zimbres-kv-bf16").value
    assert serving.cache_bytes / kv_bytes(CONFIG, 1, 8, windowed=False) == pytest.approx(published, rel=0.03)
    assert serving.cache_bytes / (kv_bytes(CONFIG, 10**6, 8) / 10**6) > 3 * published


@pytest.mark.parametrize("busy", [0.2, 0.5, 0.8])
def test_waiting_as_in_a_simulated_queue(busy: float) -> None:
    rng = random.Random(7)
    now = free = 0.0
    waits = []
    for _ in range(200_000):
        now += rng.expovariate(busy)
        waits.append(max(0.0, free - now))
        free = max(free, now) + 1.0
    waits.sort()
    assert wait(busy, 1.0, 0.99) == pytest.approx(waits[int(0.99 * len(waits))], rel=0.1, abs=0.05)
    assert wait(busy, 2.0, 0.99) == pytest.approx(2 * wait(busy, 1.0, 0.99))


def test_an_overloaded_queue_has_no_wait() -> None:
    assert wait(0, 1.0, 0.99) == 0
    with pytest.raises(ValueError, match="no steady queue"):
        wait(1.0, 1.0, 0.5)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["v6e-8", "v5p-8", "2xH100", "2xH200", "tpu7x-8"]),
    st.integers(16, 4096),
    st.integers(16, 1024),
    st.floats(0.2, 3),
)
def test_the_capacity_meets_the_objective_and_a_little_more_does_not(
    name: str, prompt: int, output: int, objective: float
) -> None:
    serving, work = ServeModel(CONFIG, parse_machine(name)), Workload(prompt, output)
    point = serving.capacity(work, objective)
    if point is None:
        assert serving.at(1e-6, work) is None or serving.at(1e-6, work).ttft_p99 > objective  # type: ignore[union-attr]
        return
    assert point.ttft_p99 <= objective
    assert point.batch <= serving.max_batch(work)
    assert point.output_throughput == pytest.approx(point.rate * output)
    # Little's law: as many are under way as arrive while an answer is written.
    assert point.batch == pytest.approx(point.rate * output * point.tpot, rel=0.01) or point.batch < 1
    more = serving.at(point.rate * 1.01, work)
    assert more is None or more.ttft_p99 > objective


def test_what_does_not_fit_serves_nothing() -> None:
    serving = ServeModel(CONFIG, parse_machine("1xL4"))
    assert not serving.fits
    assert serving.capacity(Workload()) is None
