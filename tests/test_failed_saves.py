"""A save that the disk refuses: a typed error, or a warning and the next save, as checkpoint.save.on_failure says."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests import world
from tests.run_folder import Disk, RunFolder
from tests.world import manager as build
from tests.world import names_in
from titan_ckpt import CheckpointManager, ExportConfig, RunGuard, SaveConfig
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.errors import CommitConflictError, ConfigError, ExportError, PeerError, SaveError, StateEncodingError
from titan_ckpt.exporting.exporter import ExportJob
from titan_ckpt.formats.publish.record import MadeExports
from titan_ckpt.guard import outside_request
from titan_ckpt.saving import saver
from titan_ckpt.saving.step import DISK_ERRORS, is_disk_failure
from titan_ckpt.testing import distributed


def manager_in(folder: RunFolder, **save: Any) -> CheckpointManager:
    return build(folder, nn.Linear(2, 2), **save)


def save(manager: CheckpointManager, step: int) -> None:
    manager.save(step)
    manager.wait()


def content(folder: RunFolder) -> list[int | str]:
    """Return the steps, and everything of unfinished saves and deletions."""
    return [*folder.steps(), *folder.unfinished()]


MODES = pytest.mark.parametrize("mode", ["disabled", "thread"])


@MODES
@pytest.mark.parametrize("name", ["mkdir", "pwrite_all", "rename_noreplace"])
@pytest.mark.parametrize("error", sorted(DISK_ERRORS), ids=errno.errorcode.get)
def test_an_error_of_the_disk_is_a_save_error_with_its_cause_and_path(
    tmp_path: Path, mode: str, error: int, name: str
) -> None:
    """It has the errno, names the folder and the step, and leaves no step behind; by default it ends the run."""
    disk = Disk(names=frozenset({name}))
    with disk.inserted(), manager_in(RunFolder(tmp_path), async_mode=mode) as manager:
        manager.save(1)
        manager.wait()
        disk.error = error
        with pytest.raises(SaveError) as raised:
            save(manager, 2)
        disk.error = 0
    assert raised.value.errno == error
    assert f"{tmp_path / 'checkpoints'}: step 2" in str(raised.value) and os.strerror(error) in str(raised.value)
    if name == "rename_noreplace":  # what cannot be renamed cannot be cleared away yet
        world.load(manager_in(RunFolder(tmp_path)))
    assert content(RunFolder(tmp_path)) == [1]


@pytest.mark.parametrize("mode", ["disabled", "thread"])
def test_with_warn_the_run_goes_on_and_the_next_interval_saves(
    run_folder: RunFolder, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each failed save is one warning with its cause, and a whole step is all that is ever there."""
    disk = Disk()
    with disk.inserted(), manager_in(run_folder, async_mode=mode, on_failure="warn") as manager:
        for step in range(1, 6):
            disk.error = errno.ENOSPC if step in (2, 3) else 0
            manager.save(step)
            manager.wait()
            assert manager.completed.saved == (1 if step in (2, 3) else step)
    assert content(run_folder) == [1, 4, 5]
    lines = [record.getMessage() for record in caplog.records if "is not saved" in record.getMessage()]
    assert [line.partition(":")[0] for line in lines] == [
        f"step {n} is not saved ({n - 1} in a row, 3 are accepted)" for n in (2, 3)
    ]
    assert all("No space left on device" in line for line in lines)


