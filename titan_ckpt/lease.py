"""Who may write into a checkpoint folder: one process at a time, and never one that has been succeeded.

Owns `.lease`: a locked file that names its holder. Whoever can be shown to live keeps it; anyone else is succeeded at
once, because the usual successor is the same job started again on another machine. Safety rests on two things, not on
liveness: a process that was succeeded finds another's name when it looks again, and its staging folders are renamed
away by its successor, so that a commit it was about to make has nothing left to rename.
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

from titan_ckpt import posix
from titan_ckpt.errors import CommitConflictError, PreflightError

LEASE_NAME = ".lease"

_MAX_BYTES = 4096
_held: dict[tuple[int, int], int] = {}
"""(device, inode) -> pid. Locks do not tell a process from itself, and opening the file again would drop the lock."""
_held_guard = threading.Lock()

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process, told apart from any other on any machine at any time."""

    id: str
    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: str
    """Clock ticks from boot to the process's start: a later process with the same pid has another."""

    @staticmethod
    def current() -> Holder:
        """Describe this process, under a new id."""
        return Holder(
            uuid.uuid4().hex, socket.gethostname(), _boot_id(), _pid_namespace(), os.getpid(), _started(os.getpid())
        )

    def lives_here(self) -> bool:
        """Say whether this process is to be seen alive on this machine; False also where that cannot be told."""
        same_machine = (self.boot, self.pid_namespace) == (_boot_id(), _pid_namespace()) and self.boot != ""
        return same_machine and self.started != "" and _started(self.pid) == self.started

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
        """Take the folder over, unless its holder is alive.

        Raises: CommitConflictError naming it; PreflightError; OSError.
        """
        path = folder / LEASE_NAME
        with _held_guard:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                if _held.get((status.st_dev, status.st_ino)) == os.getpid():
                    raise CommitConflictError(f"{folder}: this process already writes here through another object")
            _require_file(path)
            fd = posix.open_or_create(path)
            try:
                lease = Lease(path, fd, Holder.current())
                lease._claim(folder)
            except BaseException:
                os.close(fd)
                raise
            _held[lease._identity] = os.getpid()
        return lease

    def check(self) -> None:
        """Make sure that nobody has taken the folder over. Raises: CommitConflictError; OSError."""
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
        """Give the folder back; does nothing in a forked process or when it has been taken over."""
        if os.getpid() != self._holder.pid:
            return
        with _held_guard:
            if _held.pop(self._identity, None) is None:
                return
            try:
                if _read(self._fd) == self._holder:
                    posix.truncate(self._fd, 0)
            finally:
                posix.close(self._fd)

    def _claim(self, folder: Path) -> None:
        locked = posix.lock(self._fd)
        before = _read(self._fd)
        others = before is not None and before.pid != os.getpid()
        if locked is False or (before is not None and others and before.lives_here()):
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


def _require_file(path: Path) -> None:
    """Raises: PreflightError where a link, a folder or a pipe has the name."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise PreflightError(f"{path}: must be a regular file, found something else of that name. Move it away")


def _read(fd: int) -> Holder | None:
    """Return the holder named in the file; None where it is empty or torn by a crash."""
    try:
        record = json.loads(os.pread(fd, _MAX_BYTES, 0))
        holder = Holder(**record)
    except (ValueError, TypeError, RecursionError):
        return None
    known = all(type(getattr(holder, field.name)) is (int if field.name == "pid" else str) for field in fields(Holder))
    return holder if known else None


def _boot_id() -> str:
    return _text(Path("/proc/sys/kernel/random/boot_id"))


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return field 22 of /proc/<pid>/stat, "" for no such process and for one that is dead but not yet reaped."""
    after_name = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return after_name[19] if len(after_name) > 19 and after_name[0] not in ("Z", "X") else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
