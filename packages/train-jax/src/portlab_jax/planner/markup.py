"""What plans are shown with in HTML: tables, bars, legends."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from portlab_spec.markup import Content, node


def tag(evidence: str) -> Element:
    """A small label that says what kind of figure something is."""
    return node("span", evidence, class_="tag")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: over it, with the unit.
        evidence: of its figures, "" where it holds none.
        text: whether it is set to the left.
    """

    name: str
    evidence: str = ""
    text: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], caption: str = "") -> Element:
    """A table that scrolls by itself where it is wider than the screen."""

    def cell(kind: str, column: Column, *content: Content) -> Element:
        return node(kind, *content, class_="text" if column.text else "number")

    heads = [cell("th", c, c.name, " ", tag(c.evidence)) if c.evidence else cell("th", c, c.name) for c in columns]
    lines = [node("tr", *(cell("td", c, text) for c, text in zip(columns, row, strict=True))) for row in rows]
    parts = [node("thead", node("tr", *heads)), node("tbody", *lines)]
    if caption:
        parts.insert(0, node("caption", caption))
    return node("div", node("table", *parts), class_="wide")


@dataclass(frozen=True)
class Bar:
    """A rectangle of a chart.

    Attributes:
        kind: what it stands for; names its colour.
        start, size: along the axis, in its unit.
        says: what to show when pointed at.
        top, height: in pixels.
    """

    kind: str
    start: float
    size: float
    says: str
    top: int = 3
    height: int = 24


def bars(
    parts: Sequence[Bar], scale: float, says: str, marks: Sequence[tuple[str, float]], *, hatched: bool = False
) -> Element:
    """Bars side by side as SVG whose widths are shares of the room there is.

    Args:
        parts: the bars.
        scale: what the full width stands for.
        says: the chart in words.
        marks: kind and place of lines across the bars.
        hatched: strike the bars through.
    """

    def rectangle(start: float, size: float, **attributes: str) -> Element:
        return node("rect", x=f"{100 * start / scale:.3f}%", width=f"{100 * size / scale:.3f}%", **attributes)

    drawn = []
    for part in parts:
        place = {"y": str(part.top), "height": str(part.height)}
        drawn.append(rectangle(part.start, part.size, class_=part.kind.replace(" ", "-"), **place))
        drawn[-1].append(node("title", part.says))
        if hatched:
            drawn.append(rectangle(part.start, part.size, fill="url(#hatch)", **place))
    for kind, at in marks:
        drawn.append(node("rect", x=f"{100 * at / scale:.3f}%", y="0", width="3", height="30", class_=kind))
    return node("svg", *drawn, class_="bar", role="img", aria_label=says)


def swatch(kind: str, *, hatched: bool = False) -> Element:
    """A square of a legend."""
    squares = [node("rect", width="12", height="12", class_=kind.replace(" ", "-"))]
    if hatched:
        squares.append(node("rect", width="12", height="12", fill="url(#hatch)"))
    return node("svg", *squares, width="12", height="12", aria_hidden="true")


def hatch() -> Element:
    """The pattern that `bars` strikes through with; a page that uses it holds it once."""
    lines = node("path", d="M0,8 L8,0 M-2,2 L2,-2 M6,10 L10,6", class_="hatching")
    pattern = node("pattern", lines, id="hatch", width="8", height="8", patternUnits="userSpaceOnUse")
    return node("svg", node("defs", pattern), width="0", height="0", class_="hidden", aria_hidden="true")
