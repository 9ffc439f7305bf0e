"""The right to write into a checkpoint folder: one process has it at a time.

Owns `.lease`, a locked file that names its holder. A holder that can be shown to be alive keeps the lease; any other
loses it at once to the next process that asks, because that is usually the same job, restarted on another machine.
Safety does not depend on that liveness check, but on two things: a process that lost the lease reads its successor's
name when it checks the file, and the successor renames its staging folders away, so that a commit in progress has
nothing left to rename.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

from titan_ckpt.disk import posix
from titan_ckpt.disk.holder import Holder, read_holder
from titan_ckpt.errors import CommitConflictError, PreflightError
from titan_ckpt.stores.store import Place

LEASE_NAME = ".lease"

held: set[str] = set()
"""Paths and URLs of the leases that this process has."""

logger = logging.getLogger(__name__)


class Lease:
    """The right to write into one folder, held by this process until `release`."""

    def __init__(self, path: Path, fd: int, holder: Holder) -> None:
        self._path = path
        self._fd = fd
        self._holder = holder
        status = os.fstat(fd)
        self._identity = (status.st_dev, status.st_ino)

    @staticmethod
    def acquire(folder: Path) -> Lease:
        """Take the lease, unless its holder is alive.

        Raises: CommitConflictError naming the holder; PreflightError; OSError.
        """
        path = folder / LEASE_NAME
        _require_file(path)
        fd = posix.open_or_create(path)
        try:
            lease = Lease(path, fd, Holder.current())
            lease._claim(folder)
        except BaseException:
            posix.close(fd)
            raise
        held.add(str(path))
        return lease

    def check(self) -> None:
        """Check that this process still holds the lease. Raises: CommitConflictError; OSError."""
        if os.getpid() != self._holder.pid:
            raise CommitConflictError(
                f"{self._path.parent}: held by {self._holder}; a process it forked may not commit"
            )
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            raise CommitConflictError(f"{self._path} is gone: the folder was moved or cleared under this run") from None
        holder = read_holder(self._fd)
        if (status.st_dev, status.st_ino) != self._identity or holder != self._holder:
            raise CommitConflictError(
                f"{self._path.parent}: taken over by {holder or 'another process'} while this one, {self._holder}, was "
                "away. What it has committed stays; stop this process"
            )

    def release(self) -> None:
        """Give the lease back; does nothing in a forked process or if another process took the lease.

        An interrupt may leave it, and it is called again then.
        A disk that refuses it is logged: it must not hide why a save failed, and the next process takes the lease over.
        """
        if os.getpid() != self._holder.pid:
            return
        held.discard(str(self._path))
        with contextlib.suppress(OSError):
            status = os.fstat(self._fd)
            if (status.st_dev, status.st_ino) != self._identity:
                return  # closed by a call that was interrupted right after it
        try:
            try:
                if read_holder(self._fd) == self._holder:
                    posix.truncate(self._fd, 0)
                    posix.unlock(self._fd)
            except OSError:
                posix.close(self._fd)
                raise
            posix.close(self._fd)
        except OSError as error:
            logger.warning("%s is not given back: %s", self._path, error)

    def _claim(self, folder: Path) -> None:
        locked = posix.lock(self._fd)
        before = read_holder(self._fd)
        if before is not None:
            refuse_living(folder, self._path, before)
        if locked is False:
            raise _conflict(folder, before)
        if before is not None:
            logger.warning(
                "%s: taking over from %s, which did not close it; its unfinished saves are discarded", folder, before
            )
        self._holder.write(self._fd)


def refuse_living(folder: Place, lease: Place, holder: Holder) -> None:
    """Raise CommitConflictError if the process that the lease of a folder names is known to be alive."""
    if holder.pid != os.getpid():
        if holder.lives_here():
            raise _conflict(folder, holder)
    elif str(lease) in held:  # else this process could not give it back
        raise CommitConflictError(f"{folder}: this process already writes here through another object: close it first")


def _conflict(folder: Place, holder: Holder | None) -> CommitConflictError:
    return CommitConflictError(
        f"{folder}: {holder or 'another process'} is writing here. Wait for it to end, stop it, or choose another "
        "folder"
    )


def holder_of(folder: Path) -> Holder | None:
    """Return the process that the lease of a folder names, alive or not; None without one. Takes no lock."""
    try:
        fd = os.open(folder / LEASE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return read_holder(fd)
    except OSError:  # a pipe, for one
        return None
    finally:
        os.close(fd)


def _require_file(path: Path) -> None:
    """Check that `path` is absent or a regular file. Raises: PreflightError for a link, a folder or a pipe."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise PreflightError(f"{path}: must be a regular file, found something else of that name. Move it away")
