"""The power goes at any moment: what was not synced is dropped, torn or reordered. 20,000 schedules, 10^6 in a soak."""

from __future__ import annotations

import functools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.power import Disk, Recorder, Tree, read_tree, write_tree
from tests.faults.scenarios import NEXT, REWRITE, ROLLBACK, SCENARIOS, SEVERAL, SOAK, Scenario, judge, quick_folder
from tests.faults.shim import intercepted
from tests.faults.writers import DirectoryWriter, ManagerWriter, NaiveWriter, Save, Writer

SCHEDULES = 1_000_000 if SOAK else 20_000


def record(writer: Writer, scenario: Scenario, folder: Path) -> tuple[Tree, list[tuple[Any, ...]]]:
    """Run a scenario once and return the tree before it and every operation of it."""
    root = folder / "checkpoints"
    scenario.prepare(writer, root)
    before = read_tree(folder)
    recorder = Recorder(folder)
    with intercepted(recorder):
        writer.run(root, scenario.saves, lambda save: recorder.note("acknowledged", save), scenario.resume)
    replayed = Disk(before)
    for number, event in enumerate(recorder.events):
        replayed.do(number, event)
    assert replayed.now() == read_tree(folder), "the model does not agree with the real file system"
    return before, recorder.events


def violations(writer: Writer, scenario: Scenario, schedules: int) -> tuple[Counter[str], int]:
    """Run a scenario and lose power `schedules` times; count faults, and distinct trees judged."""
    with quick_folder() as folder:
        before, events = record(writer, scenario, folder)
    return lose_power(writer, scenario, before, events, schedules)


def lose_power(
    writer: Writer, scenario: Scenario, before: Tree, events: list[tuple[Any, ...]], schedules: int
) -> tuple[Counter[str], int]:
    """Lose power spread evenly over recorded operations."""
    choose = random.Random(0)
    found: Counter[str] = Counter()
    verdicts: dict[tuple[frozenset[tuple[str, bytes | None]], int], str | None] = {}
    disk = Disk(before)
    acknowledged: list[Save] = []
    for number in range(len(events) + 1):
        for _ in range(schedules * (number + 1) // (len(events) + 1) - schedules * number // (len(events) + 1)):
            tree = disk.after_power_loss(choose)
            key = (frozenset(tree.items()), len(acknowledged))
            if key not in verdicts:
                verdicts[key] = judged(writer, tree, scenario.legal(acknowledged), scenario.least)
            if fault := verdicts[key]:
                found[f"after {number} operations, {len(acknowledged)} acknowledged: {fault}"] += 1
        if number < len(events):
            disk.do(number, events[number])
            if events[number][0] == "acknowledged":
                acknowledged.append(events[number][1])
    return found, len(verdicts)


def judged(writer: Writer, tree: Tree, legal: set[Save | None], least: int = 0) -> str | None:
    """Put the tree on a real file system and resume from it."""
    with quick_folder() as folder:
        write_tree(folder, tree)
        return judge(writer, folder / "checkpoints", legal, least)


CASES: list[tuple[Writer, Scenario]] = [(DirectoryWriter(), scenario) for scenario in SCENARIOS]
CASES += [(ManagerWriter(mode), scenario) for mode in ("disabled", "thread") for scenario in (NEXT, ROLLBACK)]


@pytest.mark.parametrize(("writer", "scenario"), CASES, ids=lambda value: value.name)
def test_a_power_failure_loses_no_acknowledged_save(writer: Writer, scenario: Scenario) -> None:
    """In every schedule the resume finds the last acknowledged save or the one under way, whole, and goes on."""
    found, distinct = violations(writer, scenario, SCHEDULES // len(CASES))
    assert found == Counter()
    assert distinct > 30, "the schedules hardly differ"


def test_each_single_sync_of_a_save_is_needed() -> None:
    """With any one sync of files, staging folder or root dropped from a recorded save, the model finds losses."""
    writer = DirectoryWriter()
    with quick_folder() as folder:
        before, events = record(writer, NEXT, folder)
    committed = next(number for number, event in enumerate(events) if event[0] == "acknowledged")
    staged = next(number for number, event in enumerate(events) if event[0] == "mkdir")
    for number, event in enumerate(events[:committed]):
        if number < staged or not event[0].startswith("fsync") or event[1] == "checkpoints/.staging":
            continue  # A rename is atomic in the model, so the entry it takes away needs no sync of its own.
        without = [*events[:number], ("close",), *events[number + 1 :]]
        found, _ = lose_power(writer, NEXT, before, without, 300)
        assert found, f"nothing is lost without {event}"


def test_a_naive_writer_loses_checkpoints() -> None:
    """Writing in place without syncing is caught at once."""
    found, _ = violations(NaiveWriter(), REWRITE, 500)
    assert found.total() > 100


@pytest.mark.parametrize("scenario", [SEVERAL, ROLLBACK], ids=lambda scenario: scenario.name)
def test_power_lost_again_while_recovering(scenario: Scenario) -> None:
    """The tree of one power failure is recovered under another: the third start finds what the first promised."""
    choose = random.Random(7)
    writer = DirectoryWriter()
    with quick_folder() as folder:
        before, events = record(writer, scenario, folder)
    faults = []
    for _ in range(2000 if SOAK else 120):
        cut = choose.randrange(len(events) + 1)
        disk = Disk(before)
        for number, event in enumerate(events[:cut]):
            disk.do(number, event)
        acknowledged = [event[1] for event in events[:cut] if event[0] == "acknowledged"]
        first = disk.after_power_loss(choose)
        with quick_folder() as folder:
            write_tree(folder, first)
            recorder = Recorder(folder)
            note = functools.partial(recorder.note, "acknowledged")
            with intercepted(recorder):
                writer.load(folder / "checkpoints")
                writer.run(folder / "checkpoints", [(50, 9)], note)
        disk = Disk(first)
        again = choose.randrange(len(recorder.events) + 1)
        for number, event in enumerate(recorder.events[:again]):
            disk.do(number, event)
        done = any(event[0] == "acknowledged" for event in recorder.events[:again])
        legal: set[Save | None] = {(50, 9)} if done else {(50, 9), *scenario.legal(acknowledged)}
        if fault := judged(writer, disk.after_power_loss(choose), legal):
            faults.append(f"{cut}, {again}: {fault}")
    assert faults == []
