"""Retention of exports removes what this run published, as it published it, and nothing else."""

from __future__ import annotations

import errno
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests import world
from tests.faults.scenarios import kill_at, quick_folder
from tests.faults.shim import count_operations
from tests.world import manager as build
from tests.world import names_in, read_all
from titan_ckpt import CheckpointManager, ExportConfig, SaveConfig
from titan_ckpt.config import ResumeConfig
from titan_ckpt.disk import posix
from titan_ckpt.disk.unpublished_folder import StagedFolder
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ExportError, PeerError
from titan_ckpt.exporting.checks import check_folders
from titan_ckpt.formats.publish import record as export_records
from titan_ckpt.formats.publish.record import MadeExports
from titan_ckpt.tools.listing import list_run
from titan_ckpt.tools.retention import prune


def export(run: Path, *steps: int, keep: int = 1) -> None:
    """Make the exports of these steps, as one process of the run in this folder."""
    with build(run, nn.Linear(2, 2), save=None, export=(ExportConfig("dcp", interval=1, keep=keep),)) as manager:
        for step in steps:
            manager.export(step)


def names(run: Path) -> list[str]:
    return names_in(run / "exports")


def test_only_exports_of_this_run_are_removed_and_the_others_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A user's folder, a link, another run's export and an own one under another step's name stay, whatever `keep` is.

    Exports of an earlier process of the same run are removed as before.
    """
    run, other = tmp_path / "run", tmp_path / "other"
    export(other, 2)
    exports = run / "exports"
    (exports / "step-1").mkdir(parents=True)
    (exports / "step-1" / "results.txt").write_text("42")
    shutil.copytree(other / "exports" / "step-2", exports / "step-2")
    (exports / "step-3").symlink_to(exports / "step-1")
    export(run, 5, 6)
    assert names(run) == ["step-1", "step-2", "step-3", "step-6"]
    shutil.copytree(exports / "step-6", exports / "step-4")
    export(run, 7, 8)
    assert names(run) == ["step-1", "step-2", "step-3", "step-4", "step-8"]
    assert (exports / "step-1" / "results.txt").read_text() == "42"
    lines = [record.getMessage() for record in caplog.records if "retention of exports leaves" in record.getMessage()]
    assert len(lines) == 2, "one for each process"
    assert all(f"step-{n} (" in lines[0] for n in (1, 2, 3))
    assert "step-4 (there is no record that this run made it)" in lines[1]


def test_an_export_that_a_user_has_changed_stays_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file or folder that was added, edited or taken away makes an export the user's."""
    export(tmp_path, 1, 2, 3, 4, 6, keep=9)
    exports = tmp_path / "exports"
    (exports / "step-1" / "notes.md").write_text("good")
    (exports / "step-2" / "evals").mkdir()
    (exports / "step-3" / ".metadata").unlink()
    metadata = exports / "step-6" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[::-1])
    export(tmp_path, 7)
    assert names(tmp_path) == ["step-1", "step-2", "step-3", "step-6", "step-7"]
    assert "step-1 (changed since: notes.md)" in caplog.text
    assert "step-2 (changed since: evals)" in caplog.text
    assert "step-3 (changed since: .metadata)" in caplog.text
    assert "step-6 (changed since: .metadata)" in caplog.text


