"""BucketSteps: the operations of the one process that changes checkpoints in a bucket.

A bucket has no rename, so a step is committed by creating one small object, its manifest; the files of every attempt
have names of their own. Whoever takes the lease fences the attempts that it finds: an object in the place of their
commit, which only it can replace, so that a commit that is on its way finds the place taken. docs/format.md, "Buckets".
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from titan_ckpt.directory.bucket_lease import BucketLease
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.directory.names import COMMITS, DATA, PIN_NAME, CommittedStep, Survey, looks_like_a_step, step_name
from titan_ckpt.directory.steps import SAME, Attempt, Steps, committed_error, newer_step_error
from titan_ckpt.disk.direct import run_workers
from titan_ckpt.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptCheckpointError,
    PreflightError,
    SaveError,
    listed,
)
from titan_ckpt.stores.bucket import BucketPath, ObjectFacts, StoreError, Version
from titan_ckpt.stores.probe import probe

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"step-(0|[1-9][0-9]{0,18})\.json")
_ABANDONED = re.compile(r"step-(0|[1-9][0-9]{0,18})\.abandoned-[0-9a-f]{8}\.json")
_PIN = re.compile(r"step-(0|[1-9][0-9]{0,18})\.pinned")
_ATTEMPT = re.compile(r"[0-9a-f]{32}")
_FENCE = "titan_ckpt fence"
_PROBE = bytes(range(256)) * 16


@dataclass(frozen=True, slots=True)
class _Commit:
    """An object in the place of a step's commit: a manifest, or a fence."""

    version: Version
    content: bytes

    @property
    def is_fence(self) -> bool:
        return self.content.startswith(b'{"format": "' + _FENCE.encode())


