"""Commits: the small objects in a bucket that say which attempts are committed, fenced, pinned or set aside.

Owns the names below `commits/` and what they mean. Every attempt to save a step has one place, which is created once
and never again: by its manifest, which commits it, or by a fence, after which it cannot be. So no object of a later
save ever has the name of an earlier one, and a request that arrives late harms nothing. docs/format.md, "In a bucket".
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from titan_ckpt.directory.manifest import MAX_BYTES, Manifest
from titan_ckpt.directory.names import COMMITS, DATA, manifest_path, step_name
from titan_ckpt.disk.direct import run_workers
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.stores.bucket import BucketPath, ObjectFacts, Version

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,18})\.([0-9a-f]{32})\.(json|pinned|abandoned|removal)")
_FENCE = "titan_ckpt fence"
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
class Look:
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

    def look(self) -> Look:
        """List `commits/` by one request, and read what is new; fences, too. Raises: OSError."""
        matches = {f.key: (_NAME.fullmatch(f.key.rpartition("/")[2]), f) for f in self._all()}
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
        return Look(
            sorted(commits, key=lambda commit: (commit.step, commit.attempt)), strangers, removals, not matches, widowed
        )

    def _all(self) -> list[ObjectFacts]:
        return self._bucket.list_objects((self._root / COMMITS).key)

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
        run_workers(new, read, min(len(new), self._bucket.settings.concurrency))

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