def test_a_folder_of_the_users_in_the_place_of_a_recorded_export_is_the_users(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention leaves it, and a run that goes back refuses it by name and renames nothing."""
    with build(tmp_path, nn.Linear(2, 2), export=(ExportConfig("dcp", interval=1, keep=1),)) as manager:
        for step in (1, 2):
            manager.save(step)
        manager.wait()
        shutil.rmtree(tmp_path / "exports/step-2")
        (tmp_path / "exports/step-2").mkdir()
        (tmp_path / "exports/step-2/results.txt").write_text("42")
        manager.save(3)
        manager.wait()
        assert names(tmp_path) == ["step-2", "step-3"]
        assert "step-2 (nothing in it is as this run has written it)" in caplog.text
        with pytest.raises(ExportError, match=r"step-2 \(nothing in it is as this run has written it\)"):
            manager.load(1)
    assert names(tmp_path) == ["step-2", "step-3"]
    assert (tmp_path / "exports/step-2/results.txt").read_text() == "42"


def test_a_record_that_cannot_be_read_makes_nothing_ours(tmp_path: Path) -> None:
    """Damaged, foreign and oddly shaped records are no reason to delete or to end the run."""
    export(tmp_path, 1, 2, 3, 4, keep=9)
    records = sorted((tmp_path / ".titan_ckpt-exports").iterdir())
    for record, content in zip(records, (b"{", b"[]", b'{"content": {}}'), strict=False):
        record.write_bytes(content)
    records[3].unlink()
    records[3].symlink_to("/dev/null")
    export(tmp_path, 5)
    assert names(tmp_path) == [f"step-{n}" for n in range(1, 6)]
    assert len([*(tmp_path / ".titan_ckpt-exports").iterdir()]) == 5


def test_records_behind_a_link_are_another_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The exports are made, no record of the other run is removed or written over, and the log names the link."""
    export(tmp_path / "other", 1, 2, keep=9)
    records = tmp_path / "other" / ".titan_ckpt-exports"
    before = {path.name: path.read_bytes() for path in records.iterdir()}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / records.name).symlink_to(records)
    export(tmp_path / "run", 1, 2, 3)
    assert {path.name: path.read_bytes() for path in records.iterdir()} == before
    assert names(tmp_path / "run") == ["step-1", "step-2", "step-3"]
    assert "is a link, and not a folder of its own" in caplog.text


def test_an_export_whose_removal_failed_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be deleted once stays beside the exports, and the next export finds it."""
    unlink = posix.unlink

    def busy(path: Any, *parent: int) -> None:
        if Path(path).name == ".metadata":
            raise OSError(errno.EBUSY, "in use")
        unlink(path, *parent)

    export(tmp_path, 1, keep=9)
    with monkeypatch.context() as patch:
        patch.setattr(posix, "unlink", busy)
        with pytest.raises(ExportError, match="in use"):
            export(tmp_path, 2)
    assert len(names(tmp_path)) == 3
    export(tmp_path, 3, keep=9)
    assert names(tmp_path) == ["step-2", "step-3"]


def test_two_exports_that_end_at_one_moment_both_expire_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is first, and a program that evaluates the model removes its own file meanwhile."""
    discard, mark = StagedFolder.discard, export_records._mark

    def discard_twice(folder: Path) -> None:
        for _ in range(2):
            discard(folder)

    def mark_late(path: Path) -> str:
        if path.name == "results.tmp":
            path.unlink()
        return mark(path)

    monkeypatch.setattr(StagedFolder, "discard", discard_twice)
    monkeypatch.setattr(export_records, "_mark", mark_late)
    export(tmp_path, 1)
    (tmp_path / "exports" / "step-1" / "results.tmp").write_text("half")
    export(tmp_path, 2, 3)
    assert names(tmp_path) == ["step-3"]


