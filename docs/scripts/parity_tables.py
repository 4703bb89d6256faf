"""The two tables of docs/parity.md, from the code.

python docs/scripts/parity_tables.py
"""

from portlab_parity.causes import CAUSES
from portlab_parity.compare import TOLERANCES


def causes() -> str:
    """Every known cause: where it may show first, by what it is confirmed, and what to do."""
    lines = ["| cause | shows first in | confirmed by | mend |", "|---|---|---|---|"]
    lines += [f"| {c.name} | {', '.join(c.stages)} | {c.confirmed} | {c.fix} |" for c in CAUSES]
    return "\n".join(lines)


def tolerances() -> str:
    """What each stage may be off, in roundings, and why."""
    lines = ["| stage | float32 | bfloat16 | because |", "|---|---|---|---|"]
    lines += [f"| {name} | {t.float32:,} | {t.bfloat16:,} | {t.reason} |" for name, t in TOLERANCES.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{tolerances()}\n\n{causes()}")
