"""The right to write into a checkpoint folder: one process has it at a time.

Owns `.lease`, a locked file that names its holder. A holder that can be shown to be alive keeps the lease; any other
loses it at once to the next process that asks, because that is usually the same job, restarted on another machine.
Safety does not depend on that liveness check, but on two things: a process that lost the lease reads its successor's
name when it checks the file, and the successor renames its staging folders away, so that a commit in progress has
nothing left to rename.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import threading
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from titan_ckpt.disk import posix
from titan_ckpt.disk.kernel import boot_id
from titan_ckpt.errors import CommitConflictError, PreflightError

LEASE_NAME = ".lease"

_MAX_BYTES = 4096
_held: dict[tuple[int, int], int] = {}
"""(device, inode) -> pid. A lock does not conflict within its own process, and opening the file again would drop it."""
_held_guard = threading.Lock()

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """Identity of a process, unique over machines and time."""

    id: str
    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: str
    """Clock ticks from boot to the process's start; a later process with the same pid has a different value."""

    @staticmethod
    def current() -> Holder:
        """Describe this process, under a new id."""
        return Holder(
            uuid.uuid4().hex, socket.gethostname(), boot_id(), _pid_namespace(), os.getpid(), _started(os.getpid())
        )

    def lives_here(self) -> bool:
        """Return whether this process is known to be alive on this machine; False if that cannot be told."""
        same_machine = (self.boot, self.pid_namespace) == (boot_id(), _pid_namespace()) and self.boot != ""
        return same_machine and self.started != "" and _started(self.pid) == self.started

    def may_live_elsewhere(self) -> bool:
        """Return whether this process may be alive where this machine cannot see it: in another container or host."""
        if self.host != socket.gethostname():
            return True
        return self.boot == boot_id() and self.pid_namespace != _pid_namespace()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


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
        with _held_guard:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                if _held.get((status.st_dev, status.st_ino)) == os.getpid():
                    raise CommitConflictError(
                        f"{folder}: this process already writes here through another object: close it first"
                    )
            _require_file(path)
            fd = posix.open_or_create(path)
            try:
                lease = Lease(path, fd, Holder.current())
                lease._claim(folder)
            except BaseException:
                posix.close(fd)
                raise
            _held[lease._identity] = os.getpid()
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
        holder = _read(self._fd)
        if (status.st_dev, status.st_ino) != self._identity or holder != self._holder:
            raise CommitConflictError(
                f"{self._path.parent}: taken over by {holder or 'another process'} while this one, {self._holder}, was "
                "away. What it has committed stays; stop this process"
            )

    def release(self) -> None:
        """Give the lease back; does nothing in a forked process or if another process took the lease.

        A disk that refuses it is logged: it must not hide why a save failed, and the next process takes the lease over.
        """
        if os.getpid() != self._holder.pid:
            return
        with _held_guard:
            if _held.pop(self._identity, None) is None:
                return
            try:
                try:
                    if _read(self._fd) == self._holder:
                        posix.truncate(self._fd, 0)
                finally:
                    posix.close(self._fd)
            except OSError as error:
                logger.warning("%s is not given back: %s", self._path, error)

    def _claim(self, folder: Path) -> None:
        locked = posix.lock(self._fd)
        before = _read(self._fd)
        if locked is False or (before is not None and before.pid != os.getpid() and before.lives_here()):
            raise CommitConflictError(
                f"{folder}: {before or 'another process'} is writing here. Wait for it to end, stop it, or choose "
                "another folder"
            )
        if before is not None:
            logger.warning(
                "%s: taking over from %s, which did not close it; its unfinished saves are discarded", folder, before
            )
        record = json.dumps(asdict(self._holder)).encode()
        posix.pwrite_all(self._fd, record, 0)
        posix.truncate(self._fd, len(record))
        posix.fsync(self._fd)


def holder_of(folder: Path) -> Holder | None:
    """Return the process that the lease of a folder names, alive or not; None without one. Takes no lock."""
    try:
        fd = os.open(folder / LEASE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _read(fd)
    except OSError:  # a pipe, for one
        return None
    finally:
        os.close(fd)


def _require_file(path: Path) -> None:
    """Check that `path` is absent or a regular file. Raises: PreflightError for a link, a folder or a pipe."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise PreflightError(f"{path}: must be a regular file, found something else of that name. Move it away")


def holder_from(value: object) -> Holder | None:
    """Return the holder that JSON describes; None for anything else."""
    try:
        holder = Holder(**value) if isinstance(value, dict) else None
    except TypeError:
        return None
    if holder is None:
        return None
    known = all(type(getattr(holder, field.name)) is (int if field.name == "pid" else str) for field in fields(Holder))
    return holder if known else None


def _read(fd: int) -> Holder | None:
    """Return the holder named in the file; None if the file is empty or was torn by a crash."""
    try:
        return holder_from(json.loads(os.pread(fd, _MAX_BYTES, 0)))
    except (ValueError, RecursionError):
        return None


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return field 22 of /proc/<pid>/stat; "" if there is no such process or it is dead but not yet reaped."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return after_name[19] if len(after_name) > 19 and after_name[0] not in ("Z", "X") else ""
