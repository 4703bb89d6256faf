"""Prices: dated and sourced, or refused; the cheapest that meets the wishes; old ones are called old."""

import json
from datetime import date

import pytest

from portlab_spec.errors import UserError
from portlab_spec.hardware import CHIPS
from portlab_spec.prices import find_price, load_prices

RECORD = {
    "sku": "v6e",
    "provider": "google",
    "region": "us-east5",
    "plan": "on_demand",
    "usd_per_hour": 2.7,
    "unit": "chip",
    "as_of": "2026-09-17",
    "source": "https://cloud.google.com/tpu/pricing",
}


@pytest.fixture
def write(tmp_path):
    def write_list(*records):
        path = tmp_path / "prices.json"
        path.write_text(json.dumps(records))
        return path

    return write_list


def test_the_shipped_prices_load_and_every_tpu_of_today_has_one():
    on_demand = {price.sku for price in load_prices() if price.plan == "on_demand"}
    assert {"v5e", "v5p", "v6e", "tpu7x", "h100", "h200"} <= on_demand


@pytest.mark.parametrize(("chip", "usd"), [("v5e", 1.20), ("v5p", 4.20), ("v6e", 2.70), ("tpu7x", 12.00)])
def test_list_prices_on_demand(chip, usd):
    assert find_price(chip, provider="google").usd_per_hour == usd


def test_longer_commitments_cost_less():
    for chip in ("v5e", "v5p", "v6e", "tpu7x"):
        plans = ("committed_3y", "committed_1y", "on_demand")
        usd = [find_price(chip, plan=plan).usd_per_hour for plan in plans]
        assert usd == sorted(usd)


def test_the_same_offer_is_listed_once():
    keys = [(p.sku, p.provider, p.region, p.plan, p.note) for p in load_prices()]
    assert len(keys) == len(set(keys))


def test_the_cheapest_region_is_taken_unless_one_is_given():
    assert find_price("v6e", plan="spot").region == "us-east5"
    assert find_price("v6e", plan="spot", region="europe-west4").usd_per_hour == 1.78


def test_the_cheapest_provider_is_taken_unless_one_is_given():
    assert find_price("h100").provider == "runpod"
    assert find_price("h100", provider="google").usd_per_hour == pytest.approx(88.49 / 8)


def test_a_wish_that_nobody_meets_lists_what_there_is():
    with pytest.raises(UserError, match=r"no price of v5p for google, mars, on_demand.*google us-east1 on_demand"):
        find_price("v5p", provider="google", region="mars")


def test_a_chip_without_any_price_says_so():
    assert "l4" in CHIPS
    with pytest.raises(UserError, match="no price is known for l4"):
        find_price("l4")


def test_a_price_list_of_ones_own(write):
    prices = load_prices(write(RECORD, RECORD | {"region": "here", "usd_per_hour": 1.5}))
    assert find_price("v6e", prices=prices).region == "here"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"as_of": None}, "as_of: Field required"),
        ({"source": None}, "source: Field required"),
        ({"source": ""}, "source: String should have at least 1 character"),
        ({"as_of": "last summer"}, "as_of: Input should be a valid date"),
        ({"usd_per_hour": 700.0}, "usd_per_hour: 700 is not a price"),
        ({"usd_per_hour": 0}, "usd_per_hour: 0 is not a price"),
        ({"usd_per_hour": -1}, "usd_per_hour: -1 is not a price"),
        ({"sku": "v9"}, "sku: 'v9' is none of v4, v5e"),
        ({"plan": "free"}, "plan: Input should be 'on_demand'"),
        ({"unit": "gpu"}, "a v6e is priced by the chip"),
        ({"currency": "EUR"}, "currency: Extra inputs are not permitted"),
    ],
)
def test_a_bad_record_is_refused_by_name(change, message, write):
    record = {key: value for key, value in (RECORD | change).items() if value is not None}
    with pytest.raises(UserError, match=message) as refused:
        load_prices(write(RECORD, record))
    assert f"record 2 ({record['sku']} google us-east5 {record['plan']})" in str(refused.value)


@pytest.mark.parametrize(("content", "message"), [("{}", "must be a list"), ("[1]", "record 1: "), ("[", "not.*JSON")])
def test_a_file_that_is_no_price_list_is_refused(content, message, tmp_path):
    path = tmp_path / "prices.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_prices(path)


def test_a_price_is_stale_after_half_a_year(write):
    (price,) = load_prices(write(RECORD))
    assert price.age_days(date(2026, 9, 27)) == 10
    assert price.stale_warning(date(2027, 3, 16)) is None  # 180 days
    assert price.stale_warning(date(2027, 3, 17)) == (
        "The price of v6e (google, us-east5, on_demand, $2.70/h) is 181 days old: "
        "it is of 2026-09-17, from https://cloud.google.com/tpu/pricing"
    )
