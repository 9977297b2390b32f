"""A line chart as SVG, without a library. Called by `findings`, one picture a claim.

It knows nothing of runs: lines are points with a name and a number that gives the colour.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 40, 52
"""Margins; the right one has the names."""

COLOURS = (
    "#1b6ca8", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#00897b", "#8d6e63", "#e07a1f", "#5c6bc0", "#9e2a8d",
    "#607d3b", "#455a64", "#c2185b",
)  # fmt: skip

Points = Sequence[tuple[float, float]]


class Line(NamedTuple):
    """One line, and dots beside it."""

    name: str
    """Empty: it has no place among the names."""
    points: Points
    colour: int
    dots: Points = ()
    faint: bool = False


def picture(title: str, across: str, up: str, lines: Sequence[Line], places: Sequence[tuple[float, str]] = ()) -> str:
    """The chart. `across` and `up` name the axes; `places` are the marks of the first, if they are not to be numbers."""
    every = [point for line in lines for point in (*line.points, *line.dots)]
    x = _Axis([point[0] for point in every], LEFT, WIDTH - RIGHT)
    y = _Axis([point[1] for point in every], HEIGHT - BOTTOM, TOP)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, across, "middle"),
        f'<text transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(up)}</text>',
    ]
    for value, label in places or x.marks():
        at = x.of(value)
        parts += [
            f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>',
            _text(at, HEIGHT - BOTTOM + 18, label, "middle"),
        ]
    for value, label in y.marks():
        at = y.of(value)
        parts += [f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#eee"/>', _text(LEFT - 6, at + 4, label, "end")]
    for line in lines:
        colour = COLOURS[line.colour % len(COLOURS)]
        size = 2 if line.points else 4
        way = "L".join(f"{x.of(a):.1f} {y.of(b):.1f}" for a, b in line.points)
        thin = ' stroke-width=".7" opacity=".45"' if line.faint else ' stroke-width="2"'
        parts += [f'<path d="M{way}" fill="none" stroke="{colour}"{thin}/>'] if way else []
        parts += [f'<circle cx="{x.of(a):.1f}" cy="{y.of(b):.1f}" r="{size}" fill="{colour}"/>' for a, b in line.dots]
    named = [line for line in lines if line.name]
    for row, line in enumerate(named):
        at, colour = TOP + 10 + 20 * row, COLOURS[line.colour % len(COLOURS)]
        thin = ' stroke-width=".7" opacity=".45"' if line.faint else ' stroke-width="3"'
        parts.append(f'<path d="M{WIDTH - RIGHT + 14} {at}h18" stroke="{colour}"{thin}/>')
        parts.append(_text(WIDTH - RIGHT + 38, at + 4, line.name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    """From values to pixels."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        low, high = min(values), max(values)
        room = 0.04 * (high - low) or 0.5
        self.low, self.high, self.first, self.last = low - room, high + room, first, last

    def of(self, value: float) -> float:
        """Where a value is."""
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def marks(self) -> list[tuple[float, str]]:
        """Four to ten round values with their texts."""
        step = 10.0 ** len(str(int(self.high - self.low)))
        while (self.high - self.low) / step < 4:
            step /= 2 if f"{step:e}"[0] != "5" else 2.5
        first = int(self.low // step) + 1
        values = [step * n for n in range(first, int(self.high // step) + 1)]
        return [(value, f"{value:.6g}") for value in values]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
