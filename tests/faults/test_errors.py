"""Every operation fails once, or all from one on: no space, I/O error, read-only, half a write."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.faults.scenarios import NEXT, ROLLBACK, SEVERAL, SOAK, Scenario, judge, quick_folder
from tests.faults.shim import WRITES, FailAt, count_operations, intercepted
from tests.faults.writers import DirectoryWriter, ManagerWriter, NaiveWriter, Save, Writer
from tests.forked import fork
from titan_ckpt.disk import posix
from titan_ckpt.errors import CheckpointError


@dataclass(frozen=True)
class Fault:
    name: str
    errno: int
    lasting: bool = False
    only: frozenset[str] | None = None
    half: bool = False


FAULTS = (
    Fault("EIO once", errno.EIO),
    Fault("disk full from here on", errno.ENOSPC, lasting=True, only=WRITES),
    Fault("half a write, then disk full", errno.ENOSPC, lasting=True, only=WRITES, half=True),
    Fault("quota once", errno.EDQUOT, only=WRITES),
    Fault("read-only from here on", errno.EROFS, lasting=True),
)


def violations(writer: Writer, scenario: Scenario, fault: Fault) -> Iterator[str]:
    """Let each operation fail and yield what went wrong: a failure without an error, or an error that costs more."""
    with quick_folder() as folder:
        scenario.prepare(writer, folder)
        names = count_operations(lambda: writer.run(folder, scenario.saves, lambda _: None, scenario.resume))
    for ordinal, name in enumerate(names):
        if fault.only is not None and name not in fault.only:
            continue  # what lasts fails at the next operation that it is about, which has a turn of its own
        with quick_folder() as folder:
            root = folder / "checkpoints"
            scenario.prepare(writer, root)
            acknowledged: list[Save] = []
            shim = FailAt(ordinal=ordinal, errno=fault.errno, lasting=fault.lasting, only=fault.only, half=fault.half)
            where = f"{writer.name}, {scenario.name}, {fault.name}, operation {ordinal} ({name})"
            raised: BaseException | None = None
            try:
                with intercepted(shim):
                    writer.run(root, scenario.saves, acknowledged.append, scenario.resume)
            except Exception as error:
                raised = error
            if raised is not None and not isinstance(raised, CheckpointError | OSError):
                yield f"{where}: raised {type(raised).__name__}: {raised}"
            if raised is None and len(acknowledged) < len(scenario.saves):
                yield f"{where}: not saved and no error"
            legal = scenario.legal(acknowledged)
            if raised is not None and not fault.lasting:
                legal -= set(scenario.saves[len(acknowledged) :])  # What failed has been undone, not left half-way.
            if found := judge(writer, root, legal, scenario.least):
                yield f"{where}: {found}"


CASES: list[tuple[Writer, Scenario, Fault]] = [
    *((DirectoryWriter(), scenario, fault) for scenario in (NEXT, ROLLBACK, SEVERAL) for fault in FAULTS),
    *((ManagerWriter("thread"), NEXT, fault) for fault in FAULTS),
    *((ManagerWriter("disabled"), NEXT, fault) for fault in (FAULTS if SOAK else FAULTS[:1])),
]


@pytest.mark.parametrize(("writer", "scenario", "fault"), CASES, ids=lambda value: value.name)
def test_an_error_anywhere_fails_the_save_and_nothing_else(writer: Writer, scenario: Scenario, fault: Fault) -> None:
    """Earlier steps stay loadable, an unfinished save raises, and the next one works once the disk does."""
    assert list(violations(writer, scenario, fault)) == []


@pytest.mark.parametrize(("mode", "half"), [("disabled", False), ("thread", True)])
def test_an_error_in_any_helper_thread_fails_the_save(mode: Literal["disabled", "thread"], half: bool) -> None:
    """A file of several blocks is written by several threads: whichever fails, the save raises and changes nothing."""
    writer = ManagerWriter(mode, num_rows=70_000)
    with quick_folder() as folder:
        root = folder / "checkpoints"
        writer.run(root, [(10, 1)], lambda _: None)
        names = count_operations(lambda: writer.run(root, [(20, 2)], lambda _: None))
        first, number = names.index("fallocate"), names.count("pwrite_all")
        before = names[:first].count("pwrite_all")
        blocks = names[first : names.index("truncate", first)].count("pwrite_all")
        assert blocks >= 3
        for ordinal in range(before, number if SOAK else before + blocks):
            shim = FailAt(ordinal=ordinal, errno=errno.ENOSPC, half=half, named="pwrite_all")
            with intercepted(shim), pytest.raises(OSError, match="No space left"):
                writer.run(root, [(30, 3)], lambda _: None)
            assert shim.hits == 1
        assert writer.load(root) == (20, 2)


def test_the_matrix_catches_a_writer_that_swallows_errors() -> None:
    """A full disk under the naive writer is acknowledged and cannot be loaded: the matrix can fail."""
    found = list(violations(NaiveWriter(), NEXT, FAULTS[2]))
    assert any("loaded" in line or "load failed" in line for line in found), found


@pytest.mark.parametrize("name", ["fsync", "fsync_folder", "close", "pwrite_all", "rename_noreplace", "open_exclusive"])
def test_a_save_that_fails_before_its_commit_leaves_no_trace(name: str) -> None:
    """After an error the folder is, byte for byte, what it was: no attempt, no rubbish, no new step."""
    with quick_folder() as folder:
        DirectoryWriter().run(folder, [(10, 1), (20, 2)], lambda _: None)
        before = content(folder)
        names = count_operations(lambda: DirectoryWriter().run(folder, [(30, 3)], lambda _: None, keep=None))
    last = max(index for index, found in enumerate(names[: names.index("rename_noreplace") + 2]) if found == name)
    with quick_folder() as folder:
        DirectoryWriter().run(folder, [(10, 1), (20, 2)], lambda _: None)
        with intercepted(FailAt(ordinal=last, errno=errno.EIO)), pytest.raises(OSError, match="Input/output error"):
            DirectoryWriter().run(folder, [(30, 3)], lambda _: None)
        assert sorted(content(folder)) == sorted(before)


def content(root: Path) -> list[str]:
    """Return every path below a folder."""
    return [str(path.relative_to(root)) for path in root.rglob("*")]


def test_short_writes_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that writes a few bytes at a time is no error: the file is whole."""
    pwrite = os.pwrite

    def short(fd: int, data: Any, offset: int) -> int:
        return pwrite(fd, memoryview(data)[:7], offset)

    monkeypatch.setattr(os, "pwrite", short)
    with quick_folder() as folder:
        DirectoryWriter().run(folder, [(10, 1)], lambda _: None)
        assert DirectoryWriter().load(folder) == (10, 1)


