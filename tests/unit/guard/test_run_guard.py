"""What a RunGuard saves and when it stops, in one process that gets real signals."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.forked import answer
from tests.run_folder import RunFolder
from tests.world import manager as build
from tests.world import step_on
from titan_ckpt import RunGuard
from titan_ckpt.config import StopConfig
from titan_ckpt.formats.native.arena import StagedFile
from titan_ckpt.guard import outside_request, run_guard


@contextmanager
def guarded(folder: Path, interval: int = 1000, **stop: Any) -> Iterator[Callable[[int], bool]]:
    """Yield a function that takes a step and returns whether the loop must end."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        build(folder, model, optimizer, interval=interval, stop=StopConfig(**stop)) as manager,
        RunGuard(manager) as guard,
    ):
        manager.load()

        def take(step: int) -> bool:
            step_on(model, optimizer, torch.ones(1, 2))
            manager.save(step)
            return guard.step_ended(step)

        take.manager = manager  # type: ignore[attr-defined]
        yield take


def until_stopped(take: Callable[[int], bool]) -> int:
    """Take steps until the loop must end, and return the last."""
    step = 1
    while not take(step):
        time.sleep(0.01)
        step += 1
    return step


def test_signals_of_a_process_with_several_runs(tmp_path: Path) -> None:
    """SIGTERM stops the first run and the second; after a third the handler of before is back.

    A signal without a name is none of the guard's business.
    """

    def runs() -> list[Any]:
        noticed: list[int] = []
        nameless = signal.SIGRTMIN + 1
        for number in (signal.SIGTERM, nameless):
            signal.signal(number, lambda number, _: noticed.append(number))
        last = []
        for run in ("first", "second"):
            with guarded(tmp_path / run) as take:
                os.kill(os.getpid(), nameless)
                time.sleep(0.3)  # the watcher has met it
                take(1)
                os.kill(os.getpid(), signal.SIGTERM)
                last.append(until_stopped(take))
        with guarded(tmp_path / "third") as take:
            take(1)
        before = [*noticed]
        os.kill(os.getpid(), signal.SIGTERM)
        return [last, before.count(nameless), before.count(signal.SIGTERM), noticed.count(signal.SIGTERM)]

    (last, nameless, early, late), status = answer(runs)
    assert status == 0
    assert [[step] for step in last] == [RunFolder(tmp_path / run).steps() for run in ("first", "second")]
    assert (nameless, early, late) == (2, 0, 1)


def test_a_failed_save_in_flight_does_not_cost_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for the save of a step; the loop raises in the next one, and the step is saved after all."""
    write = StagedFile.write
    failures = [OSError(errno.ENOSPC, "No space left on device")]

    def written(self: StagedFile, folder: Any) -> Any:
        if failures:
            raise failures.pop()
        return write(self, folder)

    monkeypatch.setattr(StagedFile, "write", written)
    with pytest.raises(ValueError, match="a batch"), guarded(tmp_path, interval=2) as take:  # noqa: PT012
        take(1)
        take(2)
        raise ValueError("a batch that cannot be")
    assert not failures
    assert RunFolder(tmp_path).steps() == [2]


def test_the_clock_of_another_host_does_not_cost_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock that the notice's rank has is an hour behind that of the rank that counts."""
    real = time.time
    other = "titan_ckpt notices"
    monkeypatch.setattr(time, "time", lambda: real() - 3600 * (threading.current_thread().name == other))
    with guarded(tmp_path, grace_seconds=300.0) as take:
        os.kill(os.getpid(), signal.SIGTERM)
        last = until_stopped(take)
    assert RunFolder(tmp_path).steps() == [last]


def test_a_save_that_takes_longer_than_the_grace_is_made_before_the_job_of_slurm_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stops early enough for its last save makes it: the grace of signals is not its limit."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    with guarded(tmp_path, grace_seconds=1.0) as take:
        take.manager.completed.saver.seconds.append(665.0)  # type: ignore[attr-defined]
        last = until_stopped(take)
    assert RunFolder(tmp_path).steps() == [last]


def test_a_process_with_thousands_of_open_files_is_guarded(tmp_path: Path) -> None:
    """The watcher's pipe has a number above those that select() knows."""

    def run() -> list[int]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        with guarded(tmp_path) as take:
            os.kill(os.getpid(), signal.SIGTERM)
            last = until_stopped(take)
        return [last, len(files)]

    (last, _), status = answer(run)
    assert status == 0
    assert RunFolder(tmp_path).steps() == [last]


def test_a_signal_that_comes_while_the_handlers_are_installed_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the installation of its handler and the next line."""
    install = signal.signal

    def install_and_receive(number: int, handler: Any) -> Any:
        before = install(number, handler)
        if number == signal.SIGTERM and not received:
            received.append(number)
            os.kill(os.getpid(), number)
            time.sleep(0.5)  # the watcher has met it
        return before

    received: list[int] = []

    def run() -> int:
        monkeypatch.setattr(signal, "signal", install_and_receive)
        with guarded(tmp_path) as take:
            for step in range(1, 100):
                if take(step):
                    return step
                time.sleep(0.01)
        return 0

    last, status = answer(run)
    assert status == 0
    assert RunFolder(tmp_path).steps() == [last]


@pytest.mark.parametrize("busy", ["main thread", "watcher"])
def test_a_signal_that_a_busy_thread_meets_late_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    """The main thread is in C for longer than signals count as one, or the watcher waits when one is passed on."""
    monkeypatch.setattr(run_guard, "SAME_SIGNAL_SECONDS", 0.5)
    if busy == "watcher":
        monkeypatch.setattr(outside_request, "take", lambda run: time.sleep(1.5))

    def signalled() -> None:
        for _ in range(2):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)

    def run() -> int:
        with guarded(tmp_path) as take:
            take(1)
            threading.Thread(target=signalled).start()
            began = time.monotonic()
            while busy == "main thread" and time.monotonic() < began + 1.5:
                hashlib.pbkdf2_hmac("sha256", b"a", b"b", 5_000_000)
            return until_stopped(lambda step: take(step + 1)) + 1

    last, status = answer(run)
    assert status == 0
    assert RunFolder(tmp_path).steps() == [last]


def test_a_forked_process_does_not_write_signals_to_the_guards_listener(tmp_path: Path) -> None:
    """Also if no signal stops the run: the child may have closed the file, and opened one of its own by that number."""
    with guarded(tmp_path, on=("exception",)):
        assert answer(lambda: signal.set_wakeup_fd(-1)) == (-1, 0)


def test_a_requested_save_of_a_step_that_numpy_counts_is_answered(tmp_path: Path) -> None:
    """The step was saved, and its answer, which is JSON, ended the run."""
    steps: Any = np.arange(1, 1000)
    with build(tmp_path, torch.nn.Linear(2, 2), interval=1000) as manager, RunGuard(manager) as guard:
        manager.load()
        name = outside_request.ask(tmp_path)
        for step in steps:
            guard.step_ended(step)
            if (tmp_path / outside_request.ANSWER).exists():
                break
            time.sleep(0.01)
        answer = outside_request.await_answer(tmp_path, name, 10)
    assert answer.error is None and RunFolder(tmp_path).steps() == [answer.step]
