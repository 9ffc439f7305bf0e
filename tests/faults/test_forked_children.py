"""Processes that a trainer forks, as a DataLoader does for its workers, while a manager is open or saves."""

from __future__ import annotations

import gc
import json
import mmap
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.forked import fork
from tests.world import manager as build
from titan_ckpt.disk import kernel, posix
from titan_ckpt.disk.files import FileReader, FileWriter
from titan_ckpt.disk.kernel import SharedBuffer, libc
from titan_ckpt.disk.unpublished_folder import StagedFolder
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointError
from titan_ckpt.formats.native.writer_process import WriterProcess
from titan_ckpt.guard.notices import NoticeBoard
from titan_ckpt.manager import CheckpointManager

ARENA_BYTES = 8 << 20


def manager_of(folder: Path, mode: Literal["thread", "process"]) -> CheckpointManager:
    """Return a manager of a model that is larger than what a small allocation reuses."""
    model = torch.nn.Linear(ARENA_BYTES // 4096, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = build(folder, model, optimizer, async_mode=mode, folder="checkpoints")
    manager.load()
    return manager


class Worker:
    """A forked process that does `first`, then lives until `end`; `answer` is what `first` returned."""

    def __init__(self, first: Callable[[], object], folder: Path, before: list[str]) -> None:
        self._not_its_own = {name for name in open_files(os.getpid()) if name.startswith("pipe:")} - {*before}
        self._folder = folder
        read, write = os.pipe()
        wait, self._go = os.pipe()

        def live() -> None:
            os.close(self._go)
            os.write(write, json.dumps(first()).encode())
            os.close(write)
            os.read(wait, 1)

        self.pid = fork(live)
        os.close(write)
        os.close(wait)
        with os.fdopen(read) as pipe:
            self.answer = json.loads(pipe.read() or "null")

    def kept(self) -> list[str]:
        """Return what it has of the folder, of the arena, and of pipes that the test opened after `before`."""
        return [
            name
            for name in open_files(self.pid)
            if name.startswith(str(self._folder)) or "titan_ckpt-arena" in name or name in self._not_its_own
        ]

    def end(self) -> int:
        """Let it end; return its exit code."""
        os.close(self._go)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def open_files(pid: int) -> list[str]:
    """Return what the descriptors and the mappings of a process are of."""
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:  # the descriptor of this listing
            continue
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return names + [line.split(maxsplit=5)[5] for line in maps if "/" in line]


def use_addresses() -> list[mmap.mmap]:
    """Map and fill so much memory that it takes any address that has become free."""
    made = [
        mmap.mmap(-1, size) for size in (ARENA_BYTES, ARENA_BYTES // 2, ARENA_BYTES + 8192, 1 << 20) for _ in range(4)
    ]
    for memory in made:
        memory[:] = b"1" * len(memory)
    return made


def test_a_process_that_was_forked_just_now_does_not_hold_the_lease_of_a_manager_that_was_closed(
    tmp_path: Path,
) -> None:
    """A process that has not run Python since the fork has closed nothing; the next manager opens the folder."""
    first = manager_of(tmp_path, "thread")
    if (pid := libc().fork()) == 0:
        while True:
            signal.pause()
    try:
        first.close()
        manager_of(tmp_path, "thread").close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_forked_worker_keeps_nothing_of_a_manager_and_may_drop_it(tmp_path: Path, mode: Any) -> None:
    """The parent's close returns while the worker lives, whose own memory is where the parent has the arena."""
    before = open_files(os.getpid())
    managers = [manager_of(tmp_path, mode)]
    managers[0].save(1)
    managers[0].wait()
    for thread in threading.enumerate():
        if thread.name.startswith("titan_ckpt"):
            thread.join()  # a fork keeps what a thread that ends still holds
    file = managers[0]._saver._file  # type: ignore[union-attr]
    arena = weakref.ref(file._arena._buffer.tensor)  # type: ignore[union-attr]
    del file

    def drop() -> bool:
        own = use_addresses()
        managers.pop().__dict__.clear()  # in time, without a collection
        return arena() is None and all(memory[:] == b"1" * len(memory) for memory in own)

    worker = Worker(drop, tmp_path, before)
    assert worker.answer is True
    assert worker.kept() == []
    managers[0].save(2)
    managers[0].close()
    assert worker.end() == 0
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-1", "step-2"]


def test_a_worker_that_is_forked_during_a_save_waits_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The save's thread and writer are the parent's: in the worker close and an optimizer's step return at once."""
    before = open_files(os.getpid())
    manager = manager_of(tmp_path, "process")
    manager.save(1)
    manager.wait()
    (optimizer,) = manager._run.optimizers
    writer = manager._saver._file._process._process.pid  # type: ignore[union-attr]
    os.kill(writer, signal.SIGSTOP)
    manager.save(2)
    (tmp_path / "a").write_bytes(bytes(1 << 16))
    reader, shared = FileReader(tmp_path / "a"), FileWriter(tmp_path / "a", direct=True)
    mappings = reader.view(0, 4096), posix.map_shared(shared.fd, 0, 4096)
    staged = StagedFolder.begin(tmp_path / "export")
    board = NoticeBoard(
        Coordinator(0, 1, None, "", 60.0), answer_seconds=lambda _: 60.0, hang_seconds=None,
        on_signal=lambda *_: None, on_idle=lambda: None,
    )  # fmt: skip

    def act() -> bool:
        with pytest.raises(CheckpointError, match="is closed"):
            manager.save(3)
        optimizer.step()
        manager.wait()
        manager.close()
        reader.close()
        shared.close()
        os.write(board.signal_fd, b"x")  # as a signal of the worker alone would
        return True

    worker = Worker(act, tmp_path, before)
    assert worker.answer is True
    assert worker.kept() == []
    assert board._signals.read(0.0) == b""
    board.close()
    os.kill(writer, signal.SIGCONT)
    manager.close()
    assert [mapping[:4096] == bytes(4096) for mapping in mappings] == [True, True]
    assert reader.read(0, 1) == b"\0"
    reader.close()
    shared.close()
    staged.abandon()
    assert worker.end() == 0
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-1", "step-2"]
    assert caplog.text.count("Traceback") == 0


def test_a_worker_keeps_a_file_whose_number_was_that_of_a_pipe_to_a_collected_writer(tmp_path: Path) -> None:
    """A manager that is dropped and never closed leaves no number behind that a fork would take for its own."""
    shared = SharedBuffer.allocate(4096)
    writer = WriterProcess(shared)
    numbers = {pipe.fileno() for pipe in writer._pipes}
    writer._process.kill()
    writer._process.wait()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        del writer
        gc.collect()
    (tmp_path / "rows").write_bytes(b"rows")
    with ExitStack() as files:
        opened = [files.enter_context(open(tmp_path / "rows", "rb")) for _ in range(64)]
        assert numbers <= {file.fileno() for file in opened}
        worker = Worker(lambda: [file.read().decode() for file in opened], tmp_path / "none", [])
        assert worker.answer == ["rows"] * 64
        assert worker.end() == 0
    kernel.close(shared.fd)
