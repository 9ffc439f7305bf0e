"""A checkpoint folder: what counts as a step, how one is committed, kept, set aside and removed, and by whom."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults.small_checkpoints import (
    commit_step,
    load,
    manifest_of,
    open_directory,
    read_value,
    save,
    write_files,
)
from tests.forked import answer, fork
from titan_ckpt.config import KeepConfig
from titan_ckpt.directory import lease, posix_steps
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.lease import LEASE_NAME, FileLease
from titan_ckpt.directory.manifest import MANIFEST_NAME, FileRecord
from titan_ckpt.directory.names import read_manifest_bytes, survey
from titan_ckpt.directory.steps import Attempt, open_steps
from titan_ckpt.disk import posix
from titan_ckpt.disk.kernel import Holder
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptCheckpointError,
    PeerError,
    PreflightError,
    SaveError,
)
from titan_ckpt.testing import distributed


def everything(root: Path) -> dict[str, bytes | str]:
    """Return every entry under a folder with its bytes, link target or kind."""
    found: dict[str, bytes | str] = {}
    for folder, names, files in os.walk(root):
        for name in names + files:
            path = Path(folder, name)
            key = str(path.relative_to(root))
            found[key] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
    return found


def in_child(act: Callable[[], Any]) -> Any:
    """Run `act` in a forked process; return what it returned, or its error's type and text."""

    def caught() -> Any:
        try:
            return act()
        except Exception as error:
            return [type(error).__name__, str(error)]

    return answer(caught)[0]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[CheckpointDirectory]:
    """A directory of a run of one process, which a save opens."""
    made = open_directory(tmp_path)
    yield made
    made.close()


def is_tidy(root: Path) -> bool:
    """Say whether nothing of attempts and deletions is there."""
    return [*root.glob(".staging/*"), *root.glob(".trash/*")] == []


def link(path: Path) -> None:
    """Move something away and leave a link to it."""
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def remove(path: Path) -> Path:
    """Delete a folder and return its path."""
    shutil.rmtree(path)
    return path


def remove_file(path: Path) -> Path:
    """Delete a file and return its path."""
    path.unlink()
    return path


# commit


def test_a_commit_leaves_the_step_and_nothing_else(tmp_path: Path) -> None:
    """The step holds the written bytes and a manifest that lists them; staging and trash are empty again."""
    root = tmp_path / "a" / "checkpoints"
    directory = open_directory(root)
    assert directory.steps() == []
    assert not root.exists()
    manifest = commit_step(directory, 500, value=7)
    assert sorted(os.listdir(root)) == [".lease", ".staging", ".trash", "step-500"]
    assert sorted(os.listdir(root / "step-500")) == [MANIFEST_NAME, "rank-00000.safetensors", "state.json"]
    assert is_tidy(root)
    assert directory.steps() == [500]
    assert directory.committed(500)[0] == manifest
    assert directory.step_path(500) == root / "step-500"
    assert read_value(root / "step-500", manifest) == 7
    directory.close()


def test_a_step_that_is_in_the_way_and_not_ours_is_named(tmp_path: Path, directory: CheckpointDirectory) -> None:
    """A torchtitan folder of the same name is a conflict found before anything is written."""
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-10" / ".metadata").write_bytes(b"x")
    with pytest.raises(CommitConflictError, match="step-10 is in the way and is not a checkpoint"):
        directory.begin(10)
    commit_step(directory, 20)
    assert (tmp_path / "step-10" / ".metadata").read_bytes() == b"x"


