"""The commands that begin a training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from titan_ckpt.cli.command import Command
from titan_ckpt.cli.new_run import Init

__all__ = ["Init", "Train"]


@dataclass(frozen=True)
class Train(Command):
    """Train a model as a TOML file says: titan-ckpt train run.toml [--table.key VALUE ...]."""

    config: tyro.conf.Positional[Path]
    """The TOML file; `titan-ckpt init` writes one, `titan-ckpt train --list` lists every setting."""

    def run(self, console: Console) -> int:
        raise AssertionError("main hands this command on")
