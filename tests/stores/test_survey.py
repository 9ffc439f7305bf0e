"""The steps that a reader finds in a bucket while a writer changes them, whatever its two listings show of it."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.steps_tests import manifest_of, save, write
from tests.stores.test_manager_in_bucket import _forget_leases
from titan_ckpt.config import ExportConfig
from titan_ckpt.directory.bucket_steps import BucketSteps
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointNotFoundError, CommitConflictError, CorruptCheckpointError, ExportError
from titan_ckpt.formats.publish.bucket_record import BucketExports
from titan_ckpt.formats.publish.record import Staged
from titan_ckpt.saving.saver import _write_all
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.objects import MAX_SMALL_BYTES, BucketPath, ObjectFacts, ObjectStore, Version
from titan_ckpt.stores.store import StoreConfig

Objects = dict[str, tuple[bytes, Version]]


class Memory(ObjectStore):
    """A bucket in memory that keeps what was in it after every change; a list of objects is deleted one by one."""

    scheme = "s3"
    settings = StoreConfig()
    concurrency = 4
    small_bytes = MAX_SMALL_BYTES
    """A read whose caller gives no limit of its own returns so many bytes."""

    def __init__(self) -> None:
        self.moments: list[Objects] = [{}]
        self.seconds: dict[str, float] = {}
        """Key -> when it was put, by the store's clock."""

    def url(self, key: str) -> str:
        return f"s3://box/{key}"

    def create(self, key: str, data: bytes) -> Version:
        there = self.moments[-1].get(key)
        if there is not None and there[0] != data:
            raise FileExistsError(key)
        return self.replace(key, data, {}) if there is None else {}  # as after an answer that was lost

    def replace(self, key: str, data: bytes, version: Version) -> Version:  # type: ignore[override]
        new = {"e_tag": str(len(self.moments))}
        self.moments.append({**self.moments[-1], key: (data, new)})
        return new

    def put(self, key: str, data: bytes) -> None:
        self.replace(key, data, {})

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.moments.append({k: content for k, content in self.moments[-1].items() if k != key})

    def read(self, key: str, max_bytes: int = MAX_SMALL_BYTES) -> tuple[bytes, Version]:
        content, version = _read(self.moments[-1], key)
        if len(content) > (self.small_bytes if max_bytes == MAX_SMALL_BYTES else max_bytes):
            raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", self.url(key))
        return content, version

    def upload(self, key: str, parts: Any, part_bytes: int) -> None:
        self.put(key, b"".join(map(bytes, parts)))

    def read_head(self, key: str, num_bytes: int) -> tuple[bytes, int]:
        data = self.read(key)[0]
        return data[:num_bytes], len(data)

    def read_range(self, key: str, start: int, stop: int) -> memoryview:
        return memoryview(self.read(key)[0])[start:stop]

    def content(self, key: str, max_bytes: int = 0) -> bytes | None:
        return self.moments[-1].get(key, (None,))[0]

    def list_objects(self, prefix: str) -> list[ObjectFacts]:
        there = _listed(self.moments[-1], prefix)
        return [replace(facts, unix_seconds=self.seconds.get(facts.key, 0.0)) for facts in there]

    def list_files(self, prefix: str) -> list[ObjectFacts]:
        there = [facts for facts in _listed(self.moments[-1], prefix) if facts.key.count("/") == prefix.count("/") + 1]
        return [replace(facts, unix_seconds=self.seconds.get(facts.key, 0.0)) for facts in there]

    def list_names(self, prefix: str) -> list[str]:
        return sorted({facts.key.removeprefix(prefix).split("/")[1] for facts in _listed(self.moments[-1], prefix)})


class Reader(Memory):
    """The same bucket for a reader whose requests come at given moments: the first listing of each kind, and later.

    `reads_at`: when manifests are read that are in the first listing.
    """

    def __init__(self, moments: list[Objects], first: dict[str, int], later: Sequence[int], reads_at: int) -> None:
        self.moments = moments
        self._first = dict(first)
        self._later = [*later]
        self._reads_at = reads_at
        self.asked = sorted(first.values())
        """The moments at which something was listed."""

    def list_objects(self, prefix: str) -> list[ObjectFacts]:
        kind = prefix.rpartition("/")[2]
        moment = self._first.pop(kind, -1)
        if moment < 0:
            moment = self._later.pop(0) if self._later else len(self.moments) - 1
            self.asked.append(moment)
        return _listed(self.moments[moment], prefix)

    def read(self, key: str, max_bytes: int = 0) -> tuple[bytes, Version]:
        return _read(self.moments[self._reads_at if len(self.asked) == 2 else self.asked[-1]], key)


