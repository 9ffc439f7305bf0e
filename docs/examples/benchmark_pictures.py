"""`python -m docs.examples.benchmark_pictures`: draw docs/benchmarks.md's tables of seconds as bars, beside the page.

A picture is wanted where the page has an image `pictures/benchmark-NAME.svg`; it shows the table right above the image.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "benchmarks.md"
_PICTURE = re.compile(r"((?:^\|.*\n)+)\n!\[([^]]*)\]\((pictures/benchmark-[\w-]+\.svg)\)", flags=re.MULTILINE)
_CELL = re.compile(r"([\d.]+)(?: \((?:([\d.]+) to )?([\d.]+)\))?")
_OURS, _LIMIT = "titan_ckpt", "limit"
_LABELS, _BARS, _ROW = 300, 380, 24
"""Width of the labels and of the longest bar, and height of a row."""
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1d2430; } .head { font-weight: 600; } .soft { fill: #5d6778; }
.ours { fill: #2563c9; } .peer { fill: #b9c2cf; } .limit { fill: none; stroke: #8a94a6; stroke-dasharray: 3 2; }
.range { stroke: #1d2430; }
@media (prefers-color-scheme: dark) { text { fill: #e6e9ef; } .soft { fill: #9aa5b5; } .ours { fill: #6ea8ff; }
  .peer { fill: #4a5566; } .range { stroke: #e6e9ef; } }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One measure of one row."""

    label: str
    median: float
    lowest: float
    highest: float


def pictures(page: str) -> Iterator[tuple[str, str]]:
    """Yield the file and the SVG of every picture that the page wants."""
    for table, title, file in _PICTURE.findall(page):
        yield file, draw(title, list(panels(table)))


def panels(table: str) -> Iterator[tuple[str, list[Bar]]]:
    """Yield each column of seconds with its bars; a column "fastest to slowest" is the range of the one before it."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    ranges = head.index("fastest to slowest") if "fastest to slowest" in head else None
    for column in range(1, len(head)):
        if column == ranges:
            continue
        bars = []
        for row in rows:
            if (cell := _CELL.fullmatch(row[column])) is None:
                continue
            median, ends = float(cell[1]), [float(end) for end in cell.groups()[1:] if end]
            if ranges == column + 1:
                ends = [float(end) for end in row[ranges].split(" to ")]
            bars.append(Bar(row[0].replace("`", ""), median, min([median, *ends]), max([median, *ends])))
        name = re.sub(r",? s( \(fastest\))?$|^seconds$", "", head[column])
        yield f"{name}, seconds".removeprefix(", "), bars


def draw(title: str, columns: list[tuple[str, list[Bar]]]) -> str:
    """Return the SVG; every column has a scale of its own."""
    parts, y = [f'<text class="head" x="8" y="20">{html.escape(title)}</text>'], 34
    for name, bars in columns:
        longest = max(bar.median for bar in bars)
        parts.append(f'<text class="soft" x="{_LABELS}" y="{y + 14}">{html.escape(name)}</text>')
        y += _ROW
        for bar in bars:
            parts.append(_row(bar, y, _BARS / longest))
            y += _ROW
        y += 8
    width = _LABELS + _BARS + 72
    size = f'viewBox="0 0 {width} {y}" width="{width}" height="{y}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{_STYLE}</style>\n' + (
        "\n".join(parts) + "\n</svg>\n"
    )


def _row(bar: Bar, y: int, scale: float) -> str:
    kind = "ours" if bar.label.startswith(_OURS) else "limit" if bar.label.startswith(_LIMIT) else "peer"
    label, end = html.escape(bar.label), _LABELS + bar.median * scale
    drawn = f'<text x="{_LABELS - 8}" y="{y + 15}" text-anchor="end">{label}</text>'
    drawn += f'<rect class="{kind}" x="{_LABELS}" y="{y + 3}" width="{bar.median * scale:.1f}" height="16"/>'
    low, high = _LABELS + bar.lowest * scale, min(_LABELS + bar.highest * scale, _LABELS + _BARS)
    if bar.lowest < bar.highest:
        drawn += f'<path class="range" d="M{low:.1f} {y + 11}H{high:.1f}"/>'
    return drawn + f'<text x="{max(end, high) + 6:.1f}" y="{y + 15}">{bar.median:g}</text>'


if __name__ == "__main__":
    for file, svg in pictures(PAGE.read_text(encoding="utf-8")):
        (PAGE.parent / file).write_text(svg, encoding="utf-8")
