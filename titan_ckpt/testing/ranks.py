"""`@distributed`: run the body of a test in several real processes.

Owns the start, supervision and end of a test's ranks. Knows nothing of checkpoints.
Source of the idea of one decorator: torchsnapshot, test_utils.py; OLMo-core, testing/distributed.py.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, ParamSpec
from unittest import mock

import torch
import torch.distributed as dist

from titan_ckpt.process import freeze_imports

P = ParamSpec("P")
_Filter = tuple[Any, str, Any, str, int]

_PRELOADED = [
    "pytest", "torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "titan_ckpt.manager",
    __name__,
]  # fmt: skip
"""The server imports these, so that no rank does: torch imports its compiler at the first step of FSDP2."""
_LOOK_SECONDS = 0.5
"""Time is counted in looks of this length, of which one at most passes while the machine stands still."""
_GRACE_SECONDS = 5.0
"""Time that the other ranks may continue after the first failure, so that they can report their errors."""
_DONE = "titan_ckpt.testing/done"
_END = "titan_ckpt.testing/end"


class RankError(AssertionError):
    """At least one rank of a `@distributed` test failed. Carries `ranks`, in the order in which they ended."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


def distributed(nproc: int = 2, *, timeout_seconds: float = 120.0) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Run a test's body in `nproc` processes with a gloo process group, one thread each.

    Fixtures and parameters are evaluated once, in the test process, and sent to every rank, so they must be picklable
    (tmp_path is). Every rank has RANK, WORLD_SIZE and the like in its environment, and the test's warning filters.
    The test fails if a rank raises, dies, or still runs after `timeout_seconds`; the message has its traceback or
    current stack. Then all ranks and their child processes are killed.

    The processes are forked from a server that has only imported modules and runs no thread: a rank starts in
    milliseconds and shares no thread, lock or random state with the test process. The test process serves the store, as
    torchrun's agent does, so the store survives a killed rank 0.
    Raises: RankError.
    """

    def decorate(body: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(body)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            __tracebackhide__ = True
            _run_ranks(body, nproc, timeout_seconds, args, kwargs)

        return run

    return decorate


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that a rank needs to run the body."""

    module: str
    file: str
    qualname: str
    arguments: bytes
    nproc: int
    port: int
    timeout_seconds: float
    folder: str
    environment: dict[str, str]
    filters: list[_Filter]

    def notes(self, rank: int) -> Path:
        """Return the file in which a rank explains its failure."""
        return Path(self.folder, f"rank-{rank}.txt")

    def stack(self, rank: int) -> Path:
        """Return the file to which a rank writes its stack on SIGUSR1."""
        return Path(self.folder, f"rank-{rank}.stack.txt")


