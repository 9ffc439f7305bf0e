"""The right to write into a checkpoint folder: one process has it at a time.

Owns the file or object that names the holder: `.lease`, a locked file, or `lease.json`, which is changed by
compare-and-swap and has an epoch, one higher with every holder. A holder that can be shown to be alive keeps the lease;
any other loses it at once to the next process that asks, because that is usually the same job, restarted on another
machine. Safety does not depend on that liveness check, but on two things: a process that lost the lease reads its
successor's name when it checks, and the successor renames its staging folders away or fences its attempts, so that a
commit in progress has nothing left to commit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

from titan_ckpt.disk import posix
from titan_ckpt.disk.kernel import Holder, holder_from, read_holder
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import CommitConflictError, PreflightError
from titan_ckpt.stores.objects import BucketPath, Version
from titan_ckpt.stores.store import Place

LEASE_NAME = ".lease"
LEASE_OBJECT = "lease.json"

held: dict[str, str] = {}
"""Path or URL of each lease that this process has -> the id of its holder."""

logger = logging.getLogger(__name__)


class Lease(ABC):
    """The right to write into one folder, held by this process until `release`."""

    name: ClassVar[str]
    """That of the file or object which names the holder."""

    def __init__(self, root: Any) -> None:
        """Bind to a folder; nothing is touched. `take` comes next, and then `release`, also if `take` raises."""
        self.root = root
        self.place = self.at(root)
        self.holder = Holder.current()

    @classmethod
    def at(cls, root: Any) -> Any:
        """Return where the lease of a folder is."""
        return root / cls.name

    def take(self) -> None:
        """Take the lease, unless its holder is alive.

        Raises: CommitConflictError naming the holder; PreflightError if something else has its name; OSError.
        """
        self._claim(self.root)
        held[str(self.place)] = self.holder.id

    def _claim(self, root: Any) -> None:
        for is_last in (False, False, True):
            before = self.read()
            if before is not None:
                refuse_living(root, self.place, before)
            try:
                self._write(before)
            except FileExistsError:
                other = self.read()
                if not is_last and (other is None or replace(other, id="") == replace(Holder.current(), id="")):
                    continue  # a release, or an earlier request of this process, has arrived late
                raise CommitConflictError(
                    f"{root}: {other or 'another process'} has taken the lease at the same time. Stop one of the two"
                ) from None
            if before is not None:
                logger.warning(
                    "%s: taking over from %s, which did not close it; its unfinished saves are discarded", root, before
                )
            return

    def check_process(self) -> None:
        """Check, without a request, that this process took the lease. Raises: CommitConflictError."""
        if os.getpid() != self.holder.pid:
            raise CommitConflictError(f"{self.place.parent}: held by {self.holder}; a process it forked may not commit")

    def check(self) -> None:
        """Check that this process still holds the lease. Raises: CommitConflictError; OSError."""
        self.check_process()
        try:
            is_own, other = self._look()
        except FileNotFoundError:
            raise CommitConflictError(f"{self.place} is gone: the folder was moved or cleared under this run") from None
        if not is_own:
            raise CommitConflictError(
                f"{self.place.parent}: taken over by {other or 'another process'} while this one, {self.holder}, was "
                "away. What it has committed stays; stop this process"
            )

    def release(self) -> None:
        """Give the lease back; does nothing in a forked process or if another process took the lease.

        An interrupt may leave it, and it is called again then.
        A store that refuses it is logged: it must not hide why a save failed, and the next process takes it over.
        """
        if os.getpid() != self.holder.pid:
            return
        if held.get(str(self.place)) == self.holder.id:
            del held[str(self.place)]
        try:
            self._give_back()
        except OSError as error:
            logger.warning("%s is not given back: %s", self.place, error)

    @staticmethod
    @abstractmethod
    def named_in(root: Any) -> Holder | None:
        """Return the process that the lease of a folder names, alive or not; None without one. Raises: OSError."""

    @abstractmethod
    def read(self) -> Holder | None:
        """Return the process that is named now."""

    @abstractmethod
    def _write(self, before: Holder | None) -> None:
        """Name this process. Raises: FileExistsError if another one has just been named; CommitConflictError."""

    @abstractmethod
    def _look(self) -> tuple[bool, Holder | None]:
        """Return whether this process is named still, and who is. Raises: FileNotFoundError; OSError."""

    @abstractmethod
    def _give_back(self) -> None:
        """Name nobody, if this process is named. Raises: OSError."""


class FileLease(Lease):
    """The lease of a folder on a mounted file system."""

    name = LEASE_NAME
    _fd = -1
    _status: os.stat_result | None = None
    _is_written = False
    """Whether this object has named the holder, and no other one of the process."""

    @staticmethod
    def named_in(root: Path) -> Holder | None:
        """As of Lease. Takes no lock."""
        try:
            fd = os.open(FileLease.at(root), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return read_holder(fd)
        except OSError:  # a pipe, for one
            return None
        finally:
            os.close(fd)

    def _claim(self, root: Path) -> None:
        posix.make_folders(root)
        if os.path.lexists(self.place) and not stat.S_ISREG(os.lstat(self.place).st_mode):
            raise PreflightError(
                f"{self.place}: must be a regular file, found something else of that name. Move it away"
            )
        self._fd = posix.open_or_create(self.place)
        self._status = os.fstat(self._fd)
        super()._claim(root)

    def read(self) -> Holder | None:
        self._is_locked = posix.lock(self._fd)
        return read_holder(self._fd)

    def _write(self, before: Holder | None) -> None:
        if self._is_locked is False:
            raise _conflict(self.place.parent, before)
        self._is_written = True  # or soon
        posix.overwrite(self._fd, self.holder.record())

    def _look(self) -> tuple[bool, Holder | None]:
        status = os.stat(self.place)
        holder = read_holder(self._fd)
        is_same = self._status is not None and os.path.samestat(status, self._status)
        return is_same and holder == self.holder, holder

    def _give_back(self) -> None:
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            if self._status is not None and not os.path.samestat(self._status, os.fstat(self._fd)):
                return  # closed by a call that was interrupted right after it
        try:
            if self._is_written and read_holder(self._fd) == self.holder:
                posix.truncate(self._fd, 0)
                posix.unlock(self._fd)
        except OSError:
            posix.close(self._fd)
            raise
        posix.close(self._fd)


class ObjectLease(Lease):
    """The lease of a place in an ObjectStore."""

    name = LEASE_OBJECT
    epoch = 0
    _version: Version | None = None
    _content = b""
    """The bytes of the object while it names this process; empty before."""

    @staticmethod
    def named_in(root: BucketPath) -> Holder | None:
        """As of Lease. Raises: also PreflightError if another program's object is there."""
        return ObjectLease(root).read()

    def read(self) -> Holder | None:
        self.epoch, self._version = 0, None
        try:
            content, self._version = self.place.bucket.read(self.place.key)
        except FileNotFoundError:
            return None
        lease = _decode(content)
        if lease is None:
            raise PreflightError(
                f"{self.place}: expected a lease of titan_ckpt, found {len(content)} bytes of another program. Is the "
                "endpoint right? Else name another folder, or move the object away"
            )
        self.epoch, holder = lease
        return holder

    def _write(self, before: Holder | None) -> None:
        self.epoch += 1
        self._content = _encode(self.epoch, self.holder)
        try:
            if self._version is None:
                self.place.bucket.create(self.place.key, self._content)
            else:
                self.place.bucket.replace(self.place.key, self._content, self._version)
        except OSError:  # there is no more to ask a store that does not answer
            self._content = b""
            raise

    def _look(self) -> tuple[bool, Holder | None]:
        content, _ = self.place.bucket.read(self.place.key)
        return content == self._content, (_decode(content) or (0, None))[1]

    def _give_back(self) -> None:
        if not self._content:
            return
        content, version = self.place.bucket.read(self.place.key)
        if content == self._content:
            self.place.bucket.replace(self.place.key, _encode(self.epoch, None), version)


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


def _encode(epoch: int, holder: Holder | None) -> bytes:
    return json.dumps({"epoch": epoch, "holder": None if holder is None else asdict(holder)}).encode()


def _decode(content: bytes) -> tuple[int, Holder | None] | None:
    """Return the epoch and the holder that the bytes name; None for anything else."""
    try:
        value: Json = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.keys() != {"epoch", "holder"}:
        return None
    epoch, holder = value["epoch"], value["holder"]
    if type(epoch) is not int or (holder is not None and holder_from(holder) is None):
        return None
    return epoch, holder_from(holder)
