"""What kind of figure a figure is. No cell of a table is without."""

from collections.abc import Iterable
from typing import Literal

from portlab_spec.conversation import Record

Evidence = Literal["measured", "compiled", "published", "modelled"]

# Sign and colour of each kind in tables; the colours can be told apart by the colour-blind and in print.
SIGNS: dict[Evidence, str] = {"measured": "●", "compiled": "◆", "published": "■", "modelled": "○"}
COLORS: dict[Evidence, str] = {
    "measured": "#1b7837",
    "compiled": "#2166ac",
    "published": "#762a83",
    "modelled": "#b35806",
}
MEANING: dict[Evidence, str] = {
    "measured": "by us, on the device that the row names; the record holds machine, versions and date",
    "compiled": "the TPU compiler's own figure for the TPU's program; nothing ran",
    "published": "by others; source and date stand in the record",
    "modelled": "calculated from the others; the record says how",
}
# From what is worth most to what is worth least: what is made of several kinds is of the last of them.
ORDER: tuple[Evidence, ...] = ("measured", "compiled", "published", "modelled")


class Figure(Record):
    """One figure with all that a reader must know of it.

    Attributes:
        value: in `unit`.
        unit: "s", "USD", "tokens/s", "GiB", ...
        evidence: its kind.
        record: where it stands: a file of this repository with the key in it, or a source's address.
        date: of the measurement or the source, ISO 8601.
        note: what makes it differ from what the column promises; empty if nothing does.
    """

    value: float
    unit: str
    evidence: Evidence
    record: str
    date: str
    note: str = ""


def combined(figures: Iterable[Figure]) -> Evidence:
    """The kind of what is calculated from several figures, by nothing but their own arithmetic: the weakest."""
    return max((figure.evidence for figure in figures), key=ORDER.index)
