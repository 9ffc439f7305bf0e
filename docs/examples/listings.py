"""`python -m docs.examples.listings`: redraw the listings of docs/tools.md at 80 columns.

A block that begins with `$ titan-ckpt` is such a listing. The run that it looks at is made first, in a new folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

from titan_ckpt.cli.main import main
from titan_ckpt.config import from_dict
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.trainer import Trainer

PAGE = Path(__file__).parents[1] / "tools.md"
_BLOCK = re.compile(r"^```console\n\$ titan-ckpt ([^\n]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def make_run(output_folder: str = "outputs/run", num_steps: int = 12) -> None:
    """Train half of the steps, go on to the end, save six times, and export twice each time."""
    for steps in (num_steps // 2, num_steps):
        settings = {
            "output_folder": output_folder,
            "model": {"flavor": "debug-0.5m"},
            "data": {"sequence_length": 16, "tokenizer": 300},
            "training": {"steps": steps, "batch_size": 1, "device": "cpu"},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {
                "save": {"interval": num_steps // 6, "keep": {"latest": 2, "best": 1}},
                "export": [{"format": "hf"}, {"format": "dcp", "folder": "dcp-exports"}],
            },
        }
        Trainer(from_dict(RunConfig, settings)).run()


def redrawn(page: str) -> str:
    """Return the page with its listings as the commands print them here and now, in the folder of the run."""

    def draw(match: re.Match[str]) -> str:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            main(shlex.split(match[1]))
        lines = "".join(f"{line.rstrip()}\n" for line in shown.getvalue().splitlines())
        return f"```console\n$ titan-ckpt {match[1]}\n{lines}```"

    return _BLOCK.sub(draw, page)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_run()
        text = redrawn(text)
    PAGE.write_text(text, encoding="utf-8")
