"""Folders on their way to a name: what others have beside them is neither touched nor in the way."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.forked import fork
from titan_ckpt.disk import posix
from titan_ckpt.disk.kernel import Holder
from titan_ckpt.disk.unpublished_folder import StagedFolder

DEAD = ".staging-" + "a" * 32
RECORD = json.dumps(asdict(Holder.current()))
"""What the lock of a process of this machine holds."""


def publish(target: Path) -> None:
    staged = StagedFolder.begin(target)
    (staged.path / "file").write_text("whole")
    staged.publish()


def in_another_process(root: Path) -> None:
    os.waitpid(fork(lambda: publish(root)), 0)


def test_only_folders_of_exactly_such_a_name_are_removed(tmp_path: Path) -> None:
    """A dead process's folder goes; a user's own that merely begins alike stays, beside a lock or not."""
    for name in (DEAD, ".staging-area", f"{DEAD}0", f"{DEAD}.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("")
        (tmp_path / f"{name}.lock").write_text(RECORD)
    publish(tmp_path / "step-1")
    left = {name for name in os.listdir(tmp_path) if not name.endswith(".lock")}
    assert left == {".staging-area", f"{DEAD}0", f"{DEAD}.old", "step-1"}
    assert not (tmp_path / f"{DEAD}.lock").exists()
    assert all((tmp_path / name / "mine").exists() for name in left - {"step-1"})


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_cannot_be_removed_is_in_nobodys_way(tmp_path: Path, kind: str) -> None:
    """Such as another user's rest, which may not be opened: the export is made."""
    lock = tmp_path / f"{DEAD}.lock"
    lock.mkdir() if kind == "folder" else lock.symlink_to("/etc/passwd")
    (tmp_path / DEAD).mkdir()
    publish(tmp_path / "step-1")
    assert (tmp_path / "step-1" / "file").exists()
    assert (tmp_path / DEAD).exists()


@pytest.mark.parametrize("moment", ["before it is locked", "while it is locked"])
def test_a_sweep_between_a_locks_creation_and_its_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another process takes the new lock for a dead one's: a second is made, and nobody removes that."""
    lock = posix.lock
    calls: list[int] = []

    def late(fd: int) -> bool | None:
        calls.append(fd)
        if len(calls) > 1:
            return lock(fd)
        if moment == "while it is locked":
            return False
        monkeypatch.setattr(posix, "lock", lock)
        in_another_process(tmp_path / "other")
        monkeypatch.setattr(posix, "lock", late)
        return lock(fd)

    monkeypatch.setattr(posix, "lock", late)
    staged = StagedFolder.begin(tmp_path / "mine")
    assert len(calls) == 2
    assert staged.path.with_name(f"{staged.path.name}.lock").exists()
    in_another_process(tmp_path / "third")
    assert staged.path.exists()
    staged.publish()
    assert {name for name in os.listdir(tmp_path) if name.startswith(".")} == set()


def test_two_that_remove_the_same_rest_are_both_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has removed a dead one's folder after this one has found its lock."""
    (tmp_path / DEAD).mkdir()
    (tmp_path / f"{DEAD}.lock").write_text(RECORD)
    lock = posix.lock

    def late(fd: int) -> bool | None:
        monkeypatch.setattr(posix, "lock", lock)
        in_another_process(tmp_path / "other")
        return lock(fd)

    monkeypatch.setattr(posix, "lock", late)
    publish(tmp_path / "mine")
    assert sorted(os.listdir(tmp_path)) == ["mine", "other"]


def test_two_processes_that_publish_one_folder_are_told(tmp_path: Path) -> None:
    """The second one names the target and the next step, and leaves nothing of its own."""
    first, second = StagedFolder.begin(tmp_path / "step-1"), StagedFolder.begin(tmp_path / "step-1")
    first.publish()
    with pytest.raises(FileExistsError, match="step-1 has come to be there meanwhile, so another process exports"):
        second.publish()
    second.abandon()
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize("host", ["elsewhere", socket.gethostname()])
def test_a_folder_of_another_host_stays_for_days_where_locks_do_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """NFS with nolock gives each host its own locks: another host's live export is left, and a long dead one goes.

    Two machines may have one name, as "localhost" or that of a pod.
    """
    with monkeypatch.context() as elsewhere:
        holder = Holder("1" * 32, host, "other-boot", "", os.getpid(), "1")
        elsewhere.setattr(Holder, "current", staticmethod(lambda: holder))
        staged = StagedFolder.begin(tmp_path / "theirs")
    unnamed = tmp_path / DEAD
    unnamed.mkdir()
    lock = unnamed.with_name(f"{DEAD}.lock")
    lock.write_text("")
    monkeypatch.setattr(posix, "lock", lambda _: True)
    publish(tmp_path / "step-1")
    assert staged.path.exists()
    assert unnamed.exists(), "its process may not have been known yet on this host"
    for path in (lock, staged.path.with_name(f"{staged.path.name}.lock")):
        os.utime(path, (0, os.stat(path).st_mtime - 3 * 24 * 3600))
    publish(tmp_path / "step-2")
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]
    staged.release()
