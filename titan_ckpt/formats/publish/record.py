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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from titan_ckpt import policy
from titan_ckpt.config import ExportConfig
from titan_ckpt.disk import posix
from titan_ckpt.disk.unpublished_folder import StagedFolder
from titan_ckpt.encoding.strict_json import Json, parse
from titan_ckpt.errors import CorruptCheckpointError, SaveError, listed
from titan_ckpt.stores.store import Place

RECORDS = ".titan_ckpt-exports"
UNSAVED_IN = "unsaved_in"
"""Key of a record: where the run saves that had committed no step when it made the export. A restart makes it again."""
_MAX_BYTES = 1 << 24
_MAX_DIGESTED = 64 << 20
"""Longer files are known by their sizes: a digest of the weights would read all of them at every expiry."""
_SET_ASIDE = re.compile(r"\.abandoned-[0-9a-f]{8}$")
logger = logging.getLogger(__name__)


class Exports(ABC):
    """The exports that runs have made at one place, and which of them retention removes. Rank 0 alone calls this."""

    _whose: ClassVar[str]
    """Who has published what retention removes."""

    def __init__(self, root: Any) -> None:
        """Bind to a place; nothing is touched."""
        self.root = root
        self._left: set[str] = set()
        """Names that retention leaves, because they are not as they were published; each was logged."""

    def check(self) -> None:  # noqa: B027
        """Make sure that exports may be made here, if that can only be tried. Raises: OSError."""

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

    @abstractmethod
    def record(self, config: ExportConfig, step: int, unsaved_in: str | None, what: Any) -> None:
        """Record an export right before it is published, or after that: `what` is as of publication.Record.

        So after a kill no record is missing. A failure is logged: the export is whole, and it never expires.
        `unsaved_in`: where the run saves, if it has committed no step yet.
        """

    def expire(self, config: ExportConfig, step: int) -> None:
        """Remove interval exports that are no longer kept. Raises: OSError."""
        if config.keep is None:
            return
        own, leftovers = self._own_steps(config)
        for expired in [*leftovers, *policy.expired_exports(own, step, config)]:
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
            if step > above and unsaved_in in (None, (self._record(name) or {}).get(UNSAVED_IN)):
                self._set_aside(name, step, above)

    def foreign_after(self, config: ExportConfig, above: int) -> list[tuple[int, str]]:
        """Return (step, why) of each that `set_aside` would leave in place. Raises: OSError."""
        found = [
            (step, self._why_kept(self.name_of(config, step))) for step in self.steps_there(config) if step > above
        ]
        return [(step, why) for step, why in found if why is not None]

    def steps_there(self, config: ExportConfig) -> list[int]:
        """Return the steps whose exports have anything, whoever made them. Raises: OSError."""
        return steps_among(self._names_beside(config), config)

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
    def _names_beside(self, config: ExportConfig) -> list[str]:
        """Return the names of what is where exports are."""

    @abstractmethod
    def _record(self, name: str) -> dict[str, Json] | None:
        """Return the record of a folder; None, or nothing in it, without one that can be read."""

    def _is_leftover(self, name: str) -> bool:
        """Return whether a removal or an export was cut short, and nobody is at work on it."""
        return False

    def _forget_deleted(self, config: ExportConfig) -> None:  # noqa: B027
        """Delete the records of what is long gone."""


class MadeExports(Exports):
    """The exports of a run on a mounted file system, in its folder."""

    _whose = "this run"

    def name_of(self, config: ExportConfig, step: int) -> str:
        return config.lands_in(step)

    def is_there(self, name: str) -> bool:
        return bool((self.root / name).is_dir())

    def record(self, config: ExportConfig, step: int, unsaved_in: str | None, what: Path) -> None:
        name = self.name_of(config, step)
        try:
            _write(self.root, {"folder": name, "content": _content(what), UNSAVED_IN: unsaved_in})
        except OSError as error:
            logger.warning("%s is not recorded, so it never expires: %s", self.root / name, error)

    def why_foreign(self, name: str) -> str | None:
        return why_foreign(self.root, name)

    def _why_kept(self, name: str) -> str | None:
        return _why_unknown(self.root, name)

    def _set_aside(self, name: str, step: int, above: int) -> None:
        """Rename it to `step-N.abandoned-<id>`, edited or not. Its record keeps up with its name."""
        if _why_unknown(self.root, name) is not None:
            return
        aside = f"{name}.abandoned-{uuid.uuid4().hex[:8]}"
        _write(self.root, {**self._record(name), "folder": aside})
        posix.rename_noreplace(self.root / name, self.root / aside)
        posix.fsync_folder((self.root / name).parent)
        remove_record(self.root, name)
        logger.warning(
            "%s: set aside as %s, because this run went back to step %d. Retention does not delete it; "
            "`titan-ckpt prune RUN --set-aside` does", self.root / name, aside, above
        )  # fmt: skip

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another export that has just ended has removed it
            remove_export(self.root, name)

    def _names_beside(self, config: ExportConfig) -> list[str]:
        return posix.list_folder(self.root / config.folder)

    def _record(self, name: str) -> dict[str, Json]:
        return _read_record(self.root, name)