def _read(objects: Objects, key: str) -> tuple[bytes, Version]:
    if key not in objects:
        raise FileNotFoundError(key)
    return objects[key]


def _listed(objects: Objects, prefix: str) -> list[ObjectFacts]:
    there = [(key, content) for key, content in sorted(objects.items()) if key.startswith(f"{prefix}/")]
    return [ObjectFacts(key, len(data), version, 0.0) for key, (data, version) in there]


def steps_in(bucket: Memory) -> BucketSteps:
    place = BucketPath(bucket, "run")
    return BucketSteps(place)


def _saves(steps: BucketSteps) -> None:
    save(steps, 3)


def _removes(steps: BucketSteps) -> None:
    steps.remove(steps.inspect(1))


def _removes_and_saves(steps: BucketSteps) -> None:
    _removes(steps)
    save(steps, 3)


def _goes_back(steps: BucketSteps) -> None:
    steps.resume_from(1)
    save(steps, 2)


def _gives_up(steps: BucketSteps) -> None:
    attempt = steps.begin(3, 10)
    write(attempt)
    steps.abandon(attempt)


@pytest.mark.parametrize("change", [_saves, _removes, _removes_and_saves, _goes_back, _gives_up])
@pytest.mark.parametrize("is_damaged", [False, True])  # then manifests are read late, too
def test_no_order_of_the_listings_makes_a_whole_step_a_damaged_one(
    change: Callable[[BucketSteps], None], is_damaged: bool
) -> None:
    """A step that was whole all the time is found; one that was saved or deleted meanwhile is found or not, and never
    called damaged; one that has lost a file is called so.
    """
    bucket = Memory()
    steps = steps_in(bucket)
    for step in (0, 1, 2) if is_damaged else (1, 2):
        save(steps, step)
    bucket.delete([key for key in bucket.moments[-1] if "data/step-0/" in key])
    before = len(bucket.moments) - 1
    change(steps)
    steps.close()
    moments = bucket.moments[before:]
    whole = [{step.step for step in steps_in(_at([objects])).survey().steps} for objects in moments]
    surveys = 0
    for reader in _readers(moments, reads_late=is_damaged):
        seen = steps_in(reader).survey()
        surveys += 1
        found = {step.step for step in seen.steps}
        window = whole[reader.asked[0] : max(reader.asked) + 1]
        assert set.intersection(*window) <= found <= set.union(*window), reader.asked
        faulty = [(name, reason) for name, reason in seen.rejected if "set aside" not in reason]
        assert [name for name, _ in faulty] == ["step-0"] * is_damaged, (reader.asked, faulty)
    assert surveys > len(moments) ** 2 / 2


def _at(moments: list[Objects]) -> Memory:
    bucket = Memory()
    bucket.moments = moments
    return bucket


def _readers(moments: list[Objects], *, reads_late: bool) -> Iterator[Reader]:
    """Yield readers whose first two listings come in any order, and whose next ones come later."""
    last = len(moments)
    for commits, files in product(range(last), repeat=2):
        for again in range(max(commits, files), last):
            for once_more in range(again, last):
                reads_at = max(commits, files) if reads_late else commits
                reader = Reader(moments, {"commits": commits, "data": files}, [again, once_more], reads_at)
                yield reader
                if len(reader.asked) < 4:
                    break
            if len(reader.asked) < 3:
                break


