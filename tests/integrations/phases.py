"""Several runs of one or more ranks, one after another, forked from a process that has imported the libraries."""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import shutil
import signal
import socket
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import imports

from tests.forked import fork
from titan_ckpt.process import freeze_imports

# Each Accelerator asks for some thirty packages, by reading their metadata.
imports._is_package_available = functools.cache(imports._is_package_available)


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
    """Run the phases in order, each in processes of its own, and return the exit codes of their ranks."""
    programs = importlib.import_module(module)
    return [codes for phase in phases for codes in _codes(programs, [phase])]


def play_together(module: str, phases: Sequence[Phase]) -> list[list[int]]:
    """Do the same in the same processes, because each new one pays for the first use of what it uses.

    The phases have equally many ranks. After one that fails, new processes go on with the next.
    """
    programs = importlib.import_module(module)
    codes: list[list[int]] = []
    while len(codes) < len(phases):
        codes += _codes(programs, phases[len(codes) :])
    return codes


def _codes(programs: Any, phases: Sequence[Phase]) -> list[list[int]]:
    """Run phases in the same processes up to one that fails, and return the exit codes of each that was begun."""
    for phase in phases:
        Path(phase.folder).mkdir(parents=True, exist_ok=True)
    ranks, port = range(phases[0].ranks), _free_port()
    done = memoryview(mmap.mmap(-1, 4 * len(ranks))).cast("i")  # shared with the children
    children = [fork(functools.partial(_play, programs, phases, rank, port, done)) for rank in ranks]
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [[0] * len(ranks)] * min(done) + [ended] * (min(done) < len(phases))


def _play(programs: Any, phases: Sequence[Phase], rank: int, port: int, done: memoryview) -> None:
    warnings.simplefilter("ignore")  # of the libraries, in this process, which is a fork of pytest's
    world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), len(done)) | {"RANK": rank, "LOCAL_RANK": rank}
    if len(done) == 1:
        for name in world:  # a world of the zoo has them
            os.environ.pop(name, None)
    else:
        os.environ.update({name: str(value) for name, value in world.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        if len(phases) > 1:
            dist.init_process_group("gloo")  # once: what torch keeps of a mesh has the names of its groups
    for phase in phases:
        with mock.patch.dict(os.environ):  # accelerate and Lightning set some of it, and delete some
            forget()
            getattr(programs, phase.function)(phase.folder, *phase.arguments)
        freeze_imports()  # with what it leaves, which later collections would walk
        done[rank] += 1


def forget() -> None:
    """Let accelerate begin as in a new process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def join() -> None:
    """Join the other ranks by gloo, unless phases before have."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
