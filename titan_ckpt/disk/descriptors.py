"""Descriptors that this process keeps open, and that no process it forks keeps.

Owns the list of them. A DataLoader's worker may live as long as the training: a descriptor that it inherited would keep
a deleted file on the disk, a pipe open and a lock held. So each becomes one of /dev/null in a forked process. It is not
closed there, because a copy of the object that holds it may close it later, when a file of that process has its number.

A file that another thread is opening at the moment of a fork is not in the list yet: that one is inherited.
"""

from __future__ import annotations

import os

_open: set[int] = set()


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
    """Open a file that no child inherits, forked or executed; `close` closes it. Raises: OSError."""
    return keep_from_children(os.open(path, flags | os.O_CLOEXEC, mode))


def keep_from_children(fd: int) -> int:
    """Note an open descriptor, which `close` closes, and which no object closes when it is collected."""
    _open.add(fd)
    return fd


def close(fd: int) -> None:
    """Close a descriptor. Raises: OSError."""
    _open.discard(fd)  # first: its number may soon be that of another file, which children inherit
    os.close(fd)


def _give_up_in_child() -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _open:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _open.clear()


os.register_at_fork(after_in_child=_give_up_in_child)
