"""The one form in which benchmarks leave their figures: bench/results/NAME.json."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from portlab_spec.files import write_json
from portlab_spec.report import versions

RESULTS = Path(__file__).parent / "results"


def origin(*distributions: str, evidence: str = "measured") -> dict[str, Any]:
    """Where, when and with what figures were made, and of what kind they are."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    return {
        "evidence": evidence,
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": versions(*distributions),
        "commit": commit,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_result(
    name: str,
    distributions: tuple[str, ...],
    figures: dict[str, Any],
    ratios: dict[str, float],
    *,
    evidence: str = "measured",
    **more: Any,
) -> Path:
    """Write the figures of one run and return the file.

    Args:
        name: of the benchmark and its nox session.
        distributions: packages whose versions matter.
        figures: contender -> values.
        ratios: what is compared -> a number from this same run.
        evidence: "measured", or what kind the values are of: compiled, published, modelled.
        more: anything else that is to be read beside them.
    """
    path = RESULTS / f"{name}.json"
    write_json(path, {**origin(*distributions, evidence=evidence), "figures": figures, "ratios": ratios, **more})
    return path


def cpu_name() -> str:
    """The processor as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
