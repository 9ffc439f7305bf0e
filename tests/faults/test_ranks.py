"""A rank dies or hangs at some operation of a collective save: the others stop in time, and nothing is lost."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked_ranks import Ranks, outcome, run
from tests.faults.scenarios import quick_folder
from tests.faults.shim import Counter, FailAt, KillAt, StopAt, intercepted
from tests.faults.small_checkpoints import load, manifest_of, write_files
from titan_ckpt.directory import posix_steps
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import FileRecord
from titan_ckpt.distributed.coordinator import Coordinator

BOUND = 6.0
"""For a silent rank. Many worlds run at once on few cores, so a shorter one would take a slow rank for a silent one."""
HEALTHY = 60.0
"""Where no rank is silent."""


def save_together(root: Path, line: Coordinator, step: int, value: int) -> None:
    """Save one file per rank, as a manager does, in a directory opened for it."""
    directory = CheckpointDirectory(root, line)
    try:
        attempt = directory.begin(step, num_bytes=100)
        error: Exception | None = None
        records: list[FileRecord] = []
        try:
            records = write_files(attempt, value, (f"rank-{line.rank:05d}.safetensors",))
        except OSError as e:
            error = e
        try:
            gathered: Any = line.gather("written", [[r.name, r.num_bytes, r.digest] for r in records], error)
        except BaseException:
            directory.abandon(attempt)
            raise
        files = [FileRecord(*record) for rank in gathered for record in rank]
        directory.commit(
            attempt, manifest_of(attempt, files, world_size=line.world_size, created_unix_seconds=1.0 * step)
        )
    finally:
        directory.close()


@dataclass(frozen=True)
class Case:
    world: int
    victims: tuple[int, ...]
    how: str
    ordinal: int

    def live(self) -> list[int]:
        """Return the ranks that end by themselves."""
        return [rank for rank in range(self.world) if rank not in self.victims or self.how == "ENOSPC"]

    def shim(self) -> Counter:
        if self.how == "SIGSTOP":
            return StopAt(ordinal=self.ordinal)
        if self.how == "SIGKILL":
            return KillAt(ordinal=self.ordinal)
        return FailAt(ordinal=self.ordinal, errno=errno.ENOSPC)

    def body(self, root: Path) -> Callable[[Coordinator], Any]:
        def run(line: Coordinator) -> Any:
            save_together(root, line, 10, 1)
            line.timeout_seconds = HEALTHY if self.how == "ENOSPC" else BOUND
            start = time.monotonic()
            if line.rank in self.victims:
                with intercepted(self.shim()):
                    result = outcome(lambda: save_together(root, line, 20, 2))
            else:
                result = outcome(lambda: save_together(root, line, 20, 2))
            return [result, time.monotonic() - start]

        return run


NUM_RANK_0_OPERATIONS = 19
CASES = [
    *(Case(2, (1,), "SIGKILL", ordinal) for ordinal in range(4)),
    *(Case(2, (0,), "SIGKILL", ordinal) for ordinal in range(NUM_RANK_0_OPERATIONS)),
    *(Case(2, (0, 1), "SIGKILL", ordinal) for ordinal in range(4)),
    *(Case(2, (1,), "SIGSTOP", ordinal) for ordinal in range(4)),
    *(Case(2, (0,), "SIGSTOP", ordinal) for ordinal in (3, 9, 15)),
    *(Case(4, (2,), "SIGKILL", ordinal) for ordinal in (0, 2)),
    *(Case(4, (1, 3), "SIGSTOP", ordinal) for ordinal in (1,)),
    *(Case(2, (1,), "ENOSPC", ordinal) for ordinal in range(4)),
    *(Case(2, (0,), "ENOSPC", ordinal) for ordinal in range(NUM_RANK_0_OPERATIONS - 3)),
]


def judge(case: Case, root: Path, results: list[Any]) -> str | None:
    """Say what is wrong with how the ranks ended and with what they left, if anything is."""
    for rank in case.live():
        if results[rank] is None or "crash" in results[rank]:
            return f"rank {rank} ended with {results[rank]}"
        (kind, *details), seconds = results[rank]
        if seconds > 100:  # the machine may have stood still
            return f"rank {rank} waited {seconds:.1f} s"
        if kind == "PeerError" and not set(details[0]) <= set(case.victims):
            return f"rank {rank} blames {details}"
        if kind not in ("ok", "PeerError", "SaveError", "OSError"):
            return f"rank {rank} raised {kind}: {details}"
    kinds = {results[rank][0][0] for rank in case.live()}
    if case.how == "ENOSPC" and "ok" in kinds and len(kinds) > 1:
        return f"some ranks think it is saved: {results}"
    found = load(root)
    if found not in ([(20, 2)] if "ok" in kinds else [(10, 1), (20, 2)]):
        return f"{kinds}, and loaded {found}"
    return None


def test_no_operation_is_a_bad_moment_for_a_rank_to_fail() -> None:
    """Killed, stopped or out of space, on any rank and at any operation: the rest raise in time, naming it."""
    found = []
    for batch in range(0, len(CASES), 16):  # At once, because they mostly wait.
        cases = CASES[batch : batch + 16]
        with quick_folder() as folder:
            roots = [folder / str(number) for number in range(len(cases))]
            with ExitStack() as stack:
                worlds = [
                    stack.enter_context(Ranks(case.world, case.body(root), HEALTHY, False))
                    for case, root in zip(cases, roots, strict=True)
                ]
                answers = [
                    [world.result(rank) if rank in case.live() else None for rank in range(case.world)]
                    for case, world in zip(cases, worlds, strict=True)
                ]
            for case, root, results in zip(cases, roots, answers, strict=True):
                if fault := judge(case, root, results):
                    found.append(f"{case}: {fault}")
            for case, after in zip(cases, outcomes_of_next_worlds(cases, roots), strict=True):
                if after != (30, 3):
                    found.append(f"{case}: the next world found {after}")
    assert found == []


def save_30(root: Path) -> Callable[[Coordinator], Any]:
    return lambda line: outcome(lambda: save_together(root, line, 30, 3))


def outcomes_of_next_worlds(cases: list[Case], roots: list[Path]) -> list[Any]:
    """Save step 30 in each folder with new ranks, and load it."""
    with ExitStack() as stack:
        worlds = [
            stack.enter_context(Ranks(case.world, save_30(root), HEALTHY, False))
            for case, root in zip(cases, roots, strict=True)
        ]
        results = [world.results() for world in worlds]
    return [
        load(root) if result == [["ok", None]] * case.world else result
        for case, root, result in zip(cases, roots, results, strict=True)
    ]


def test_the_numbers_of_operations_are_right() -> None:
    """Rank 0's last case is its last operation, and the others' are the four of a file."""
    with quick_folder() as folder:

        def body(line: Coordinator) -> Any:
            save_together(folder / "x", line, 10, 1)
            counter = Counter()
            with intercepted(counter):
                save_together(folder / "x", line, 20, 2)
            return counter.names

        names = run(2, body)
    assert len(names[0]) == NUM_RANK_0_OPERATIONS, names[0]
    assert names[1] == ["open_exclusive", "pwrite_all", "fsync", "close"]


@pytest.mark.parametrize("view", ["older", "empty"])
def test_ranks_with_stale_views_wait_or_refuse_together(view: str) -> None:
    """Rank 1 sees the folder as it was before: it waits for rank 0's choice, and no rank goes on alone."""
    with quick_folder() as folder:

        def body(line: Coordinator) -> Any:
            root = folder / "x"
            if view == "older":
                save_together(root, line, 10, 1)
            save_together(root, line, 20, 2)
            posix_steps.VISIBLE_SECONDS = 0.3
            if line.rank == 1:
                setattr(posix_steps, "read_twice", lambda *_: b"")  # noqa: B010 - not exported there.
            directory = CheckpointDirectory(root, line)
            return [directory.steps(), outcome(lambda: directory.committed(20)[0].step)]

        results = run(2, body)
    steps = [10, 20] if view == "older" else [20]
    assert [result[0] for result in results] == [steps, steps]
    assert [result[1][0] for result in results] == ["PeerError", "CheckpointNotFoundError"]
