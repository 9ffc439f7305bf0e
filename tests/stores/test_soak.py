"""Saves to a bucket that breaks, by two writers, and by runs that are killed: nothing is lost, torn or doubled.

A twentieth of the runs, of killed exports a fortieth; all of them with TITAN_CKPT_SOAK=1 (`make soak`). Seeds choose
what breaks. No result depends on time: a machine that is slow makes more saves fail, and a save that failed may be
there or not.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from typing import TypeVar
from unittest import mock

import pytest
from torch.distributed import TCPStore

from tests.faults.scenarios import SOAK
from tests.faults.small_checkpoints import alone
from tests.stores import killed_exports, soak_runs
from tests.stores.conftest import place_in, through
from tests.stores.servers import Fault, Proxy, Server
from tests.stores.soak_runs import KEEP, Save, TakingTurns, Turns, commit_step, judge
from titan_ckpt.directory import bucket_steps, lease
from titan_ckpt.directory.bucket_commits import Commits
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.errors import CommitConflictError, CorruptCheckpointError, SaveError
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.testing import ranks

T = TypeVar("T")
FAULT_RUNS, KILLS, EXPORT_KILLS, ROUNDS = (250, 200, 200, 200) if SOAK else (13, 10, 5, 10)


class _NeverHeld(dict[str, str]):
    """Lets a process take a lease that it has, as a process on another machine could."""

    def __contains__(self, item: object) -> bool:
        return False


@pytest.fixture
def _two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "held", _NeverHeld())


@pytest.mark.usefixtures("_two_machines")
@pytest.mark.timeout(14400 if SOAK else 300)
def test_a_store_that_breaks_loses_tears_and_doubles_nothing(server: Server) -> None:
    """503, SlowDown, answers that are cut after the request was processed, and stalls; restarts in between."""
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    with ThreadPoolExecutor(4) as threads:  # most of the time a run waits to ask again
        for of_run, seen in threads.map(lambda seed: _run_behind_faults(server, seed), range(FAULT_RUNS)):
            faults += of_run
            outcomes += seen
    assert faults == []
    assert outcomes["acknowledged"] and outcomes["failed"], outcomes


def _run_behind_faults(server: Server, seed: int) -> tuple[list[str], Counter[str]]:
    """Save three steps; after a failure the same or another process goes on. Return what is wrong and what happened."""
    generator = random.Random(seed)
    share = generator.choice((0.02, 0.1, 0.2))
    place = place_in(server)
    acknowledged: list[Save] = []
    in_doubt: list[Save] = []
    outcomes: Counter[str] = Counter()
    is_over = False

    def decide(method: str, path: str) -> Fault:
        if is_over:
            return "stall"
        if generator.random() >= share:
            return None
        return generator.choices(("503", "SlowDown", "cut", "stall"), (4, 4, 8, 1))[0]

    with Proxy(server.endpoint, decide) as proxy:
        broken = through(place, proxy, retry_seconds=0.5)
        directory = CheckpointDirectory(broken, alone())
        for number in range(6):
            save = (10 * (number // 2 + 1), 100 * seed + number)  # two tries of each step
            if acknowledged and acknowledged[-1][0] == save[0]:
                continue
            try:
                commit_step(directory, alone(), *save)
                acknowledged.append(save)
                outcomes["acknowledged"] += 1
                directory.expire(KEEP)
            except CommitConflictError as error:
                if "committed already" not in str(error):  # by the first try, whose answer was lost
                    raise
                outcomes["arrived late"] += 1
            except (StoreError, SaveError):
                in_doubt.append(save)
                outcomes["failed"] += 1
                if generator.random() < 0.5:
                    directory.close()
                    directory = CheckpointDirectory(broken, alone())
        directory.close()
        is_over = True
        _settle(proxy)
    return [f"seed {seed}: {fault}" for fault in judge(place, acknowledged, in_doubt)], outcomes


def _settle(proxy: Proxy) -> None:
    """Wait until no request is worked on. The caller has made sure that no other is passed on."""
    while proxy.forwarding:
        time.sleep(0.005)


@pytest.mark.timeout(14400 if SOAK else 300)
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_killed_at_any_request_loses_and_tears_nothing(s3: Server, world: int) -> None:
    """SIGKILL when a request arrives, which is then processed or not. Of two ranks one or both are killed."""
    saves = [(10, 1), (20, 2), (30, 3)]
    with _Killer(s3, world, soak_runs.killed_rank) as killer:
        in_doubt = [[save] for save in saves] + [[]]
        assert killer.trials(KILLS, saves, lambda place, told: judge(place, told, in_doubt[len(told)])) == []


@pytest.mark.timeout(14400 if SOAK else 300)
@pytest.mark.parametrize("world", [1, 2])
def test_an_export_killed_at_any_request_never_opens_half(s3: Server, world: int) -> None:
    """A folder that opens is whole; the next export removes what a killed one has left, and so does retention."""
    steps = [10, 20]
    with _Killer(s3, world, killed_exports.killed_export) as killer:
        judged = killed_exports.judge_exports
        assert killer.trials(EXPORT_KILLS, steps, lambda place, told: judged(place, told, steps)) == []


class _Killer:
    """Runs ranks whose requests pass a proxy, which kills some of them when a request of a given number arrives."""

    def __init__(self, server: Server, world: int, body: Callable[..., None]) -> None:
        self.arrived = 0
        self._server = server
        self._world = world
        self._body = body
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._proxy = Proxy(server.endpoint, self._decide)
        self._pids: list[int] = []
        self._all_started = threading.Event()
        self._last = 0
        self._is_over = False
        """The server processes no request of a run that has ended while the run's place is judged."""
        self._victims: Sequence[int] = ()

    def _decide(self, method: str, path: str) -> Fault:
        self._all_started.wait()
        if self._is_over:
            return "stall"
        self.arrived += 1
        if self.arrived != self._last:
            return None
        for rank in self._victims:
            os.kill(self._pids[rank], signal.SIGKILL)
        is_lost = len(self._victims) == self._world and self._last % 2 == 0
        return "stall" if is_lost else "cut"

    def trials(self, kills: int, work: Sequence[T], judged: Callable[[BucketPath, list[T]], list[str]]) -> list[str]:
        """Kill runs at requests that a seed chooses; return what is wrong with what they leave."""
        generator = random.Random(self._world)
        faults: list[str] = []
        progress: Counter[int] = Counter()
        assert self.run(place_in(self._server), work, 10**9, range(0)) == work
        whole = self.arrived
        for trial in range(kills):
            place = place_in(self._server)
            victims = [generator.randrange(self._world)] if generator.random() < 0.2 else range(self._world)
            told = self.run(place, work, generator.randint(1, whole), victims)
            progress[len(told)] += 1
            faults += [f"{trial}: {fault}" for fault in judged(place, told)]
        assert len(progress) > 1, progress
        return faults

    def run(self, place: BucketPath, work: Sequence[T], last: int, victims: Sequence[int]) -> list[T]:
        """Do the work until request `last`; return what was told before all ranks ended."""
        self.arrived, self._last, self._victims, self._pids = 0, last, victims, []
        self._is_over = False
        self._all_started.clear()
        timeout = 2.0 if len(victims) == 1 else 60.0  # a survivor waits so long for its peer
        read, write = Pipe(duplex=False)
        common = (str(place), self._proxy.endpoint)
        processes = [
            ranks._context().Process(
                target=self._body, args=(*common, rank, self._world, self._store.port, timeout, work, write)
            )
            for rank in range(self._world)
        ]
        for process in processes:
            process.start()
            assert process.pid is not None
            self._pids.append(process.pid)
        self._all_started.set()
        write.close()
        told: list[T] = []
        with contextlib.suppress(EOFError):
            while True:
                told.append(read.recv())
        read.close()
        for process in processes:
            process.join()
        self._is_over = True
        _settle(self._proxy)
        return told

    def __enter__(self) -> _Killer:
        self._proxy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.__exit__()


