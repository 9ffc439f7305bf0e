"""Processes that tests fork: functions from the test itself, and programs from the ranks' server.

Each is a real process with a real pid, which signals stop and SIGKILL kills. A program starts without importing torch
once more. What a command line does before `main` is not in it: tests of that start an interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
import torch._dynamo  # the first optimizer imports it: most of a second in every fork
import torch.distributed as dist

from titan_ckpt.process import freeze_imports
from titan_ckpt.testing import ranks

with suppress(ImportError):
    from tqdm.std import TqdmDefaultWriteLock  # type: ignore[import-untyped]

    # a process that is killed while it draws a bar must not keep the lock from all others
    TqdmDefaultWriteLock.mp_lock = None


@functools.cache
def take_huge_pages() -> None:
    """Have the kernel put this process's memory on huge pages, where it can: a fork copies an entry for each page."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in span.split("-"))
        begin, end = -(-begin >> 21) << 21, end >> 21 << 21
        if rights == "rw-p" and inode == "0" and begin < end:
            advise(begin, end - begin, 25)  # MADV_COLLAPSE, since Linux 6.1; what it cannot do is left as it is


def fork(act: Callable[[], object]) -> int:
    """Run `act` in a forked process and return its pid; its exit code is 0, or 1 after an error, which it prints.

    An error must not leave the forked process: pytest would go on in it, with the tests that are still to run.
    """
    take_huge_pages()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            freeze_imports()  # a collection would copy every page of the parent's objects
            torch.set_num_threads(1)  # makes anew the pool that a fork breaks, which two threads cannot at once
            act()
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(code)
    return pid


def answer(act: Callable[[], object]) -> tuple[Any, int]:
    """Run `act` in a forked process; return what it returned, as JSON has it, and its wait status."""
    read, write = os.pipe()
    pid = fork(lambda: os.write(write, json.dumps(act()).encode()))
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return json.loads(text or "null"), os.waitpid(pid, 0)[1]


def resident(name: str = "VmRSS") -> int:
    """Return the bytes of memory that this process has now, or had at its peak: VmHWM."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name))


def memory_of(act: Callable[[], object], before: Callable[[], object] = int) -> tuple[int, Any]:
    """Run `act` in a forked process; return the bytes that it takes at its peak, and what it returned.

    `before` runs first, so that first uses of libraries are not counted.
    """

    def measured() -> tuple[int, object]:
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is given back, and counts again
        before()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        begin = resident()
        found = act()
        return resident("VmHWM") - begin, found

    answered, status = answer(measured)
    assert status == 0 and answered is not None
    return answered[0], answered[1]


def wait_until(is_so: Callable[[], bool], *of: Program, seconds: float = 240) -> None:
    """Return once something is so. Fails if one of the programs that do it ends before, or if it takes too long."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert all(process.poll() is None for process in of), [process.text() for process in of]
        assert time.monotonic() < deadline, [process.text() for process in of]
        time.sleep(0.005)


class Program:
    """sys.exit(main(*arguments)) as a process, with the methods of subprocess.Popen; its output goes to a file."""

    def __init__(
        self,
        main: Callable[..., int | None],
        *arguments: Any,
        output: Path,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.output = output
        output.touch()
        where = (str(output), os.getcwd(), dict(environment))
        self._process = ranks._context().Process(target=_run, args=(main, arguments, *where), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises: subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def text(self) -> str:
        """Return what the process has written so far."""
        return self.output.read_text()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return once the process has done something, before it has ended."""
        wait_until(is_so, self)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Job:
    """The ranks of one run, started as torchrun starts them; each one's output is a file. Killed at the block's end."""

    def __init__(self, main: Callable[..., int | None], *arguments: Any, folder: Path, num_ranks: int = 1) -> None:
        shared = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._store = None
        if num_ranks > 1:  # served here, as by torchrun's agent, so that it outlives rank 0
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "GLOO_SOCKET_IFNAME": "lo"}
        folder.mkdir(exist_ok=True)
        self.ranks: list[Program] = []
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)} if num_ranks > 1 else {}
            output = folder / f"out-{rank}-{time.time_ns()}.txt"
            self.ranks.append(Program(main, *arguments, output=output, environment=shared | own))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()

    def text(self) -> str:
        return "\n".join(rank.text() for rank in self.ranks)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return once the run has done something, before a rank has ended."""
        wait_until(is_so, *self.ranks)

    def codes(self, but: tuple[int, ...] = ()) -> list[int]:
        """Wait for all ranks to end and return their exit codes."""
        try:
            return [process.wait(240) for rank, process in enumerate(self.ranks) if rank not in but]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a rank does not end: {self.text()}") from None


def _run(
    main: Callable[..., int | None], arguments: tuple[Any, ...], output: str, folder: str, environment: dict[str, str]
) -> None:
    freeze_imports()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start its own
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    try:
        sys.exit(main(*arguments))
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
