"""BucketSteps: the operations of the one process that changes checkpoints in a bucket.

A bucket has no rename, so a step is committed by creating one small object, its manifest, in the place that its attempt
has (`bucket_commits`). Whoever takes the lease first fences the attempts that it finds, so that a commit that is on its
way finds its place taken. docs/format.md, "In a bucket", has the protocol and why it holds.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from titan_ckpt.directory.bucket_commits import Commit, CommitListing, Commits
from titan_ckpt.directory.lease import Lease, ObjectLease
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.directory.names import DATA, CommittedStep, Survey, step_name
from titan_ckpt.directory.steps import PROBE, SAME, Attempt, Steps, faults_of
from titan_ckpt.disk.kernel import Holder
from titan_ckpt.disk.workers import meanwhile, run_workers
from titan_ckpt.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptCheckpointError,
    PreflightError,
    SaveError,
    listed,
)
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import Place

logger = logging.getLogger(__name__)

_PROBE = re.compile(r"probe-[0-9a-f]{32}")
_FENCE_SECONDS = 7 * 86400.0
"""A fence, or a pin whose commit is gone, stays so long: no request to commit what a fence fences arrives later, but
from a process that was suspended."""
_PROBE_SECONDS = 86400.0
"""A test save that is so old when the lease is taken is not under way any more, also of the holder before."""
_AWAY_SECONDS = 3600.0
"""A commit that took longer than this may have been fenced so long ago that the fence is gone."""


class BucketSteps(Steps):
    """The committed steps below a URL, as their writer sees them."""

    lease_kind = ObjectLease

    def __init__(self, root: BucketPath) -> None:
        super().__init__()
        self.root: BucketPath = root
        self._bucket = root.bucket
        self._is_probed = False
        self._commits = Commits(root)

    def files_of(self, step: int) -> Place:
        return self.inspect(step).path

    def attempt_at(self, step: int, attempt_id: str) -> Attempt:
        return Attempt(step, attempt_id, self._commits.files(step, attempt_id))

    def survey(self) -> Survey:
        return self._commits.survey()

    def dcp_steps(self) -> list[int]:
        """Return none, without a request: torchtitan's steps in a bucket can only be sources."""
        return []

    def inspect(self, step: int) -> CommittedStep:
        """Read a step's commit and compare its files' sizes with a listing; what else is there does no harm."""
        seen = self.survey()
        for committed in seen.steps:
            if committed.step == step:
                return committed
        path = str(self.step_path(step))
        if faults := [reason for name, reason in seen.rejected if name == step_name(step)]:
            raise CorruptCheckpointError("; ".join(faults), path)
        raise self._not_there(step, seen)

    def exists(self, step: int) -> bool:
        return any(commit.step == step and commit.is_current for commit in self._commits.list_commits().commits)

    def view(self, manifest: Manifest, expected: bytes, names: Sequence[str]) -> tuple[str, BucketPath]:
        files = self._commits.files(manifest.step, manifest.attempt)
        commit = self._commits.place(manifest.step, manifest.attempt)
        wanted = [files / record.name for record in manifest.files if record.name in names]
        place = self._bucket.fetched(files, [commit, *wanted])
        try:
            content = replace(commit, heads=place.heads).read()
        except FileNotFoundError:
            return "nothing", place
        return SAME if content == expected else "another save", place

    def present(self) -> list[tuple[int, str]]:
        return [(commit.step, commit.attempt) for commit in self._commits.list_commits().commits if commit.is_current]

    def _check(self, lease: Lease) -> CommitListing | None:
        """Check the lease, and list the commits at the same time, unless that comes too early."""
        lease.check_process()  # in a forked process the client may never answer
        looks: list[CommitListing] = []
        is_settled = not (self._has_leftovers or self._in_doubt) and self._rolled_back_to is None
        with meanwhile(lambda: looks.extend([self._commits.list_commits()] if is_settled else [])):
            lease.check()
        return looks[0] if looks else None

    def _make_place(self, attempt: Attempt, num_bytes: int, seen: CommitListing | None) -> None:
        listing = seen or self._commits.list_commits()
        if listing.is_empty:  # since this run has opened it, so what it clears away later would be whole steps
            self._recover(self.open())
        self._refuse_step_beside(attempt.step, [commit.step for commit in listing.commits if commit.is_current])

    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Compare what was written with the manifest, and create the manifest's object: that is the commit.

        The files are there before the lease is looked at. So a process that takes the lease after that look finds
        them, and fences the attempt. A lost lease counts before files that are gone: its new holder has deleted them.
        Raises: SaveError; CommitConflictError; OSError, after which the commit may have happened all the same.
        """
        assert self._lease is not None, "begin() comes first"
        started = _clocks()
        actual: dict[str, int] = {}
        with meanwhile(lambda: actual.update(self._sizes_of(attempt)), patience=0.0):
            self._lease.check()
        if faults := faults_of(manifest, actual, exactly=True):
            self._lease.check()  # it may have been lost between the two answers
            raise SaveError(f"{attempt.path}: {'; '.join(faults)}")
        self._in_doubt.add(attempt.id)
        try:
            self._commits.commit(attempt.step, attempt.id, manifest.to_bytes())
        except FileExistsError:
            raise self._was_fenced(attempt, self._commits.fenced_by(attempt.step, attempt.id)) from None
        seconds = max(now - then for now, then in zip(_clocks(), started, strict=True))
        # whoever fences an attempt deletes its files before the fence goes
        if seconds > _AWAY_SECONDS and faults_of(manifest, self._sizes_of(attempt)):
            self._bucket.delete([self._commits.place(attempt.step, attempt.id).key])
            raise self._was_fenced(attempt, "another process")
        self._in_doubt.discard(attempt.id)

    def _was_fenced(self, attempt: Attempt, by: str) -> CommitConflictError:
        return CommitConflictError(
            f"{self.root}: step {attempt.step} is not committed: {by} has taken over while this process was "
            "away. What this one has committed stays; stop this process"
        )

    def _sizes_of(self, attempt: Attempt) -> dict[str, int]:
        """Return the sizes of an attempt's files, by one listing."""
        files = self._commits.files(attempt.step, attempt.id)
        return {f.key.rpartition("/")[2]: f.num_bytes for f in self._bucket.list_objects(files.key)}

    def _abandon(self, attempt: Attempt) -> bool:
        self._has_leftovers = True  # a request of any rank may still be on its way
        is_committed = attempt.id in self._in_doubt and self._fence(attempt.step, attempt.id)
        if not is_committed:
            self._discard(attempt.step, attempt.id)
        return is_committed

    def remove(self, step: CommittedStep) -> None:
        self.open().check()
        attempt = step.manifest.attempt
        mark, pin = self._commits.mark("removal", step.step, attempt), self._commits.mark("pinned", step.step, attempt)
        if not step.foreign:
            self._bucket.create(mark.key, b"")
            if self._bucket.content(pin.key) is None:  # whoever pins it from now on finds the mark
                self._bucket.delete([self._commits.place(step.step, attempt).key])
                files = self._commits.files(step.step, attempt)
                self._bucket.delete([*((files / record.name).key for record in step.manifest.files), mark.key])
                return
            self._bucket.delete([mark.key])
        raise SaveError(f"{self.step_path(step.step)}: is pinned; unpin it first")

    def set_aside(self) -> dict[str, int]:
        found = self._set_aside()
        sizes = self._commits.sizes() if found else {}
        return {name: sum(sizes.get((c.step, c.attempt), {}).values()) for name, c in found.items()}

    def remove_set_aside(self, name: str, *, dry_run: bool = False) -> None:
        commit = self._set_aside()[name]
        if commit.is_pinned:
            raise SaveError(f"{self.root / name}: is pinned, and was when it was set aside")
        if not dry_run:
            self.open().check()
            self._bucket.delete([commit.path.key])  # first and alone: without its mark the step would be there again
            self._bucket.delete([self._commits.mark("abandoned", commit.step, commit.attempt).key])
            self._discard(commit.step, commit.attempt)

    def _set_aside(self) -> dict[str, Commit]:
        commits = [
            commit for commit in self._commits.list_commits().commits if commit.is_set_aside and not commit.is_fence
        ]
        return {f"{step_name(commit.step)}.{commit.attempt}": commit for commit in commits}

    def left_over(self) -> tuple[str, ...]:
        return ()

    def pin(self, step: int) -> None:
        """Create an object beside the commit. Raises: CheckpointNotFoundError if the step is deleted meanwhile."""
        attempt = self.inspect(step).manifest.attempt
        pin = self._commits.mark("pinned", step, attempt)
        try:
            self._bucket.create(pin.key, uuid.uuid4().hex.encode())
            is_own = True
        except FileExistsError:
            is_own = False  # somebody else relies on it
        # in this order, because a removal deletes the commit before its mark
        removal = self._bucket.content(self._commits.mark("removal", step, attempt).key)
        if removal is not None or self._commits.content(step, attempt) is None:
            if is_own:
                self._bucket.delete([pin.key])
            raise CheckpointNotFoundError(f"{self.step_path(step)}: is being deleted; pin a step that stays")

    def unpin(self, step: int) -> None:
        self._bucket.delete([self._commits.mark("pinned", step, self.inspect(step).manifest.attempt).key])

    def begin_probe(self, num_bytes: int) -> str:
        if self._is_probed:  # what a store keeps does not change during a run
            return ""
        probe(self.root / DATA)
        return f"probe-{uuid.uuid4().hex}"

    def write_probe(self, name: str, rank: int) -> None:
        self._bucket.create(self._probe_key(name, rank), PROBE)

    def _probe_key(self, name: str, rank: int) -> str:
        return (self.root / DATA / name / f"{rank:05d}").key

    def end_probe(self, name: str, world_size: int) -> None:
        keys = [self._probe_key(name, rank) for rank in range(world_size)]
        contents: list[bytes] = []

        def read(key: str) -> None:
            if (content := self._bucket.content(key)) is not None:
                contents.append(content)

        run_workers(keys, read, min(len(keys), self._bucket.concurrency))
        self._bucket.delete(keys)
        self._check_probe(contents, world_size)
        self._is_probed = True

    def abandon_probe(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._bucket.delete([f.key for f in self._bucket.list_objects((self.root / DATA / name).key)])

    def _set_aside_after(self, above: int, lease: Lease) -> None:
        commits = [c for c in self._commits.list_commits().commits if c.is_current and c.step > above]
        if commits:
            lease.check()
        for commit in reversed(commits):
            mark = self._commits.mark("abandoned", commit.step, commit.attempt)
            self._bucket.create(mark.key, b"")
            logger.warning("%s: set aside by %s: this run went back to step %d", self.root, mark.name, above)

    def _recover(self, lease: Lease) -> None:
        """Fence the attempts that are not committed, delete their files, and finish removals that were cut short.

        Old fences, marks of steps that are gone, and test saves that were cut short are deleted, too.
        Raises: CommitConflictError if another process has taken the lease meanwhile, whose attempts these may be;
        CorruptCheckpointError, before anything is deleted, if `commits/` was lost.
        """
        prefix = (self.root / DATA).key
        facts = self._bucket.list_objects(prefix)
        # After the files: a removal deletes the commit first, so files without one are left over.
        listing = self._commits.list_commits()
        places = {(commit.step, commit.attempt): commit for commit in listing.commits}
        with_files = self._commits.sizes(facts).keys()
        if faults := listing.lost(with_files):
            lines = listed([f"{name}: {reason}" for name, reason in faults], "\n  ", "\n  ")
            raise CorruptCheckpointError(f"{self.root}: nothing is deleted:\n  {lines}", str(self.root))
        if listing.is_empty:
            self._commits.mark_opened()
        for step, attempt in sorted(with_files):
            commit = places.get((step, attempt))
            if commit is None or commit.is_fence:
                lease.check()
                if commit is not None or not self._fence(step, attempt):
                    logger.info("%s: discarding attempt %s of step %d, which was interrupted", self.root, attempt, step)
                    self._discard(step, attempt)
        for step, attempt in listing.removals:
            lease.check()
            self._finish_removal(step, attempt, places.get((step, attempt)))
        fences = [commit for commit in listing.commits if commit.is_fence]
        aged = [(f.path.key, f.unix_seconds) for f in fences if (f.step, f.attempt) not in with_files]
        aged += [(mark.key, mark.unix_seconds) for mark in listing.widowed]
        probes = [f for f in facts if _PROBE.fullmatch(f.key.removeprefix(f"{prefix}/").partition("/")[0])]
        old = [(key, seconds + _FENCE_SECONDS) for key, seconds in aged]
        old += [(f.key, f.unix_seconds + _PROBE_SECONDS) for f in probes]
        taken = self._taken() if old else 0.0
        self._bucket.delete([key for key, until in old if until < taken])
        self._in_doubt.clear()

    def _taken(self) -> float:
        """Return when this process took the lease, by the store's clock, whatever this machine's says."""
        key = ObjectLease.at(self.root).key
        return min((f.unix_seconds for f in self._bucket.list_files(self.root.key) if f.key == key), default=0.0)

    def _finish_removal(self, step: int, attempt: str, commit: Commit | None) -> None:
        if commit is not None and not commit.is_fence and not commit.is_pinned:
            self._bucket.delete([commit.path.key])
            self._discard(step, attempt)
        self._bucket.delete([self._commits.mark("removal", step, attempt).key])

    def _fence(self, step: int, attempt: str) -> bool:
        """Make sure that an attempt is never committed; return whether it is committed already."""
        is_committed = self._commits.fence(step, attempt, str(Holder.current())) is not None
        self._in_doubt.discard(attempt)
        return is_committed

    def _discard(self, step: int, attempt: str) -> None:
        files = self._commits.files(step, attempt)
        self._bucket.delete([f.key for f in self._bucket.list_objects(files.key)])


def _clocks() -> tuple[float, float]:
    """Return the seconds of two clocks: one counts while this machine sleeps, one also while it is paused."""
    boot = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS has only the latter, which counts sleep there
    return time.clock_gettime(boot), time.time()


def probe(folder: BucketPath) -> None:
    """Put, read, list and delete an object below `folder`, and put it twice. Nothing of it stays.

    Raises: PreflightError naming all that the store lacks; StoreError for a right that the credentials lack.
    """
    place = folder / f"probe-{uuid.uuid4().hex}"
    try:
        lacks = _lacks(place)
    finally:
        with contextlib.suppress(StoreError):
            place.bucket.delete([place.key])
    if lacks:
        raise PreflightError(
            f"{folder}: this store cannot commit: {'; '.join(lacks)}. Two writers could overwrite each other. Take "
            "another store, or set checkpoint.store.single_writer = true if you make sure that there is one"
            if not place.bucket.settings.single_writer
            else f"{folder}: this store cannot hold checkpoints: {'; '.join(lacks)}"
        )


def _lacks(place: BucketPath) -> list[str]:
    bucket, key = place.bucket, place.key
    first, second, third = (f"{name} {uuid.uuid4().hex}".encode() for name in ("first", "second", "third"))
    lacks: list[str] = []

    def must_fail(act: Callable[[], object], what: str) -> None:
        with contextlib.suppress(FileExistsError):
            act()
            lacks.append(what)

    bucket.create(key, first)
    if key not in [facts.key for facts in bucket.list_files(place.parent.key)]:
        lacks.append("a listing does not show what was just written")
    content, version = bucket.read(key)
    if content != first:
        lacks.append("what is read is not what was written")
    if bucket.scheme != "gs" and version.get("version", "null") != "null":
        logger.warning(
            "%s keeps old versions, so deleted steps go on taking space: give it a rule that deletes old versions",
            bucket,
        )
    if not bucket.settings.single_writer:
        must_fail(lambda: bucket.create(key, second), "a put with If-None-Match: * overwrites what is there")
        content, version = bucket.read(key)
        try:
            bucket.replace(key, third, version)
        except FileExistsError:
            lacks.append("a put with the right If-Match is refused")
        must_fail(lambda: bucket.replace(key, second, version), "a put with an old If-Match overwrites what is there")
    try:
        bucket.delete([key])
        bucket.create(key, second)
    except FileExistsError:
        lacks.append("an object that was deleted cannot be created again")
    except StoreError as error:
        if not lacks:
            raise
        lacks.append(f"objects cannot be deleted ({error})")
    return lacks
