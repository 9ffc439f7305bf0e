"""One of two ranks is killed at every change it makes while they export: no folder, or a proved one."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked_ranks import Ranks, outcome
from tests.faults.rank_exports import ALONE, KINDS, Kind, prepare
from tests.faults.scenarios import SOAK, quick_folder
from tests.faults.shim import Counter, KillAt, Moment, intercepted
from tests.world import contents
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import PeerGroups
from titan_ckpt.process import instances_of

BOUNDS = ((2.0, 24), (8.0, 4)) if not SOAK else ((6.0, 16), (20.0, 4))
"""Seconds that a rank waits for a silent one, and how many worlds, which mostly wait, are there at once.

The second time is for cases that say nothing about the export: a slow rank, or the store's host, was taken for a
silent one before the kill was reached, or the survivor ran out of its time while so many others shared the machine.
"""
PATIENCE = 5
"""How many times as long as it waits for a silent rank a survivor may run until its export has ended."""
HEALTHY = 60.0
"""Seconds, where no rank is silent."""
SAMPLES = {"rows": 15, "columns": 15, "merged": 5, "staged": 5}
"""How many kills of each kind where not all are made."""


@dataclass(frozen=True)
class Case:
    """A rank that is killed at one of its operations."""

    kind: Kind
    victim: int
    ordinal: int
    name: str
    moment: Moment
    after_publication: bool

    def start(self, root: Path, bound: float) -> Ranks:
        shim = KillAt(ordinal=self.ordinal, moment=self.moment)
        return world(self.kind, root, shim, self.victim, bound)

    def __str__(self) -> str:
        return f"{self.kind.name}: rank {self.victim} killed {self.moment} operation {self.ordinal}, {self.name}"


def every_case(kind: Kind, names: Sequence[Sequence[str]]) -> Iterator[Case]:
    """Yield each moment of each operation that each rank makes."""
    publication = len(names[0]) - 1 - names[0][::-1].index("rename_noreplace")
    for victim, operations in enumerate(names):
        for ordinal, name in enumerate(operations):
            moments: tuple[Moment, ...] = ("before", "half", "after") if name == "pwrite_all" else ("before", "after")
            for moment in moments:
                done = ordinal + (moment == "after") > publication
                yield Case(kind, victim, ordinal, name, moment, victim == 0 and done)


def world(kind: Kind, root: Path, shim: Counter, victim: int | None = None, bound: float = HEALTHY) -> Ranks:
    """Start an export, in which the shim is the victim's, or every rank's where there is none."""

    def body(line: Coordinator) -> Any:
        act = kind.on_rank(root, line)
        line.barrier("both are ready")
        line.timeout_seconds = bound
        start = time.monotonic()
        if victim in (None, line.rank):
            with intercepted(shim):
                result = outcome(act)
        else:
            result = outcome(act)
        return [result, shim.names, time.monotonic() - start, [] if result[0] == "ok" else rests()]

    return Ranks(2, body, HEALTHY, False)


def rests() -> list[str]:
    """Return the groups of an export that this process still has."""
    return [str(ranks) for one in instances_of(PeerGroups) for ranks in one._groups]


def unfinished(root: Path) -> list[str]:
    """Return what attempts have left in a run's folder."""
    left = [*root.glob("exports/.staging*"), *root.glob("checkpoints/.staging/*"), *root.glob("checkpoints/.trash/*")]
    return sorted(str(path.relative_to(root)) for path in left)


def published(root: Path, complete: dict[str, bytes]) -> set[str]:
    """Return the names of all exports, each of which must be whole."""
    names = {path.name for path in root.glob("exports/*") if not path.name.startswith(".staging")}
    assert [name for name in names if contents(root / "exports" / name) != complete] == []
    return names


def judge(case: Case, root: Path, answers: list[Any], complete: dict[str, bytes], bound: float) -> None:
    """Look at how the survivor ended and at what is left; then export again, on one rank."""
    survivor = 1 - case.victim
    assert answers[survivor] is not None, "the other died too"
    assert "crash" not in answers[survivor], answers[survivor]
    (ended, *why), _, seconds, rest = answers[survivor]
    found = published(root, complete)
    assert bool(found) == case.after_publication, found
    if ended != "ok":
        assert ended in ("ExportError", "PeerError", "SaveError"), (ended, why)
        told = "may be published" in why[-1] or "is published" in why[-1]
        assert told or not case.after_publication, why
        assert f"rank {case.victim}" in why[-1] or "closed by peer" in why[-1] or "reset by peer" in why[-1], why
    assert seconds < PATIENCE * bound, f"it ran on for {seconds:.1f} s"
    assert rest == []
    if survivor == 0:
        assert not list(root.glob("exports/.staging*"))
    for name in found:  # so that the same step can be exported again
        (root / "exports" / name).rename(root / "exports" / f"{name}-before")
    case.kind.make(root, ALONE)()
    assert len(published(root, complete)) == len(found) + 1
    assert unfinished(root) == []


