"""Several runs of one or more ranks, one after another, forked from a process that has imported the libraries."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.forked import fork


class Phase(NamedTuple):
    """One start of a training."""

    function: str
    """Name in the module; it is called with the folder and the arguments."""
    folder: str
    ranks: int
    arguments: tuple[Any, ...] = ()


def die_at(step: int, killed_at: int | None, interval: int, folder: Path) -> None:
    """End the process by SIGKILL, when the newest save before the step is committed."""
    if step == killed_at:
        saved = folder / "checkpoints" / f"step-{(step - 1) // interval * interval}"
        while not saved.is_dir():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def leave_behind(folder: Path) -> None:
    """Copy a run's folder as a kill would leave it now to `resumed` beside it, once, on rank 0."""
    resumed = folder.with_name("resumed")
    if not int(os.environ.get("RANK", "0")) and not (resumed / "checkpoints").exists():
        shutil.copytree(folder, resumed, ignore=shutil.ignore_patterns("loop"), dirs_exist_ok=True)


def play(module: str, phases: Sequence[Phase]) -> list[list[int]]:
    """Run the phases in order, and return the exit codes of their ranks."""
    programs = importlib.import_module(module)
    codes = []
    for phase in phases:
        Path(phase.folder).mkdir(parents=True, exist_ok=True)
        port = _free_port()
        children = [fork(partial(_play, programs, phase, rank, port)) for rank in range(phase.ranks)]
        codes.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    return codes


def _play(programs: Any, phase: Phase, rank: int, port: int) -> None:
    warnings.simplefilter("ignore")  # of the libraries, in this process, which is a fork of pytest's
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": phase.ranks, "LOCAL_WORLD_SIZE": phase.ranks}
    if phase.ranks == 1:
        for name in world:  # a world of the zoo has them
            os.environ.pop(name, None)
    else:
        os.environ.update({name: str(value) for name, value in world.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    getattr(programs, phase.function)(phase.folder, *phase.arguments)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
