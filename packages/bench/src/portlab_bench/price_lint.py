"""Prices that cannot be: held against every dated price of the same chip, and searched for mixed-up units.

How far prices of one chip and one way of paying really lie apart, in `portlab_spec`'s list of November 2026 and in
SkyPilot's catalogue: on-demand and commitments of one provider within 1.2x over regions; spot of one generation 3.7x
over regions of one catalogue, and down to 3.9x below the dated records; one GPU on demand 2.8x over providers. A price
outside the known range by more than that is refused.
"""

from collections.abc import Sequence

from portlab_bench.machines import Machine
from portlab_bench.roofline import Verdict
from portlab_spec.prices import Plan, Price, load_prices

LISTED, SPOT, PROVIDERS = 1.25, 4.0, 2.8
_NEAR = 0.03  # rounding of prices that are printed with two digits


def check_price(
    machine: Machine, usd_per_hour: float, plan: Plan | None = None, *, prices: Sequence[Price] | None = None
) -> Verdict:
    """Hold what a whole machine is said to cost for an hour against the known prices of its chip.

    Args:
        machine: the slice or GPUs.
        usd_per_hour: of all of it.
        plan: way of paying; None if the source does not say.
        prices: known ones; the shipped by default.
    """
    records = load_prices() if prices is None else prices
    known = [price for price in records if price.sku == machine.chip.name]
    if not known:
        return Verdict(True)
    same = [price for price in known if price.plan == plan]
    each = usd_per_hour / machine.chips
    counted = same or known
    factor = _spread(machine, plan if same else None)
    low = min(price.usd_per_hour for price in counted) / factor
    high = max(price.usd_per_hour for price in counted) * factor
    if low <= each <= high:
        return Verdict(True, f"${each:.2f} a chip lies within the known {low:.2f} to {high:.2f}")
    mixed = _mixed_up(machine, usd_per_hour, known)
    said = f" {plan}" if plan and same else ""
    return Verdict(
        False,
        f"${usd_per_hour:,.2f}/h for {machine.name} is ${each:.2f} a {_unit(machine)}; known{said} prices allow "
        f"${low:.2f} to ${high:.2f}" + (f"; it is {mixed}" if mixed else ""),
    )


def _spread(machine: Machine, plan: Plan | None) -> float:
    if plan in (None, "spot"):
        return SPOT
    return LISTED if machine.part else PROVIDERS


def _mixed_up(machine: Machine, usd: float, known: Sequence[Price]) -> str:
    """A known price that the figure would be in another unit or way of paying; "" if there is none."""
    unit, guesses = _unit(machine), {}
    for price in known:
        whole = price.usd_per_hour * machine.chips
        guesses[price.usd_per_hour] = f"the {price.plan} price of one {unit}, not of {machine.name}"
        guesses[whole * machine.chips] = f"the {price.plan} price of {machine.name}, taken for that of one {unit}"
        guesses[whole] = f"the {price.plan} price"
        if machine.part and int(machine.name.rpartition("-")[2]) == 2 * machine.chips:
            guesses[whole / 2] = f"the {price.plan} price with cores taken for chips"
            guesses[whole * 2] = f"the {price.plan} price with the name's number taken for chips"
    near = [(abs(usd / guess - 1), text) for guess, text in guesses.items() if abs(usd / guess - 1) <= _NEAR]
    near += [(abs(usd / guess - 1), f"near {text}") for guess, text in guesses.items() if text.endswith(" price")]
    best = min(near, default=(1.0, ""))
    return best[1] if best[0] <= 0.05 else ""


def _unit(machine: Machine) -> str:
    return "chip" if machine.part else "GPU"