class BucketSteps(Steps):
    """The committed steps below a URL, as their writer sees them."""

    def __init__(self, root: BucketPath) -> None:
        super().__init__()
        self.root: BucketPath = root
        self._bucket = root.bucket
        self._lease: BucketLease | None = None
        self._commits: dict[str, _Commit] = {}
        """Key -> what was read there last; an object of the same version is not read again."""
        self._attempted: dict[str, Version | None] = {}
        """Id of an attempt whose commit was asked for -> the fence that the commit was to replace, if any."""

    def step_path(self, step: int) -> BucketPath:
        return self.root / step_name(step)

    def attempt_at(self, step: int, attempt_id: str) -> Attempt:
        return Attempt(step, attempt_id, self.root / DATA / step_name(step) / attempt_id)

    def files_of(self, manifest: Manifest) -> BucketPath:
        return self.root / DATA / step_name(manifest.step) / manifest.attempt

    def survey(self) -> Survey:
        """List the commits, and read those that are new. Raises: OSError."""
        facts = self._bucket.list_objects((self.root / COMMITS).key)
        found = self._read_commits(facts)
        pinned = {int(match[1]) for f in facts if (match := _PIN.fullmatch(_name(f.key)))}
        steps: list[CommittedStep] = []
        rejected: list[tuple[str, str]] = []
        for key, commit in found.items():
            match = _COMMIT.fullmatch(_name(key))
            if match is None or commit.is_fence:
                continue
            try:
                steps.append(self._committed(int(match[1]), commit.content, is_pinned=int(match[1]) in pinned))
            except CorruptCheckpointError as error:
                rejected.append((f"step-{match[1]}", str(error)))
        if not facts:
            rejected += self._strangers()
        return Survey(tuple(sorted(steps, key=lambda step: step.step)), (), tuple(rejected))

    def _read_commits(self, facts: list[ObjectFacts]) -> dict[str, _Commit]:
        """Return the commits of a listing, abandoned ones too. Only those of new versions are read."""
        wanted = {
            f.key: f.version for f in facts if _COMMIT.fullmatch(_name(f.key)) or _ABANDONED.fullmatch(_name(f.key))
        }
        found = {key: c for key, c in self._commits.items() if key in wanted and _is_of(c.version, wanted[key])}

        def read(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                content, version = self._bucket.read(key)
                found[key] = _Commit(version, content)

        run_workers([key for key in wanted if key not in found], read, self._bucket.settings.concurrency)
        self._commits = found
        return dict(sorted(found.items()))

    def _committed(self, step: int, content: bytes, *, is_pinned: bool) -> CommittedStep:
        path = str(self._commit_at(step))
        manifest = Manifest.from_bytes(content, path)
        if manifest.step != step:
            raise CorruptCheckpointError(f"{path}: its manifest says step {manifest.step}", path)
        return CommittedStep(step, self.files_of(manifest), manifest, content, (PIN_NAME,) if is_pinned else ())

    def _strangers(self) -> list[tuple[str, str]]:
        """Return what looks like checkpoints of another program, where there are none of ours."""
        names = self._bucket.list_names(self.root.key)
        return [(name, "not a checkpoint of titan_ckpt in a bucket") for name in names if looks_like_a_step(name)]

    def inspect(self, step: int) -> CommittedStep:
        """Read a step's commit and compare its files' sizes with a listing; what else is there does no harm."""
        with contextlib.suppress(FileNotFoundError):
            content, _ = self._bucket.read(self._commit_at(step).key)
            if not _Commit({}, content).is_fence:
                committed = self._committed(step, content, is_pinned=self._is_pinned(step))
                if faults := self._faults(self.files_of(committed.manifest), committed.manifest)[0]:
                    path = str(self.step_path(step))
                    raise CorruptCheckpointError(f"{path}: {listed(faults, last=' ')}", path)
                return committed
        steps = ", ".join(str(committed.step) for committed in self.survey().steps) or "none"
        raise CheckpointNotFoundError(f"{self.root}: step {step} is not there; committed steps: {steps}")

    def has(self, step: int) -> bool:
        try:
            content, _ = self._bucket.read(self._commit_at(step).key)
        except FileNotFoundError:
            return False
        return not _Commit({}, content).is_fence

    def view(self, step: int, expected: bytes) -> str:
        try:
            content, _ = self._bucket.read(self._commit_at(step).key)
        except FileNotFoundError:
            return "nothing"
        return SAME if content == expected else "another save"

    def open(self) -> BucketLease:
        if self._lease is None:
            lease = BucketLease.acquire(self.root)
            try:
                self._recover(lease)
            except BaseException:
                lease.release()
                raise
            self._lease = lease
        return self._lease

    def close(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def begin(self, step: int, num_bytes: int) -> Attempt:
        lease = self.open()
        lease.check()
        if self._has_leftovers:
            self._has_leftovers = False
            try:
                self._recover(lease)
            except StoreError as error:
                self._report([f"leftovers: {error}"])
        self._leave_abandoned_branch()
        self._refuse_conflict(step)
        return self.attempt_at(step, uuid.uuid4().hex)

    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Compare what was written with the manifest, and create the manifest's object: that is the commit.

        Raises: SaveError; CommitConflictError; OSError, after which the commit may have happened all the same.
        """
        assert self._lease is not None, "begin() comes first"
        faults, foreign = self._faults(self.files_of(manifest), manifest)
        if faults or foreign:
            raise SaveError(f"{attempt.path}: {'; '.join(faults + [f'{name} is not expected' for name in foreign])}")
        content = manifest.to_bytes()
        place = self._commit_at(attempt.step)
        fence = self._commits.get(place.key)
        self._lease.check()
        self._attempted[attempt.id] = None if fence is None else fence.version
        try:
            if fence is None:
                self._bucket.create(place.key, content)
            else:
                self._bucket.replace(place.key, content, fence.version)
        except FileExistsError:
            raise CommitConflictError(
                f"{place}: another process has committed step {attempt.step}, or keeps this one from it. What this one "
                "has committed stays; stop this process"
            ) from None
        self._attempted.pop(attempt.id)

    def abandon(self, attempt: Attempt) -> None:
        try:
            content = None
            if attempt.id in self._attempted:  # the request may still be on its way
                content = self._fence(attempt.step, [self._attempted[attempt.id]])
            if not self._discard(attempt, content):
                logger.warning(
                    "%s: its files stay: the store has committed step %d, although its answer was lost and the save "
                    "failed", attempt.path, attempt.step
                )  # fmt: skip
        except OSError as error:
            self._report([f"{attempt.path}: {error}"])

    def remove(self, step: CommittedStep) -> None:
        self.open().check()
        if step.foreign or self._is_pinned(step.step):  # it may have been pinned since it was listed
            raise SaveError(f"{self.step_path(step.step)}: is pinned; unpin it first")
        self._bucket.delete([self._commit_at(step.step).key])
        files = self.files_of(step.manifest)
        self._bucket.delete([(files / record.name).key for record in step.manifest.files])

    def pin(self, step: int) -> None:
        """Create an object beside the commit. Raises: CheckpointNotFoundError if the step is deleted meanwhile."""
        self.inspect(step)
        pin = self._pin_at(step)
        self._bucket.create(pin.key, b"")
        if not self.has(step):
            self._bucket.delete([pin.key])
            raise CheckpointNotFoundError(
                f"{self.step_path(step)}: was deleted before the pin; pin a step that is there"
            )

    def unpin(self, step: int) -> None:
        self._bucket.delete([self._pin_at(step).key])

    def begin_probe(self, num_bytes: int) -> str:
        probe(self.root)
        return f"probe-{uuid.uuid4().hex}"

    def write_probe(self, name: str, rank: int) -> None:
        self._bucket.create((self.root / name / f"{rank:05d}").key, _PROBE)

    def end_probe(self, name: str, world_size: int) -> None:
        facts = self._bucket.list_objects((self.root / name).key)
        contents = [self._bucket.read(f.key)[0] for f in facts]
        self._bucket.delete([f.key for f in facts])
        if contents != [_PROBE] * world_size:
            raise PreflightError(
                f"{self.root}: a test save failed: {contents.count(_PROBE)} of {world_size} ranks' bytes came back"
            )

    def abandon_probe(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._bucket.delete([f.key for f in self._bucket.list_objects((self.root / name).key)])

    def _commit_at(self, step: int) -> BucketPath:
        return self.root / COMMITS / f"{step_name(step)}.json"

    def _pin_at(self, step: int) -> BucketPath:
        return self.root / COMMITS / f"{step_name(step)}.pinned"

    def _is_pinned(self, step: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self._pin_at(step).read()
            return True
        return False

    def _faults(self, files: BucketPath, manifest: Manifest) -> tuple[list[str], list[str]]:
        """Compare an attempt with its manifest, by one listing: what is wrong, and names that it does not list."""
        actual = {_name(f.key): f.num_bytes for f in self._bucket.list_objects(files.key)}
        expected = {record.name: record.num_bytes for record in manifest.files}
        missing = [f"{name} is missing" for name in sorted(expected.keys() - actual.keys())]
        sizes = [
            f"{name} has {actual[name]} bytes, {size} were written"
            for name, size in expected.items()
            if actual.get(name, size) != size
        ]
        return [*missing, *sizes], sorted(actual.keys() - expected.keys())

    def _leave_abandoned_branch(self) -> None:
        """Set aside the commits after the step that this run went back to, newest first; damaged ones, too."""
        above = self._rolled_back_to
        if above is not None:
            commits = self._read_commits(self._bucket.list_objects((self.root / COMMITS).key))
            steps = {int(m[1]): c for key, c in commits.items() if (m := _COMMIT.fullmatch(_name(key)))}
            for step in sorted((n for n, commit in steps.items() if n > above and not commit.is_fence), reverse=True):
                aside = self.root / COMMITS / f"{step_name(step)}.abandoned-{uuid.uuid4().hex[:8]}.json"
                self._bucket.create(aside.key, steps[step].content)
                self._bucket.delete([self._commit_at(step).key])
                self._bucket.delete([self._pin_at(step).key])  # the next step of this number is not pinned
                logger.warning("%s: set aside as %s: this run went back to step %d", self.root, aside.name, above)
        self._rolled_back_to = None  # only now: if a request failed, the next save tries it again

    def _refuse_conflict(self, step: int) -> None:
        seen = self.survey()
        newer = [committed.step for committed in seen.steps if committed.step > step]
        if newer:
            raise CommitConflictError(newer_step_error(self.root, step, max(newer)))
        if any(committed.step == step for committed in seen.steps):
            raise CommitConflictError(committed_error(self.step_path(step), step))
        for name, reason in seen.rejected:
            if name == step_name(step):
                raise CommitConflictError(f"{reason}. It is in the way of step {step}: move it away")

    def _recover(self, lease: BucketLease) -> None:
        """Fence the attempts that no commit names, and delete them; none of a step of which a commit is damaged.

        Raises: CommitConflictError if another process has taken the lease meanwhile, whose attempts these may be.
        """
        facts = self._bucket.list_objects((self.root / COMMITS).key)
        committed, unreadable = _attempts(self._read_commits(facts))
        prefix = (self.root / DATA).key
        places = [f.key.removeprefix(f"{prefix}/").split("/")[:2] for f in self._bucket.list_objects(prefix)]
        for (step, attempt), _ in groupby(place for place in places if len(place) == 2):
            number = _number(step)
            if attempt in committed or number is None or not _ATTEMPT.fullmatch(attempt):  # a foreign name
                continue
            lease.check()
            content = self._fence(number)
            if step not in unreadable:
                logger.info("%s: discarding attempt %s of %s, a save that was interrupted", self.root, attempt, step)
                self._discard(self.attempt_at(number, attempt), content)

    def _discard(self, attempt: Attempt, content: bytes | None) -> bool:
        """Delete the files of an attempt, unless `content` is its commit, or one that cannot be read.

        Return whether they are deleted.
        """
        if content is not None:
            with contextlib.suppress(CorruptCheckpointError):
                if Manifest.from_bytes(content).attempt != attempt.id:
                    content = None
        if content is None:
            assert isinstance(attempt.path, BucketPath)
            self._bucket.delete([f.key for f in self._bucket.list_objects(attempt.path.key)])
        return content is None

    def _fence(self, step: int, expected: Sequence[Version | None] | None = None) -> bytes | None:
        """Make sure that no commit of a step that is on its way succeeds; return the content of one that has.

        `expected`: the only fences that such a commit may be about to replace; any, if it is not known. The fence of
        another process stays: that process commits over it.
        """
        place = self._commit_at(step)
        fence = json.dumps({"format": _FENCE, "id": uuid.uuid4().hex}).encode()
        while True:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                try:
                    content, version = self._bucket.read(place.key)
                except FileNotFoundError:
                    self._bucket.create(place.key, fence)
                    return None
                if not _Commit(version, content).is_fence:
                    return content
                if expected is not None and version not in expected:
                    return None
                self._bucket.replace(place.key, fence, version)
                return None


def _is_of(version: Version, listed: Version) -> bool:
    """Return whether a listing shows this version.

    S3's leave out the id that a versioned bucket gives it, Azure's the quotes of the ETag.
    """
    return bool(listed) and all(version.get(name, "").strip('"') == text.strip('"') for name, text in listed.items())


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _number(name: str) -> int | None:
    match = _COMMIT.fullmatch(f"{name}.json")
    return int(match[1]) if match else None


def _attempts(commits: Mapping[str, _Commit]) -> tuple[set[str], set[str]]:
    """Return the ids of the attempts that commits name, and the steps of the commits that cannot be read."""
    committed: set[str] = set()
    unreadable: set[str] = set()
    for key, commit in commits.items():
        if not commit.is_fence:
            try:
                committed.add(Manifest.from_bytes(commit.content, key).attempt)
            except CorruptCheckpointError:
                unreadable.add(_name(key).partition(".")[0])
    return committed, unreadable
