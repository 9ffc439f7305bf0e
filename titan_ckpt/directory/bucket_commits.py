"""Commits: the small objects in a bucket that say which attempts are committed, fenced, pinned or set aside.

Owns the names below `commits/` and `data/` and what they mean, and so which steps are committed, as any process finds
them. Every attempt to save a step has one place, which is created once
and never again: by its manifest, which commits it, or by a fence, after which it cannot be. So no object of a later
save ever has the name of an earlier one, and a request that arrives late harms nothing. docs/format.md, "In a bucket".
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from titan_ckpt.directory.lease import ObjectLease
from titan_ckpt.directory.manifest import MAX_BYTES, Manifest
from titan_ckpt.directory.names import (
    COMMITS,
    DATA,
    LOOKS_LIKE_A_STEP,
    PIN_NAME,
    CommittedStep,
    Survey,
    manifest_path,
    step_name,
    step_of,
)
from titan_ckpt.directory.steps import faults_of
from titan_ckpt.disk.workers import meanwhile, run_workers
from titan_ckpt.errors import CorruptCheckpointError, listed
from titan_ckpt.stores.objects import BucketPath, ObjectFacts, Version

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,18})\.([0-9a-f]{32})\.(json|pinned|abandoned|removal)")
_FENCE = "titan_ckpt fence"
_ATTEMPT = re.compile(r"[0-9a-f]{32}")
Sizes = dict[tuple[int, str], dict[str, int]]
"""(Step, attempt) -> size of each of its files."""
_WAS_LEFT = "set aside when its run went back to an earlier step"
_OPENED = "opened"
"""Name of an object that the first run puts before its first attempt: `commits/` is never empty where files are."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The object in an attempt's place, a manifest or a fence, and the marks beside it."""

    step: int
    attempt: str
    path: BucketPath
    content: bytes
    version: Version
    is_pinned: bool = False
    is_set_aside: bool = False
    is_removed: bool = False
    """Its removal is under way, or was cut short. A pin that came first counts more."""
    unix_seconds: float = 0.0
    """When it was created, by the store's clock."""

    @property
    def is_fence(self) -> bool:
        return _is_fence(self.content)

    @property
    def is_current(self) -> bool:
        """Return whether this commits a step, and no rollback has set it aside and no removal has begun."""
        return not (self.is_fence or self.is_set_aside or (self.is_removed and not self.is_pinned))

    def manifest(self) -> Manifest:
        """Return the manifest. Raises: CorruptCheckpointError, also if it is another attempt's."""
        manifest = Manifest.from_bytes(self.content, str(self.path))
        if (manifest.step, manifest.attempt) != (self.step, self.attempt):
            raise CorruptCheckpointError(
                f"{self.path}: its manifest says step {manifest.step}, attempt {manifest.attempt}", str(self.path)
            )
        return manifest


