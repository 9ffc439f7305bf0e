"""Steps in a bucket as their writer changes them: what it deletes and sets aside, and what other ranks are told."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tests.steps_tests import manifest_of, save, write
from tests.stores.conftest import place_in
from tests.stores.servers import Server, free_port
from tests.stores.test_manager_in_bucket import _forget_leases, keys
from titan_ckpt.directory import bucket_steps
from titan_ckpt.directory import lease as leases
from titan_ckpt.directory.bucket_commits import Commits
from titan_ckpt.directory.bucket_steps import BucketSteps
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.steps import Attempt
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointNotFoundError, CommitConflictError, PeerError, PreflightError, SaveError
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.bucket import Bucket
from titan_ckpt.stores.objects import BucketPath, ObjectStore, Version
from titan_ckpt.stores.store import StoreConfig


def _with_steps(server: Server, *saved: int) -> tuple[BucketPath, BucketSteps]:
    """Return a place, and who has saved these steps there and holds the lease."""
    place = place_in(server)
    steps = BucketSteps(place)
    for step in saved:
        save(steps, step)
    return place, steps


def test_a_clean_up_that_fails_fails_no_save_and_is_tried_again(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And deletes nothing that is not named as an attempt is."""
    place, steps = _with_steps(s3, 1)
    attempt = f"data/step-2/{uuid.uuid4().hex}/rank-00000.json"
    for name in (attempt, "data/step-2/notes/a.txt"):
        place.bucket.create((place / name).key, b"x")
    steps._has_leftovers = True

    def refuse(keys: object) -> None:
        raise StoreError(errno.EACCES, "no right to delete", is_final=True)

    with monkeypatch.context() as patch:
        patch.setattr(steps._bucket, "delete", refuse)
        save(steps, 3)
    assert attempt in keys(place)
    save(steps, 4)
    steps.close()
    assert attempt not in keys(place) and "data/step-2/notes/a.txt" in keys(place)
    assert [step.step for step in steps.survey().steps] == [1, 3, 4]


def test_a_foreign_object_beside_the_files_damages_no_step(s3: Server) -> None:
    """A step is what its manifest lists."""
    place, steps = _with_steps(s3, 1)
    steps.close()
    files = place / "data" / "step-1" / steps.inspect(1).manifest.attempt
    place.bucket.create((files / "_SUCCESS").key, b"")
    assert steps.inspect(1).step == 1


def test_a_pin_whose_step_is_gone_is_deleted_after_a_week(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pinned it was killed before it saw that the step was being deleted. Other pins stay."""
    place, steps = _with_steps(s3, 1, 2)
    steps.pin(1)
    steps.pin(2)
    steps.close()
    (commit,) = [key for key in keys(place) if key.startswith("commits/step-1.") and key.endswith(".json")]
    widow = commit.removesuffix("json") + "pinned"
    place.bucket.delete([(place / commit).key])
    place.bucket.create((place / commit.replace("json", "abandoned")).key, b"")
    for seconds, left in ((bucket_steps._FENCE_SECONDS, True), (-60.0, False)):
        monkeypatch.setattr(bucket_steps, "_FENCE_SECONDS", seconds)
        steps.open()
        steps.close()
        assert (widow in keys(place)) == left
    marks = [key.partition(".")[0] for key in keys(place) if key.endswith((".pinned", ".abandoned"))]
    assert marks == ["commits/step-2"]
    assert [(step.step, step.foreign) for step in steps.survey().steps] == [(2, ("PINNED",))]


def test_a_store_that_one_rank_cannot_reach_stops_all_ranks_and_damages_no_step(s3: Server) -> None:
    """Rank 1 has the store's error, rank 0 is told of it at once; neither goes on to an older step."""
    place, steps = _with_steps(s3, 1)
    steps.close()
    nowhere = StoreConfig(endpoint=f"http://127.0.0.1:{free_port()}", retry_seconds=0.3)
    places = [place, BucketPath(Bucket(place.bucket.scheme, place.bucket.name, nowhere), place.key)]
    store, errors = dist.HashStore(), dict[int, BaseException]()

    def open_step(rank: int) -> None:
        try:
            CheckpointDirectory(places[rank], Coordinator(rank, 2, store, "view", 10.0)).committed(1)
        except BaseException as error:
            errors[rank] = error

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(open_step, range(2))]
    assert isinstance(errors[1], StoreError) and isinstance(errors[0], PeerError)
    assert "rank 1" in str(errors[0]) and "could not read it" in str(errors[0])


