"""Runs that save to a bucket while the store, another writer or a SIGKILL is in their way, and how the place is judged.

A save is two or more small files whose bytes say which save they are of; `tests/stores/test_soak.py` does the rest.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash
from torch.distributed import TCPStore

from tests.faults.small_checkpoints import alone, manifest_of, payload, read_value
from tests.stores import servers
from titan_ckpt.config import KeepConfig
from titan_ckpt.directory.bucket_steps import BucketSteps
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import FileRecord, Manifest
from titan_ckpt.directory.steps import Attempt
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.stores.bucket import Bucket
from titan_ckpt.stores.objects import BucketPath, ObjectStore
from titan_ckpt.stores.store import StoreConfig, open_location

Save = tuple[int, int]
"""(step, value): the value is what every file of the save names."""
KEEP = KeepConfig(latest=2)


def commit_step(directory: CheckpointDirectory, coordinator: Coordinator, step: int, value: int) -> None:
    """Save one step, every rank a file, and delete what has expired. Collective."""
    attempt = directory.begin(step, 1000)
    names = [f"rank-{rank:05d}.safetensors" for rank in range(coordinator.world_size)]
    write_file(attempt, names[coordinator.rank], value)
    if coordinator.rank == 0:
        write_file(attempt, "state.json", value)
    coordinator.barrier(f"written {step}")
    directory.commit(attempt, manifest_with(attempt, value, [*names, "state.json"]))


def write_file(attempt: Attempt, name: str, value: int) -> None:
    place = attempt.path
    assert isinstance(place, BucketPath)
    data = memoryview(payload(attempt.step, value, name))
    place.bucket.upload((place / name).key, iter([data]), 5 << 20)


def manifest_with(attempt: Attempt, value: int, names: Sequence[str]) -> Manifest:
    contents = {name: payload(attempt.step, value, name) for name in names}
    files = [FileRecord(name, len(data), xxhash.xxh3_128_hexdigest(data)) for name, data in contents.items()]
    return manifest_of(attempt, files, world_size=len(names) - 1)


def judge(place: BucketPath, acknowledged: Sequence[Save], in_doubt: Sequence[Save]) -> list[str]:
    """Look at the place as the next run does, then save and look again; return what is wrong.

    The newest acknowledged save must be there; any step may only hold a save that was acknowledged for it, or is in
    doubt: one that was under way when its run ended, or failed because the store did not answer.
    """
    faults = _wrong(place, acknowledged, in_doubt)
    directory = CheckpointDirectory(place, alone())
    try:
        if steps := directory.steps():
            directory.resume_from(steps[-1])
        commit_step(directory, alone(), 1000, 1)
    finally:
        directory.close()
    faults += _wrong(place, [(1000, 1)], [*acknowledged, *in_doubt])
    seen = BucketSteps(place).survey()
    expected = {str(step.path) for step in seen.steps}
    left = {str(BucketPath(place.bucket, f.key).parent) for f in place.bucket.list_objects((place / "data").key)}
    return faults + [f"left behind: {path}" for path in sorted(left - expected)]


def _wrong(place: BucketPath, acknowledged: Sequence[Save], in_doubt: Sequence[Save]) -> list[str]:
    seen = BucketSteps(place).survey()
    faults = [f"damaged: {name}: {reason}" for name, reason in seen.rejected]
    values: dict[int, int] = {}
    for committed in seen.steps:
        try:
            values[committed.step] = read_value(committed.path, committed.manifest)
        except (AssertionError, OSError, CorruptCheckpointError) as error:
            faults.append(f"torn: {error}")
    told = dict(acknowledged)
    for step, value in values.items():
        legal = {told[step]} if step in told else {v for s, v in in_doubt if s == step}
        if value not in legal:
            faults.append(f"step {step} holds {value}, legal were {legal}")
    if acknowledged and acknowledged[-1][0] not in values:
        faults.append(f"lost: step {acknowledged[-1][0]}; there are {sorted(values)}")
    return faults


def joined(rank: int, world: int, port: int, name: str, timeout: float) -> Coordinator:
    """Make this forked process a rank of a run, and return its coordinator. `port`: that of the ranks' store."""
    gc.freeze()  # a collection would copy every page of the server that this process is forked from
    os.environ.update(servers.CREDENTIALS, RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if world == 1:
        return alone()
    return Coordinator(rank, world, TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30)), name, timeout)


def killed_rank(
    url: str, endpoint: str, rank: int, world: int, port: int, timeout: float, saves: Sequence[Save], told: Connection
) -> None:
    """Be one rank of a run that makes the saves; rank 0 tells each when it is committed."""
    coordinator = joined(rank, world, port, url, timeout)
    place = open_location(url, settings=StoreConfig(endpoint=endpoint, retry_seconds=30.0))
    directory = CheckpointDirectory(place, coordinator)
    for step, value in saves:
        commit_step(directory, coordinator, step, value)
        if rank == 0:
            told.send((step, value))
        directory.expire(KEEP)
    directory.close()


class Turns:
    """Lets one of two threads run at a time, from a request to its next; a seed says which, and for how many."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._alive = {0, 1}
        self._waiting: set[int] = set()
        self._next: int | None = None
        self._burst = 0
        self._last = 0

    def wait(self, who: int) -> None:
        """Wait for this thread's turn, which lasts until it calls again."""
        with self._changed:
            self._waiting.add(who)
            self._choose()
            self._changed.wait_for(lambda: self._next == who)
            self._waiting.discard(who)
            self._next = None

    def end(self, who: int) -> None:
        """Leave the rest to the other thread."""
        with self._changed:
            self._alive.discard(who)
            self._choose()

    @contextlib.contextmanager
    def in_either_order(self, action: Callable[[], None], *, patience: float | None = None) -> Iterator[None]:
        """Take the place of `meanwhile`: of requests at the same time, which need two threads, any may come first."""
        del patience  # of threads
        errors: list[Exception] = []

        def act() -> None:
            try:
                action()
            except Exception as error:
                errors.append(error)

        is_first = self._random.random() < 0.5
        if is_first:
            act()
        yield
        if not is_first:
            act()
        if errors:
            raise errors[0]

    def _choose(self) -> None:
        if self._next is None and self._waiting == self._alive and self._waiting:
            if self._burst == 0 or self._last not in self._waiting:
                self._last, self._burst = self._random.choice(sorted(self._waiting)), self._random.randrange(1, 14)
            self._burst -= 1
            self._next = self._last
            self._changed.notify_all()


class TakingTurns(Bucket):
    """A bucket whose requests wait for their turn."""

    def __init__(self, like: ObjectStore, turns: Turns, who: int) -> None:
        super().__init__(like.scheme, like.name, StoreConfig(endpoint=like.settings.endpoint))
        self.concurrency = 1
        for name in ("create", "replace", "upload", "read", "list_objects", "list_names", "delete"):
            setattr(self, name, self._in_turn(getattr(self, name), turns, who))

    @staticmethod
    def _in_turn(act: Callable[..., Any], turns: Turns, who: int) -> Callable[..., Any]:
        def waited(*args: Any) -> Any:
            if args != ([],):  # to delete nothing is no request
                turns.wait(who)
            return act(*args)

        return waited