def test_commits_and_files_are_listed_at_the_same_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each listing waits until both are asked for."""
    bucket = Memory()
    steps = steps_in(bucket)
    save(steps, 1)
    both, asked = threading.Barrier(2), list[str]()

    def meet(prefix: str) -> list[ObjectFacts]:
        asked.append(prefix)
        both.wait(20.0)
        return _listed(bucket.moments[-1], prefix)

    monkeypatch.setattr(bucket, "list_objects", meet)
    assert [step.step for step in steps.survey().steps] == [1]
    assert sorted(asked) == ["run/commits", "run/data"]


def test_a_step_as_listed_is_not_looked_for_again_and_one_that_was_deleted_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its manifest is read by every rank, so one that is gone is known, and the next look is a new one."""
    bucket = Memory()
    steps = steps_in(bucket)
    for step in (1, 2):
        save(steps, step)
    directory = CheckpointDirectory(steps.root, Coordinator(0, 1, None, "", 10.0))
    bucket.read_head = lambda key, num_bytes: (bucket.read(key)[0], len(bucket.read(key)[0]))  # type: ignore[method-assign]
    assert directory.steps() == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "list_objects", lambda prefix: pytest.fail(f"{prefix} is listed again"))
        assert directory.committed(2, as_listed=True)[0].step == 2
    assert directory.steps() == [1, 2]
    steps.remove(steps.inspect(2))
    with pytest.raises(CheckpointNotFoundError, match="was deleted while it was being opened"):
        directory.committed(2, as_listed=True)
    with pytest.raises(CheckpointNotFoundError, match="step 2 is not there; committed steps: 1"):
        directory.committed(2, as_listed=True)


