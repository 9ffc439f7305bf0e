"""A run's records of the exports that it has made, and their retention: it removes those and nothing else.

Owns `.titan_ckpt-exports/` in the run's folder: a file for each export, with the size of every file in it, and the
digests of those that people edit. Records are not in the exports, because the bytes of an export depend on the weights
and the settings alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from titan_ckpt.config import ExportConfig
from titan_ckpt.disk import posix
from titan_ckpt.disk.unpublished_folder import StagedFolder
from titan_ckpt.encoding.strict_json import Json, parse
from titan_ckpt.errors import CorruptCheckpointError, SaveError, listed
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.objects import object_path
from titan_ckpt.stores.store import POSIX, Place, local_path, store_of

RECORDS = ".titan_ckpt-exports"
UNSAVED_IN = "unsaved_in"
"""Key of a record: where the run saves that had committed no step when it made the export. A restart makes it again."""
_MAX_BYTES = 1 << 24
_MAX_DIGESTED = 64 << 20
"""Longer files are known by their sizes: a digest of the weights would read all of them at every expiry."""
_SET_ASIDE = re.compile(r"\.abandoned-[0-9a-f]{8}$")
logger = logging.getLogger(__name__)


RecordExport = Callable[[Any], None]
"""Records an export: right before it is published, with its folder on a disk, or with its last file in a bucket; there
once more after that, with None."""


def unrecorded(_: Any) -> None:
    """Record nothing: the export is nobody's, and no run removes it."""


@dataclass(frozen=True, slots=True)
class Staged:
    """An export that is being written, on rank 0."""

    path: Place
    """The place that takes the files of the export."""
    publish: Callable[[RecordExport, tuple[str, bytes] | None], None]
    """Gives it its name; the second is its last file in a bucket. Raises: FileExistsError; ExportError; OSError."""
    abandon: Callable[[], None]
    """Removes it. Raises: OSError; a later export then removes the rest."""
    attempt: str = ""
    """Tells it from other exports to the same place, where each has no folder of its own."""


