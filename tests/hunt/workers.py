"""Processes that carry out programs, one for each rank, forked once and used for many programs.

A process that hangs or breaks a promise is killed with its children, and the next program gets another. A writer
process is forked from one that has imported everything, because to start an interpreter takes seconds.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import tempfile
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.scenarios import quick_folder
from tests.hunt.programs import Program
from titan_ckpt.process import freeze_imports
from titan_ckpt.testing import ranks

HANG_SECONDS = 30.0
"""An act that takes longer hangs."""


class Workers:
    """The processes of one number of ranks."""

    def __init__(self, world: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hunt-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world > 1 else None
        port = self._store.port if self._store is not None else 0
        self._lines: list[Any] = []
        self._processes = []
        for rank in range(world):
            line, other = ranks._context().Pipe()
            arguments = (other, rank, world, port, str(self._stack(rank)), os.getpid())
            process = ranks._context().Process(target=_serve, args=arguments, name=f"hunt {rank}")
            process.start()
            other.close()
            self._lines.append(line)
            self._processes.append(process)

    def _stack(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank-{rank}.txt")

    def run(self, program: Program) -> str | None:
        """Carry out a program; return what was wrong, or None. These processes are of no use after that."""
        with quick_folder() as folder:
            words: tuple[object, ...] = (str(program), str(folder))
            for _ in ("carried out", "checked"):
                for line in self._lines:
                    line.send(words)
                kind, text = self._answers()
                if kind == "wrong":
                    return text
                words = ("check", text)
        return None

    def _answers(self) -> tuple[str, str]:
        """Wait until all ranks are done, or one is wrong or hangs. Return which, and what it says."""
        doing = dict.fromkeys(range(len(self._lines)), "nothing")
        said = ""
        while doing:
            ready = connection.wait([self._lines[rank] for rank in doing], HANG_SECONDS)
            if not ready:
                return "wrong", "\n".join(self._why_hung(*about) for about in doing.items())
            for rank in [rank for rank in doing if self._lines[rank] in ready]:
                try:
                    kind, text = self._lines[rank].recv()
                except EOFError:
                    return "wrong", f"rank {rank} died in {doing[rank]}"
                if kind == "wrong":
                    return kind, f"rank {rank}, in {doing[rank]}: {text}"
                if kind == "done":
                    del doing[rank]
                    said = said or text
                else:
                    doing[rank] = text
        return "done", said

    def _why_hung(self, rank: int, act: str) -> str:
        os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        self._processes[rank].join(0.5)
        return f"rank {rank} hangs in {act}, at\n{self._stack(rank).read_text()}"

    def close(self) -> None:
        for process in self._processes:
            ranks._kill(process)
        for line in self._lines:
            line.close()
        self._folder.cleanup()


def _serve(line: Any, rank: int, world: int, port: int, stack: str, parent: int) -> None:
    """Carry out programs until the line is closed."""
    os.setsid()
    freeze_imports()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    file = open(stack, "w")  # noqa: SIM115 - for the whole life of the process
    faulthandler.register(signal.SIGUSR1, file=file)
    from tests.hunt.run import OutOfStepError, Run, WrongError
    from tests.hunt.slow import Slow

    slow = Slow()
    slow.install()
    if world > 1:
        os.environ.update(GLOO_SOCKET_IFNAME="lo")
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))

    def carry_out(text: str, folder: str) -> None:
        program = Program.parse(text)
        run = None
        try:
            line.send(("doing", "the start"))
            run = Run(program, Path(folder), rank, slow)
            with suppress(OutOfStepError):
                for number, act in enumerate(program.acts, start=1):
                    line.send(("doing", f"act {number}, {act.text}"))
                    run.act(act)
            line.send(("doing", "close"))
            run.finish()
            line.send(("done", "out of step" if run.is_out_of_step else ""))
            _, said = line.recv()
            line.send(("doing", "the check at the end"))
            run.check(resumes=not said)
            line.send(("done", ""))
        except BaseException as error:
            text = str(error) if isinstance(error, WrongError) else traceback.format_exc()
            line.send(("wrong", text))
        finally:
            slow.flow()
            if run is not None:
                run.leave()

    while True:
        try:
            carry_out(*line.recv())
        except (EOFError, OSError):
            os._exit(0)