def test_with_warn_a_run_that_saves_in_a_process_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It does not take `run_folder`, because a process takes seconds to start: one test of those on buckets has one."""
    test_with_warn_the_run_goes_on_and_the_next_interval_saves(RunFolder(tmp_path), "process", caplog)


def test_warn_ends_the_run_at_one_failure_too_many_in_a_row(run_folder: RunFolder) -> None:
    """A save that succeeds begins the count anew."""
    disk = Disk()
    manager = manager_in(run_folder, async_mode="disabled", on_failure="warn")
    with disk.inserted(), manager:
        for step in range(1, 9):
            disk.error = 0 if step in (1, 4) else errno.EDQUOT
            if step < 8:
                assert manager.save(step) is (step in (1, 4))
            else:
                with pytest.raises(SaveError, match=r"step 8.*Disk quota exceeded"):
                    manager.save(step)
        disk.error = 0
    assert content(run_folder) == [1, 4]


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("disabled", "last step"),
        ("disabled", "last step, begun as any other"),
        ("thread", "last step"),
        ("thread", "last step, begun as any other"),
        ("thread", "close"),
    ],
)
def test_the_last_save_always_raises(run_folder: RunFolder, mode: str, how: str) -> None:
    """No later save can make up for it, so "warn" does not hide that it is missing."""
    disk = Disk()

    def end() -> None:
        with disk.inserted(), manager_in(run_folder, async_mode=mode, on_failure="warn") as manager:
            manager.save(1)
            manager.wait()
            disk.error = errno.ENOSPC
            if how != "last step":
                manager.save(2)
            if how != "close":
                manager.save(2, last_step=True)

    with pytest.raises(SaveError, match="No space left"):
        end()
    assert content(run_folder) == [1]


def test_what_a_failed_save_could_not_clear_away_is_cleared_by_the_next_one(tmp_path: Path) -> None:
    """A disk that refuses to rename keeps the files of the attempt; they do not pile up over a run that goes on."""
    disk = Disk(names=frozenset({"rename_noreplace"}))
    with disk.inserted(), manager_in(RunFolder(tmp_path), async_mode="disabled", on_failure="warn") as manager:
        for step in range(1, 5):
            disk.error = errno.EROFS if step in (2, 3) else 0
            assert manager.save(step) is (step in (1, 4))
        assert content(RunFolder(tmp_path)) == [1, 4]


def test_the_last_save_makes_up_for_the_one_before_it(run_folder: RunFolder) -> None:
    """A background save that turns out to have failed when the last one begins is no failure of the last one."""
    disk = Disk()
    with disk.inserted(), manager_in(run_folder, on_failure="warn") as manager:
        save(manager, 1)
        disk.error = errno.ENOSPC
        manager.save(2)
        assert manager.in_flight is not None and not manager.in_flight.succeeded()
        disk.error = 0
        assert manager.save(3, last_step=True)
    assert content(run_folder) == [1, 3]


def test_warn_is_no_licence_for_other_failures(tmp_path: Path) -> None:
    """A folder that another writer has taken over stops this run at once."""
    with manager_in(RunFolder(tmp_path), async_mode="disabled", on_failure="warn") as manager:
        manager.save(1)
        (tmp_path / "checkpoints" / ".lease").unlink()
        with pytest.raises(CommitConflictError):
            manager.save(2)
    assert not is_disk_failure(["peer", "peer"]), "a rank that no longer answers"
    assert not is_disk_failure(["disk", "done"]), "ranks that do not agree whether the step is there"


def test_a_lack_of_space_that_is_foreseen_is_a_failure_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save asks for the space that it takes; nothing is written if it is not there."""
    with manager_in(RunFolder(tmp_path), async_mode="disabled", on_failure="warn") as manager:
        assert manager.save(1)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=1, f_bavail=0, f_frsize=1))
        assert not manager.save(2)
        monkeypatch.undo()
        assert manager.save(3)
    assert content(RunFolder(tmp_path)) == [1, 3]


def export_through(folder: Path, mode: str, *, last_step: int) -> None:
    """Save and export every step; the disk refuses what is exported of steps 2 and 3."""
    disk = Disk(only="exports")
    manager = build(
        folder, nn.Linear(2, 2), async_mode=mode, on_failure="warn", export=(ExportConfig("dcp", interval=1),)
    )
    with disk.inserted(), manager:
        for step in range(1, last_step + 1):
            manager.wait()
            disk.error = errno.ENOSPC if step in (2, 3) else 0
            manager.save(step, last_step=step == last_step)


ON_A_FULL_DISK = """
import subprocess, sys
from pathlib import Path
from torch import nn
from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig

folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
config = CheckpointConfig(save=SaveConfig(interval=1, on_failure="warn"))
with CheckpointManager(config, model_parts=[nn.Linear(700, 700)], base_folder=folder) as manager:
    for step in range(1, 4):
        if step == 2:
            (folder / "somebody else's").write_bytes(bytes(5 << 20))
        manager.save(step)
        manager.wait()
        (folder / "somebody else's").unlink(missing_ok=True)
print(sorted(path.name for path in (folder / "checkpoints").glob("s*")))
config = CheckpointConfig(save=SaveConfig(interval=1))
with CheckpointManager(config, model_parts=[nn.Linear(700, 700)], base_folder=folder) as manager:
    manager.load()
    (folder / "somebody else's").write_bytes(bytes(3 << 20))
    try:
        manager.save(4)
        manager.wait()
    except OSError as error:
        print("raised:", "space" in str(error))
with CheckpointManager(CheckpointConfig(), model_parts=[nn.Linear(700, 700)], base_folder=folder) as manager:
    print("resumed:", manager.load().step)
"""


