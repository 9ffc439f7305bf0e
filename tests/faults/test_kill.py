"""A process killed by SIGKILL before, in the middle of, or after every change it makes to the file system."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.faults.scenarios import (
    FRESH,
    NEXT,
    REWRITE,
    ROLLBACK,
    SCENARIOS,
    SEVERAL,
    SOAK,
    Scenario,
    copy_of,
    judge,
    quick_folder,
    run_killed,
)
from tests.faults.shim import KillAt, Moment, count_operations
from tests.faults.writers import DirectoryWriter, ManagerWriter, NaiveWriter, Save, Writer
from titan_ckpt.config import KeepConfig
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.directory.names import STAGING, TRASH
from titan_ckpt.directory.posix_steps import PosixSteps
from titan_ckpt.directory.steps import Attempt

MOMENTS: tuple[Moment, ...] = ("before", "half", "after")


def violations(writer: Writer, scenario: Scenario, every: int = 1) -> Iterator[str]:
    """Kill at every operation of the scenario, from a fresh copy each time, and yield what went wrong.

    After one operation the file system is as it is before the next, where no fewer saves are acknowledged: so where
    every operation is killed at, a kill after one tells something new only of the last. A soak kills there too.
    """
    with quick_folder() as prepared:
        scenario.prepare(writer, prepared / "checkpoints")
        with copy_of(prepared) as folder:
            root = folder / "checkpoints"
            names = count_operations(lambda: writer.run(root, scenario.saves, lambda _: None, scenario.resume))
        assert len(names) > 10, "the shim counts nothing"
        for ordinal in range(0, len(names), every):
            for moment in MOMENTS:
                if moment == "half" and names[ordinal] != "pwrite_all":
                    continue
                if moment == "after" and every == 1 and ordinal + 1 < len(names) and not SOAK:
                    continue
                with copy_of(prepared) as folder:
                    root = folder / "checkpoints"
                    acknowledged, finished = run_killed(writer, scenario, root, KillAt(ordinal=ordinal, moment=moment))
                    assert not finished, f"operation {ordinal} was not reached"
                    if fault := judge(writer, root, scenario.legal(acknowledged), scenario.least):
                        operation = f"{moment} operation {ordinal} ({names[ordinal]})"
                        yield f"{writer.name}, {scenario.name}, {operation}: {fault}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_operation_is_a_bad_moment_to_be_killed(scenario: Scenario) -> None:
    """Whatever was acknowledged is there, or what was under way is there whole; and the run can go on."""
    assert list(violations(DirectoryWriter(), scenario)) == []


@pytest.mark.parametrize(
    ("mode", "scenario", "every"),
    [
        ("thread", NEXT, 1),
        ("disabled", NEXT, 3),
        ("thread", ROLLBACK, 2),
        ("disabled", ROLLBACK, 3),
        ("disabled", FRESH, 3),
        ("thread", FRESH, 3),
        ("disabled", SEVERAL, 5),
        ("thread", SEVERAL, 5),
        *([("process", NEXT, 1), ("process", ROLLBACK, 1)] if SOAK else []),  # Each starts an interpreter.
    ],
    ids=lambda value: value.name if isinstance(value, Scenario) else str(value),
)
def test_a_manager_may_be_killed_at_any_operation(
    mode: Literal["disabled", "thread", "process"], scenario: Scenario, every: int
) -> None:
    """The same for training runs with model and optimizer, saved in the loop and in a thread; a soak kills at each."""
    assert list(violations(ManagerWriter(mode), scenario, 1 if SOAK else every)) == []


def test_the_matrix_catches_a_naive_writer() -> None:
    """The same kills against writing in place find lost and mixed checkpoints: the matrix can fail."""
    found = list(violations(NaiveWriter(), REWRITE))
    assert any("a mix of saves" in fault for fault in found), found
    assert len(found) >= 5


def test_the_matrix_catches_each_broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting before the commit and not recovering at the opening are both caught."""
    commit = PosixSteps.commit

    def expire_first(store: PosixSteps, attempt: Attempt, manifest: Manifest) -> None:
        store.expire(KeepConfig(latest=1))
        commit(store, attempt, manifest)

    writer = DirectoryWriter()
    with monkeypatch.context() as patch:
        patch.setattr(PosixSteps, "commit", expire_first)
        assert any("valid steps are left" in fault for fault in violations(writer, NEXT, 3))
    with monkeypatch.context() as patch:
        patch.setattr(PosixSteps, "_recover", lambda steps, lease: [*map(steps._make_own_folder, (STAGING, TRASH))])
        assert any("left behind" in fault for fault in violations(writer, NEXT, 3))