def says_nothing(case: Case, answers: list[Any], bound: float, crowded: bool) -> bool:
    """Return whether the kill was not reached, or the machine was too busy to tell a slow survivor from a hung one."""
    if answers[case.victim] is not None or "store of the process group" in str(answers):
        return True
    survivor = answers[1 - case.victim]
    return crowded and survivor is not None and survivor[2] >= PATIENCE * bound


def undisturbed(kind: Kind, root: Path) -> tuple[list[list[str]], dict[str, bytes]]:
    """Return the names of each rank's operations, and the export that they make."""
    with world(kind, root, Counter()) as ranks:
        whole = ranks.results()
    assert [one[0] for one in whole] == [["ok", None]] * 2, whole
    names: list[list[str]] = [one[1] for one in whole]
    assert all("pwrite_all" in one for one in names)
    assert names[0].count("rename_noreplace") == (2 if (root / "checkpoints").exists() else 1)
    assert kind.name != "columns" or not any("map_shared" in one for one in names), "nothing was put together"
    return names, contents(root / "exports" / "step-1")


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_dead_rank_ends_the_exchange_of_columns_in_time(victim: int, how: signal.Signals) -> None:
    """The other names it, publishes nothing and keeps no connection; the next export is made on one rank."""
    (kind,) = [kind for kind in KINDS if kind.name == "columns"]
    bound = 3.0
    with quick_folder() as folder:
        prepare(folder)

        def body(line: Coordinator) -> Any:
            act = kind.on_rank(folder, line)
            line.barrier("both are ready")
            line.timeout_seconds = bound
            exchange, number = line.peers.exchange, itertools.count()

            def stopped(*arguments: Any) -> Any:
                if line.rank == victim and next(number) == 1:  # after one for the sizes
                    os.kill(os.getpid(), how)
                return exchange(*arguments)

            line.peers.exchange = stopped  # type: ignore[assignment, method-assign]
            start = time.monotonic()
            return [outcome(act), time.monotonic() - start, rests()]

        with Ranks(2, body, HEALTHY, False) as ranks:
            (ended, why), seconds, rest = ranks.result(1 - victim)
        assert ended == "ExportError"
        assert f"rank {victim} did not a" in why  # arrive, or answer
        assert "nothing was published" in why
        assert seconds < PATIENCE * bound
        assert rest == []
        assert list(folder.glob("exports/step-*")) == []
        kind.make(folder, ALONE)()
        assert unfinished(folder) == []


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] if SOAK else [KINDS], ids=lambda kinds: kinds[0].name)
def test_a_killed_rank_leaves_no_folder_or_a_proved_one(kinds: Sequence[Kind]) -> None:
    """At every operation of either: the other raises in time, the base is as it was, the next export cleans up."""
    faults: list[str] = []
    with quick_folder() as folder:
        prepare(folder / "source")
        base = contents(folder / "source")
        complete: dict[str, dict[str, bytes]] = {}
        cases: list[Case] = []
        for kind in kinds:
            shutil.copytree(folder / "source", folder / kind.name)
            names, complete[kind.name] = undisturbed(kind, folder / kind.name)
            every = list(every_case(kind, names))
            step = 1 if SOAK else len(every) // SAMPLES[kind.name]
            cases += every[random.Random(kind.name).randrange(step) :: step]
            cases += [] if SOAK else [next(case for case in every if case.after_publication)]
        random.Random(0).shuffle(cases)  # so that those that take long to begin do not begin at once
        for bound, at_once in BOUNDS:
            crowded = (bound, at_once) != BOUNDS[-1]
            late: list[Case] = []
            running: deque[tuple[Case, Path, Ranks]] = deque()
            for i in range(len(cases) + at_once):
                if i < len(cases):
                    root = folder / f"{i}"
                    shutil.copytree(folder / "source", root)
                    running.append((cases[i], root, cases[i].start(root, bound)))
                if i >= at_once - 1 and running:
                    case, root, ranks = running.popleft()
                    with ranks:
                        answers = ranks.results()
                    if says_nothing(case, answers, bound, crowded):
                        late.append(case)
                    else:
                        try:
                            judge(case, root, answers, complete[case.kind.name], bound)
                            assert {name: contents(root)[name] for name in base} == base
                        except Exception as error:
                            faults.append(f"{case}: {type(error).__name__}: {error}")
                    shutil.rmtree(root)
            cases = late
    assert cases == [], "not reached, or the store did not answer"
    assert faults == []