def test_a_run_goes_on_over_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    """On a real file system of 8 MiB: the save that does not fit is a warning, and the one after it is there.

    Without "warn" it is an error, and the step before it is resumed.
    """
    command = ["unshare", "-rm", sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    told = "['step-1', 'step-3']\nraised: True\nresumed: 3\n"
    assert done.stdout == told, done.stderr
    assert "step 2 is not saved (1 in a row, 3 are accepted)" in done.stderr


@MODES
def test_an_interval_export_that_the_disk_refuses_does_not_end_the_run(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is one warning and leaves nothing behind, made in the background or not; the last exports raise."""
    export_through(tmp_path / "a", mode, last_step=4)
    assert names_in(tmp_path / "a" / "exports") == ["step-1", "step-4"]
    assert content(RunFolder(tmp_path / "a")) == [1, 2, 3, 4]
    assert [n for n in range(1, 5) if f"step {n} is not exported" in caplog.text] == [2, 3]
    with pytest.raises(ExportError, match="No space left"):
        export_through(tmp_path / "b", mode, last_step=3)


@MODES
def test_the_fourth_failure_in_a_row_of_one_export_ends_the_run_whatever_others_do(tmp_path: Path, mode: str) -> None:
    """The success of one that is made beside it began the count anew, so that the warnings never ended."""
    disk = Disk(error=errno.ENOSPC, only="/full/")
    exports = tuple(ExportConfig("dcp", interval=1, folder=name) for name in ("full", "exports"))
    manager = build(tmp_path, nn.Linear(2, 2), async_mode=mode, on_failure="warn", export=exports)
    with disk.inserted(), manager:
        for step in (1, 2, 3):
            save(manager, step)
        with pytest.raises(ExportError, match=r"No space left"):
            save(manager, 4)
    assert names_in(tmp_path / "exports")[:3] == ["step-1", "step-2", "step-3"]


def broken(*_: object) -> None:
    raise ValueError("a fault of our own")


def test_an_error_of_any_kind_in_an_export_is_no_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step stays the last one saved, the next one is saved before the error is raised, and the run can go on."""
    with build(tmp_path, nn.Linear(2, 2), export=(ExportConfig("dcp", interval=1),)) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(ExportJob, "run", broken)
            manager.save(1)
            assert (handle := manager.in_flight) is not None and handle.succeeded()
            with pytest.raises(ValueError, match="a fault of our own"):
                manager.save(2)
            assert manager.completed.saved == 2
        save(manager, 3)
    assert content(RunFolder(tmp_path)) == [1, 2, 3]
    assert names_in(tmp_path / "exports") == ["step-3"]


def test_an_export_that_failed_before_a_failed_save_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the save is raised; that of the export is raised by the next call that raises errors, once."""
    state: dict[str, Any] = {}
    owner: Any = SimpleNamespace(state_dict=state.copy, load_state_dict=state.update)
    with build(tmp_path, nn.Linear(2, 2), export=(ExportConfig("dcp", interval=1),), states={"own": owner}) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(ExportJob, "run", broken)
            manager.save(1)
            assert (handle := manager.in_flight) is not None and handle.succeeded()
            state["it"] = object()
            with pytest.raises(StateEncodingError):
                manager.save(2)
            assert manager.completed.saved == 1
        state.clear()
        with pytest.raises(ValueError, match="a fault of our own"):
            manager.save(2)
        save(manager, 3)
    assert content(RunFolder(tmp_path)) == [1, 2, 3]


def test_a_resumed_run_goes_on_if_it_cannot_see_whether_an_export_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bucket that does not answer is as a disk that does not: one warning, and the next export is made."""
    export = (ExportConfig("dcp", interval=1),)
    settings: dict[str, Any] = {"async_mode": "disabled", "on_failure": "warn", "export": export}
    model = nn.Linear(2, 2)
    with build(tmp_path, model, **settings) as manager:
        save(manager, 1)

    def silent(self: object, name: str) -> bool:
        raise OSError(errno.EIO, "no answer")

    with build(tmp_path, model, **settings) as manager:
        manager.load()
        with monkeypatch.context() as patch:
            patch.setattr(MadeExports, "is_there", silent)
            save(manager, 2)
        save(manager, 3)
    assert names_in(tmp_path / "exports") == ["step-1", "step-3"]
    assert "step 2 is not exported (1 in a row, 3 are accepted)" in caplog.text


@distributed(nproc=2)
def test_all_ranks_go_on_after_a_failure_of_one(run_folder: RunFolder) -> None:
    """The disk of one rank is full, then rank 0's: both go on and save the next step; one too many ends both."""
    disk = Disk()
    manager = manager_in(run_folder, on_failure="warn")
    with disk.inserted(), manager:
        for step, full in ((1, None), (2, 1), (3, 0), (4, None), (5, 1), (6, 1), (7, 0), (8, 1)):
            disk.error = errno.ENOSPC if full == dist.get_rank() else 0
            if step < 8:
                save(manager, step)
                assert manager.completed.saved == (step if full is None else 1 if step < 4 else 4)
            else:
                with pytest.raises(SaveError, match="No space left"):
                    save(manager, step)
        disk.error = 0
    assert content(run_folder) == [1, 4]


@distributed(nproc=2, timeout_seconds=60)
def test_a_save_that_fails_on_one_rank_beside_exports_ends_all_ranks_at_once(tmp_path: Path) -> None:
    """No rank waits for the other one: not in the export of that step, nor to count its failures."""
    manager = build(
        tmp_path, nn.Linear(2, 2), timeout_seconds=300, on_failure="warn", export=(ExportConfig("dcp", interval=1),)
    )
    expected, message = (PeerError, "on rank 1") if dist.get_rank() == 0 else (ValueError, "a fault of our own")
    with manager, pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(CheckpointDirectory, "expire", broken)
        manager.save(1)
        with pytest.raises(expected, match=message):
            manager.wait()
    assert not (tmp_path / "exports").exists()


@MODES
def test_a_requested_save_that_fails_is_answered_and_the_run_goes_on(run_folder: RunFolder, mode: str) -> None:
    """The answer says that the save has failed, whether it was made in the background or not."""
    disk = Disk(only=run_folder.attempts)
    manager = manager_in(run_folder, async_mode=mode, on_failure="warn")
    with disk.inserted(), manager, RunGuard(manager) as guard:
        manager.save(1)
        guard.step_ended(1)
        manager.wait()
        disk.error = errno.ENOSPC
        name = outside_request.ask(run_folder.base)
        for step in range(2, 1000):
            manager.completed.complete(step)
            guard.step_ended(step)
            if (run_folder.base / outside_request.ANSWER).exists():
                break
            time.sleep(0.02)
        answer = outside_request.await_answer(run_folder.base, name, 10)
        assert answer.error is not None and ("No space left" in answer.error or "see the log" in answer.error)
        disk.error = 0
        manager.save(step + 1)
    assert content(run_folder) == [1, step + 1]


def test_a_save_that_failed_of_anything_does_not_keep_a_stop_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No memory for the save in flight is an error of one rank alone, which would leave the others in the last save."""

    def no_memory(*_: object) -> None:
        raise MemoryError("no room for the copy")

    with manager_in(RunFolder(tmp_path), async_mode="thread") as manager, RunGuard(manager) as guard:
        with monkeypatch.context() as patch:
            patch.setattr(saver, "_write_all", no_memory)
            manager.save(1)
            assert (handle := manager.in_flight) is not None and not handle.succeeded()
        signal.raise_signal(signal.SIGTERM)
        last = next(step for step in range(2, 1000) if guard.step_ended(step))
    assert content(RunFolder(tmp_path)) == [last]
    assert "the save in flight has failed: no room for the copy" in caplog.text


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_called_save_request_and_is_none_does_not_end_a_run(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays, the log names it once, and the run saves as if it were not there."""
    path = tmp_path / "save-request"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")
    else:
        os.mkfifo(path)
    with manager_in(RunFolder(tmp_path)) as manager, RunGuard(manager) as guard:
        while "no request to save: " not in caplog.text:
            time.sleep(0.01)
        for step in range(1, 4):
            time.sleep(0.2)  # time to say it again
            manager.save(step)
            assert not guard.step_ended(step)
    assert content(RunFolder(tmp_path)) == [1, 2, 3]
    assert os.path.lexists(path)
    assert caplog.text.count("no request to save: ") == 1 and str(path) in caplog.text


def test_an_unknown_way_to_fail_is_refused() -> None:
    """With the rest of the config."""
    with pytest.raises(ConfigError, match="on_failure: expected one of "):
        SaveConfig(1, on_failure="ignore")  # type: ignore[arg-type]