def test_being_killed_while_recovering_loses_nothing() -> None:
    """The process that clears up after a kill is killed too, at every operation, and the third one is fine."""
    writer = DirectoryWriter()
    again = Scenario("again", (), ((40, 9),))
    found = []
    with quick_folder() as prepared:
        NEXT.prepare(writer, prepared / "checkpoints")
        for first in range(13, 28):  # From the manifest to the last unlink of the expired step.
            with copy_of(prepared) as killed:
                acknowledged, finished = run_killed(writer, NEXT, killed / "checkpoints", KillAt(ordinal=first))
                assert not finished
                for second in range(0, 16, 1 if SOAK else 3):
                    with copy_of(killed) as folder:
                        root = folder / "checkpoints"
                        more, _ = run_killed(writer, again, root, KillAt(ordinal=second))
                        legal: set[Save | None] = {more[-1]} if more else {*NEXT.legal(acknowledged), (40, 9)}
                        if fault := judge(writer, root, legal):
                            found.append(f"{first}, {second}: {fault}")
    assert found == []


def test_being_killed_at_any_time_on_a_real_disk_loses_nothing(tmp_path: Path) -> None:
    """Real SIGKILLs at random times while saves and expiries follow each other: 200, 5,000 in a soak."""
    writer = DirectoryWriter()
    generator = random.Random(0)
    saves = tuple((10 * step, 100 * step) for step in range(2, 80))
    scenario = Scenario("random", ((10, 1),), saves)
    start = time.monotonic()
    writer.run(tmp_path / "timed", saves[:4], lambda _: None)
    some_saves = time.monotonic() - start
    scenario.prepare(writer, tmp_path / "prepared")
    found = []
    progress = set()
    for trial in range(5000 if SOAK else 200):
        root = tmp_path / str(trial)
        shutil.copytree(tmp_path / "prepared", root)

        def kill_soon(pid: int) -> None:
            time.sleep(generator.uniform(0, some_saves))
            os.kill(pid, signal.SIGKILL)

        acknowledged, _ = run_killed(writer, scenario, root, None, kill_soon)
        progress.add(len(acknowledged))
        if fault := judge(writer, root, scenario.legal(acknowledged)):
            found.append(fault)
    assert found == []
    assert len(progress) > 2, "the kills did not hit different saves"


@pytest.mark.parametrize(
    ("scenario", "renames", "unlinks"),
    [(FRESH, 1, 0), (NEXT, 2, 3), (ROLLBACK, 4, 0), (SEVERAL, 5, 6)],
    ids=lambda value: value.name if isinstance(value, Scenario) else "",
)
def test_the_scenarios_do_what_their_names_promise(scenario: Scenario, renames: int, unlinks: int) -> None:
    """The operations that are killed are commits, expiries and set-asides, not just writes."""
    with quick_folder() as folder:
        writer = DirectoryWriter()
        scenario.prepare(writer, folder)
        names = count_operations(lambda: writer.run(folder, scenario.saves, lambda _: None, scenario.resume))
    assert names.count("rename_noreplace") == renames
    assert names.count("unlink") == unlinks
    assert names.count("fsync_folder") >= 3 * len(scenario.saves)