class Exports(ABC):
    """The exports that runs have made at one place, and which of them retention removes.

    Rank 0 alone calls this, but for `require_own`.
    """

    _whose: ClassVar[str]
    """Who has published what retention removes."""
    renames: ClassVar[bool]
    """Whether an export gets its name by a rename."""

    def __init__(self, root: Any) -> None:
        """Bind to a place; nothing is touched."""
        self.root = root
        self._left: set[str] = set()
        """Names that retention leaves, because they are not as they were published; each was logged."""

    def check(self) -> None:  # noqa: B027
        """Make sure that exports may be made here, if that can only be tried. Raises: OSError."""

    @abstractmethod
    def begin(self, name: str) -> Staged:
        """Start an export; what one that was cut short left is deleted.

        Raises: FileExistsError if anything of this name is there that no export has left; OSError.
        """

    def require_own(self, name: str, attempt: str) -> None:  # noqa: B027
        """Raises: ExportError if another export to this name was begun after this attempt, which shares its files."""

    @abstractmethod
    def name_of(self, config: ExportConfig, step: int) -> str:
        """Return the name of an export, below the root."""

    def folder(self, config: ExportConfig, step: int) -> Place:
        """Return where an export of this step is, or will be."""
        folder: Place = self.root / self.name_of(config, step)
        return folder

    @abstractmethod
    def is_there(self, name: str) -> bool:
        """Return whether an export of this name is published, by whomever. Raises: OSError."""

    def record(self, config: ExportConfig, step: int, unsaved_in: str | None = None, what: Any = None) -> None:
        """Record an export right before it is published, or after that: `what` is as of RecordExport.

        So after a kill no record is missing. A failure is logged: the export is whole, and it never expires.
        `unsaved_in`: where the run saves, if it has committed no step yet.
        """
        name = self.name_of(config, step)
        try:
            self._write({"folder": name, **self._content_of(name, what), UNSAVED_IN: unsaved_in})
        except OSError as error:
            logger.warning("%s is not recorded, so it never expires: %s", self.root / name, error)

    @abstractmethod
    def _content_of(self, name: str, what: Any) -> Mapping[str, Json]:
        """Return what a record says of the export itself. Raises: OSError."""

    def expire(self, config: ExportConfig, step: int) -> None:
        """Remove interval exports that are no longer kept. Raises: OSError."""
        if config.keep is None:
            return
        own, leftovers = self._own_steps(config)
        for expired in [*leftovers, *config.expired(own, step)]:
            self._remove(self.name_of(config, expired))
            if expired in own:
                logger.info("export of step %d removed: the newest %d are kept", expired, config.keep)
            else:
                logger.info("export of step %d removed: only a part of it was there", expired)
        self._forget_deleted(config)

    def set_aside(self, config: ExportConfig, above: int, unsaved_in: str | None = None) -> None:
        """Take the exports after step `above` out of the way, newest first. Raises: OSError.

        Only exports that a run has made are taken. `unsaved_in`: and only those that were recorded with it.
        """
        for step in sorted(self.steps_there(config), reverse=True):
            name = self.name_of(config, step)
            if step > above and unsaved_in in (None, self._record(name).get(UNSAVED_IN)):
                self._set_aside(name, step, above)

    def were_set_aside(self) -> dict[str, int]:
        """Return the names of the recorded folders that a rollback has renamed, and the bytes of each."""
        return {}

    def remove_set_aside(self, name: str, *, dry_run: bool) -> None:
        """Delete an export that was set aside; with `dry_run` only check that it may be deleted.

        Raises: SaveError for one that is not as it was published; OSError.
        """
        if why := self.why_foreign(name):
            raise SaveError(f"{self.root / name}: {why}. Delete it yourself")
        if not dry_run:
            self._remove(name)

    def foreign_after(self, config: ExportConfig, above: int) -> list[tuple[int, str]]:
        """Return (step, why) of each that `set_aside` would leave in place. Raises: OSError."""
        found = [
            (step, self._why_kept(self.name_of(config, step))) for step in self.steps_there(config) if step > above
        ]
        return [(step, why) for step, why in found if why is not None]

    def steps_there(self, config: ExportConfig) -> list[int]:
        """Return the steps whose exports have anything, whoever made them. Raises: OSError."""
        place = self.folder(config, 0).parent
        return steps_among(store_of(place).names_in(place), config)

    def _own_steps(self, config: ExportConfig) -> tuple[list[int], list[int]]:
        """Return the steps whose exports are as they were published, and those of which only a part is left.

        Others of such names are named once.
        """
        foreign = {step: self.why_foreign(self.name_of(config, step)) for step in self.steps_there(config)}
        leftovers = [step for step, why in foreign.items() if why and self._is_leftover(self.name_of(config, step))]
        left = {self.name_of(config, step): why for step, why in foreign.items() if why and step not in leftovers}
        if new := [f"{self.root / name} ({why})" for name, why in left.items() if name not in self._left]:
            logger.warning(
                "retention of exports leaves what is not as %s published it: %s", self._whose, ", ".join(new)
            )
        self._left.update(left)
        return [step for step, why in foreign.items() if why is None], leftovers

    @abstractmethod
    def why_foreign(self, name: str) -> str | None:
        """Return why a folder is not an export as it was published; None if it is. Raises: OSError."""

    @abstractmethod
    def _why_kept(self, name: str) -> str | None:
        """Return why `set_aside` leaves a folder; None if it does not, or if nobody takes it for an export."""

    @abstractmethod
    def _set_aside(self, name: str, step: int, above: int) -> None:
        """Take an export out of the way, if it is one."""

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Delete an export and its record."""

    @abstractmethod
    def _record_at(self, name: str) -> Any:
        """Return the file of a record. Raises: OSError if it may not be there."""

    @abstractmethod
    def _write(self, record: Mapping[str, Json]) -> None:
        """Write the record of the export "folder", which is relative to the root. Raises: OSError."""

    def _record(self, name: str) -> dict[str, Json]:
        """Return the record of a folder; nothing in it without one that can be read. Raises: StoreError."""
        try:
            path = self._record_at(name)
            record = parse(store_of(path).read_whole(path, _MAX_BYTES), _MAX_BYTES, str(path))
        except StoreError:
            raise
        except (OSError, CorruptCheckpointError):
            return {}
        return record if isinstance(record, dict) and record.get("folder") == name else {}

    def _is_leftover(self, name: str) -> bool:
        """Return whether a removal or an export was cut short, and nobody is at work on it."""
        return False

    def _forget_deleted(self, config: ExportConfig) -> None:  # noqa: B027
        """Delete the records of what is long gone."""


class MadeExports(Exports):
    """The exports of a run on a mounted file system, in its folder."""

    root: Path
    _whose = "this run"
    renames = True

    def begin(self, name: str) -> Staged:
        folder = StagedFolder.begin(self.root / name)

        def publish(record: RecordExport, last: object) -> None:
            record(folder.path)
            folder.publish()

        return Staged(folder.path, publish, folder.abandon)

    def name_of(self, config: ExportConfig, step: int) -> str:
        return config.lands_in(step)

    def is_there(self, name: str) -> bool:
        return (self.root / name).is_dir()

    def _content_of(self, name: str, what: Path) -> Mapping[str, Json]:
        return {"content": _content(what)}

    def why_foreign(self, name: str) -> str | None:
        written = self._record(name).get("content")
        known = written if isinstance(written, dict) else {}
        return self._why_kept(name) or why_changed(known, _content(self.root / name))

    def _why_kept(self, name: str) -> str | None:
        if not posix.is_real_folder(self.root / name):
            return "it is no folder of its own"
        written = self._record(name).get("content")
        if not isinstance(written, dict):
            return "there is no record that this run made it"
        if not any(written.get(path) == mark for path, mark in _content(self.root / name).items()):
            return "nothing in it is as this run has written it"
        return None

    def _set_aside(self, name: str, step: int, above: int) -> None:
        """Rename it to `step-N.abandoned-<id>`, edited or not. Its record keeps up with its name."""
        if self._why_kept(name) is not None:
            return
        aside = f"{name}.abandoned-{uuid.uuid4().hex[:8]}"
        self._write({**self._record(name), "folder": aside})
        posix.rename_noreplace(self.root / name, self.root / aside)
        posix.fsync_folder((self.root / name).parent)
        POSIX.remove([self._record_at(name)])
        logger.warning(
            "%s: set aside as %s, because this run went back to step %d. Retention does not delete it; "
            "`titan-ckpt prune RUN --set-aside` does", self.root / name, aside, above
        )  # fmt: skip

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another export that has just ended has removed it
            StagedFolder.discard(self.root / name)
            POSIX.remove([self._record_at(name)])

    def recorded(self) -> list[str]:
        """Return the names of the folders that the run has a record of, whether or not they are still there."""
        names: list[str] = []
        for file in posix.list_folder(self.root / RECORDS):
            with contextlib.suppress(OSError, CorruptCheckpointError):
                record = parse(posix.read_whole(self.root / RECORDS / file, _MAX_BYTES), _MAX_BYTES, file)
                name = record.get("folder") if isinstance(record, dict) else None
                if isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts and name:
                    names.append(name)
        return names

    def were_set_aside(self) -> dict[str, int]:
        names = [n for n in self.recorded() if _SET_ASIDE.search(n) and os.path.lexists(self.root / n)]
        return {name: POSIX.folder_bytes(self.root / name) for name in names}

    def _write(self, record: Mapping[str, Json]) -> None:
        path = self._record_at(str(record["folder"]))
        POSIX.remove([path])
        posix.make_folders(path.parent)
        posix.write_file(path, json.dumps(record, indent=1).encode())

    def _record_at(self, name: str) -> Path:
        """Return the file of a record. Raises: OSError if their folder is a link, which leads to another run's."""
        if (self.root / RECORDS).is_symlink():
            raise OSError(errno.ENOTDIR, "is a link, and not a folder of its own", str(self.root / RECORDS))
        return self.root / RECORDS / f"{xxhash.xxh3_128_hexdigest(name.encode())}.json"


