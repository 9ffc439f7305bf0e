"""Line plots of the report: figures of HTML and SVG, whose labels keep their size on any screen."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MAX_STRETCHES = 300
"""A drawn line has at most this many stretches, and each stretch has two points."""
_MAX_TICKS = 6
_RESUME = '<path class="dashed" d="M{:.1f} 0V200"><title>resumed from step {}</title></path>'
STYLE = """
.plot { position: relative; height: 12rem; margin: .6rem .8rem 1.6rem 4.2rem; font-size: .75rem; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; fill: none; stroke-width: 2; overflow: visible; }
.plot svg * { vector-effect: non-scaling-stroke; }
.plot .grid { stroke: var(--line); stroke-width: 1; } .dashed { stroke: var(--soft); stroke-dasharray: 4 3; }
.plot span { position: absolute; color: var(--soft); font-variant-numeric: tabular-nums; white-space: nowrap; }
.plot .y { right: 100%; padding-right: .5rem; transform: translateY(50%); }
.plot .x { top: 100%; padding-top: .2rem; transform: translateX(-50%); }
"""
"""CSS; the page defines the colours."""


@dataclass(frozen=True, slots=True)
class Line:
    """Values by step, in the order of the steps, as finite numbers."""

    name: str
    color: str
    """The name of a CSS variable."""
    points: Sequence[tuple[int, float]]


def plot(lines: Sequence[Line], resumed: Iterable[int]) -> str:
    """Return a figure with axes. `resumed`: steps that get a dashed mark. No line without a point may be given."""
    steps = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    across, down = _Axis(min(steps), max(steps), 1000), _Axis(min(values), max(values), 200)
    y_ticks, x_ticks = ticks(down.low, down.high), [t for t in ticks(across.low, across.high) if t == int(t)]
    grid = "".join(f'<path class="grid" d="M0 {200 - down.at(tick):.1f}H1000"/>' for tick in y_ticks)
    grid += "".join(f'<path class="grid" d="M{across.at(tick):.1f} 0V200"/>' for tick in x_ticks)
    inside = [step for step in resumed if across.low <= step <= across.high]
    marks = "".join(_RESUME.format(across.at(step), step) for step in inside)
    drawn = "".join(_polyline(line, across, down) for line in lines)
    labels = "".join(f'<span class="y" style="bottom:{down.at(t) / 2:.2f}%">{_number(t)}</span>' for t in y_ticks)
    labels += "".join(f'<span class="x" style="left:{across.at(t) / 10:.2f}%">{_number(t)}</span>' for t in x_ticks)
    svg = f'<svg viewBox="0 0 1000 200" preserveAspectRatio="none">{grid}{drawn}{marks}</svg>'
    caption = "; ".join(map(_caption, lines)) + "; dashed: a resume" * bool(inside)
    return f'<figure><figcaption>{caption}</figcaption><div class="plot">{svg}{labels}</div></figure>'


def ticks(low: float, high: float) -> list[float]:
    """Return at most six round numbers from `low` to `high`, evenly spaced; one number if there is no other between."""
    span = high - low
    unit = 10.0 ** (math.floor(math.log10(span)) - 1) if span > 0 else 0.0
    if unit == 0.0 or low + unit == low:
        return [low]
    for factor in (1, 2, 5, 10, 20, 50):
        first, last = math.ceil(low / (unit * factor)), math.floor(high / (unit * factor))
        if last - first < _MAX_TICKS:
            return [n * (unit * factor) for n in range(first, last + 1)]
    return [low]


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    length: float

    def at(self, value: float) -> float:
        """Return the place of a value, from 0 to `length`; that of the only value is the middle."""
        span = self.high - self.low
        return (value - self.low) / span * self.length if span else self.length / 2


def _polyline(line: Line, across: _Axis, down: _Axis) -> str:
    """Draw a line through points, of each stretch the lowest and the highest, so that no spike is lost."""
    width = len(line.points) // _MAX_STRETCHES + 1
    stretches = [line.points[at : at + width] for at in range(0, len(line.points), width)]
    kept = [p for few in stretches for p in sorted({min(few, key=lambda p: p[1]), max(few, key=lambda p: p[1])})]
    path = " ".join(f"{across.at(x):.1f},{200 - down.at(y):.1f}" for x, y in kept)
    return f'<polyline points="{path}" stroke="var({line.color})"/>'


def _caption(line: Line) -> str:
    low, high = min(value for _, value in line.points), max(value for _, value in line.points)
    steps = f"of steps {line.points[0][0]} to {line.points[-1][0]}"
    name = f'<b style="color:var({line.color})">{html.escape(line.name)}</b>'
    return f"{name} {steps}, from {low:.4g} to {high:.4g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e12 else f"{value:.6g}"