def test_a_list_leaves_out_the_export_that_its_run_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It expires while its files are compared with their record."""
    export(tmp_path, 1)
    (tmp_path / "checkpoints" / ".staging").mkdir(parents=True)
    why_foreign = MadeExports.why_foreign

    def late(exports: MadeExports, name: str) -> str | None:
        monkeypatch.setattr(MadeExports, "why_foreign", why_foreign)
        why = why_foreign(exports, name)
        export(tmp_path, 2)
        return why

    monkeypatch.setattr(MadeExports, "why_foreign", late)
    assert list_run(tmp_path).exports == ()


def test_a_kill_at_any_operation_of_an_export_leaves_none_that_never_expires() -> None:
    """Also between its publication and what follows."""
    with quick_folder() as run:
        export(run, 1)
        operations = count_operations(lambda: export(run, 2))
    published = set()
    for ordinal in [i for i, name in enumerate(operations) if name != "pwrite_all"]:
        with quick_folder() as run:
            export(run, 1)
            kill_at(ordinal, partial(export, run, 2))
            published.add("step-2" in names(run))
            export(run, 3)
            assert names(run) == ["step-3"], (ordinal, operations[ordinal])
    assert published == {False, True}


def test_a_run_that_is_killed_before_its_first_save_makes_its_exports_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its exports are set aside by the restart. Those made since a save, and another run's, stay in the way."""
    model = nn.Linear(2, 2, bias=False)

    def run(steps: range, value: float, interval: int = 100, folder: str = "checkpoints") -> None:
        save, exports = SaveConfig(interval=interval), (ExportConfig("dcp", interval=5),)
        with build(tmp_path, model, save=save, folder=folder, export=exports) as manager:
            manager.load()
            train_to(manager, model, steps[0], steps[-1], value)

    exports = tmp_path / "exports"
    run(range(1, 13), 0.0)
    assert names(tmp_path) == ["step-10", "step-5"]
    with pytest.raises(ExportError, match="step-5 is there already"):
        run(range(1, 13), 200.0, folder="others")
    run(range(1, 8), 100.0)
    assert exported(exports / "step-5") == 105.0
    aside = [name for name in names(tmp_path) if ".abandoned-" in name]
    assert sorted(exported(exports / name) for name in aside) == [5.0, 10.0]
    assert "because this run went back to step 0" in caplog.text
    run(range(1, 13), 300.0, interval=5)
    assert [exported(exports / f"step-{n}") for n in (5, 10)] == [305.0, 310.0]
    shutil.rmtree(tmp_path / "checkpoints")
    caplog.clear()
    with pytest.raises(ExportError, match="step-5 is there already"):
        run(range(1, 13), 400.0)
    assert "exports/step-5 is there from before this run" in caplog.text
    assert [exported(exports / f"step-{n}") for n in (5, 10)] == [305.0, 310.0]


def train_to(of: CheckpointManager, model: nn.Linear, first: int, last: int, value: float) -> None:
    """Take steps whose weights say which step and branch they are of, and save them."""
    for step in range(first, last + 1):
        of.maybe_wait_for_staging()
        nn.init.constant_(model.weight, value + step)
        of.save(step)


def exported(folder: Path) -> float:
    """Return the value that every weight has in an export."""
    (weight,) = read_all(folder).values()
    return float(weight.unique())


