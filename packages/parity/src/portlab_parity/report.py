"""A comparison in words, and as JSON."""

from typing import Any

import numpy as np

from portlab_parity.causes import Finding
from portlab_parity.compare import ROUNDING, TOLERANCES, Comparison

NO_CAUSE = "none of the known ones explains it; the numbers above are all that is certain"


def describe(comparison: Comparison, finding: Finding | None, untested: str = "") -> str:
    """Lines for a terminal, without colour."""
    first, second = comparison.backends
    unit = f"roundings of {comparison.dtype}, {ROUNDING[comparison.dtype]:.1e} of a value"
    difference = comparison.difference
    if difference is None:
        lines = [f"{first} and {second} agree. Largest errors in {unit}:"]
    else:
        stage = f"{difference.stage} of step {difference.step}" if difference.step else difference.stage
        before = f"Errors before, in {unit}:" if comparison.errors else "Nothing was compared before."
        lines = [f"{first} and {second} part in: {stage}. {before}"]
    for name, error in comparison.errors.items():
        tolerance = getattr(TOLERANCES[name], comparison.dtype)
        said = "equal" if not error else f"{error:,.1f}"
        lines.append(f"  {name:<22}{said:>12}   of {tolerance:,} allowed" if tolerance else f"  {name:<22}{said:>12}")
    if difference is None:
        return "\n".join(lines)
    values = difference.values
    at = f": {values[0]:.6g} and {values[1]:.6g}" if values else ""
    far = "not a matter of rounding"
    if np.isfinite(difference.error):
        far = f"{difference.error:,.0f} roundings where {difference.tolerance:,} are allowed"
    share = f", {difference.share:.1%} of the tensor beyond that" if difference.share < 1 else ""
    lines += [
        f"where  {difference.tensor}, {difference.where}{at}",
        f"far    {far}{share}",
    ]
    if finding is None:
        lines.append(f"cause  {NO_CAUSE}")
        if untested:
            lines.append(f"       {untested}")
    else:
        lines += [
            f"cause  {finding.cause.name}, in {finding.backend}: {finding.said}",
            f"mend   {finding.cause.fix}",
        ]
    return "\n".join(lines)


def as_json(comparison: Comparison, finding: Finding | None) -> dict[str, Any]:
    """For a machine."""
    difference = comparison.difference
    found: dict[str, Any] = {
        "backends": list(comparison.backends),
        "dtype": comparison.dtype,
        "agree": difference is None,
        "errors": {name: round(error, 1) for name, error in comparison.errors.items()},
    }
    if difference is not None:
        found["difference"] = {
            "stage": difference.stage,
            "step": difference.step,
            "tensor": difference.tensor,
            "where": difference.where,
            "roundings": difference.error if np.isfinite(difference.error) else None,
            "tolerance": difference.tolerance,
            "values": list(difference.values) if difference.values else None,
        }
        found["cause"] = None if finding is None else finding.cause.name
        if finding is not None:
            found |= {"backend": finding.backend, "said": finding.said, "fix": finding.cause.fix}
    return found
