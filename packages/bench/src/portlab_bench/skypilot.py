"""Prices from a catalogue file of SkyPilot (github.com/skypilot-org/skypilot-catalog, catalogs/v*/CLOUD/vms.csv).

Its rows need care, which is why they are not simply read:

- TPU rows are priced by the slice; a price here is of one chip, and v5p names count cores.
- An unknown price is 700.0 (`TPU_V6E_MAX_PRICE` of its own fetcher).
- On Google Cloud, a GPU and the machine around it are two rows, of which neither is a price of a GPU that one can rent.
- Zones repeat their region's price, and slices of one generation their chip's.
- The file holds no date: it must be given.

A number that is none refuses the whole file; a row that is of no use is counted with its reason.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.hardware import CHIPS, parse_slice
from portlab_spec.prices import Plan, Price

COLUMNS = (
    "InstanceType",
    "vCPUs",
    "MemoryGiB",
    "AcceleratorName",
    "AcceleratorCount",
    "GpuInfo",
    "Region",
    "AvailabilityZone",
    "Price",
    "SpotPrice",
)
SENTINEL = 700.0
_GPUS = {"H100": "h100", "H200": "h200", "A100": "a100-40", "A100-80GB": "a100-80", "L4": "l4"}
# Clouds whose GPU rows are whole machines; of others nobody has checked it.
_WHOLE = ("aws", "azure", "lambda", "runpod", "nebius")
_PLANS: dict[str, Plan] = {"Price": "on_demand", "SpotPrice": "spot"}


@dataclass(frozen=True)
class Imported:
    """What a catalogue holds.

    Attributes:
        prices: each once, sorted.
        skipped: how many rows by reason.
    """

    prices: tuple[Price, ...]
    skipped: Mapping[str, int]


def read_catalogue(path: Path, *, provider: str, as_of: date, source: str) -> Imported:
    """Prices of a catalogue file.

    Args:
        path: the CSV.
        provider: whose it is: "google", "aws", ...
        as_of: day on which its prices held, which the file does not say.
        source: address and version of the file.

    Raises:
        UserError: no such file, other columns, a row that is cut off, or a price that is no positive number; the
            message names the line. Also if nothing in it is of use.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("catalogue not found", where=str(path), fix="Check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"is no text ({error.reason})", where=str(path), fix="Give the CSV as SkyPilot has it"
        ) from None
    lines = io.StringIO(text, newline="")
    found = parse_catalogue(lines, provider=provider, as_of=as_of, source=source, where=str(path))
    if not found.prices:
        reasons = "; ".join(f"{count} rows: {reason}" for reason, count in found.skipped.items()) or "no rows"
        raise UserError(f"no price of a chip that is described here ({reasons})", where=str(path))
    return found


def parse_catalogue(lines: Iterable[str], *, provider: str, as_of: date, source: str, where: str) -> Imported:
    """As `read_catalogue`, of lines."""
    if not provider or not source:
        raise UserError("a price needs its provider and its source", where=where)
    rows = csv.reader(lines)
    head = next(_rows(rows, where), [])
    if missing := [name for name in COLUMNS if name not in head]:
        raise UserError(f"the columns {', '.join(missing)} are missing", where=where, fix="Give SkyPilot's vms.csv")
    prices: dict[tuple[str, str, str, float], Price] = {}
    skipped: Counter[str] = Counter()
    for row in _rows(rows, where):
        place = f"{where}, line {rows.line_num}"
        if len(row) != len(head):
            raise UserError(
                f"{len(row)} fields for {len(head)} columns", where=place, fix="The file is cut off or edited"
            )
        named = dict(zip(head, row, strict=True))
        chip, count, reason = _what(named, provider, place)
        for column, plan in _PLANS.items():
            usd = _number(named[column], f"{place}, {column}")
            if usd is None:
                continue
            if reason or usd == SENTINEL:
                skipped[reason or "700.0 stands for an unknown price"] += 1
                continue
            each = round(usd / count, 6)
            key = (chip, named["Region"], plan, round(each, 4))
            if key in prices:
                skipped["the same price again"] += 1
                continue
            prices[key] = Price(
                sku=chip,
                provider=provider,
                region=named["Region"],
                plan=plan,
                usd_per_hour=each,
                unit="chip" if CHIPS[chip].ici_links else "gpu",
                as_of=as_of,
                source=source,
                note=f"1/{count} of {named['AcceleratorName'] or named['InstanceType']}" if count > 1 else "",
            )
    ordered = sorted(prices.values(), key=lambda price: (price.sku, price.region, price.plan, price.usd_per_hour))
    return Imported(tuple(ordered), dict(skipped))


def _rows(rows: Any, where: str) -> Iterator[list[str]]:
    """Rows that are not empty.

    Raises:
        UserError: what the CSV reader cannot split.
    """
    try:
        yield from filter(None, rows)
    except csv.Error as error:
        raise UserError(
            f"is no CSV ({error})", where=f"{where}, line {rows.line_num}", fix="Restore the file"
        ) from None


def _what(row: Mapping[str, str], provider: str, place: str) -> tuple[str, int, str]:
    """Chip, how many, and why the row is of no use; "" if it is of use."""
    name = row["AcceleratorName"].strip()
    if not name:
        return "", 1, "no accelerator"
    if not row["Region"].strip():
        return "", 1, "no region"
    number = _number(row["AcceleratorCount"], f"{place}, AcceleratorCount") or 1.0
    if name.lower().startswith("tpu"):
        try:
            part = parse_slice(name.lower().removeprefix("tpu-"))
        except UserError:
            return "", 1, "a slice that is not described here"
        return part.chip.name, part.chips * round(number), ""
    if name not in _GPUS:
        return "", 1, "a GPU that is not described here"
    if provider not in _WHOLE:
        return "", 1, "a GPU without its machine, or a machine without its GPU"
    if number != round(number):
        return "", 1, "a part of a GPU"
    return _GPUS[name], round(number), ""


def _number(text: str, place: str) -> float | None:
    """A positive number; None if the field is empty."""
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{text!r} is not a positive number", where=place, fix="Restore the file")
    return value
