"""Small charts as inline SVG, drawn with the page's colours."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_WIDTH = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 106, 12, 12, 28
_PITCH = 24
_MAX_POINTS = 600


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a bar chart: its label, and its parts as (name, length, CSS colour)."""

    label: str
    parts: tuple[tuple[str, float, str], ...]


def lines(points: Sequence[tuple[float, float]], color: str, *, marks: Iterable[float] = (), height: int = 200) -> str:
    """Return a line through finite points; `marks` are dashed verticals. A long series is thinned, ends kept."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) < 2:
        return ""
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    first, last = finite[0][0], finite[-1][0]
    span_x, span_y = (last - first) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - first) / span_x * (_WIDTH - _LEFT - _RIGHT)
        return across, _TOP + (high - y) / span_y * (height - _TOP - _BOTTOM)

    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in _thinned(finite)))
    bottom = height - _BOTTOM
    drawn = [f'<polyline points="{path}" fill="none" stroke="var({color})" stroke-width="1.8"/>']
    for mark in marks:
        if first <= mark <= last:
            across, _ = place(mark, low)
            drawn.append(
                f'<line x1="{across:.1f}" x2="{across:.1f}" y1="{_TOP}" y2="{bottom}" stroke="var(--b)" '
                f'stroke-dasharray="4 3"><title>resumed from step {mark:g}</title></line>'
            )
    for value, y in ((high, _TOP + 10), (low, bottom)):
        drawn.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{_short(value)}</text>')
    drawn.append(f'<text x="{_LEFT}" y="{height - 8}">step {first:g}</text>')
    drawn.append(f'<text x="{_WIDTH - _RIGHT}" y="{height - 8}" text-anchor="end">step {last:g}</text>')
    drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" stroke="var(--line)"/>')
    return _svg(height, drawn)


def bars(rows: Sequence[Bar], unit: str) -> str:
    """Return stacked horizontal bars with a legend; every part has its length as a tooltip."""
    longest = max((sum(length for _, length, _ in row.parts) for row in rows), default=0.0) or 1.0
    drawn: list[str] = []
    across = float(_LEFT)
    for name, color in dict.fromkeys((name, color) for row in rows for name, _, color in row.parts):
        drawn.append(f'<rect x="{across:.0f}" y="4" width="11" height="11" rx="2" fill="var({color})"/>')
        drawn.append(f'<text x="{across + 16:.0f}" y="14">{html.escape(name)}</text>')
        across += 40 + 10 * len(name)
    for index, row in enumerate(rows):
        top, at = 30 + _PITCH * index, float(_LEFT)
        drawn.append(f'<text x="{_LEFT - 6}" y="{top + 14}" text-anchor="end">{html.escape(row.label)}</text>')
        for name, length, color in row.parts:
            width = length / longest * (_WIDTH - _LEFT - _RIGHT - 80)
            drawn.append(
                f'<rect x="{at:.1f}" y="{top}" width="{width:.1f}" height="17" fill="var({color})">'
                f"<title>{html.escape(name)}: {length:.3f} {unit}</title></rect>"
            )
            at += width
        total = sum(length for _, length, _ in row.parts)
        drawn.append(f'<text x="{at + 6:.1f}" y="{top + 14}">{total:.2f} {unit}</text>')
    return _svg(34 + _PITCH * len(rows), drawn)


def _short(value: float) -> str:
    """Return a number in at most six characters, or seven if it is negative, because labels are large on a phone."""
    text = f"{value:.3g}"
    if len(text.lstrip("-")) <= 6:
        return text
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most about 600 points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    width = len(points) / (_MAX_POINTS / 2)
    kept: list[tuple[float, float]] = [points[0]]
    for i in range(_MAX_POINTS // 2):
        stretch = points[int(i * width) : int((i + 1) * width)]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])} if stretch else set()
        kept += sorted(ends)
    return [*kept, points[-1]]


def _svg(height: int, drawn: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(drawn)}</svg>'