@pytest.mark.parametrize("mode", ["disabled", "thread"])
@pytest.mark.parametrize("way", ["another process", "the same process", "killed before the first save"])
def test_exports_of_a_branch_that_was_given_up_are_set_aside(
    tmp_path: Path, way: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After resume.step, or a load of a step, the new branch's exports have its weights; the others keep their bytes.

    Nothing is renamed before the first save or export. An export that somebody has edited is renamed too, and no
    command deletes it. A run that only was interrupted replays its steps, so its exports stay. prune --set-aside
    deletes those set aside.
    """
    model = nn.Linear(2, 2, bias=False)
    manager = partial(build, tmp_path, model, interval=5, async_mode=mode, export=(ExportConfig("dcp", interval=5),))

    def train(of: CheckpointManager, first: int, last: int, value: float) -> None:
        train_to(of, model, first, last, value)
        of.wait()

    exports = tmp_path / "exports"
    with manager() as first:
        train(first, 1, 20, 0.0)
        (exports / "step-20" / "notes.md").write_text("good")
        if way == "the same process":
            first.load(5)
            before = names(tmp_path)
            train(first, 6, 21, 100.0)
    if way == "killed before the first save":
        world.load(manager(resume=ResumeConfig(step=5)))
    if way != "the same process":
        with manager(resume=ResumeConfig(step=5)) as second:
            second.load()
            before = names(tmp_path)
            train(second, 6, 21, 100.0)
    assert before == ["step-10", "step-15", "step-20", "step-5"]
    assert [exported(exports / f"step-{n}") for n in (5, 10, 15, 20)] == [5.0, 110.0, 115.0, 120.0]
    aside = [name for name in names(tmp_path) if ".abandoned-" in name]
    assert [name.partition(".")[0] for name in aside] == ["step-10", "step-15", "step-20"]
    assert [exported(exports / name) for name in aside] == [10.0, 15.0, 20.0]
    assert caplog.text.count("set aside as exports/step-") == 3
    (tmp_path / "checkpoints/step-20/MANIFEST.json").unlink()
    (tmp_path / "checkpoints/step-20").rename(tmp_path / "lost")
    with manager() as third:
        assert third.load().step == 15
        train(third, 16, 20, 100.0)
    assert {*aside, "step-20"} <= {*names(tmp_path)} and len(names(tmp_path)) == 7
    found = prune(tmp_path, None, set_aside=True, dry_run=True)
    assert {*found.set_aside} >= {f"exports/{name}" for name in aside[:2]} and found.set_aside_bytes > 4000
    (exports / aside[0] / "notes.md").write_text("good, too")
    found = prune(tmp_path, None, set_aside=True, dry_run=False)
    assert names(tmp_path) == sorted([aside[0], aside[2], "step-10", "step-15", "step-20", "step-5"])
    edited = [f"{exports / aside[i]}: changed since: notes.md" for i in (0, 2)]
    assert sorted(why.partition(". Delete")[0] for why in found.held) == sorted(edited)


def test_a_run_that_goes_back_refuses_what_it_would_take_for_its_own_export(tmp_path: Path) -> None:
    """A copy without a record, and a link, are named before the first step, and stay as they are."""
    exports = tmp_path / "exports"
    with build(tmp_path, nn.Linear(2, 2), interval=5, export=(ExportConfig("dcp", interval=5),)) as manager:
        for step in range(1, 11):
            manager.save(step)
        manager.wait()
        shutil.copytree(exports / "step-10", exports / "step-15")
        (exports / "step-20").symlink_to(exports / "step-15")
        with pytest.raises(ExportError, match=r"step-15 \(there is no record .*step-20 \(it is no folder of its own\)"):
            manager.load(5)
        assert names(tmp_path) == ["step-10", "step-15", "step-20", "step-5"]
        for step in (15, 20):
            (exports / f"step-{step}").rename(tmp_path / f"moved-{step}")
        assert manager.load(5).step == 5
        manager.save(10)
    assert len(names(tmp_path)) == 3


def test_a_run_that_went_back_exported_and_was_killed_goes_on_with_the_branch_of_its_export(tmp_path: Path) -> None:
    """Steps are set aside with the exports, even if no save has begun; an export of the named step leaves no branch.

    Another load of the same step, which names none, is no reason to take the exports of the branch before for its own.
    """
    model = nn.Linear(2, 2, bias=False)
    manager = partial(build, tmp_path, model, interval=5, export=(ExportConfig("dcp", interval=1),))

    def train(of: CheckpointManager, first: int, last: int, value: float) -> None:
        train_to(of, model, first, last, value)

    exports = tmp_path / "exports"
    with manager() as first:
        train(first, 1, 10, 0.0)
    with manager() as second:
        second.load(5)
        second.export(5)
    with manager() as third:
        assert third.load().step == 10
        third.load(5)
        train(third, 6, 8, 100.0)
    with manager() as fourth:
        assert fourth.load().step == 5
        assert [exported(exports / f"step-{n}") for n in range(1, 9)] == [1.0, 2.0, 3.0, 4.0, 5.0, 106.0, 107.0, 108.0]
        fourth.load(5)
        fourth.load()
        train(fourth, 6, 7, 200.0)
    assert [exported(exports / f"step-{n}") for n in (5, 6, 7)] == [5.0, 206.0, 207.0]
    assert not (exports / "step-8").exists()


def test_a_folder_of_exports_that_rank_0_cannot_list_stops_all_ranks_at_once() -> None:
    """Rank 1 is told; it does not wait for the timeout."""
    store, errors = dist.HashStore(), dict[int, BaseException]()

    class Unreachable(MadeExports):
        def steps_there(self, config: ExportConfig) -> list[int]:
            raise OSError(errno.EIO, "no answer")

    def check(rank: int) -> None:
        exporter: Any = SimpleNamespace(
            coordinator=Coordinator(rank, 2, store, "exports", 60.0),
            made=lambda config: Unreachable(Path()),
            start_over=lambda configs: None,
        )
        try:
            check_folders(exporter, [ExportConfig("dcp")], fresh=True)
        except BaseException as error:
            errors[rank] = error

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(check, range(2))]
    assert isinstance(errors[0], OSError) and isinstance(errors[1], PeerError) and "no answer" in str(errors[1])
