"""Checkpoints in a bucket as a user meets them: saves in every mode, resumes, the ladder, retention and pins."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.steps_tests import manifest_of, save, write
from tests.stores.conftest import behind, flip_last_bit, place_in, through
from tests.stores.servers import Server
from tests.test_manager import Run
from tests.world import load
from titan_ckpt.config import SaveConfig, StoreConfig
from titan_ckpt.directory import lease
from titan_ckpt.directory.bucket_steps import BucketSteps
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.directory.steps import Attempt
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CommitConflictError, CorruptCheckpointError, SaveError
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.stores.bucket import Bucket
from titan_ckpt.stores.objects import BucketPath


def manager(run: Run, place: BucketPath, folder: Path, **save: object) -> CheckpointManager:
    config = SaveConfig(**{"interval": 2, **save})  # type: ignore[arg-type]
    return run.manager(folder, folder=str(place), store=place.bucket.settings, save=config)


def keys(place: BucketPath) -> list[str]:
    return [facts.key.removeprefix(place.key + "/") for facts in place.bucket.list_objects(place.key)]


def test_the_files_of_a_rank_are_sent_and_asked_for_at_the_same_time(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request waits until all are there; nothing is asked for twice, also not tensors that came with the head."""
    place, run, all_there = place_in(s3), Run(), threading.Barrier(3)
    asked: list[str] = []

    def meet(method: str) -> None:
        act = getattr(Bucket, method)

        def met(self: Bucket, key: str, *args: object) -> object:
            if "/data/step-" in key:
                asked.append(f"{method} {key.rpartition('/')[2]}")
                all_there.wait(20.0)
            return act(self, key, *args)

        monkeypatch.setattr(Bucket, method, met)

    with manager(run, place, tmp_path, interval=1) as saves:
        run.step()
        for method in ("create", "upload", "read", "read_head", "read_range"):
            meet(method)
        saves.save(1)
        saves.wait()
        tensors, small = "rank-00000.safetensors", ["rank-00000.json", "state.json"]
        assert sorted(asked) == [*(f"create {name}" for name in small), f"upload {tensors}"]
        del asked[:]
        assert saves.load(1).step == 1
    assert sorted(asked) == sorted(f"read_head {name}" for name in (*small, tensors))


def test_one_wrong_answer_steps_back_from_nothing(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit flips in the first answer for each object of the newest step; a new request shows that it is right."""
    place, run = place_in(s3), Run()
    with manager(run, place, tmp_path, interval=1) as saves:
        for step in (1, 2):
            run.step()
            saves.save(step)
            saves.wait()
    flipped: set[tuple[str, str]] = set()

    def flip(method: str) -> None:
        act = getattr(Bucket, method)

        def ask(self: Bucket, key: str, *args: object) -> Any:
            content, fact = act(self, key, *args)
            if "/step-2" not in key or (method, key) in flipped:
                return content, fact
            flipped.add((method, key))
            return content[:-1] + bytes([content[-1] ^ 4]), fact

        monkeypatch.setattr(Bucket, method, ask)

    flip("read")
    flip("read_head")
    assert load(manager(run, place, tmp_path)).step == 2
    objects = {key.rpartition("/")[2].partition(".")[0] for _, key in flipped}
    assert objects == {"step-2", "state", "rank-00000"}


def test_a_damaged_step_is_named_and_the_one_before_is_loaded(server: Server, tmp_path: Path) -> None:
    """One flipped bit in a tensor's block: the ladder goes on to the older step; by number it is an error."""
    place = place_in(server)
    run = Run()
    with manager(run, place, tmp_path, interval=1) as saves:
        for step in (1, 2):
            run.step()
            saves.save(step)
            saves.wait()
    (key,) = [f.key for f in place.bucket.list_objects(f"{place.key}/data/step-2") if f.key.endswith("0.safetensors")]
    flip_last_bit(place, key)
    with manager(run, place, tmp_path) as saves, pytest.raises(CorruptCheckpointError, match="do not have the digest"):
        saves.load(2)
    assert load(manager(run, place, tmp_path)).step == 1
    place.bucket.delete([key])
    assert load(manager(run, place, tmp_path)).step == 1


def test_what_a_dead_run_left_is_cleared_and_cannot_be_committed_any_more(server: Server) -> None:
    """A writer that lost the lease between its check and its commit finds the commit's place taken.

    That holds for good: also after the other's save of the same step has expired.
    """
    place = place_in(server)
    old, new = BucketSteps(place), BucketSteps(place)
    attempt = old.begin(5, 10)
    write(attempt)
    took_over = False

    def check_then_stop() -> None:
        nonlocal took_over
        _forget_leases()
        save(new, 5)
        save(new, 6)
        new.remove(new.inspect(5))
        took_over = True

    assert old._lease is not None
    old._lease.check = check_then_stop  # the other takes over just after the check
    with pytest.raises(CommitConflictError, match=r"step 5 is not committed: process \d+ on \S+ has taken over"):
        old.commit(attempt, manifest_of(attempt))
    assert took_over
    old.abandon(attempt)
    assert [step.step for step in new.survey().steps] == [6]
    save(new, 7)
    new.close()
    assert not [key for key in keys(place) if key.startswith("data/step-5")]


def test_a_commit_whose_answer_is_lost_for_good_is_kept_and_one_that_never_arrives_is_fenced(
    s3: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that does not know whether it has committed asks the store again, and says what it then knows."""
    place = place_in(s3)
    for step, fault in ((1, "cut"), (2, "stall")):
        with behind(s3, fault, "PUT", f"commits/step-{step}[^/]*json", times=99) as proxy:  # type: ignore[arg-type]
            steps = BucketSteps(place)
            attempt = steps.begin(step, 10)
            write(attempt)
            broken = through(place, proxy, retry_seconds=0.5).bucket
            broken.content = lambda key, max_bytes=0: None  # type: ignore[method-assign]  # nor can it be read back
            commit = steps.commit

            def commit_without_answer(attempt: Attempt, manifest: Manifest) -> None:
                steps._bucket = steps._commits._bucket = broken  # noqa: B023
                try:
                    commit(attempt, manifest)  # noqa: B023
                finally:
                    steps._bucket = steps._commits._bucket = place.bucket  # noqa: B023

            steps.commit = commit_without_answer  # type: ignore[method-assign]
            directory = CheckpointDirectory(place, Coordinator.current())
            directory._store = steps
            if step == 1:
                directory.commit(attempt, manifest_of(attempt))
                assert "is committed, although the answer was lost" in caplog.text
            else:
                with pytest.raises(SaveError, match=r"step 2 was not saved.*could not write it"):
                    directory.commit(attempt, manifest_of(attempt))
        steps.close()
    left = BucketSteps(place).survey().steps
    assert [committed.step for committed in left] == [1]
    assert BucketSteps(place).inspect(1).manifest == left[0].manifest
    assert not [key for key in keys(place) if key.startswith("data/step-2")]


def _forget_leases() -> None:
    """Let this process take a lease that it has, as if the holder were on another machine."""
    lease.held.clear()


def test_a_bucket_that_is_not_there_is_an_error_before_the_first_step(server: Server, tmp_path: Path) -> None:
    """The preflight says it; no folder of that name appears."""
    run = Run()
    settings = StoreConfig(endpoint=server.endpoint, retry_seconds=5.0)
    config = SaveConfig(interval=1)
    place = f"{server.url}-none/x"
    saves = run.manager(tmp_path, folder=place, store=settings, save=config)
    with pytest.raises(OSError, match="Create the bucket"):
        saves.load()
    saves.close()
    assert not (tmp_path / place.partition("/")[0]).exists()
