"""The writers of the fault matrix: real ones that must hold, and a naive one that must be caught."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from tests import world
from tests.faults import small_checkpoints as small
from tests.world import manager as build
from titan_ckpt.config import KeepConfig, ResumeConfig
from titan_ckpt.disk import posix

Save = tuple[int, int]
"""(step, value): the value is what every byte of the save is made of."""
Told = Callable[[Save], None]
"""Is told of each save that is durable."""


class Writer(Protocol):
    """A run that saves, and a run that resumes."""

    @property
    def name(self) -> str: ...

    def run(
        self, root: Path, saves: Sequence[Save], acknowledge: Told, resume: int | None = None, keep: int | None = 2
    ) -> None:
        """Be one process that goes on from step `resume`, makes the saves, and acknowledges each when it is durable."""

    def load(self, root: Path) -> Save | None:
        """Be one process that resumes from the newest checkpoint it can; None for a fresh start."""


@dataclass(frozen=True)
class DirectoryWriter:
    """CheckpointDirectory with two small files a step."""

    name: str = "directory"

    def run(
        self, root: Path, saves: Sequence[Save], acknowledge: Told, resume: int | None = None, keep: int | None = 2
    ) -> None:
        directory = small.open_directory(root)
        try:
            if resume is not None:
                directory.resume_from(resume)
            for step, value in saves:
                small.commit_step(directory, step, value)
                acknowledge((step, value))
                directory.expire(None if keep is None else KeepConfig(latest=keep))
        finally:
            directory.close()

    def load(self, root: Path) -> Save | None:
        return small.load(root)


@dataclass(frozen=True)
class NaiveWriter:
    """A plausible script: it writes in place, names the step last, trusts what has the name, and purges by pattern.

    Source: the behaviour of torch.distributed.checkpoint's FileSystemWriter and of torchtitan's manager.
    """

    name: str = "naive"

    def run(
        self, root: Path, saves: Sequence[Save], acknowledge: Told, resume: int | None = None, keep: int | None = 2
    ) -> None:
        posix.make_folders(root)
        for step, value in saves:
            folder = root / f"step-{step}"
            posix.make_folders(folder)
            for name in small.FILES:
                self._write(folder / name, small.payload(step, value, name))
            self._write(folder / "metadata.json", json.dumps({"step": step}).encode())
            acknowledge((step, value))
            if keep is not None:
                for old in self._steps(root)[:-keep]:
                    shutil.rmtree(root / old)

    def load(self, root: Path) -> Save | None:
        names = [name for name in self._steps(root) if (root / name / "metadata.json").exists()]
        if not names:
            return None
        values = set()
        for name in small.FILES:
            step, value, _ = (root / names[-1] / name).read_bytes().split(b":")[:3]
            values.add((int(step), int(value)))
        if len(values) != 1:
            raise AssertionError(f"a mix of saves: {values}")
        return values.pop()

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        """Write in place; an error of a helper thread that nobody looks at is suppressed here, as it is there."""
        if path.exists():
            posix.unlink(path)
        with contextlib.suppress(OSError):
            fd = posix.open_exclusive(path)
            try:
                posix.pwrite_all(fd, data, 0)
            finally:
                posix.close(fd)

    @staticmethod
    def _steps(root: Path) -> list[str]:
        found = [(int(match.group(1)), name) for name in os.listdir(root) if (match := re.search(r"step-(\d+)", name))]
        return [name for _, name in sorted(found)]


@dataclass(frozen=True)
class ManagerWriter:
    """CheckpointManager with a small real model and optimizer, as a training loop uses it."""

    async_mode: Literal["disabled", "thread", "process"]
    num_rows: int = 16
    """Rows of the first layer, each of 16 floats."""

    @property
    def name(self) -> str:
        return f"manager, {self.async_mode}"

    def run(
        self, root: Path, saves: Sequence[Save], acknowledge: Told, resume: int | None = None, keep: int | None = 2
    ) -> None:
        model, optimizer = _model_and_optimizer(self.num_rows)
        keeping = {} if keep is None else {"keep": KeepConfig(latest=keep)}
        how: dict[str, Any] = {"folder": root.name, "async_mode": self.async_mode, **keeping}
        with build(root.parent, model, optimizer, resume=ResumeConfig(step=resume), **how) as manager:
            manager.load()
            for step, value in saves:
                manager.maybe_wait_for_staging()
                _fill(model, optimizer, value)
                manager.save(step)
                manager.wait()
                acknowledge((step, value))

    def load(self, root: Path) -> Save | None:
        model, optimizer = _model_and_optimizer(self.num_rows)
        step = world.load(build(root.parent, model, optimizer, folder=root.name, save=None)).step
        if step == 0:
            return None
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        values = {x for tensor in [*model.state_dict().values(), *state] for x in tensor.unique().tolist()}
        assert len(values) == 1, f"a mix of saves: {values}"
        return step, int(values.pop())


def _model_and_optimizer(num_rows: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(16, num_rows), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _fill(model, optimizer, -1)
    return model, optimizer


def _fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer, value: int) -> None:
    """Make every number of the model and of the optimizer's state `value`."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
