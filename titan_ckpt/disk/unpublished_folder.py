"""A folder that appears complete or not at all: it is written beside its target, then renamed to it.

Owns the staging folder's name, lock, removal and publication. Knows no tensors and no ranks: one process creates and
publishes the folder, other processes may write into it meanwhile.

`.staging-<id>` is a sibling of the target, on the same file system. Its process holds the lock on `.staging-<id>.lock`,
so that a later export can tell the leftovers of a killed process from a folder that is being written. The file
also names the process, because some mounts (NFS with `nolock`, Lustre with `localflock`) keep locks within one host:
what a process of another host or container may still write stays for some days.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.disk import posix
from titan_ckpt.disk.kernel import Holder, read_holder

logger = logging.getLogger(__name__)

_PREFIX = ".staging-"
_LOCK = ".lock"
_MAX_EXPORT_SECONDS = 2 * 24 * 3600
"""No export takes longer: an older folder is taken for a leftover, wherever its process may be."""
_LOCK_NAME = re.compile(re.escape(_PREFIX) + "[0-9a-f]{32}" + re.escape(_LOCK))


@dataclass(frozen=True, slots=True)
class StagedFolder:
    """A staging folder at `path` that will be renamed to `target`."""

    target: Path
    path: Path
    lock_fd: int

    @staticmethod
    def begin(target: Path) -> StagedFolder:
        """Create an empty staging folder beside the target; remove those of killed processes first.

        Raises: FileExistsError if the target exists; OSError.
        """
        if os.path.lexists(target):
            raise FileExistsError(f"{target} is there already; remove it or choose another folder")
        posix.make_folders(target.parent)
        staged = StagedFolder._claim(target)
        try:
            _sweep(staged)
            posix.mkdir(staged.path)
        except BaseException:
            staged.release()
            raise
        return staged

    @staticmethod
    def _claim(target: Path) -> StagedFolder:
        """Choose a name beside the target and lock it. Raises: OSError."""
        while True:
            path = target.parent / f"{_PREFIX}{uuid.uuid4().hex}"
            staged = StagedFolder(target, path, posix.open_exclusive(_lock_of(path)))
            try:
                is_ours = posix.lock(staged.lock_fd) is not False
                if is_ours:
                    posix.overwrite(staged.lock_fd, Holder.current().record())
                if is_ours and _lock_of(path).exists():
                    return staged
            except BaseException:
                staged.release()
                raise
            staged.release()  # the sweep of another process took the unlocked file for a dead one's

    def publish(self) -> None:
        """Rename the folder durably to its target. Raises: FileExistsError if the target exists by now; OSError."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            posix.fsync_folder(folder)
        try:
            posix.rename_noreplace(self.path, self.target)
        except FileExistsError:
            raise FileExistsError(
                f"{self.target} has come to be there meanwhile, so another process exports to the same name: stop it, "
                "or choose another folder"
            ) from None
        try:
            posix.fsync_folder(self.target.parent)
        except OSError:
            posix.rename_noreplace(self.target, self.path)
            raise
        self.release()

    def abandon(self) -> None:
        """Remove the folder and everything in it. Raises: OSError; a later export then removes the rest."""
        try:
            _remove(self.path)
        finally:
            self.release()

    @staticmethod
    def discard(folder: Path) -> None:
        """Remove a published folder: rename it first, so that after a kill a later export removes the rest."""
        staged = StagedFolder._claim(folder)
        try:
            posix.rename_noreplace(folder, staged.path)
            posix.fsync_folder(folder.parent)
            _remove(staged.path)
        finally:
            staged.release()

    def release(self) -> None:
        """Release the lock; its file stays beside a folder that was not removed, so that a later export finds it."""
        with contextlib.suppress(OSError):
            if not os.path.lexists(self.path):
                posix.unlink(_lock_of(self.path))
        with contextlib.suppress(OSError):
            posix.close(self.lock_fd)


def _sweep(staged: StagedFolder) -> None:
    """Remove staging folders whose process is gone; keep locked ones, and all where the file system has no locks."""
    now = os.fstat(staged.lock_fd).st_mtime  # the file system's own clock: hosts' clocks may differ
    for name in filter(_LOCK_NAME.fullmatch, posix.list_folder(staged.path.parent)):
        folder = staged.path.with_name(name).with_suffix("")
        if folder == staged.path:
            continue
        try:
            _remove_if_dead(folder, now)
        except FileNotFoundError:  # another process has removed it
            continue
        except OSError as error:  # such as a folder of another user; the export goes on
            logger.warning("%s stays as it is: %s", folder, error)


def _remove_if_dead(folder: Path, now: float) -> None:
    fd = os.open(_lock_of(folder), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not posix.lock(fd):
            return
        if os.path.lexists(folder):
            holder = read_holder(fd)
            is_new = now - os.fstat(fd).st_mtime < _MAX_EXPORT_SECONDS
            if is_new and (holder is None or holder.may_live_elsewhere()):
                logger.warning("%s stays: %s may still write it. Remove it if not", folder, holder or "some process")
                return
            _remove(folder)
        posix.unlink(_lock_of(folder))
    finally:
        posix.close(fd)


def _remove(folder: Path) -> None:
    """Remove a folder and everything in it, if it is there. Raises: OSError for a link, and for the first rest."""
    for error in posix.remove_tree(folder):
        raise error


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)