def exports_at(root: Place) -> Exports:
    """Return the exports of runs whose folder this is, or that export to this place."""
    if (folder := local_path(root)) is not None:
        return MadeExports(folder)
    from titan_ckpt.formats.publish.bucket_record import BucketExports

    return BucketExports(object_path(root))


def steps_among(names: Iterable[str], config: ExportConfig) -> list[int]:
    """Return the steps of the exports that have these names beside each other."""
    before, after = map(re.escape, config.lands_in().rpartition("/")[2].split("N"))
    matches = map(re.compile(rf"{before}(0|[1-9][0-9]*){after}").fullmatch, names)
    return [int(match[1]) for match in matches if match]


def why_changed(written: Mapping[str, Json], content: Mapping[str, Json]) -> str | None:
    """Return what is no longer as it was written; None if all of it is."""
    changed = sorted(entry for entry in {*written, *content} if written.get(entry) != content.get(entry))
    return f"changed since: {listed(changed, ', ', most=3)}" if changed else None


def _content(folder: Path) -> dict[str, Json]:
    """Return the path of everything in a folder, each with its size and, if it is short, its digest."""
    content: dict[str, Json] = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                content[str(path.relative_to(folder))] = _mark(path)
    return content


def _mark(path: Path) -> str:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "no file"
    size = f"{status.st_size} bytes"
    if status.st_size > _MAX_DIGESTED:
        return size
    return f"{size}, {xxhash.xxh3_128_hexdigest(posix.read_whole(path, _MAX_DIGESTED))}"