def test_a_commit_is_read_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing names its version, in buckets that keep versions, too, where it leaves out their ids. What this
    process has committed is not read at all.
    """
    place, steps = _with_steps(server, 1)
    first = BucketSteps(place).survey()
    steps.close()
    seen = steps._commits._seen
    steps._commits._seen = {key: (content, {**version, "version": "7"}) for key, (content, version) in seen.items()}
    monkeypatch.setattr(steps._bucket, "read", lambda key: pytest.fail(f"{key} is read again"))
    assert steps.survey() == first


def test_a_save_waits_until_it_is_known_that_an_earlier_one_of_its_step_never_arrives(s3: Server) -> None:
    """Its commit was sent, its answer was lost, and the store could not be asked: one step is not saved twice."""
    place = place_in(s3)
    steps = BucketSteps(place)
    attempt = steps.begin(1, 10)
    write(attempt)
    manifest, bucket = manifest_of(attempt), steps._bucket
    nowhere = Bucket("s3", "box", StoreConfig(endpoint=f"http://127.0.0.1:{free_port()}", retry_seconds=0.2))
    steps._commits._bucket = nowhere
    steps._bucket = _Lists(nowhere, bucket)  # type: ignore[assignment]
    with pytest.raises(StoreError):
        steps.commit(attempt, manifest)
    steps.abandon(attempt)
    steps._bucket = bucket
    with pytest.raises(StoreError):
        steps.begin(1, 10)
    steps._commits._bucket = bucket
    bucket.create(steps._commits.place(1, attempt.id).key, manifest.to_bytes())  # it does arrive
    with pytest.raises(CommitConflictError, match="committed already"):
        steps.begin(1, 10)
    steps.close()
    assert steps.inspect(1).manifest == manifest


class _Lists:
    """A bucket that lists, and answers nothing else."""

    def __init__(self, nowhere: ObjectStore, bucket: ObjectStore) -> None:
        self.create, self.list_objects = nowhere.create, bucket.list_objects


@pytest.mark.parametrize("put", range(5))
def test_a_pin_and_a_removal_that_is_killed_lose_no_pinned_step(s3: Server, put: int) -> None:
    """Before request `put` of a removal another process creates its pin, and looks whether the step is still there some
    requests later; then the removal is killed. Whoever was told that the step is pinned finds it after a restart.
    """
    place = place_in(s3)
    steps = BucketSteps(place)
    cases = [(look, end) for look in range(put, 5) for end in (look, look + 1, 99)]
    for step, (look, end) in enumerate(cases, 1):
        save(steps, step)
        is_pinned = _pin_during_removal(steps, step, put, look, end)
        steps.close()
        _forget_leases()
        steps = BucketSteps(place)
        steps.open()
        there = {committed.step: committed.foreign for committed in steps.survey().steps}
        assert not is_pinned or there.get(step) == ("PINNED",), (put, look, end)
        assert step in there or not [key for key in keys(place) if f"data/step-{step}/" in key], (put, look, end)
        assert not [key for key in keys(place) if key.endswith(".removal")]
    steps.close()


def test_a_pin_that_is_there_already_is_no_answer_while_a_removal_is_under_way(s3: Server) -> None:
    """The removal may have looked before that pin came; and the pin is another's, so it stays."""
    place, steps = _with_steps(s3, 1)
    steps.pin(1)
    steps.pin(1)
    attempt = steps.inspect(1).manifest.attempt
    mark = place / "commits" / f"step-1.{attempt}.removal"
    place.bucket.create(mark.key, b"")
    with pytest.raises(CheckpointNotFoundError, match="is being deleted"):
        steps.pin(1)
    place.bucket.delete([mark.key])
    assert steps.inspect(1).foreign == ("PINNED",)
    steps.unpin(1)
    assert steps.inspect(1).foreign == ()
    steps.close()


class _Killed(BaseException):
    pass


def _pin_during_removal(steps: BucketSteps, step: int, put: int, look: int, end: int) -> bool:
    """Remove a step, whose removal is killed before request `end`; return whether another process was told of a pin."""
    pinner = BucketSteps(BucketPath(Bucket("s3", "box", steps._bucket.settings), steps.root.key))
    is_put, may_look = threading.Event(), threading.Event()
    told: list[BaseException | None] = []

    def put_then_wait(key: str, data: bytes, create: Any = pinner._bucket.create) -> Version:
        version: Version = create(key, data)
        is_put.set()
        assert may_look.wait(30)
        return version

    def pin() -> None:
        try:
            pinner.pin(step)
            told.append(None)
        except CheckpointNotFoundError as error:
            told.append(error)
        is_put.set()

    pinner._bucket.create = put_then_wait  # type: ignore[method-assign]
    thread = threading.Thread(target=pin)
    listed = steps.inspect(step)
    count = 0

    def before(act: Any) -> Any:
        def acted(*args: Any) -> Any:
            nonlocal count
            number, count = count, count + 1
            if number == put:
                thread.start()
                assert is_put.wait(30)
            if number == look:
                may_look.set()
                thread.join()
            if number == end:
                raise _Killed
            return act(*args)

        return acted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("create", "read", "delete"):
            patch.setattr(steps._bucket, name, before(getattr(steps._bucket, name)))
        with contextlib.suppress(_Killed, SaveError):
            steps.remove(listed)
    may_look.set()
    if thread.ident is None:
        thread.start()
    thread.join()
    return told == [None]


def _before_a_commit(server: Server) -> tuple[BucketPath, BucketSteps, BucketSteps, Attempt]:
    """Return a place, its writer, another one, and the first one's attempt at step 5, whose files are there."""
    place = place_in(server)
    old, new = BucketSteps(place), BucketSteps(place)
    attempt = old.begin(5, 10)
    write(attempt)
    return place, old, new, attempt