def steps_among(names: Iterable[str], config: ExportConfig) -> list[int]:
    """Return the steps of the exports that have these names beside each other."""
    before, after = map(re.escape, config.lands_in().rpartition("/")[2].split("N"))
    matches = map(re.compile(rf"{before}(0|[1-9][0-9]*){after}").fullmatch, names)
    return [int(match[1]) for match in matches if match]


def why_changed(written: Mapping[str, Json], content: Mapping[str, Json]) -> str | None:
    """Return what is no longer as it was written; None if all of it is."""
    changed = sorted(entry for entry in {*written, *content} if written.get(entry) != content.get(entry))
    return f"changed since: {listed(changed, ', ', most=3)}" if changed else None


def _write(run: Path, record: Mapping[str, Json]) -> None:
    """Write the record of the export "folder", which is relative to the run's folder. Raises: OSError."""
    name = str(record["folder"])
    remove_record(run, name)
    posix.make_folders(run / RECORDS)
    posix.write_file(_path_of(run, name), json.dumps(record, indent=1).encode())


def remove_record(run: Path, name: str) -> None:
    """Remove the record of a folder, if there is one. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        posix.unlink(_path_of(run, name))


def recorded_folders(run: Path) -> list[str]:
    """Return the folders that the run has a record of, whether or not they are still there."""
    names: list[str] = []
    for file in posix.list_folder(run / RECORDS):
        with contextlib.suppress(OSError, CorruptCheckpointError):
            record = parse(posix.read_whole(run / RECORDS / file, _MAX_BYTES), _MAX_BYTES, file)
            name = record.get("folder") if isinstance(record, dict) else None
            if isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts and name:
                names.append(name)
    return names


def set_aside_exports(run: Path) -> list[str]:
    """Return the recorded folders that a rollback has set aside, relative to the run's folder."""
    return [name for name in recorded_folders(run) if _SET_ASIDE.search(name) and os.path.lexists(run / name)]


def remove_export(run: Path, name: str) -> None:
    """Delete an export of this run, and its record. Raises: OSError."""
    StagedFolder.discard(run / name)
    remove_record(run, name)


def remove_set_aside_export(run: Path, name: str, *, dry_run: bool) -> None:
    """Delete an export that was set aside; with `dry_run` only check that it may be deleted.

    Raises: SaveError for one that is not as this run published it; OSError.
    """
    if why := why_foreign(run, name):
        raise SaveError(f"{run / name}: {why}. Delete it yourself")
    if not dry_run:
        remove_export(run, name)


def why_foreign(run: Path, name: str) -> str | None:
    """Return why a folder is not an export as this run published it; None if it is."""
    written = _read_record(run, name).get("content")
    return _why_unknown(run, name) or why_changed(written if isinstance(written, dict) else {}, _content(run / name))


def _why_unknown(run: Path, name: str) -> str | None:
    """Return why a folder is not one that this run has published, whatever has become of it; None if it is."""
    if not posix.is_real_folder(run / name):
        return "it is no folder of its own"
    written = _read_record(run, name).get("content")
    if not isinstance(written, dict):
        return "there is no record that this run made it"
    if not any(written.get(path) == mark for path, mark in _content(run / name).items()):
        return "nothing in it is as this run has written it"
    return None


def _read_record(run: Path, name: str) -> dict[str, Json]:
    """Return the record of a folder; {} without one that can be read."""
    record: Json = None
    with contextlib.suppress(OSError, CorruptCheckpointError):
        path = _path_of(run, name)
        record = parse(posix.read_whole(path, _MAX_BYTES), _MAX_BYTES, str(path))
    return record if isinstance(record, dict) and record.get("folder") == name else {}


def _path_of(run: Path, name: str) -> Path:
    """Return the file of a record. Raises: OSError if the folder of records is a link, which leads to another run's."""
    if (run / RECORDS).is_symlink():
        raise OSError(errno.ENOTDIR, "is a link, and not a folder of its own", str(run / RECORDS))
    return run / RECORDS / f"{xxhash.xxh3_128_hexdigest(name.encode())}.json"


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
