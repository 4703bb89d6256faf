"""From counts to seconds and dollars, by hand."""

from datetime import date

import pytest
from canned_plans import canned_program

from portlab_jax.planner.estimate import EFFICIENCY, Roofline, estimate, roofline
from portlab_spec.hardware import CHIPS, parse_slice
from portlab_spec.prices import Price

V5E = CHIPS["v5e"]  # 197 TFLOP/s, 819 GB/s, 400 GB/s over all links in both directions
PRICE = Price(
    sku="v5e",
    provider="gcp",
    region="any",
    plan="on_demand",
    usd_per_hour=1.2,
    unit="chip",
    as_of=date(2026, 9, 17),
    source="https://example.com/prices",
)


TORUS = parse_slice("v5e-16")  # 4x4: the inner chips use all their links


def counts(compute, hbm, ici, chip=V5E):
    """A program that keeps the resources of a device busy for so many seconds."""
    per = chip.devices
    sent = {"all-gather": round(ici * chip.ici_bandwidth / 2 / per)} if ici else {}
    return canned_program(flops=compute * chip.bf16_flops / per, bytes=hbm * chip.hbm_bandwidth / per, sent=sent)


@pytest.mark.parametrize(
    ("busy", "bound"), [((3, 2, 1), "compute"), ((1, 3, 2), "hbm"), ((2, 1, 3), "ici"), ((1, 0.5, 0), "compute")]
)
def test_the_slowest_resource_bounds(busy, bound):
    found = roofline(counts(*busy), TORUS)
    assert (found.compute, found.hbm, found.ici) == pytest.approx(busy)
    assert (found.bound, found.seconds) == (bound, pytest.approx(max(busy)))


def test_peaks_are_those_of_the_sheet():
    program = canned_program(flops=197e12, bytes=819e9, sent={"all-gather": 150 * 10**9, "all-reduce": 50 * 10**9})
    assert roofline(program, TORUS) == Roofline(1.0, 1.0, 1.0)


def test_a_device_of_a_chip_with_two_has_half_of_it():
    program = canned_program(flops=2307e12, bytes=7380e9, sent={"all-gather": 600 * 10**9})
    assert roofline(program, parse_slice("tpu7x-128")) == Roofline(2.0, 2.0, 2.0)


def test_links_that_leave_the_slice_carry_nothing():
    program = canned_program(flops=1, bytes=1, sent={"all-gather": 75 * 10**9})
    assert roofline(program, parse_slice("v5e-8")).ici == pytest.approx(0.5)  # three of four links: 300 GB/s
    assert roofline(program, TORUS).ici == pytest.approx(0.375)


def test_one_device_needs_no_links():
    assert roofline(counts(1, 1, 0), parse_slice("v5e-1")).ici == 0


def test_a_run_is_steps_over_the_efficiency():
    # Two seconds a step by the bound, four at half of it; 900 steps are an hour of eight chips at $1.20.
    found = estimate(
        [(900, counts(2, 1, 1))],
        parse_slice("v5e-8"),
        rows=32,
        tokens=8000.0,
        steps=900,
        price=PRICE,
        efficiency=0.5,
    )
    assert found.step_seconds == pytest.approx(4)
    assert found.tokens_per_second == pytest.approx(2000)
    assert found.examples_per_second == pytest.approx(8)
    assert found.hours == pytest.approx(1)
    assert found.usd == pytest.approx(8 * 1.2)
    assert found.usd_per_million_tokens == pytest.approx(9.6 / 7.2)


def test_a_run_is_paid_by_the_chip_whatever_its_devices():
    tpu7x = CHIPS["tpu7x"]
    price = PRICE.model_copy(update={"sku": "tpu7x", "usd_per_hour": 12.0})
    part = parse_slice("tpu7x-8")
    assert (part.chips, part.devices) == (4, 8)
    found = estimate([(1, counts(1800, 1, 1, tpu7x))], part, rows=1, tokens=1.0, steps=1, price=price, efficiency=0.5)
    assert found.usd == pytest.approx(4 * 12.0)


def test_shapes_count_by_their_steps():
    shapes = [(30, counts(1, 3, 0.5)), (10, counts(9, 1, 0.5))]
    found = estimate(shapes, TORUS, rows=32, tokens=1.0, steps=40, price=None, efficiency=1.0)
    assert (found.roofline.compute, found.roofline.hbm, found.roofline.ici) == pytest.approx((3, 2.5, 0.5))
    # Each step is bound by a resource of its own, so that their mean is more than any resource's mean.
    assert found.step_seconds == pytest.approx((30 * 3 + 10 * 9) / 40)
    assert found.hours == pytest.approx(40 * 4.5 / 3600)


def test_without_a_price_there_is_time_and_no_cost():
    found = estimate([(1, counts(1, 1, 0))], parse_slice("v5e-8"), rows=1, tokens=1.0, steps=1, price=None)
    assert (found.usd, found.usd_per_million_tokens) == (None, None)
    assert found.step_seconds == pytest.approx(1 / EFFICIENCY)
