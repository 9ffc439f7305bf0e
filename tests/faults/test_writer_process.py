"""async_mode "process": the writer process is killed, fails, or outlives its trainer, and never commits anything."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.power import read_tree
from tests.faults.scenarios import SOAK, quick_folder
from tests.faults.writers import ManagerWriter
from tests.forked import fork, wait_until
from titan_ckpt.disk import kernel
from titan_ckpt.disk.kernel import SharedBuffer
from titan_ckpt.errors import SaveError
from titan_ckpt.formats.native.rank_file import lay_out
from titan_ckpt.formats.native.writer_process import WriterProcess
from titan_ckpt.formats.safetensors.container import Layout
from titan_ckpt.geometry.chunks import Chunk, TensorInfo

HOOK = Path(__file__).parent / "in_writer_process"
KILLS = [{"kind": "KillAt", "ordinal": at, "moment": moment} for at in range(7) for moment in ("before", "after")]
ERRORS = [{"kind": "FailAt", "ordinal": at, "errno": code} for at in range(7) for code in (errno.EIO, errno.ENOSPC)]
SOME = [
    {"kind": "KillAt", "ordinal": 0, "moment": "before"},
    {"kind": "KillAt", "ordinal": 2, "moment": "half"},
    {"kind": "FailAt", "ordinal": 5, "errno": errno.EIO},
]


@pytest.fixture(autouse=True)
def _hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a writer process that is started from here import the fault."""
    monkeypatch.setattr(sys, "path", [str(HOOK), str(HOOK.parents[2]), *sys.path])


@pytest.mark.parametrize(
    "fault", [*KILLS, *ERRORS] if SOAK else SOME, ids=lambda fault: "-".join(map(str, fault.values()))
)
def test_a_fault_of_the_writer_process_fails_the_save(monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]) -> None:
    """Killed or out of space at an operation of its own: the trainer's save raises, and the step before is there."""
    with quick_folder() as folder:
        root = folder / "checkpoints"
        ManagerWriter("disabled").run(root, [(10, 1)], lambda _: None)
        monkeypatch.setenv("TITAN_CKPT_FAULT", json.dumps(fault))
        with pytest.raises(OSError, match=r"writer process ended with SIGKILL|Input/output error|No space left"):
            ManagerWriter("process").run(root, [(20, 2)], lambda _: None)
        assert ManagerWriter("disabled").load(root) == (10, 1)
        assert sorted(os.listdir(root / ".staging")) == sorted(os.listdir(root / ".trash")) == []
        ManagerWriter("disabled").run(root, [(30, 3)], lambda _: None)
        assert ManagerWriter("disabled").load(root) == (30, 3)


def test_a_writer_process_that_outlives_its_trainer_commits_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The trainer is killed while its writer is stopped in a file; a new run goes on; the writer then wakes quietly."""
    with quick_folder() as folder:
        root = folder / "checkpoints"
        ManagerWriter("disabled").run(root, [(10, 1)], lambda _: None)
        monkeypatch.setenv("TITAN_CKPT_FAULT", json.dumps({"kind": "StopAt", "ordinal": 3}))
        trainer = fork(lambda: ManagerWriter("process").run(root, [(20, 2)], lambda _: None))
        writer = stopped_child_of(trainer)
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        assert ManagerWriter("disabled").load(root) == (10, 1)
        ManagerWriter("disabled").run(root, [(30, 3)], lambda _: None)
        before = read_tree(root)
        os.kill(writer, signal.SIGCONT)
        await_end(writer)
        assert "Traceback" not in capfd.readouterr().err
        after = read_tree(root)
        assert {path for path in after if path.startswith("step")} == {
            path for path in before if path.startswith("step")
        }
        assert ManagerWriter("disabled").load(root) == (30, 3)
        ManagerWriter("disabled").run(root, [(40, 4)], lambda _: None)
        assert os.listdir(root / ".staging") == os.listdir(root / ".trash") == []


def test_a_stopped_writer_process_holds_nobody_without_a_bound(tmp_path: Path) -> None:
    """It is named and killed after the timeout, and at the end without one. One that is busy has all the time.

    It starts without torch, which takes seconds of a processor, and 200 MB on every rank.
    """
    shared, layout = of_one_page()
    writer = WriterProcess(shared, timeout_seconds=2.0)
    assert len(writer.write(tmp_path / "first", layout, 4096)) == 32, "its start takes longer than the timeout"
    assert "libtorch" not in Path(f"/proc/{writer._process.pid}/maps").read_text()
    os.kill(pid := writer._process.pid, signal.SIGSTOP)
    with pytest.raises(SaveError, match=f"second: the writer process {pid} has done nothing for 2 s and was killed"):
        writer.write(tmp_path / "second", layout, 4096)
    assert not writer.is_idle
    writer.close()
    writer = WriterProcess(shared)
    os.kill(writer._process.pid, signal.SIGSTOP)
    writer.close()
    kernel.close(shared.fd)


def test_a_writer_process_imports_nothing_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file there has the name of a module that the writer needs; the trainer's path does not name the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    Path("xxhash.py").write_text("raise AssertionError")
    shared, layout = of_one_page()
    writer = WriterProcess(shared)
    assert len(writer.write(tmp_path / "file", layout, 4096)) == 32
    writer.close()
    kernel.close(shared.fd)


def of_one_page() -> tuple[SharedBuffer, Layout]:
    """Return an arena with zeros and, at byte 4096, the header of a file."""
    shared = SharedBuffer.allocate(1 << 20)
    layout = lay_out([("w", TensorInfo((1024,), torch.float32), Chunk.whole((1024,)))], 0, 1)
    shared.buffer.view[4096 : 4096 + len(layout.header)] = layout.header
    return shared, layout


def test_a_writer_process_ends_with_its_trainer_though_a_fork_holds_its_line() -> None:
    """The trainer is killed; a process that it forked, as data loaders do, has inherited all of its descriptors."""
    read, write = os.pipe()

    def train() -> None:
        writer = WriterProcess(SharedBuffer.allocate(4096))
        loader = fork(lambda: time.sleep(500))  # longer than await_end waits
        os.write(write, json.dumps([writer._process.pid, loader]).encode())
        time.sleep(500)

    trainer = fork(train)
    os.close(write)
    writer, loader = json.loads(os.read(read, 100))
    os.close(read)
    try:
        assert b"CUDA_VISIBLE_DEVICES=" in environment_of(writer)
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        await_end(writer)
        assert state_of(loader) == "S"
    finally:
        os.kill(loader, signal.SIGKILL)


def environment_of(pid: int) -> list[bytes]:
    """Return the environment that a process began with; for a moment after its start the kernel shows none."""
    environment = Path(f"/proc/{pid}/environ")
    wait_until(lambda: environment.read_bytes() != b"")
    return environment.read_bytes().split(b"\0")


def stopped_child_of(pid: int) -> int:
    """Wait until a child of a process has been stopped; return it."""

    def stopped() -> list[int]:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if state_of(int(child)) == "T"]

    wait_until(lambda: stopped() != [])
    return stopped()[0]


def await_end(pid: int) -> None:
    """Wait until a process that is nobody's child here has ended."""
    wait_until(lambda: state_of(pid) in ("", "Z"))


def state_of(pid: int) -> str:
    """Return the state letter of a process, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