@pytest.mark.usefixtures("_two_machines")
@pytest.mark.timeout(14400 if SOAK else 300)
def test_of_two_writers_exactly_one_commits_a_step(s3: Server) -> None:
    """The other is told. A seed orders their requests."""
    assert [fault for seed in range(ROUNDS) for fault in _race(s3, seed)] == []


@pytest.mark.usefixtures("_two_machines")
def test_the_race_finds_a_writer_that_does_not_fence(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds can fail."""
    monkeypatch.setattr(Commits, "fence", lambda commits, step, attempt, by: commits.content(step, attempt))
    assert any(_race(s3, seed) for seed in range(ROUNDS * (1 if SOAK else 20)))


def _race(server: Server, seed: int) -> list[str]:
    """Let two writers save step 10, and return what is wrong."""
    place = place_in(server)
    turns = Turns(seed)
    told: list[Save] = []
    refused: list[Exception] = []

    def save(who: int) -> None:
        directory = CheckpointDirectory(BucketPath(TakingTurns(place.bucket, turns, who), place.key), alone())
        try:
            commit_step(directory, alone(), 10, who)
            told.append((10, who))
        except Exception as error:
            refused.append(error)
        finally:
            directory.close()
            turns.end(who)

    threads = [threading.Thread(target=save, args=(who,)) for who in range(2)]
    with mock.patch.object(bucket_steps, "meanwhile", turns.in_either_order):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    was_told = len(told) == 1 and [type(error) for error in refused] == [CommitConflictError]
    faults = [] if was_told else [f"{len(told)} commits, {refused}"]
    try:
        faults += judge(place, told[:1], [])
    except CorruptCheckpointError as error:
        faults.append(str(error))
    return [f"seed {seed}: {fault}" for fault in faults]