@dataclass(frozen=True, slots=True)
class CommitListing:
    """The content of one listing of `commits/`."""

    commits: list[Commit]
    """Also fences, by step."""
    strangers: list[str]
    """Names of other objects."""
    removals: list[tuple[int, str]]
    """(step, attempt) of the removals that are under way, or were cut short; of some the commit is deleted already."""
    is_empty: bool
    """Whether nothing at all is listed."""
    widowed: list[ObjectFacts]
    """Pins, and marks of what was set aside, in whose place is no commit. They never come before it."""

    def lost(self, attempts: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
        """Return (name, reason) of every attempt that has files where all of `commits/` was deleted, or not copied."""
        reason = f"its files are there, and {COMMITS}/, which says whether they are a whole step, is empty: put it back"
        return [(f"{DATA}/{step_name(n)}/{attempt}", reason) for n, attempt in sorted(attempts) if self.is_empty]


class Commits:
    """The objects below `commits/` of a place in a bucket. One thread uses it at a time."""

    def __init__(self, root: BucketPath) -> None:
        self._root = root
        self._bucket = root.bucket
        self._seen: dict[str, tuple[bytes, Version]] = {}
        """Key -> what was read or put there last; an object of the same version is not read again."""

    def files(self, step: int, attempt: str) -> BucketPath:
        """Return where an attempt's files are."""
        return self._root / DATA / step_name(step) / attempt

    def place(self, step: int, attempt: str) -> BucketPath:
        """Return the place of an attempt's commit."""
        return manifest_path(self.files(step, attempt))

    def mark(self, kind: Literal["pinned", "abandoned", "removal"], step: int, attempt: str) -> BucketPath:
        """Return the name of the object that pins a step, sets it aside, or says that it is being removed."""
        return self._root / COMMITS / f"{step_name(step)}.{attempt}.{kind}"

    def survey(self) -> Survey:
        """List the commits and the files at the same time, and read the commits that are new. Raises: OSError.

        A step that has no fault is whole, whichever listing came first: its files come before its commit, and go after
        it. A fault may come from the order, for example if the step was committed between the two. So the files are
        listed again, after the commits. A fault that stays counts if the commits are the same after that; else the step
        was deleted meanwhile, and all is looked at again.
        """
        sizes: Sizes = {}
        with meanwhile(lambda: sizes.update(self.sizes()), patience=0.0):
            listing = self.list_commits()
        while True:
            seen = self._survey_of(listing, sizes)
            if _is_clear(seen):
                return seen
            sizes = self.sizes()
            seen = self._survey_of(listing, sizes)
            if _is_clear(seen) or (again := self.list_commits()) == listing:
                return seen
            listing = again

    def sizes(self, listing: Iterable[ObjectFacts] | None = None) -> Sizes:
        """Return the sizes of the files of every attempt, by one listing of them. Raises: StoreError."""
        sizes: Sizes = {}
        prefix = (self._root / DATA).key
        for facts in self._bucket.list_objects(prefix) if listing is None else listing:
            step, _, rest = facts.key.removeprefix(f"{prefix}/").partition("/")
            attempt, _, name = rest.partition("/")
            number = step_of(step)
            if number is not None and name and _ATTEMPT.fullmatch(attempt):
                sizes.setdefault((number, attempt), {})[name] = facts.num_bytes
        return sizes

    def _survey_of(self, listing: CommitListing, sizes: Sizes) -> Survey:
        steps: dict[int, CommittedStep] = {}
        rejected = [(f"{step_name(c.step)}.{c.attempt}", _WAS_LEFT) for c in listing.commits if c.is_set_aside]
        for commit in listing.commits:
            if not commit.is_current:
                continue
            try:
                committed = self._committed(commit, sizes.get((commit.step, commit.attempt), {}))
            except CorruptCheckpointError as error:
                rejected.append((step_name(commit.step), str(error)))
                continue
            other = steps.setdefault(commit.step, committed)
            if other is not committed:  # only a store without conditional puts lets it happen
                older, steps[commit.step] = sorted((other, committed), key=lambda c: c.manifest.created_unix_seconds)
                rejected.append((f"{step_name(commit.step)}.{older.manifest.attempt}", "an older save of this step"))
        if not listing.commits:
            rejected += [*self._strangers(listing), *listing.lost(sizes)]
        return Survey(tuple(steps[step] for step in sorted(steps)), (), tuple(rejected))

    def _committed(self, commit: Commit, sizes: Mapping[str, int]) -> CommittedStep:
        """Return a commit as a step. `sizes`: those of its files. Raises: CorruptCheckpointError."""
        manifest = commit.manifest()
        files = self.files(commit.step, commit.attempt)
        if faults := faults_of(manifest, sizes):
            raise CorruptCheckpointError(f"{files}: {listed(faults, last=' ')}", str(files))
        return CommittedStep(commit.step, files, manifest, commit.content, (PIN_NAME,) if commit.is_pinned else ())

    def _strangers(self, listing: CommitListing) -> list[tuple[str, str]]:
        """Return what looks like checkpoints of another program, where there are none of ours.

        Raises: PreflightError if the lease is not one of ours, because a web server may list nothing, too; OSError.
        """
        ObjectLease.named_in(self._root)
        names = [*self._bucket.list_names(self._root.key), *listing.strangers]
        reason = "not a checkpoint of titan_ckpt in a bucket, which has another layout than a folder on a disk"
        return [(name, reason) for name in names if LOOKS_LIKE_A_STEP.fullmatch(name)]

    def list_commits(self) -> CommitListing:
        """List `commits/` by one request, and read what is new; fences, too. Raises: OSError."""
        matches = {
            f.key: (_NAME.fullmatch(f.key.rpartition("/")[2]), f)
            for f in self._bucket.list_objects((self._root / COMMITS).key)
        }
        names = [key.rpartition("/")[2] for key, (match, _) in matches.items() if match is None]
        strangers = [name for name in names if name != _OPENED]
        marks = {(m[3], int(m[1]), m[2]) for m, _ in matches.values() if m}
        wanted = {key: (m, facts) for key, (m, facts) in matches.items() if m and m[3] == "json"}
        self._read(facts for _, facts in wanted.values())
        commits = []
        for key, (match, facts) in wanted.items():
            if key in self._seen:
                step, attempt = int(match[1]), match[2]
                pinned, set_aside, removed = ((m, step, attempt) in marks for m in ("pinned", "abandoned", "removal"))
                path = BucketPath(self._bucket, key)
                commits.append(
                    Commit(step, attempt, path, *self._seen[key], pinned, set_aside, removed, facts.unix_seconds)
                )
        removals = sorted((step, attempt) for mark, step, attempt in marks if mark == "removal")
        held = {(n, a) for mark, n, a in marks if mark == "json"} - {(c.step, c.attempt) for c in commits if c.is_fence}
        pins_and_marks = [(m, facts) for m, facts in matches.values() if m and m[3] in ("pinned", "abandoned")]
        widowed = [facts for match, facts in pins_and_marks if (int(match[1]), match[2]) not in held]
        return CommitListing(
            sorted(commits, key=lambda commit: (commit.step, commit.attempt)), strangers, removals, not matches, widowed
        )

    def _read(self, facts: Iterable[ObjectFacts]) -> None:
        """Read the objects whose versions have not been read; forget those that are not asked for."""
        facts = tuple(facts)
        listed = {f.key: f.version for f in facts}
        self._seen = {k: seen for k, seen in self._seen.items() if k in listed and _is_of(seen[1], listed[k])}
        # no manifest is so large: such an object is the fault of its own step, and is not asked for
        self._seen |= {f.key: (b"", f.version) for f in facts if f.num_bytes > MAX_BYTES}

        def read(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                self._seen[key] = self._bucket.read(key)
                if not _is_whole(self._seen[key][0]):  # one wrong answer is no damage
                    self._seen[key] = self._bucket.read(key)

        new = [key for key in listed if key not in self._seen]
        run_workers(new, read, min(len(new), self._bucket.concurrency))

    def mark_opened(self) -> None:
        """Put what shows, once attempts have files, that `commits/` was not lost. Raises: StoreError."""
        with contextlib.suppress(FileExistsError):
            self._bucket.create((self._root / COMMITS / _OPENED).key, uuid.uuid4().hex.encode())

    def commit(self, step: int, attempt: str, content: bytes) -> None:
        """Put a manifest into an attempt's place. Raises: FileExistsError for a fence; StoreError, as `create`."""
        key = self.place(step, attempt).key
        self._seen[key] = content, self._bucket.create(key, content)

    def content(self, step: int, attempt: str) -> bytes | None:
        """Return what is in an attempt's place: a manifest; None for nothing or a fence. Raises: StoreError."""
        content = self._bucket.content(self.place(step, attempt).key)
        return None if content is None or _is_fence(content) else content

    def fence(self, step: int, attempt: str, by: str) -> bytes | None:
        """Make sure that an attempt is never committed; return its manifest if it is committed already.

        `by`: the process that does it, for the error of the one that is fenced. Raises: OSError.
        """
        place = self.place(step, attempt)
        fence = json.dumps({"format": _FENCE, "by": by, "id": uuid.uuid4().hex}).encode()
        try:
            self._bucket.create(place.key, fence)
            return None
        except FileExistsError:
            return self.content(step, attempt)

    def fenced_by(self, step: int, attempt: str) -> str:
        """Return who has fenced an attempt. Raises: OSError."""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(self._bucket.read(self.place(step, attempt).key)[0])["by"])
        return "another process"


def _is_clear(seen: Survey) -> bool:
    """Return whether the listings show no fault; that a step was set aside is none."""
    return all(reason == _WAS_LEFT for _, reason in seen.rejected)


def _is_whole(content: bytes) -> bool:
    try:
        Manifest.from_bytes(content)
    except CorruptCheckpointError:
        return _is_fence(content)
    return True


def _is_fence(content: bytes) -> bool:
    return content.startswith(b'{"format": "' + _FENCE.encode())


def _is_of(version: Version, listed: Version) -> bool:
    """Return whether a listing shows this version.

    S3's leave out the id that a versioned bucket gives it, Azure's the quotes of the ETag.
    """
    return bool(listed) and all(version.get(name, "").strip('"') == text.strip('"') for name, text in listed.items())
