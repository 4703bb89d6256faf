"""`portlab-bench import-prices`: a price list from a SkyPilot catalogue; `collect`: the data file of compiled runs."""

import dataclasses
from datetime import date
from pathlib import Path

from portlab_bench.compiled import write_collected
from portlab_bench.skypilot import read_catalogue
from portlab_spec.errors import UserError
from portlab_spec.files import write_json


@dataclasses.dataclass(frozen=True)
class ImportPricesCommand:
    """Turn a SkyPilot catalogue (vms.csv) into a price list that plan-tpu and portlab-bench read."""

    catalogue: Path
    """The CSV."""
    as_of: str
    """Day on which its prices held, YYYY-MM-DD: the file does not say."""
    source: str
    """Where it is from, with the version."""
    out: Path
    """Price list to write."""
    provider: str = "google"
    """Whose catalogue it is."""


@dataclasses.dataclass(frozen=True)
class CollectCommand:
    """Gather what tables need of this repository's results into the file that the package ships."""

    results: Path = Path("bench/results")
    """Folder of results."""
    out: Path = Path("packages/bench/src/portlab_bench/data/compiled.json")
    """File to write."""


def run_import_prices(command: ImportPricesCommand) -> int:
    """Import, write, and say what was left out; 0."""
    try:
        day = date.fromisoformat(command.as_of)
    except ValueError:
        raise UserError("is no date", where=f"--as-of {command.as_of}", fix="Use YYYY-MM-DD") from None
    if day > date.today():
        raise UserError("lies in the future", where=f"--as-of {command.as_of}", fix="Give the day of the prices")
    found = read_catalogue(command.catalogue, provider=command.provider, as_of=day, source=command.source)
    write_json(command.out, [price.model_dump(mode="json") for price in found.prices])
    print(f"{len(found.prices)} prices written to {command.out}")
    for reason, count in sorted(found.skipped.items()):
        print(f"{count} left out: {reason}")
    return 0


def run_collect(command: CollectCommand) -> int:
    """Write the data file; 0."""
    write_collected(command.results, command.out)
    print(f"wrote {command.out}")
    return 0
