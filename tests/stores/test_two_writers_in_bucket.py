"""Two writers in a bucket, interleaved at every request of either: no step that was acknowledged is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.faults.two_writers import BEFORE, CASES, Baton, Case, Run, faults_of, manager_of, positions, race
from tests.stores.test_survey import Memory, Objects
from titan_ckpt.config import StoreConfig
from titan_ckpt.stores.objects import BucketPath, ObjectStore, Version


class Shared(Memory):
    """A bucket in memory whose requests, of many threads, come one after the other; each side is a `Side` of it."""

    def __init__(self, moments: Sequence[Objects] = ({},)) -> None:
        super().__init__()
        self.moments = [*moments]
        self.guard = threading.RLock()

    def replace(self, key: str, data: bytes, version: Version) -> Version:  # type: ignore[override]
        there = self.moments[-1].get(key)
        if version and (there is None or there[1] != version):
            raise FileExistsError(key)
        return super().replace(key, data, version)


class Side(ObjectStore):
    """The requests of one writer, each of which waits for its turn."""

    scheme = "s3"
    settings = StoreConfig()
    concurrency = 1
    _REQUESTS = (
        "create", "replace", "put", "upload", "delete", "content", "read", "read_head", "read_range", "list_objects",
        "list_files", "list_names",
    )  # fmt: skip

    def __init__(self, bucket: Shared, baton: Baton | None, who: int) -> None:
        self._bucket, self._baton, self._who = bucket, baton, who

    def url(self, key: str) -> str:
        return self._bucket.url(key)

    def _ask(self, request: str, *args: Any) -> Any:
        if request == "upload":
            args = (args[0], [b"".join(map(bytes, args[1]))], *args[2:])
        if self._baton is not None and args != ([],):  # to delete nothing is no request
            self._baton.step(self._who)
        with self._bucket.guard:
            return getattr(self._bucket, request)(*args)

    for request in _REQUESTS:
        locals()[request] = partialmethod(_ask, request)


@contextmanager
def _opened(bucket: Shared, baton: Baton | None = None) -> Iterator[None]:
    """Let the runs at s3://0 and s3://1, which wait for their turns, and at s3://2 be in the bucket."""
    sides = {f"s3://{who}/run": Side(bucket, baton if who < 2 else None, who) for who in range(3)}  # type: ignore[abstract]

    def place_of(url: str, *_: object) -> BucketPath:
        return BucketPath(sides[url], "run")

    with mock.patch("titan_ckpt.manager.open_location", place_of):
        yield


def _begun(base: Path) -> Shared:
    """Return a bucket with the steps that are there before."""
    bucket = Shared()
    with _opened(bucket), manager_of("s3://2/run", base) as manager:
        for step in BEFORE:
            manager.save(step)
    return bucket


def _raced(begun: Shared, base: Path, case: Case, at: Sequence[int]) -> tuple[Run, Baton, int]:
    """Let two runs meet; return what they did, and what a third one resumes."""
    baton = Baton(*at)
    with _opened(Shared(begun.moments), baton):
        done = race(baton, ["s3://0/run", "s3://1/run"], base, case)
        with manager_of("s3://2/run", base, saves=False) as third:
            return done, baton, third.load().step


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.timeout(14400)
def test_a_successor_resumes_the_newest_acknowledged_step_whenever_it_comes(case: Case, tmp_path: Path) -> None:
    """Or it is told, if a setting names an older one. It never fails because the other one goes on."""
    begun = _begun(tmp_path)
    _, baton, _ = _raced(begun, tmp_path, case, ())
    faults = []
    for at in positions(baton.counts, 30):
        done, _, newest = _raced(begun, tmp_path, case, at)
        faults += [f"{at}: {fault}" for fault in faults_of(done, case, newest)]
    assert faults == []