def test_test_saves_that_were_cut_short_go_after_a_day_and_never_one_that_may_be_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their age is counted by the store's clock, whatever this machine's says; what has another name stays."""
    bucket = Memory()
    steps = steps_in(bucket)
    bucket.create("run/data/probe-notes", b"x")
    for age, letter in ((86500.0, "a"), (86300.0, "b")):
        bucket.create(f"run/data/probe-{letter * 32}", b"x")
        bucket.create(f"run/data/probe-{letter * 32}/00001", b"x")
        bucket.seconds |= {key: 1e6 - age for key in bucket.moments[-1] if letter * 32 in key}
    bucket.seconds["run/lease.json"] = 1e6
    monkeypatch.setattr("time.time", lambda: 9e9)
    save(steps, 1)
    left = [key for key in bucket.moments[-1] if "probe-" in key]
    assert left == ["run/data/probe-notes", f"run/data/probe-{'b' * 32}", f"run/data/probe-{'b' * 32}/00001"]


def test_a_place_that_lost_its_commits_is_no_fresh_start_and_loses_nothing_more() -> None:
    """Somebody has deleted `commits/`, or copied `data/` alone. A first save that was interrupted is no such loss."""
    bucket = Memory()
    steps = steps_in(bucket)
    attempt = steps.begin(1, 10)
    write(attempt)
    _forget_leases()
    steps = steps_in(bucket)
    for step in (1, 2):
        save(steps, step)
    assert not [key for key in bucket.moments[-1] if attempt.id in key and "/data/" in key]
    steps.close()
    bucket.delete([key for key in bucket.moments[-1] if key.startswith("run/commits/")])
    files = {key for key in bucket.moments[-1] if key.startswith("run/data/")}
    directory = CheckpointDirectory(steps.root, Coordinator(0, 1, None, "", 10.0))
    for act in (directory.steps, lambda: directory.begin(3), steps_in(bucket).open):
        with pytest.raises(CorruptCheckpointError, match=r"data/step-1/[0-9a-f]{32}: its files are there, and"):
            act()
    assert {key for key in bucket.moments[-1] if key.startswith("run/data/")} == files


def test_a_commit_that_is_too_large_is_a_fault_of_its_own_step(caplog: pytest.LogCaptureFixture) -> None:
    """The log names the object, the other steps can be loaded, and a run that goes on from one sets it aside."""
    bucket = Memory()
    steps = steps_in(bucket)
    for step in (1, 2):
        save(steps, step)
    (commit,) = [key for key in bucket.moments[-1] if key.startswith("run/commits/step-2.")]
    bucket.put(commit, bytes(MAX_SMALL_BYTES + 1))
    steps.close()
    assert CheckpointDirectory(steps.root, Coordinator(0, 1, None, "", 10.0)).steps() == [1]
    assert re.search(r"step-2 is not a checkpoint.*commits/step-2\.[0-9a-f]{32}\.json.*more than 33554432", caplog.text)
    again = steps_in(bucket)
    again.resume_from(1)
    save(again, 2)
    assert [step.step for step in again.survey().steps] == [1, 2]
    again.close()


def test_the_age_of_a_fence_is_counted_by_the_clock_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is years off deletes no fence that is needed, and keeps none for ever."""
    bucket = Memory()
    fences = [f"run/commits/step-{days}.{'a' * 32}.json" for days in (6, 8)]
    for days, key in zip((6, 8), fences, strict=True):
        bucket.create(key, b'{"format": "titan_ckpt fence", "by": "x", "id": "y"}')
        bucket.seconds[key] = 1e9 - days * 86400
    bucket.seconds["run/lease.json"] = 1e9
    for now in (9e9, 0.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        steps = steps_in(bucket)
        steps.open()
        steps.close()
        assert [key for key in fences if key in bucket.moments[-1]] == fences[:1]


def test_a_save_whose_tensors_fail_says_so_while_small_files_are_still_tried() -> None:
    """The requests for these may be tried again for minutes."""
    tried, answered = threading.Event(), threading.Event()

    def create(key: str, data: bytes) -> Version:
        tried.set()
        assert answered.wait(20.0)
        return {}

    def fail(folder: object) -> Any:
        assert tried.wait(20.0)
        raise OSError("no right to write")

    bucket: Any = Memory()
    bucket.create = create
    with pytest.raises(OSError, match="no right to write"):
        _write_all(BucketPath(bucket, "run/data/step-1"), fail, {"state.json": b"{}"})
    try:
        assert not answered.is_set()
        assert any(thread.name == "titan_ckpt-meanwhile" for thread in threading.enumerate())
    finally:
        answered.set()


def test_what_arrives_after_a_save_has_failed_is_deleted_by_the_next_one() -> None:
    """A request of the failed save was still on its way when its files were deleted."""
    bucket = Memory()
    steps = steps_in(bucket)
    save(steps, 1)
    attempt = steps.begin(2, 10)
    steps.abandon(attempt)
    write(attempt)
    save(steps, 3)
    assert not [key for key in bucket.moments[-1] if "data/step-2/" in key]
    with pytest.raises(FileExistsError):
        bucket.create(steps._commits.place(2, attempt.id).key, manifest_of(attempt).to_bytes())


def test_a_step_that_was_set_aside_is_never_there_again_by_half_a_deletion() -> None:
    """A store deletes the objects of a list in any order, and may refuse one of them."""
    bucket = Memory()
    steps = steps_in(bucket)
    for step in (1, 2, 3):
        save(steps, step)
    _goes_back(steps)
    (name,) = [name for name in steps.set_aside() if name.startswith("step-3.")]
    delete = bucket.delete

    def delete_the_last(keys: Sequence[str]) -> None:
        delete(keys[-1:])
        raise StoreError(errno.EIO, "InternalError", is_final=False)

    bucket.delete = delete_the_last  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        steps.remove_set_aside(name)
    assert [step.step for step in steps_in(_at([bucket.moments[-1]])).survey().steps] == [1, 2]


def test_a_run_that_was_taken_over_while_it_went_back_sets_no_step_of_the_other_aside() -> None:
    """It is suspended between its look at the lease and its listing of the commits."""
    bucket = Memory()
    slow, quick = steps_in(bucket), steps_in(bucket)
    for step in (1, 2):
        save(slow, step)
    slow.resume_from(1)
    lease = slow.open()
    check = lease.check

    def check_then_sleep() -> None:
        check()
        lease.check = check  # type: ignore[method-assign]
        _forget_leases()
        save(quick, 3)

    lease.check = check_then_sleep  # type: ignore[method-assign]
    with pytest.raises(CommitConflictError, match="taken over"):
        slow.begin(2, 10)
    assert [step.step for step in quick.survey().steps] == [1, 2, 3]
    quick.close()


@pytest.mark.parametrize("when", ["before the record", "before the last file"])
def test_no_export_is_published_whose_files_another_run_has_deleted(when: str) -> None:
    """The other one takes the first for one that was cut short. One of the two is told."""
    bucket = Memory()
    first, second = (BucketExports(BucketPath(bucket, "e")) for _ in range(2))
    attempt = first.begin("step-1")
    bucket.create("e/step-1/model.safetensors", b"weights")
    put, create = bucket.put, bucket.create

    def publish_then_put(key: str, data: bytes) -> None:
        attempt.publish(print, ("config.json", b"{}"))
        put(key, data)

    def begin_then_create(key: str, data: bytes) -> Version:
        second.begin("step-1")
        return create(key, data)

    if when == "before the record":
        bucket.put = publish_then_put  # type: ignore[method-assign]
        with pytest.raises(FileExistsError, match="is there already"):
            second.begin("step-1")
    else:
        bucket.create = begin_then_create  # type: ignore[method-assign]
        with pytest.raises(ExportError, match="another run exports to this name"):
            attempt.publish(print, ("config.json", b"{}"))
    left = {key for key in bucket.moments[-1] if key.startswith("e/step-1/")}
    assert left in ({"e/step-1/model.safetensors", "e/step-1/config.json"}, set())


@pytest.mark.parametrize(("failing", "after"), [("put", 0), ("put", 1), ("delete", 0)])
def test_an_export_that_could_not_be_set_aside_is_so_by_the_next_try(failing: str, after: int) -> None:
    """Whichever request has failed, nobody can load the abandoned branch's export after the second call."""
    bucket, config = Memory(), ExportConfig("dcp", interval=1, folder="s3://box/e")
    bucket.small_bytes = 1 << 16
    exports, weights = BucketExports(BucketPath(bucket, "e")), bytes(bucket.small_bytes + 1)
    for step in (1, 2):
        exports.begin(f"step-{step}").publish(print, (".metadata", weights))
        exports.record(config, step)
    works, calls = getattr(bucket, failing), iter(range(9))  # its metadata is large, as that of many ranks is

    def fails(*given: Any) -> None:
        if next(calls) == after:
            raise StoreError(errno.EIO, "no answer", is_final=True)
        works(*given)

    setattr(bucket, failing, fails)
    with pytest.raises(StoreError, match="no answer"):
        exports.set_aside(config, 1)
    exports.set_aside(config, 1)
    assert exports.is_there("step-1") and not exports.is_there("step-2")
    assert bucket.content("e/step-2/.metadata.abandoned") == weights
    exports.begin("step-2")


def test_no_run_takes_the_last_file_of_another_ones_export_for_its_own() -> None:
    """It has the same bytes, and the other run, which is told, deletes it."""
    bucket = Memory()
    first, second = (BucketExports(BucketPath(bucket, "e")) for _ in range(2))
    attempt = first.begin("step-1")
    bucket.create("e/step-1/model.safetensors", b"weights")
    create, read = bucket.create, bucket.read

    def begin_then_create(key: str, data: bytes) -> Version:
        bucket.create = create  # type: ignore[method-assign]
        other = second.begin("step-1")
        bucket.create("e/step-1/model.safetensors", b"weights")
        bucket.read = lambda key, max_bytes=0: publish_then_read(key, other)  # type: ignore[method-assign]
        return create(key, data)

    def publish_then_read(key: str, other: Staged) -> tuple[bytes, Version]:
        bucket.read = read  # type: ignore[method-assign]
        with pytest.raises(FileExistsError, match="another run has written it"):
            other.publish(print, ("config.json", b"{}"))
        return read(key)

    bucket.create = begin_then_create  # type: ignore[method-assign]
    with pytest.raises(ExportError, match="another run exports to this name"):
        attempt.publish(print, ("config.json", b"{}"))


def test_an_export_whose_run_is_killed_right_after_its_last_file_is_the_runs_own() -> None:
    """It expires, it is set aside, and a changed file makes it the user's, as of any other."""
    bucket, config = Memory(), ExportConfig("dcp", interval=1, keep=1, folder="s3://box/e")
    exports = BucketExports(BucketPath(bucket, "e"))

    def killed(step: int, last: tuple[str, bytes] | None) -> None:
        if last is None:
            raise KeyboardInterrupt
        exports.record(config, step, "s3://box/steps", last)

    for step in (1, 2, 3, 4):
        attempt = exports.begin(f"step-{step}")
        bucket.create(f"e/step-{step}/__0_0.distcp", b"weights")
        with pytest.raises(KeyboardInterrupt):
            attempt.publish(partial(killed, step), (".metadata", b"names"))
    bucket.put("e/step-2/.metadata", b"other names")
    assert exports.foreign_after(config, 1) == [(2, "changed since: .metadata")]
    exports.set_aside(config, 3, "s3://box/steps")
    exports.expire(config, 3)
    assert [exports.is_there(f"step-{step}") for step in (1, 2, 3, 4)] == [False, True, True, False]