def test_a_write_without_progress_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that accepts nothing does not make an endless loop."""
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with quick_folder() as folder, pytest.raises(OSError, match="no progress"):
        posix.write_file(folder / "x", b"data")


@pytest.mark.parametrize("support", ["no renameat2", "flag not supported"])
def test_renames_work_where_the_kernel_cannot_refuse_to_replace(monkeypatch: pytest.MonkeyPatch, support: str) -> None:
    """The fallback commits as well, and still never renames over something."""
    code = errno.ENOSYS if support == "no renameat2" else errno.EINVAL
    monkeypatch.setattr(posix, "_renameat2", lambda *_: code)
    with quick_folder() as folder:
        (folder / "a").mkdir()
        (folder / "b").mkdir()
        with pytest.raises(FileExistsError):
            posix.rename_noreplace(folder / "a", folder / "b")
        DirectoryWriter().run(folder / "x", [(10, 1), (20, 2), (30, 3)], lambda _: None)
        assert DirectoryWriter().load(folder / "x") == (30, 3)


def test_a_file_system_without_locks_still_has_one_writer_per_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks are not supported, the record of a living process on this machine is respected."""
    monkeypatch.setattr(posix, "lock", lambda fd: None)
    with quick_folder() as folder:
        ready, go = os.pipe(), os.pipe()

        def wait(_: Save) -> None:
            os.write(ready[1], b"x")
            os.read(go[0], 1)

        pid = fork(lambda: DirectoryWriter().run(folder, [(10, 1)], wait))
        os.close(ready[1])
        assert os.read(ready[0], 1) == b"x"
        with pytest.raises(CheckpointError, match=f"process {pid} on .* is writing here"):
            DirectoryWriter().run(folder, [(20, 2)], lambda _: None)
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
        DirectoryWriter().run(folder, [(20, 2)], lambda _: None)
        assert DirectoryWriter().load(folder) == (20, 2)
