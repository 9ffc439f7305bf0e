"""`python -m docs.examples.demo_picture FILE.svg`: run the demo and keep its comparisons as a picture.

The picture loads no font from elsewhere. It leaves out the bars of the training, whose times are those of one machine;
docs/pictures/demo-recording.svg has them: `make demo`, recorded with asciinema and drawn by svg-term.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME

from docs.examples import demo
from docs.examples.demo_checks import Story, report

WIDTH = 80


def draw(story: Story, path: Path) -> bool:
    """Compare, write what a terminal shows of it, and return whether all claims hold."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH)
    passed = report(story, console)
    plain = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title="make demo", theme=SVG_EXPORT_THEME, code_format=plain, unique_id="demo")
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")
    return passed


if __name__ == "__main__":
    runs = demo.train()
    sys.exit(runs is None or not draw(runs, Path(sys.argv[1])))
