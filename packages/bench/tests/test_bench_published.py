"""Figures of others: what is refused, why, and that nothing else is."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_bench import roofline
from portlab_bench.machines import parse_machine
from portlab_bench.price_lint import check_price
from portlab_bench.published import find_published, load_published
from portlab_spec.errors import UserError
from portlab_spec.models.published import published_config
from portlab_spec.prices import load_prices

CONFIG = published_config("google/gemma-4-31B-it")
assert CONFIG
# By hand: q, o 32 heads; 50 sliding layers (256 wide, k and v of 16 heads), 10 full (512 wide, k of 4 heads, no v).
_D, _MLP = 5376, 21504
LINEARS = 50 * (_D * 256 * (32 * 2 + 16 * 2) + 3 * _D * _MLP) + 10 * (_D * 512 * (32 * 2 + 4) + 3 * _D * _MLP)
HEAD = 262144 * _D

IMPOSSIBLE = {
    "devto-gemma4-5fon-prefill",
    "groundy-v6e-4-price",
    "rvllm-v6e-4-price",
    # Whole bursts and long prompts before which no chip could have been: see docs/bench-tables.md.
    "paper-short-v6e-8-ttft",
    "paper-short-2xh100-ttft",
    "paper-max-v6e-8-ttft",
    "paper-max-2xh100-ttft",
}


def valid() -> dict[str, Any]:
    return {
        "id": "x",
        "model": "google/gemma-4-31B-it",
        "machine": "v6e-8",
        "workload": "some",
        "metric": "output_throughput",
        "value": 100.0,
        "unit": "tokens/s",
        "as_of": "2026-05",
        "dated": "read",
        "source": "https://example.org",
    }


def write(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "published.json"
    path.write_text(json.dumps(list(records)))
    return path


def test_weights_are_counted_as_by_hand() -> None:
    size = roofline.base_size(CONFIG)
    assert (size.linears, size.head) == (LINEARS, HEAD)


def test_bounds_by_hand() -> None:
    machine = parse_machine("v6e-4")
    assert roofline.prefill_limit(CONFIG, machine) == pytest.approx(4 * 918e12 / (2 * LINEARS))
    assert roofline.decode_limit(CONFIG, machine, "w8a16", 1) == pytest.approx(4 * 1638e9 / (LINEARS + HEAD))
    assert roofline.decode_limit(CONFIG, machine, "bf16", 10**6) == pytest.approx(4 * 918e12 / 2 / (LINEARS + HEAD))
    one = roofline.ttft_limit(CONFIG, machine, 1000)
    assert one == pytest.approx(1000 * 2 * LINEARS / (4 * 918e12))
    assert roofline.ttft_limit(CONFIG, machine, 1000, burst=30) == pytest.approx(15 * one)
    assert roofline.train_limit(CONFIG, machine, method="full") < roofline.train_limit(CONFIG, machine)


def test_the_impossible_is_refused_and_nothing_else() -> None:
    assert {record.id for record in load_published() if record.refused} == IMPOSSIBLE


def test_the_prefill_figure_is_caught_by_the_roofline() -> None:
    record = find_published("devto-gemma4-5fon-prefill")
    assert record.value == 463_345
    assert "7.4x the bound" in (record.refused or "")


def test_the_price_is_caught_by_the_lint() -> None:
    record = find_published("groundy-v6e-4-price")
    assert record.value == 0.40
    assert "$0.10 a chip" in (record.refused or "")


def test_the_prices_that_ship_pass_their_own_lint() -> None:
    for price in load_prices():
        machine = parse_machine(
            {"v5e": "v5e-8", "v5p": "v5p-8", "v6e": "v6e-8", "tpu7x": "tpu7x-8"}.get(price.sku, price.sku)
        )
        assert check_price(machine, price.usd_per_hour * machine.chips, price.plan).ok, price


@pytest.mark.parametrize(
    ("machine", "usd", "plan", "says"),
    [
        ("v5p-8", 4.20, "on_demand", "price of one chip, not of v5p-8"),
        ("v5p-8", 16.80 * 4, "on_demand", "taken for that of one chip"),
        ("v5p-8", 16.80 * 2, "on_demand", "number taken for chips"),
        ("v5p-8", 16.80 / 2, "on_demand", "cores taken for chips"),
        ("v6e-4", 5.20, "on_demand", "flex_start"),
        ("v5e-8", 8 * 0.12, "on_demand", "known on_demand prices"),  # ten times too little, as once hard-coded
    ],
)
def test_unit_mix_ups_are_named(machine: str, usd: float, plan: Any, says: str) -> None:
    verdict = check_price(parse_machine(machine), usd, plan)
    assert not verdict.ok
    assert says in verdict.why


@pytest.mark.parametrize("usd", [4.35, 9.72, 10.80, 2.90])  # spot of v6e-8 by region, 3.7x apart
def test_spot_prices_of_all_regions_pass(usd: float) -> None:
    assert check_price(parse_machine("v6e-8"), usd, "spot").ok


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"unit": "ms"}, "is given in tokens/s"),
        ({"unit": "tokens/s/chip"}, "is given in tokens/s"),
        ({"value": 0}, "greater than 0"),
        ({"value": -1}, "greater than 0"),
        ({"value": "NaN"}, "value"),
        ({"value": "Infinity"}, "value"),
        ({"as_of": "2026"}, "no date"),
        ({"as_of": "2026-13"}, "no date"),
        ({"as_of": None}, "as_of"),
        ({"source": ""}, "source"),
        ({"surprise": 1}, "surprise"),
        ({"against": "2xH100"}, "ratio"),
        ({"metric": "mfu", "unit": "share", "value": 45.5}, "at most 1"),
        ({"refused": "because"}, "guards refuse"),
        ({"verdict": {"ok": True}}, "guards refuse"),
        ({"batch": 0}, "batch"),
    ],
)
def test_bad_records_are_refused_with_their_name(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_published(write(tmp_path, valid() | change))
    assert "record 1 (x)" in str(caught.value)


@pytest.mark.parametrize("key", ["id", "model", "machine", "workload", "metric", "value", "unit", "as_of", "source"])
def test_a_missing_key_is_an_error(tmp_path: Path, key: str) -> None:
    record = valid()
    del record[key]
    with pytest.raises(UserError, match=key):
        load_published(write(tmp_path, record))


def test_files_that_are_no_list_of_records(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for text in ("{}", "[]", "[1]", '[{"id": "x"', ""):
        path.write_text(text)
        with pytest.raises(UserError):
            load_published(path)
    with pytest.raises(UserError, match="twice"):
        load_published(write(tmp_path, valid(), valid()))


@given(st.floats(min_value=1e-3, max_value=1e9), st.integers(1, 4096), st.sampled_from(["v5p-8", "v6e-8", "2xH100"]))
def test_a_rate_is_refused_exactly_above_its_bound(rate: float, batch: int, name: str) -> None:
    limit = roofline.decode_limit(CONFIG, parse_machine(name), "bf16", batch)
    assert roofline.check_rate("x", rate, limit).ok == (rate <= limit * roofline.SLACK)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(st.sampled_from([*valid(), "rate", "batch", "burst", "precision", "plan", "against", "other"]), json_values)
def test_any_value_of_a_key_is_read_or_refused_with_one_clear_error(key: str, value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "published.json"
        path.write_text(json.dumps([valid() | {key: value}]))
        try:
            (record,) = load_published(path)
        except UserError:
            return
    assert record.value > 0
    assert record.source
    assert record.unit == "tokens/s"
