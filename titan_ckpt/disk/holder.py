"""The process that holds a lock, as a record in the locked file names it: a lock may not reach to another host."""

from __future__ import annotations

import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from titan_ckpt.disk import posix
from titan_ckpt.disk.kernel import boot_id

_MAX_BYTES = 4096


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
        """Return whether this process may be alive where this machine cannot see it: in another container or host.

        Its host's name says nothing, because machines may share one.
        """
        return self.boot == "" or (self.boot, self.pid_namespace) != (boot_id(), _pid_namespace())

    def write(self, fd: int) -> None:
        """Make this the whole and durable content of a file. Raises: OSError."""
        record = json.dumps(asdict(self)).encode()
        posix.pwrite_all(fd, record, 0)
        posix.truncate(fd, len(record))
        posix.fsync(fd)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


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


def read_holder(fd: int) -> Holder | None:
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
