"""A folder that appears complete or not at all: written beside its place, then renamed into it.

Owns the staging folder's name, its lock, its removal and its publication. Knows no tensors and no other rank; one
process begins and ends it, others write into it meanwhile.

`.staging-<id>` stands beside the target, on the same file system; `.staging-<id>.lock` is held while its process lives,
so that a later export can tell what a killed one left behind from what is being written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt import posix
from titan_ckpt.storage.engine import IO_BYTES

logger = logging.getLogger(__name__)

_PREFIX = ".staging-"
_LOCK = ".lock"
_LOCK_NAME = re.compile(re.escape(_PREFIX) + "[0-9a-f]{32}" + re.escape(_LOCK))
_live: set[str] = set()
"""Names that this process holds: POSIX locks do not tell a process from itself."""


@dataclass(frozen=True, slots=True)
class StagedFolder:
    """A folder under way to `target`."""

    target: Path
    path: Path
    lock_fd: int

    @staticmethod
    def begin(target: Path) -> StagedFolder:
        """Create an empty staging folder beside the target, after removing what killed processes left there.

        Raises: FileExistsError if the target is there; OSError.
        """
        if os.path.lexists(target):
            raise FileExistsError(f"{target} is there already; remove it or choose another folder")
        _make_folders(target.parent)
        _sweep(target.parent)
        staged = StagedFolder._claim(target)
        try:
            posix.mkdir(staged.path)
        except BaseException:
            staged.release()
            raise
        return staged

    @staticmethod
    def _claim(target: Path) -> StagedFolder:
        """Take a name beside the target, and its lock. Raises: OSError."""
        while True:
            path = target.parent / f"{_PREFIX}{uuid.uuid4().hex}"
            staged = StagedFolder(target, path, posix.open_exclusive(_lock_of(path)))
            _live.add(path.name)
            if posix.lock(staged.lock_fd) is not False and _lock_of(path).exists():
                return staged
            staged.release()  # before it was locked, another process's sweep took it for a dead one's

    def publish(self, fsync: bool) -> None:
        """Give the folder its name. Raises: FileExistsError if something has taken it; OSError."""
        if fsync:
            for folder in _folders(self.path):
                posix.fsync_folder(folder)
        posix.rename_noreplace(self.path, self.target)
        try:
            if fsync:
                posix.fsync_folder(self.target.parent)
        except OSError:
            posix.rename_noreplace(self.target, self.path)
            raise
        self.release()

    def abandon(self) -> None:
        """Remove the folder and everything in it. Raises: OSError; a later export removes what is left."""
        try:
            if self.path.exists():
                _remove(self.path)
        finally:
            self.release()

    @staticmethod
    def discard(folder: Path) -> None:
        """Remove a published folder: it loses its name at once; what a kill leaves of it, a later export removes."""
        staged = StagedFolder._claim(folder)
        try:
            posix.rename_noreplace(folder, staged.path)
            posix.fsync_folder(folder.parent)
            _remove(staged.path)
        finally:
            staged.release()

    def release(self) -> None:
        """Let go of the lock; what cannot be removed now is removed by a later export."""
        with contextlib.suppress(OSError):
            posix.unlink(_lock_of(self.path))
        with contextlib.suppress(OSError):
            posix.close(self.lock_fd)
        _live.discard(self.path.name)


def write_file(path: Path, data: bytes, fsync: bool) -> None:
    """Write a new file."""
    fd = posix.open_exclusive(path)
    try:
        posix.pwrite_all(fd, data, 0)
        if fsync:
            posix.fsync(fd)
    finally:
        posix.close(fd)


def copy_file(source: Path, path: Path, fsync: bool) -> None:
    """Copy a file's bytes to a new file, and nothing else of it: links in download caches become files."""
    fd = posix.open_exclusive(path)
    try:
        offset = 0
        with source.open("rb") as file:
            while block := file.read(IO_BYTES):
                posix.pwrite_all(fd, block, offset)
                offset += len(block)
        if fsync:
            posix.fsync(fd)
    finally:
        posix.close(fd)


def _make_folders(path: Path) -> None:
    if not path.is_dir():
        _make_folders(path.parent)
        try:
            posix.mkdir(path)
        except FileExistsError:
            if not path.is_dir():
                raise
        posix.fsync_folder(path.parent)


def _sweep(parent: Path) -> None:
    """Remove staging folders whose process is gone; leave those that are locked, or where locks do not exist."""
    for name in filter(_LOCK_NAME.fullmatch, posix.list_folder(parent)):
        folder = (parent / name).with_suffix("")
        if folder.name in _live:
            continue
        try:
            _remove_if_dead(folder)
        except FileNotFoundError:  # another process has done it
            continue
        except OSError as error:  # such as another user's: no reason not to export
            logger.info("%s stays as it is: %s", folder, error)


def _remove_if_dead(folder: Path) -> None:
    fd = os.open(_lock_of(folder), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if posix.lock(fd):
            _remove(folder)
            posix.unlink(_lock_of(folder))
    finally:
        os.close(fd)


def _remove(folder: Path) -> None:
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            posix.unlink(Path(parent) / name)
        posix.rmdir(parent)


def _folders(path: Path) -> Iterator[Path]:
    """Yield every folder in a folder, and itself last."""
    for parent, _, _ in os.walk(path, topdown=False):
        yield Path(parent)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)
