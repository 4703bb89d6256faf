"""What an accelerator costs by the hour, where, and who said so when.

`prices.json` holds dated, sourced records; a price without a date or a source is refused, because it cannot be told
from a stale one. Web articles are no source: they contradict every catalogue. All prices are for one chip or GPU, in
US dollars, without disks, traffic and taxes; of a virtual machine with eight GPUs, an eighth.

The shipped records were collected in November 2026 from public transcripts of the pages that they name, each with the
day on which it was made. Of Google's TPU page there are two, of 2026-09-17 and -18, which agree on the on-demand prices
of v5e, v6e and TPU7x; v5p, commitments and most regions rest on one. No spot price of v5p and TPU7x bears a date, so
there is none.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from portlab_spec.conversation import Record
from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.hardware import CHIPS

Plan = Literal["on_demand", "spot", "flex_start", "committed_1y", "committed_3y"]

_STALE_AFTER_DAYS = 180
_SENTINELS = {700.0}  # what SkyPilot's catalogue prints for an unknown price


def _check_amount(usd: float) -> float:
    if not (0 < usd < math.inf) or usd in _SENTINELS:
        raise ValueError(f"{usd:g} is not a price")
    return usd


def _check_chip(name: str) -> str:
    if name not in CHIPS:
        raise ValueError(f"{name!r} is none of {', '.join(CHIPS)}")
    return name


class Price(Record):
    """The price of one chip or GPU for an hour."""

    sku: Annotated[str, AfterValidator(_check_chip)] = Field(description="name of the chip, as in `hardware.CHIPS`")
    provider: str = Field(min_length=1)
    region: str = Field(min_length=1, description='region, or "any" where the provider has one price')
    plan: Plan
    usd_per_hour: Annotated[float, AfterValidator(_check_amount)]
    unit: Literal["chip", "gpu"]
    as_of: date = Field(description="day on which the source said so")
    source: str = Field(min_length=1)
    note: str = ""

    @model_validator(mode="after")
    def _check_unit(self) -> "Price":
        expected = "chip" if CHIPS[self.sku].ici_links else "gpu"
        if self.unit != expected:
            raise ValueError(f"a {self.sku} is priced by the {expected}, not by the {self.unit}")
        return self

    def age_days(self, today: date) -> int:
        """Days since the price was read."""
        return (today - self.as_of).days

    def stale_warning(self, today: date) -> str | None:
        """A sentence for the user if the price is older than half a year; None if it is not."""
        days = self.age_days(today)
        if days <= _STALE_AFTER_DAYS:
            return None
        return f"The price of {self} is {days} days old: it is of {self.as_of}, from {self.source}"

    def __str__(self) -> str:
        return f"{self.sku} ({self.provider}, {self.region}, {self.plan}, ${self.usd_per_hour:.2f}/h)"


def load_prices(path: Path | None = None) -> tuple[Price, ...]:
    """Records of a price file, of the shipped one by default.

    Raises:
        UserError: no such file, not JSON, or a record without date or source, with a sentinel for a price, or of a chip
            that is not in the hardware table; the message names the record.
    """
    if path is None:
        return _shipped()
    return _parse(read_json(path, "price list"), str(path))


def find_price(
    chip: str,
    *,
    provider: str | None = None,
    region: str | None = None,
    plan: Plan = "on_demand",
    prices: Sequence[Price] | None = None,
) -> Price:
    """The cheapest price of a chip that meets the wishes.

    Args:
        chip: its name in `hardware.CHIPS`.
        provider: of any provider if None.
        region: in any region if None.
        plan: way of paying.
        prices: records to look in; the shipped ones by default.

    Raises:
        UserError: there is none; the message lists what there is for this chip.
    """
    known = [price for price in (load_prices() if prices is None else prices) if price.sku == chip]
    if not known:
        raise UserError(
            f"no price is known for {chip}", fix="Give a price list that has one, dated and with its source"
        )
    found = [
        price
        for price in known
        if price.plan == plan and provider in (None, price.provider) and region in (None, price.region)
    ]
    if not found:
        wishes = ", ".join(wish for wish in (provider, region, plan) if wish)
        have = "; ".join(sorted(f"{price.provider} {price.region} {price.plan}" for price in known))
        raise UserError(f"no price of {chip} for {wishes}", fix=f"There are: {have}")
    return min(found, key=lambda price: (price.usd_per_hour, -price.as_of.toordinal(), price.provider, price.region))


@cache
def _shipped() -> tuple[Price, ...]:
    file = resources.files("portlab_spec") / "prices.json"
    with resources.as_file(file) as path:
        return _parse(read_json(path, "price list"), "prices.json")


def _parse(raw: Any, where: str) -> tuple[Price, ...]:
    if not isinstance(raw, list):
        raise UserError("a price list must be a list of records", where=where)
    return tuple(_parse_record(record, f"{where}, record {number}") for number, record in enumerate(raw, start=1))


def _parse_record(raw: Any, where: str) -> Price:
    name = ""
    if isinstance(raw, Mapping):
        name = " ".join(str(raw[key]) for key in ("sku", "provider", "region", "plan") if key in raw)
    try:
        return Price.model_validate(raw)
    except ValidationError as error:
        faults = "; ".join(_fault(e["loc"], e["msg"]) for e in error.errors())
        raise UserError(
            faults, where=f"{where} ({name})" if name else where, fix="A price needs its date and its source"
        ) from None


def _fault(loc: tuple[int | str, ...], message: str) -> str:
    key = ".".join(map(str, loc))
    message = message.removeprefix("Value error, ")
    return f"{key}: {message}" if key else message