def test_fences_go_after_a_week_and_a_writer_that_was_away_longer_is_told(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is suspended just before its commit, for so long that even the fence of its attempt is gone."""
    place, old, new, attempt = _before_a_commit(s3)
    now = [1000.0]
    monkeypatch.setattr(bucket_steps, "_clocks", lambda: (now[0],))

    def check_then_sleep() -> None:
        _forget_leases()
        new.open()
        fences = [key for key in keys(place) if key.startswith("commits/step-5.")]
        assert len(fences) == 1
        for seconds, left in ((0.0, fences), (-bucket_steps._FENCE_SECONDS, [])):
            monkeypatch.setattr(bucket_steps, "_FENCE_SECONDS", bucket_steps._FENCE_SECONDS + seconds - 60 * (not left))
            new._has_leftovers = True
            save(new, 6 + (not left))
            assert [key for key in keys(place) if key.startswith("commits/step-5.")] == left
        now[0] += bucket_steps._AWAY_SECONDS + 1

    assert old._lease is not None
    old._lease.check = check_then_sleep
    with pytest.raises(CommitConflictError, match="step 5 is not committed: another process has taken over"):
        old.commit(attempt, manifest_of(attempt))
    new.close()
    assert [step.step for step in new.survey().steps] == [6, 7]
    assert not [key for key in keys(place) if "step-5" in key] and not new.survey().rejected


def test_a_release_that_arrives_late_is_no_other_writer(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer was lost; the next run of this process has read the lease before it arrives."""
    place = place_in(s3)
    first, second = BucketSteps(place), BucketSteps(place)
    lease = first.open()
    replace = place.bucket.replace

    def after_the_release(*args: Any) -> None:
        monkeypatch.setattr(place.bucket, "replace", replace)
        lease.release()
        _forget_leases()
        replace(*args)

    _forget_leases()
    monkeypatch.setattr(leases, "refuse_living", lambda *_: None)
    monkeypatch.setattr(place.bucket, "replace", after_the_release)
    second.open()
    save(second, 1)
    second.close()


def test_another_programs_lease_is_not_taken(s3: Server) -> None:
    """An object of that name, or a web server that answers everything, is no lease."""
    place = place_in(s3)
    place.bucket.create((place / "lease.json").key, b'{"holder": "terraform"}')
    with pytest.raises(PreflightError, match="expected a lease of titan_ckpt, found 23 bytes of another program"):
        BucketSteps(place).open()
    assert (place / "lease.json").read() == b'{"holder": "terraform"}'


def test_a_run_that_loads_again_does_not_ask_again_what_the_store_keeps(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test save of all ranks that has come back proves the rights and the store for the rest of the run."""
    asked: list[BucketPath] = []
    monkeypatch.setattr(bucket_steps, "probe", asked.append)
    steps = BucketSteps(place_in(s3))
    name = steps.begin_probe(1)
    with pytest.raises(PreflightError, match="0 of 1 ranks' bytes came back"):
        steps.end_probe(name, 1)
    name = steps.begin_probe(1)
    steps.write_probe(name, 0)
    steps.end_probe(name, 1)
    assert not steps.begin_probe(1)
    assert asked == [steps.root / "data"] * 2


def test_a_lost_lease_counts_before_a_listing_that_fails(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are asked for at the same time when a save begins; a run that is taken over is told so."""
    place, steps = _with_steps(s3, 1)
    _forget_leases()
    BucketSteps(place).open()

    def silent(commits: Commits) -> None:
        raise StoreError(errno.EIO, "no answer", is_final=False)

    monkeypatch.setattr(Commits, "list_commits", silent)
    with pytest.raises(CommitConflictError, match="taken over by"):
        steps.begin(2, 10)


def test_a_forked_process_is_told_so_without_a_request(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client that it has may never answer there."""
    steps = BucketSteps(place_in(s3))
    save(steps, 1)
    asked: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        for name in ("read", "list_objects"):
            patch.setattr(Bucket, name, lambda _, key: asked.append(key))
        with pytest.raises(CommitConflictError, match="a process it forked may not commit"):
            steps.begin(2, 10)
    assert asked == []
    steps.close()


def test_a_lease_that_is_lost_during_a_commit_counts_before_the_files_that_its_new_holder_deletes(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is looked at and the files are listed at the same time; here another process comes between the two."""
    place, old, new, attempt = _before_a_commit(s3)

    @contextlib.contextmanager
    def with_another_between(action: Callable[[], None], *, patience: float) -> Iterator[None]:
        yield
        monkeypatch.undo()
        _forget_leases()
        new.open()
        action()

    monkeypatch.setattr(bucket_steps, "meanwhile", with_another_between)
    with pytest.raises(CommitConflictError, match="taken over by"):
        old.commit(attempt, manifest_of(attempt))
    assert not new.survey().steps and not [key for key in keys(place) if key.startswith("data/")]
    new.close()