# discovery


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: (p / MANIFEST_NAME).unlink(), "no MANIFEST.json"),
        (lambda p: (p / MANIFEST_NAME).write_bytes(b""), "no seal"),
        (lambda p: link(p / MANIFEST_NAME), "not a manifest, which is a regular file"),
        (lambda p: remove_file(p / MANIFEST_NAME).mkdir(), "not a manifest, which is a regular file"),
        (lambda p: os.mkfifo(remove_file(p / MANIFEST_NAME)), "not a manifest, which is a regular file"),
        (lambda p: os.truncate(p / MANIFEST_NAME, 1 << 40), "not a manifest, which is a regular file"),
        (lambda p: (p / "state.json").unlink(), "state.json: No such file"),
        (lambda p: os.truncate(p / "state.json", 3), "state.json: 3 bytes"),
        (lambda p: os.truncate(p / "state.json", 3000), "state.json: 3000 bytes"),
        (lambda p: link(p / "state.json"), "not a regular file"),
        (lambda p: link(p), "a link or a file"),
        (lambda p: remove(p).write_text("step"), "a link or a file"),
        (lambda p: shutil.copytree(p.parent / "step-10", remove(p)), "its manifest says step 10"),
        (lambda p: remove(p).mkdir(), "no MANIFEST.json"),
    ],
)
def test_a_damaged_step_is_skipped_with_its_reason(
    tmp_path: Path,
    directory: CheckpointDirectory,
    damage: Callable[[Path], Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The older one is taken, and the log says, once, what is wrong with the newer one."""
    commit_step(directory, 10)
    commit_step(directory, 20)
    damage(tmp_path / "step-20")
    with caplog.at_level(logging.WARNING):
        assert directory.steps() == [10]
        assert directory.steps() == [10]
    assert len([line for line in caplog.messages if "step-20" in line and reason in line]) == 1, caplog.messages
    with pytest.raises(CorruptCheckpointError, match="step-20"):
        directory.committed(20)


@pytest.mark.parametrize("name", ["step-10", "step-4.tmp", "old-step-3", "checkpoint-500", "global_step12", "anything"])
def test_content_that_looks_like_checkpoints_refuses_a_fresh_start(tmp_path: Path, name: str) -> None:
    """Nothing valid, but something that looks like a checkpoint: an error that lists it, with what to do."""
    (tmp_path / name).mkdir()
    (tmp_path / name / ".metadata").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=f"(?s){name}.*move it away"):
        open_directory(tmp_path).steps()


def test_other_content_does_not_stand_in_the_way(tmp_path: Path) -> None:
    """Logs, a config and exports beside an empty run are no reason to refuse."""
    for name in ("tensorboard", "exports", ".git"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-1.log").write_text("")
    assert open_directory(tmp_path).steps() == []


def test_looking_changes_nothing(tmp_path: Path, directory: CheckpointDirectory) -> None:
    """Listing and reading steps leaves a folder as it was, attempts of a living save included."""
    commit_step(directory, 10)
    attempt = directory.begin(20)
    write_files(attempt, 0)
    before = everything(tmp_path)
    reader = open_directory(tmp_path)
    assert reader.steps() == [10]
    reader.committed(10)
    reader.resume_from(10)
    assert open_steps(tmp_path).expired(KeepConfig(latest=1)) == []
    reader.close()
    assert everything(tmp_path) == before


# rollback


def test_a_rollback_that_was_interrupted_by_an_error_is_finished_by_the_next_save(
    tmp_path: Path,
    directory: CheckpointDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One failed rename among several fails that save alone, and the log names those that were renamed."""
    for step in (10, 20, 30):
        save(tmp_path, step, step, keep=None)
    directory.resume_from(10)
    rename = posix.rename_noreplace

    def fail(source: Any, target: Any) -> None:
        if Path(source).name == "step-20":
            raise OSError(errno.EIO, "no luck")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(posix, "rename_noreplace", fail)
        with pytest.raises(SaveError, match="no luck"):
            commit_step(directory, 15)
    assert directory.steps() == [10, 20]
    assert caplog.text.count("set aside as step-30.abandoned-") == 1
    commit_step(directory, 15)
    assert directory.steps() == [10, 15]


# retention


def test_a_step_that_holds_a_file_of_a_user_stays(tmp_path: Path, directory: CheckpointDirectory) -> None:
    """No policy deletes it, and nobody by hand, until the file is taken out."""
    for step in (1, 2, 3):
        commit_step(directory, step)
    (tmp_path / "step-2" / "notes.txt").write_text("look at this one")
    assert directory.expire(KeepConfig(latest=1)) == [1]
    directory.close()
    store = open_steps(tmp_path)
    with pytest.raises(SaveError, match=r"notes\.txt"):
        store.remove(store.inspect(2))
    store.close()
    assert directory.steps() == [2, 3] and is_tidy(tmp_path)


def test_retention_looks_at_the_files_of_new_steps_alone(tmp_path: Path, directory: CheckpointDirectory) -> None:
    """A save asks once for each step that is kept, not once for each file; a pin and a lost step are noticed."""

    def save_of_ranks(step: int) -> None:
        attempt = directory.begin(step)
        ranks = [f"rank-{rank:05d}.{kind}" for rank in range(40) for kind in ("json", "safetensors")]
        records = write_files(attempt, 0, ("state.json", *ranks))
        directory.commit(attempt, manifest_of(attempt, records, world_size=40))

    def calls_of_expire(keep: KeepConfig, expired: list[int]) -> int:
        calls = 0

        def count(frame: Any, event: str, function: Any) -> None:
            nonlocal calls
            calls += event == "c_call" and getattr(function, "__module__", "") == "posix"

        sys.setprofile(count)
        try:
            gone = directory.expire(keep)
        finally:
            sys.setprofile(None)
        assert gone == expired
        return calls

    for step in range(1, 11):
        save_of_ranks(step)
    keep = KeepConfig(latest=20)
    calls_of_expire(keep, [])
    save_of_ranks(11)
    with_one_new = calls_of_expire(keep, [])
    save_of_ranks(12)
    shutil.rmtree(tmp_path / "step-12")
    without_new = calls_of_expire(keep, [])
    assert without_new < 40 and with_one_new < without_new + 3 * 81
    open_steps(tmp_path).pin(2)
    (tmp_path / "step-10" / "state.json").unlink()
    calls_of_expire(KeepConfig(latest=1), [1, *range(3, 10)])
    assert directory.steps() == [2, 11]


def test_a_file_that_a_user_adds_while_a_step_expires_keeps_the_step(
    tmp_path: Path, directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is looked at again when it has left its place, and goes back there whole."""
    for step in (1, 2):
        commit_step(directory, step)
    rename = posix.rename_noreplace

    def pinned(source: Any, target: Any) -> None:
        if os.fspath(source).endswith("step-1"):
            (Path(source) / "PINNED").touch()
        rename(source, target)

    monkeypatch.setattr(posix, "rename_noreplace", pinned)
    assert directory.expire(KeepConfig(latest=1)) == []
    assert "step-1: holds what is not ours: PINNED" in caplog.text
    assert directory.steps() == [1, 2]
    assert open_steps(tmp_path).expired(KeepConfig(latest=1)) == []


def test_a_deletion_that_fails_is_reported_and_finished_later(
    tmp_path: Path, directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is no checkpoint any more, the error is in the log, and the next opening removes the rest."""
    for step in (1, 2):
        commit_step(directory, step)
    unlink = posix.unlink

    def broken(path: Any, *parent: int) -> None:
        if os.fspath(path).endswith("state.json"):
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, *parent)

    monkeypatch.setattr(posix, "unlink", broken)
    directory.expire(KeepConfig(latest=1))
    assert directory.steps() == [2]
    assert any("state.json: Input/output error" in line for line in caplog.messages)
    assert len(os.listdir(tmp_path / ".trash")) == 1
    monkeypatch.setattr(posix, "unlink", unlink)
    directory.close()
    directory._store.open()
    assert os.listdir(tmp_path / ".trash") == []


@pytest.mark.parametrize("call", ["preflight", "begin"])
def test_a_peer_that_is_lost_while_a_save_begins_leaves_no_folder(tmp_path: Path, call: str) -> None:
    """Rank 0 removes what it has made, because nobody else would before the next start."""
    store = dist.HashStore()
    directory = CheckpointDirectory(tmp_path, Coordinator(0, 2, store, "begin", 1.0))
    peer = Coordinator(1, 2, store, "begin", 60.0)
    tag = "preflight bytes" if call == "preflight" else "begin step 5"
    thread = threading.Thread(target=peer.gather, args=(tag, 100), daemon=True)  # and no more is heard of it
    thread.start()
    with pytest.raises(PeerError, match="rank 1 did not arrive"):
        directory.preflight(100) if call == "preflight" else directory.begin(5, 100)
    thread.join()
    assert is_tidy(tmp_path)
    directory.close()


# one writer


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    """Another process and another object of this process both learn who holds the folder; reading stays possible."""
    first = open_directory(tmp_path)
    commit_step(first, 1)
    with pytest.raises(CommitConflictError, match="this process already writes here"):
        open_directory(tmp_path).begin(2)
    kind, message = in_child(lambda: open_directory(tmp_path).begin(2).step)
    assert kind == "CommitConflictError"
    assert f"process {os.getpid()} on " in message
    assert in_child(lambda: open_directory(tmp_path).steps()) == [1]
    commit_step(first, 2)
    first.close()
    assert in_child(lambda: save(tmp_path, 3, 0)) is None


def test_a_killed_writer_is_succeeded_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SIGKILL leaves the lease file behind but not the lease, even while the dead process is not reaped."""

    def die() -> None:
        commit_step(open_directory(tmp_path), 1)
        os.kill(os.getpid(), signal.SIGKILL)

    pid = fork(die)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    save(tmp_path, 2, 0)
    os.waitpid(pid, 0)
    assert any(f"taking over from process {pid} " in line for line in caplog.messages)
    assert open_directory(tmp_path).steps() == [1, 2]


def _elsewhere() -> None:
    """Let this process look as if it ran on another machine, so that only a lock shows that it lives."""
    holder = Holder("1" * 32, "elsewhere", "other-boot", "", os.getpid(), "1")
    Holder.current = staticmethod(lambda: holder)  # type: ignore[method-assign]


def test_reading_the_lease_in_its_holders_process_does_not_give_it_up(tmp_path: Path) -> None:
    """As `titan-ckpt ls` in a callback does, or an upload of the whole folder, or a second manager of the process."""
    read, write = os.pipe()

    def hold() -> None:
        _elsewhere()
        directory = open_directory(tmp_path)
        commit_step(directory, 1)
        assert FileLease.named_in(tmp_path) is not None
        (tmp_path / LEASE_NAME).read_bytes()
        with pytest.raises(CommitConflictError, match="this process already writes here"):
            open_directory(tmp_path).begin(2)
        os.write(write, b"held")
        signal.pause()

    pid = fork(hold)
    try:
        assert os.read(read, 4) == b"held"
        with pytest.raises(CommitConflictError, match=f"process {pid} on elsewhere is writing here"):
            open_directory(tmp_path).begin(2)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    save(tmp_path, 2, 0)


def test_a_killed_writer_is_succeeded_while_a_worker_that_it_forked_lives(tmp_path: Path) -> None:
    """A dataloader worker inherits the descriptor of the lease, and does not keep the lease by it."""
    read, write = os.pipe()

    def hold() -> None:
        _elsewhere()
        commit_step(open_directory(tmp_path), 1)
        fork(work)
        signal.pause()

    def work() -> None:
        os.write(write, str(os.getpid()).encode())  # it has given up its copy of the lease
        signal.pause()

    pid = fork(hold)
    worker = int(os.read(read, 20))
    try:
        with pytest.raises(CommitConflictError, match="is writing here"):
            open_directory(tmp_path).begin(2)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        save(tmp_path, 2, 0)
        os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_process_cannot_commit(tmp_path: Path) -> None:
    """A writer process that outlives its trainer holds a copy of everything but the right to commit."""
    directory = open_directory(tmp_path)
    attempt = directory.begin(1)
    records = write_files(attempt, 0)
    kind, message = in_child(lambda: directory._store.commit(attempt, manifest_of(attempt, records)))
    assert kind == "CommitConflictError"
    assert "a process it forked may not commit" in message
    directory.close()
    assert directory.steps() == []


@pytest.mark.parametrize("moment", ["writing", "checked"])
def test_a_stopped_writer_that_was_succeeded_never_commits(tmp_path: Path, moment: str) -> None:
    """A writer on another machine is stopped, replaced, and wakes up: before its last check, and right after it.

    The other machine is played by a lock that does not reach and a record that names another boot.
    """
    read, write = os.pipe()

    def write_elsewhere() -> None:
        posix.lock = lambda fd: None
        _elsewhere()
        directory = open_directory(tmp_path)
        attempt = directory.begin(10)
        records = write_files(attempt, 1)
        check, held = directory._store.open().check, directory._store.open()
        checks = iter(range(2))

        def check_and_stop() -> None:
            check()
            if next(checks) == 1:
                os.kill(os.getpid(), signal.SIGSTOP)

        if moment == "writing":
            os.kill(os.getpid(), signal.SIGSTOP)
        held.check = check_and_stop  # type: ignore[method-assign]
        try:
            directory.commit(attempt, manifest_of(attempt, records))
            os.write(write, b"committed")
        except SaveError as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())

    pid = fork(write_elsewhere)
    os.close(write)
    os.waitpid(pid, os.WUNTRACED)
    successor = open_directory(tmp_path)
    assert successor.steps() == []
    commit_step(successor, 10, value=2)
    before = everything(tmp_path)
    os.kill(pid, signal.SIGCONT)
    os.waitpid(pid, 0)
    told = os.read(read, 10_000).decode()
    assert told.startswith("CommitConflictError" if moment == "writing" else "SaveError"), told
    assert everything(tmp_path) == before
    assert load(tmp_path) == (10, 2)
    commit_step(successor, 20, value=3)
    successor.close()


def test_a_clean_up_of_a_writer_that_was_succeeded_spares_the_save_of_its_successor(tmp_path: Path) -> None:
    """It is suspended between its look at the lease and its clean-up, which then finds the other's save under way."""
    held = dict(lease.held)
    old, new = open_directory(tmp_path), open_directory(tmp_path)
    commit_step(old, 1)
    old._store._has_leftovers = True
    mine = old._store.open()
    check = mine.check
    attempts: list[Attempt] = []

    def check_then_sleep() -> None:
        mine.check = check  # type: ignore[method-assign]
        check()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lease, "held", held)
            patch.setattr(posix, "lock", lambda fd: None)
            attempts.append(new.begin(2))
            write_files(attempts[0], 0)

    mine.check = check_then_sleep  # type: ignore[method-assign]
    with pytest.raises(CommitConflictError, match="taken over"):
        old.begin(3)
    assert attempts[0].folder.exists()
    old.close()
    new.close()


def test_a_folder_that_is_moved_away_under_its_writer_is_noticed(tmp_path: Path) -> None:
    """The run's folder is renamed while it runs: the next save says so instead of writing somewhere new."""
    directory = open_directory(tmp_path / "run")
    commit_step(directory, 10)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(CommitConflictError, match=r"\.lease is gone: the folder was moved or cleared"):
        directory.begin(20)
    assert not (tmp_path / "run").exists()
    directory.close()


def test_a_torn_lease_file_is_no_obstacle(tmp_path: Path) -> None:
    """A lease cut by a power failure, or scribbled over, names nobody."""
    for data in (b"", b"{", b"[]", b'{"id": 1}', b"\xff" * 10_000):
        (tmp_path / LEASE_NAME).write_bytes(data)
        directory = open_directory(tmp_path)
        directory._store.open()
        directory.close()


@pytest.mark.parametrize("name", [LEASE_NAME, ".staging", ".trash"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder or file"])
def test_what_has_the_name_of_something_of_ours_is_named_with_what_to_do(tmp_path: Path, name: str, kind: str) -> None:
    """A link, a pipe, a folder in place of the lease or a file in place of a folder: one typed error, nothing hangs."""
    path = tmp_path / name
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif name == LEASE_NAME:
        path.mkdir()
    else:
        path.write_text("")
    with pytest.raises(PreflightError, match=rf"{re.escape(str(path))}: must be .* Move it away"):
        open_directory(tmp_path).preflight(1)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_may_not_be_looked_into_is_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost+found of a disk that is mounted as the checkpoint folder belongs to root."""
    save(tmp_path, 1, 1)
    (tmp_path / "lost+found").mkdir()
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if "lost+found/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert open_directory(tmp_path).steps() == [1]


# pre-flight


def test_f7_a_preflight_that_passes_leaves_nothing(tmp_path: Path) -> None:
    """A tiny save goes all the way and is deleted; the folder is ready."""
    directory = open_directory(tmp_path / "new" / "run")
    directory.preflight(1_000_000)
    assert sorted(os.listdir(tmp_path / "new" / "run")) == [".lease", ".staging", ".trash"]
    root = tmp_path / "new" / "run"
    assert is_tidy(root)
    commit_step(directory, 1)
    directory.close()


def test_f7_too_little_space_is_found_before_anything_is_written(
    tmp_path: Path, directory: CheckpointDirectory
) -> None:
    """1.05 times the bytes must be free, at the pre-flight and at each save; the message has the numbers."""
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    for act in (directory.preflight, lambda size: directory.begin(1, size)):
        with pytest.raises(PreflightError, match=r"wants [\d.]+ MiB free, found [\d.]+ MiB"):
            act(free)
    assert os.listdir(tmp_path / ".staging") == []


def test_a_file_system_that_does_not_say_its_size_takes_saves(
    tmp_path: Path, directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as ramfs, which reports no blocks at all: neither the pre-flight nor a save finds it full."""
    nothing = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: nothing)
    directory.preflight(1_000_000)
    commit_step(directory, 1)


def _failing_at_the_commit(
    monkeypatch: pytest.MonkeyPatch, root: Path, error: BaseException, *, undo_fails: bool
) -> None:
    """Let the commit's rename work and what follows it raise; then also the rename back, if `undo_fails`."""
    rename = posix.rename_noreplace

    def rename_then_fail(source: Path, target: Path) -> None:
        if undo_fails and source.parent == root:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)
        if isinstance(error, KeyboardInterrupt) and target.parent == root:
            raise error

    def fail_to_sync(folder: Path) -> None:
        if folder == root and (root / "step-1").exists():
            raise error

    monkeypatch.setattr(posix, "rename_noreplace", rename_then_fail)
    monkeypatch.setattr(posix, "fsync_folder", fail_to_sync)


def test_a_commit_that_is_interrupted_behind_its_rename_is_taken_back(
    tmp_path: Path, directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt ends the save, so the step is not there, and the next save makes it."""
    with monkeypatch.context() as patch:
        _failing_at_the_commit(patch, tmp_path, KeyboardInterrupt(), undo_fails=False)
        with pytest.raises(KeyboardInterrupt):
            commit_step(directory, 1, 1)
    assert directory.steps() == [] and os.listdir(tmp_path / ".staging") == []
    commit_step(directory, 1, 1)
    assert directory.steps() == [1]


def test_a_step_that_can_neither_be_synced_nor_taken_back_is_said_to_be_there(
    tmp_path: Path, directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not call a step lost that the next resume finds."""
    with monkeypatch.context() as patch:
        _failing_at_the_commit(patch, tmp_path, OSError(errno.EIO, "Input/output error"), undo_fails=True)
        with pytest.raises(SaveError, match="step-1: is there, but may be gone after a power failure"):
            commit_step(directory, 1, 1)
    assert directory.steps() == [1]


@pytest.mark.parametrize("name", ["mkdir", "open_exclusive", "pwrite_all", "fsync", "fsync_folder", "rename_noreplace"])
def test_f7_a_folder_where_saves_fail_is_found_at_the_preflight(
    tmp_path: Path, directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each operation of a save failing, as on a read-only or broken mount, is one PreflightError with what to check."""
    directory._store.open()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(posix, name, fail)
    with pytest.raises(PreflightError, match=r"saves cannot work here: .*Read-only file system") as caught:
        directory.preflight(10)
    assert caught.value.errno == errno.EROFS
    monkeypatch.undo()


def test_a_file_where_the_folder_should_be_is_typed(tmp_path: Path) -> None:
    """A path that cannot be a folder is named by the pre-flight."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="file"):
        open_directory(tmp_path / "file" / "checkpoints").preflight(1)


# several ranks


def collective_save(directory: CheckpointDirectory, line: Coordinator, step: int, value: int) -> None:
    """Save one file per rank, as a manager does."""
    attempt = directory.begin(step, num_bytes=100)
    records = write_files(attempt, value, (f"rank-{line.rank:05d}.safetensors",))
    gathered: Any = line.gather("written", [[r.name, r.num_bytes, r.digest] for r in records])
    files = [FileRecord(*record) for rank in gathered for record in rank]
    moment: Any = line.broadcast("time", time.time())
    directory.commit(attempt, manifest_of(attempt, files, world_size=line.world_size, created_unix_seconds=moment))


@distributed(nproc=3)
def test_ranks_save_and_see_alike(tmp_path: Path) -> None:
    """Three ranks commit one step together and agree on the list and on the manifest."""
    line = Coordinator.current(20)
    directory = CheckpointDirectory(tmp_path, line)
    directory.preflight(1000)
    collective_save(directory, line, 10, 1)
    collective_save(directory, line, 20, 2)
    assert directory.steps() == [10, 20]
    manifest, _ = directory.committed(20)
    assert [record.name for record in manifest.files] == [f"rank-{rank:05d}.safetensors" for rank in range(3)]
    assert read_value(tmp_path / "step-20", manifest) == 2
    directory.expire(KeepConfig(latest=1))
    assert directory.steps() == [20]
    directory.close()


@distributed(nproc=2)
def test_rank_0s_failure_is_every_ranks(tmp_path: Path) -> None:
    """A conflict that only rank 0 can see stops rank 1 as well, and names it; both go on together."""
    line = Coordinator.current(20)
    directory = CheckpointDirectory(tmp_path, line)
    collective_save(directory, line, 10, 1)
    expected = CommitConflictError if line.rank == 0 else PeerError
    with pytest.raises(expected, match="step 10 is committed already"):
        directory.begin(10)
    with pytest.raises(CheckpointNotFoundError if line.rank == 0 else PeerError, match="step 11 is not there"):
        directory.committed(11)
    collective_save(directory, line, 20, 2)
    assert directory.steps() == [10, 20]
    directory.close()


@distributed(nproc=2)
def test_files_that_are_seen_late_are_waited_for(tmp_path: Path) -> None:
    """Rank 0's listing lacks rank 1's file for two tenths of a second, as over a network file system: no error."""
    line = Coordinator.current(20)
    directory = CheckpointDirectory(tmp_path, line)
    list_folder, start = posix.list_folder, time.monotonic()

    def late(path: Any) -> list[str]:
        seen = time.monotonic() - start > 0.2
        return [name for name in list_folder(path) if seen or not name.startswith("rank-00001")]

    posix.list_folder = late
    collective_save(directory, line, 10, 1)
    assert directory.steps() == [10]
    posix_steps.VISIBLE_SECONDS = 0.3
    posix.list_folder = lambda path: [name for name in list_folder(path) if not name.startswith("rank-00001")]
    with pytest.raises(SaveError if line.rank == 0 else PeerError, match=r"rank-00001\.safetensors is missing"):
        collective_save(directory, line, 20, 2)
    posix.list_folder = list_folder
    assert directory.steps() == [10]
    directory.close()


@distributed(nproc=2)
def test_f7_a_folder_that_is_not_shared_is_found_at_the_preflight(tmp_path: Path) -> None:
    """Rank 1's path leads to another disk: the pre-flight names the rank instead of a save failing hours later."""
    line = Coordinator.current(20)
    root = tmp_path / f"disk-of-rank-{line.rank}"
    directory = CheckpointDirectory(root, line)
    expected = PreflightError if line.rank == 1 else PeerError
    with pytest.raises(expected, match=r"rank 1 on .* does not see what rank 0 makes there"):
        directory.preflight(10)
    if line.rank == 0:
        assert is_tidy(root)
    directory.close()


@distributed(nproc=2)
def test_ranks_that_see_different_saves_do_not_load_a_mix(tmp_path: Path) -> None:
    """Rank 1's view of a step is another attempt, or nothing: every rank refuses, naming rank 1, and at once if rank 1
    does not even see the folder. The step is not called damaged, so that no older one is loaded in its place.
    """
    posix_steps.VISIBLE_SECONDS = 0.5
    line = Coordinator.current(20)
    root = tmp_path / f"view-of-rank-{line.rank}"
    if line.rank == 0:
        save(tmp_path / "view-of-rank-0", 10, 1)
        save(tmp_path / "view-of-rank-0", 20, 1)
        save(tmp_path / "view-of-rank-1", 10, 2)
    line.barrier("saved")
    directory = CheckpointDirectory(root, line)
    assert directory.steps() == [10, 20]
    for step, seen in ((10, "another save"), (20, "nothing")):
        with pytest.raises(CheckpointNotFoundError if line.rank == 1 else PeerError, match=f"rank 1 on .* sees {seen}"):
            directory.committed(step)
    directory.close()
    posix_steps.VISIBLE_SECONDS = 10_000.0
    root = tmp_path / "view-of-rank-0" if line.rank == 0 else tmp_path / "not-mounted"
    with pytest.raises(
        CheckpointNotFoundError if line.rank == 1 else PeerError, match=r"rank 1 on .* sees no such folder"
    ):
        CheckpointDirectory(root, line).committed(20)


@distributed(nproc=2)
def test_a_listing_that_arrives_late_is_waited_for(tmp_path: Path) -> None:
    """Rank 1 sees the step two tenths of a second after rank 0, as over a network file system: no error."""
    line = Coordinator.current(20)
    if line.rank == 0:
        save(tmp_path, 10, 1)
    line.barrier("saved")
    if line.rank == 1:
        start = time.monotonic()

        def late(path: Path) -> bytes:
            return read_manifest_bytes(path if time.monotonic() - start > 0.2 else path.with_name("not-yet"))

        setattr(posix_steps, "read_manifest_bytes", late)  # noqa: B010 - it is not exported there.
    directory = CheckpointDirectory(tmp_path, line)
    assert directory.committed(10)[0].step == 10
    directory.close()


def test_a_step_that_torchtitan_deletes_while_it_is_looked_at_ends_no_survey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its .metadata was there for the first look and not for the second, and the load of all other steps failed."""
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / ".metadata").write_bytes(b"x")
    look = os.stat

    def deleted(path: Any, **options: Any) -> os.stat_result:
        found = look(path, **options)
        if str(path).endswith(".metadata"):
            (tmp_path / "step-5" / ".metadata").unlink()
        return found

    monkeypatch.setattr(os, "stat", deleted)
    assert survey(tmp_path).dcp == (5,)
    assert survey(tmp_path).dcp == ()