def _run_ranks(
    body: Callable[..., None], nproc: int, timeout_seconds: float, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    __tracebackhide__ = True
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(
            body.__module__,
            body.__code__.co_filename,
            body.__qualname__,
            _pickled(args, kwargs),
            nproc,
            store.port,
            timeout_seconds,
            folder,
            dict(os.environ),
            _filters(),
        )
        with _started(job) as processes:
            failed, hung = _watch(processes, job, store)
        if failed or hung:
            why = {rank: _why_failed(job, rank, processes[rank].exitcode) for rank in failed}
            why |= {rank: _why_hung(job, rank) for rank in hung}
            report = "".join(f"\n--- rank {rank}: {text}" for rank, text in why.items())
            raise RankError(f"{len(why)} of {nproc} ranks failed: {body.__qualname__}{report}", tuple(why))


def _filters() -> list[_Filter]:
    """Return this process's warning filters in order, as arguments of warnings.filterwarnings."""
    return [
        (action, getattr(message, "pattern", ""), category, getattr(module, "pattern", ""), line)
        for action, message, category, module, line in warnings.filters
    ]


def _pickled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the pickled arguments. Raises: TypeError naming the argument that cannot be sent to ranks."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(f"argument {name} of a @distributed test cannot be sent to its ranks: {error}") from None
    return pickle.dumps((args, kwargs))


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    """Start the server from which ranks are forked; it must have one thread, because a fork copies only one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


@contextmanager
def _started(job: _Job) -> Iterator[list[ForkServerProcess]]:
    processes: list[ForkServerProcess] = []
    try:
        for rank in range(job.nproc):
            process = _context().Process(target=_rank_main, args=(job, rank), name=f"rank {rank}")
            process.start()
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            _kill(process)


def _kill(process: ForkServerProcess) -> None:
    """Kill a rank and its child processes; the rank leads its own session, unless it has not reached setsid yet."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _watch(processes: Sequence[ForkServerProcess], job: _Job, store: dist.Store) -> tuple[list[int], list[int]]:
    """Wait until all ranks end or time runs out. Return the failed ranks in order of failure, and the hung ranks."""
    left = job.timeout_seconds
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    failed: list[int] = []
    time_is_over = False
    while running:
        ended = connection.wait(list(running), timeout=_LOOK_SECONDS)
        if not ended:
            left -= _LOOK_SECONDS
        if left <= 0 and time_is_over:
            break
        if left <= 0:
            # Ranks that are done and wait for the others leave now; ranks that remain hang.
            time_is_over = True
            store.set(_END, "time is over")
            left = 2.0
        for sentinel in ended:
            assert isinstance(sentinel, int)
            rank = running.pop(sentinel)
            processes[rank].join()
            if processes[rank].exitcode != 0:
                failed.append(rank)
                store.set(_END, "a rank failed")
                left = min(left, _GRACE_SECONDS)
    for rank in running.values():
        pid = processes[rank].pid
        assert pid is not None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    for _ in range(50):
        if all(job.stack(rank).stat().st_size for rank in running.values() if job.stack(rank).exists()):
            break
        time.sleep(0.1)
    return failed, sorted(running.values())


def _why_failed(job: _Job, rank: int, exit_code: int | None) -> str:
    if job.notes(rank).exists():
        return job.notes(rank).read_text()
    assert exit_code is not None
    return f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _why_hung(job: _Job, rank: int) -> str:
    stack = job.stack(rank).read_text() if job.stack(rank).exists() else ""
    return f"did not end and was ended by force, at\n{stack or '  nowhere known: it answered no signal'}"


def _rank_main(job: _Job, rank: int) -> None:
    """Run the body as one rank; exit code 0 means that it passed."""
    os.setsid()
    freeze_imports()  # a collection would walk, and so copy, everything that the server has imported
    os.environ.clear()
    os.environ.update(
        job.environment
        | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.nproc), "LOCAL_WORLD_SIZE": str(job.nproc)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    )
    torch.set_num_threads(1)
    with job.stack(rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        # If the test process itself was killed, nothing else would end a hung rank.
        faulthandler.dump_traceback_later(job.timeout_seconds + 60, exit=True, file=stack)
        try:
            _rank_body(job, rank)
        except BaseException as error:
            job.notes(rank).write_text(_explain(error))
            sys.stdout.flush()
            # Not sys.exit: a thread that a failed body left behind would keep the process alive.
            os._exit(1)


def _rank_body(job: _Job, rank: int) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in job.filters:
        warnings.filterwarnings(action, message, category, module, line, append=True)
    timeout = timedelta(seconds=job.timeout_seconds)
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timeout)
    body = _find(job)
    args, kwargs = pickle.loads(job.arguments)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.nproc, timeout=timeout)
    body(*args, **kwargs)
    # A rank that leaves closes its connections, and a slower rank would report that as a failure.
    if store.add(_DONE, 1) == job.nproc:
        store.set(_END, "all done")
    store.wait([_END], timeout + timedelta(seconds=30))  # the watcher, which may run late, says who hangs
    if dist.is_initialized():
        dist.destroy_process_group()


def _find(job: _Job) -> Callable[..., None]:
    """Return the undecorated body; a test file that is not importable by name is loaded from its path."""
    try:
        value: Any = importlib.import_module(job.module)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        assert spec is not None
        assert spec.loader is not None
        value = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = value
        spec.loader.exec_module(value)
    for name in job.qualname.split("."):
        value = getattr(value, name)
    body: Callable[..., None] = value.__wrapped__
    return body


def _explain(error: BaseException) -> str:
    """Return the traceback with the innermost local variables, because pytest rewrites no assertions in ranks."""
    frames = list(traceback.walk_tb(error.__traceback__))
    text = "".join(traceback.format_exception(error))
    if frames:
        values = [f"    {name} = {_clip(value)}" for name, value in frames[-1][0].f_locals.items()]
        text += "\n".join(["with", *values]) if values else ""
    return text


def _clip(value: Any) -> str:
    try:
        text = re.sub(r"\s+", " ", repr(value))
    except Exception as error:
        text = f"<no repr: {error}>"
    return text if len(text) <= 300 else text[:297] + "..."
