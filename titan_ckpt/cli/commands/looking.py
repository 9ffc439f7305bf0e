"""The commands that look at checkpoints and runs, and change none."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro
from rich.console import Console

from titan_ckpt.cli import tables
from titan_ckpt.cli.command import DIFFERENT, SAME, Shown, place, print_json
from titan_ckpt.errors import ConfigError, CorruptCheckpointError


@dataclass(frozen=True)
class Ls(Shown):
    """List the steps and exports of a run, and why any folder is not a step."""

    takes_urls: ClassVar[bool] = True
    folder: tyro.conf.Positional[Path]
    """The run's folder, or its checkpoint folder; or its place in a bucket: s3://bucket/key, gs://, az://."""

    def run(self, console: Console) -> int:
        from titan_ckpt.tools.listing import list_run

        found = list_run(place(self.folder))
        return self.show(found, lambda: tables.listing(found, console))


@dataclass(frozen=True)
class Inspect(Shown):
    """Show what a checkpoint of any format holds: native step, Hugging Face folder, PEFT adapter, DCP."""

    takes_urls: ClassVar[bool] = True
    path: tyro.conf.Positional[Path]
    """Folder, file, or bucket's URL."""
    tensor: tyro.conf.Positional[str | None] = None
    """Show figures and a histogram of this tensor."""
    all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """List every tensor, not one line for equal layers; and the state of the run."""

    def run(self, console: Console) -> int:
        from titan_ckpt.tools import inspecting

        if self.tensor is not None:
            figures = inspecting.statistics(place(self.path), self.tensor)
            return self.show(figures, lambda: tables.statistics(figures, console))
        found = inspecting.inspect(place(self.path))
        return self.show(found, lambda: tables.content(found, console, everything=self.all))


@dataclass(frozen=True)
class Verify(Shown):
    """Read a checkpoint whole: digests of a native step; files, index and config of the other formats."""

    takes_urls: ClassVar[bool] = True
    damaged: ClassVar[int] = DIFFERENT
    path: tyro.conf.Positional[Path]
    """Folder, file, or bucket's URL."""

    def run(self, console: Console) -> int:
        from titan_ckpt.tools.verifying import verify

        try:
            found = verify(place(self.path))
        except CorruptCheckpointError as error:
            if self.json:
                print_json({"path": str(self.path), "whole": False, "faults": str(error).splitlines()})
            else:
                console.print(str(error), soft_wrap=True, markup=False, highlight=False)
            return DIFFERENT
        return self.show(found, lambda: tables.verified(found, console), whole=True)


@dataclass(frozen=True)
class Diff(Shown):
    """Compare two checkpoints of any formats and sharding: exit code 0 if they are the same, 1 if not."""

    takes_urls: ClassVar[bool] = True
    left: tyro.conf.Positional[Path]
    """Folder, file, or bucket's URL."""
    right: tyro.conf.Positional[Path]
    """Folder, file, or bucket's URL."""
    weights: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compare the model's weights alone, and neither optimizer, state nor settings."""
    top: int = 10
    """Number of differences of each kind that are shown."""
    config: Path | None = None
    """Folder of the model's config.json, if neither checkpoint has one."""

    def run(self, console: Console) -> int:
        from titan_ckpt.tools.difference import compare
        from titan_ckpt.training.launch.terminal import hide_foreign

        if self.top < 1:
            raise ConfigError([f"--top: expected a positive integer, found {self.top}"])

        hide_foreign()
        config = None if self.config is None else place(self.config)
        found = compare(place(self.left), place(self.right), config=config, weights_only=self.weights)
        self.show(found, lambda: tables.difference(found, console, self.top), same=found.same)
        return SAME if found.same else DIFFERENT


@dataclass(frozen=True)
class Plan(Shown):
    """Say what a run with this TOML file would load, source by source. No tensor is read."""

    config: tyro.conf.Positional[Path]
    settings: tyro.conf.Positional[tuple[str, ...]] = ()
    """Settings in place of those in the file: training.steps=100."""

    def run(self, console: Console) -> int:
        from titan_ckpt.cli.planning import plan_load

        found = plan_load(self.config, self.settings)
        self.show(found, lambda: tables.plan(found, console))
        return DIFFERENT if found.problems else SAME


@dataclass(frozen=True)
class Report(Shown):
    """Write one HTML page about a run: loss, saves, kills and resumes, sizes, exports. It needs no network."""

    folder: tyro.conf.Positional[Path]
    """The run's folder."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The file to be written; absent: report.html in the run's folder. A file that is there is replaced."""

    def run(self, console: Console) -> int:
        from titan_ckpt.tools.report import write_report

        output = self.output if self.output is not None else self.folder / "report.html"
        figures = write_report(self.folder, output)
        text = f"{output} is written: {os.path.getsize(output)} bytes"
        return self.say(console, text, **figures, output=str(output))
