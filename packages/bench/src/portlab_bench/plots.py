"""Plots as SVG: points and lines over two axes, and bars. Marks tell the evidence, colours the machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from portlab_bench.evidence import COLORS, Evidence
from portlab_spec.markup import node

WIDTH, HEIGHT = 680, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 16, 52
# Okabe and Ito's colours, which the colour-blind can tell apart.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999933")


@dataclass(frozen=True)
class Series:
    """Points of one machine and one kind.

    Attributes:
        name: in the legend.
        evidence: of all of its points.
        points: (x, y).
        says: per point, what to show when pointed at.
        line: whether they are joined.
    """

    name: str
    evidence: Evidence
    points: tuple[tuple[float, float], ...]
    says: tuple[str, ...]
    line: bool = False


Scales = tuple[bool, bool]


def scatter(title: str, x: str, y: str, series: Sequence[Series], *, log: Scales = (True, True)) -> Element:
    """A plot; axes are logarithmic where `log` says so, and then all values must be positive."""
    shown = [s for s in series if s.points]
    xs = [p[0] for s in shown for p in s.points]
    ys = [p[1] for s in shown for p in s.points]
    if not xs:
        return node("p", f"{title}: nothing to show.")
    across = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, log[0])
    up = _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP, log[1])
    parts = [*_frame(x, y, across, up)]
    names = list(dict.fromkeys(s.name for s in shown))
    for s in shown:
        color = PALETTE[names.index(s.name) % len(PALETTE)]
        places = [(across.at(px), up.at(py)) for px, py in s.points]
        if s.line and len(places) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            parts.append(node("polyline", points=path, fill="none", stroke=color, stroke_width="1.5"))
        for (px, py), says in zip(places, s.says, strict=True):
            parts.append(_mark(s.evidence, px, py, color, f"{s.name}: {says} ({s.evidence})", small=s.line))
    for number, name in enumerate(names):
        top = TOP + 10 + 18 * number
        kinds = list(dict.fromkeys(s.evidence for s in shown if s.name == name))
        for place, kind in enumerate(kinds):
            parts.append(_mark(kind, WIDTH - RIGHT + 18 + 14 * place, top, PALETTE[number % len(PALETTE)], kind))
        parts.append(_label(name, WIDTH - RIGHT + 26 + 14 * len(kinds), top + 4, "start"))
    return _figure(title, parts, HEIGHT)


def bars(title: str, unit: str, rows: Sequence[tuple[str, float, float | None, Evidence]]) -> Element:
    """Bars, a row each: name, value, limit (a line across; None for none), evidence (its colour)."""
    if not rows:
        return node("p", f"{title}: nothing to show.")
    top = max(max(value, limit or 0) for _, value, limit, _ in rows) * 1.05
    left, width, parts = 250, WIDTH - 250 - 90, []
    for number, (name, value, limit, kind) in enumerate(rows):
        at = 8 + 24 * number
        size = width * value / top
        parts.append(_label(name, left - 8, at + 13, "end"))
        bar = node("rect", x=str(left), y=str(at), width=f"{size:.1f}", height="16", fill=COLORS[kind])
        bar.append(node("title", f"{name}: {value:,.2f} {unit} ({kind})"))
        parts.append(bar)
        end = size
        if limit is not None:
            end = max(end, width * limit / top)
            parts.append(
                node("rect", x=f"{left + width * limit / top:.1f}", y=str(at - 2), width="2", height="20", fill="#d00")
            )
        parts.append(_label(f"{value:,.1f} {unit}", left + end + 8, at + 13, "start"))
    return _figure(title, parts, 16 + 24 * len(rows))


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        """Pixel of a value."""
        low, high = self.bounds
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    @property
    def bounds(self) -> tuple[float, float]:
        """Ends of the axis, with room around the values."""
        if self.log:
            if self.low <= 0:
                raise ValueError("a logarithmic axis has no place for zero")
            return self.low / 1.25, self.high * 1.25
        return 0.0, self.high * 1.08 or 1.0

    def ticks(self) -> list[float]:
        """Round values along it."""
        low, high = self.bounds
        if self.log:
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            return [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
        step = 10 ** math.floor(math.log10(high / 4))
        step *= next(m for m in (1, 2, 5, 10) if high / (m * step) <= 6)
        return [step * n for n in range(math.floor(high / step) + 1)]


def _frame(x: str, y: str, across: _Axis, up: _Axis) -> list[Element]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in across.ticks():
        at = across.at(value)
        parts.append(_rule(at, TOP, at, bottom))
        parts.append(_label(_tick(value), at, bottom + 16, "middle"))
    for value in up.ticks():
        at = up.at(value)
        parts.append(_rule(LEFT, at, right, at))
        parts.append(_label(_tick(value), LEFT - 6, at + 4, "end"))
    parts.append(_label(x, (LEFT + right) / 2, HEIGHT - 14, "middle"))
    turned = _label(y, 14, (TOP + bottom) / 2, "middle")
    turned.set("transform", f"rotate(-90 14 {(TOP + bottom) / 2:.1f})")
    return [*parts, turned]


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def _rule(x1: float, y1: float, x2: float, y2: float) -> Element:
    return node("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", stroke="#ddd")


def _label(words: str, x: float, y: float, anchor: str) -> Element:
    return node("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def _mark(kind: Evidence, x: float, y: float, color: str, says: str, *, small: bool = False) -> Element:
    """Round and full: measured; a rhombus: compiled; a square: published; round and empty: modelled."""
    r = 2.5 if small else 5.0
    if kind == "published":
        made = node("rect", x=f"{x - r:.1f}", y=f"{y - r:.1f}", width=f"{2 * r}", height=f"{2 * r}", fill=color)
    elif kind == "compiled":
        corners = f"{x:.1f},{y - r:.1f} {x + r:.1f},{y:.1f} {x:.1f},{y + r:.1f} {x - r:.1f},{y:.1f}"
        made = node("polygon", points=corners, fill=color)
    else:
        fill = color if kind == "measured" else "white"
        made = node("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{r}", fill=fill, stroke=color, stroke_width="1.5")
    made.append(node("title", says))
    return made


def _figure(title: str, parts: Sequence[Element], height: int) -> Element:
    drawn = node("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title)
    return node("figure", node("figcaption", title), drawn)
