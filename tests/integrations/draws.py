"""Runs that a seed has drawn: killed at drawn moments, resumed until they end, and compared with whole ones.

Every step writes what it has read and digests of all that training changes, so that all of a killed run is compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.integrations.phases import Phase, play

Kill = tuple[int, float]
"""After how many steps of a process it ends by SIGKILL, and how many milliseconds later."""


def local(value: Any) -> Any:
    return getattr(value, "_local_tensor", value)


def digest(value: Any) -> str:
    """Return a digest of nested values with tensors."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, torch.Tensor):
            found.update(local(value.detach()).contiguous().numpy().tobytes())
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()[:16]


def random_state() -> str:
    """Return a digest of the process's random states."""
    return digest([torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())])  # noqa: NPY002


class Record:
    """Writes a line for each step, and ends the process some time after a number of them."""

    def __init__(self, folder: Path, rank: int, kill: tuple[int, float] | None) -> None:
        self.file = open(folder / f"steps-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
        self.kill, self.num = kill, 0

    def add(self, step: int, **values: Any) -> None:
        self.file.write(json.dumps([step, values]) + "\n")
        self.num += 1
        if self.kill and self.num == self.kill[0]:
            if self.kill[1] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=self._die, daemon=True).start()

    def _die(self) -> None:
        assert self.kill
        time.sleep(self.kill[1] / 1000)
        os.kill(os.getpid(), signal.SIGKILL)


def judge(module: str, case: dict[str, Any], ranks: int, folder: Path) -> list[str]:
    """Play a case whole, and killed as often as it says; return the verdict of each rank."""
    start = partial(Phase, "run", ranks=ranks)
    play(module, [start(folder=str(folder / "whole"), arguments=(case, None))])
    if not [*folder.glob("whole/error-*")]:
        for kill in (*case["kills"], None):
            for error in folder.glob("killed/error-*"):  # of a rank that has lost another
                error.unlink()
            play(module, [start(folder=str(folder / "killed"), arguments=(case, kill))])
    return [verdict(folder, rank) for rank in range(ranks)]


def verdict(folder: Path, rank: int) -> str:
    """Return "exact", why the case was refused, or what differs."""
    whole, killed = folder / "whole", folder / "killed"
    if (error := whole / f"error-{rank}.txt").exists():
        return f"refused: {error.read_text()}" if "ConfigError" in error.read_text() else f"broken: {error.read_text()}"
    expected = dict(json.loads(line) for line in (whole / f"steps-{rank}.jsonl").read_text().splitlines())
    if (error := killed / f"error-{rank}.txt").exists():
        return f"resumed: {error.read_text()}"
    if not (killed / f"done-{rank}").exists():
        return "it did not end"
    lines = [json.loads(line) for line in (killed / f"steps-{rank}.jsonl").read_text().splitlines()]
    for step, values in lines:
        wrong = [name for name, value in values.items() if value != expected[step][name]]
        if wrong:
            return f"different: step {step}: {', '.join(wrong)}"
    starts = [after[0] for before, after in pairwise(lines) if after[0] <= before[0]]
    return f"exact, resumed before steps {starts}"
