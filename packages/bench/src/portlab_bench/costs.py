"""Dated prices of a machine, and what an hour's price makes of a million tokens."""

from collections.abc import Sequence

from portlab_bench.evidence import Figure, combined
from portlab_bench.machines import Machine
from portlab_spec.prices import Plan, Price, load_prices

PLANS: tuple[Plan, ...] = ("on_demand", "spot", "flex_start", "committed_1y", "committed_3y")
PLAN_NAMES: dict[Plan, str] = {
    "on_demand": "on demand",
    "spot": "spot",
    "flex_start": "flex-start",
    "committed_1y": "1 year",
    "committed_3y": "3 years",
}


def price_of(
    machine: Machine,
    plan: Plan = "on_demand",
    *,
    provider: str | None = None,
    region: str | None = None,
    prices: Sequence[Price] | None = None,
) -> Price | None:
    """The cheapest dated price of a chip of the machine; None if there is none by these wishes."""
    found = [
        price
        for price in (load_prices() if prices is None else prices)
        if price.sku == machine.chip.name
        and price.plan == plan
        and provider in (None, price.provider)
        and region in (None, price.region)
    ]
    return min(found, key=lambda price: (price.usd_per_hour, price.provider, price.region)) if found else None


def hourly(machine: Machine, price: Price) -> Figure:
    """US dollars for an hour of the whole machine."""
    return Figure(
        value=price.usd_per_hour * machine.chips,
        unit="USD/h",
        evidence="published",
        record=price.source,
        date=price.as_of.isoformat(),
        note=f"{price.provider}, {price.region}, {PLAN_NAMES[price.plan]}",
    )


def per_million(throughput: Figure, hour: Figure) -> Figure:
    """US dollars for a million tokens at a throughput in tokens per second, all of the hour used."""
    return _made(hour.value / (throughput.value * 3600 / 1e6), "USD/Mtoken", throughput, hour)


def for_hours(hours: Figure, hour: Figure, overhead: Figure | None = None) -> Figure:
    """US dollars for hours of work, and for the seconds before them."""
    paid = hours.value + (overhead.value / 3600 if overhead else 0)
    return _made(paid * hour.value, "USD", *filter(None, (hours, hour, overhead)))


def _made(value: float, unit: str, work: Figure, hour: Figure, *more: Figure) -> Figure:
    return Figure(
        value=value,
        unit=unit,
        evidence=combined((work, hour, *more)),
        record=work.record,
        date=work.date,
        note=f"at {hour.value:,.2f} USD/h ({hour.note}, {hour.date}, {hour.record})",
    )
