"""Every change this package makes to a file system, one small function per operation.

Owns the operations; knows no checkpoints. Call them as `posix.name(...)`, never `from titan_ckpt.posix import name`:
the fault tests wrap each function in `MUTATING` to number, kill, fail and record operations, and a test refuses any
other module that changes files by another way, so a new operation cannot escape them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

MUTATING: set[str] = set()
"""Names of the functions here that change a file system."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def _mutating(function: _Function) -> _Function:
    MUTATING.add(function.__name__)
    return function


@_mutating
def open_exclusive(path: str | os.PathLike[str], extra_flags: int = 0) -> int:
    """Create a new file and return its descriptor, open for reading and writing; `extra_flags` may add O_DIRECT.

    Raises: FileExistsError, also where a dangling link has the name.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW | extra_flags
    return os.open(path, flags, 0o644)


@_mutating
def open_or_create(path: str | os.PathLike[str]) -> int:
    """Open a file for reading and writing, creating it empty where it is absent; never through a symbolic link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


@_mutating
def pwrite_all(fd: int, buffer: Any, offset: int) -> None:
    """Write the whole buffer at a byte offset, going on after short writes.

    Raises: OSError; part of the buffer may then be written.
    """
    view = memoryview(buffer).cast("B")
    while len(view):
        written = os.pwrite(fd, view, offset)
        if written == 0:
            raise OSError(errno.EIO, "write made no progress")
        view = view[written:]
        offset += written


@_mutating
def map_shared(fd: int, offset: int, num_bytes: int) -> mmap.mmap:
    """Map part of a file that is open for reading and writing: what is stored into the memory is in the file.

    The range must be allocated, for a store that finds the disk full ends the process.
    """
    return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)


@_mutating
def truncate(fd: int, num_bytes: int) -> None:
    """Set the file's size."""
    os.ftruncate(fd, num_bytes)


@_mutating
def fallocate(fd: int, num_bytes: int) -> None:
    """Reserve the first `num_bytes` where the file system can; a full disk is found here rather than half way."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


@_mutating
def fsync(fd: int) -> None:
    """Make the file's bytes durable. A failure is final: the kernel may have dropped the dirty pages."""
    os.fsync(fd)


@_mutating
def close(fd: int) -> None:
    """Close a descriptor that was written; network file systems report late write errors here."""
    os.close(fd)


@_mutating
def fsync_folder(path: str | os.PathLike[str]) -> None:
    """Make the folder's entries durable, where the file system can do that for folders at all.

    Source: PostgreSQL fd.c fsync_fname_ext, which ignores the same two errors for folders.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL):
            raise
    finally:
        os.close(fd)


@_mutating
def mkdir(path: str | os.PathLike[str]) -> None:
    """Create one folder. Raises: FileExistsError."""
    os.mkdir(path)


def make_folders(path: Path) -> None:
    """Create a folder and the parents it lacks, each durable in its parent."""
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    fsync_folder(path.parent)


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file whose bytes are durable; its entry is when the folder is synced. Raises: FileExistsError."""
    fd = open_exclusive(path)
    try:
        pwrite_all(fd, data, 0)
        fsync(fd)
    finally:
        close(fd)


@_mutating
def unlink(path: str | os.PathLike[str]) -> None:
    """Remove one file."""
    os.unlink(path)


@_mutating
def rmdir(path: str | os.PathLike[str]) -> None:
    """Remove one empty folder."""
    os.rmdir(path)


@_mutating
def rename_noreplace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file or folder within one file system, never over something that is there.

    Where the kernel or file system lacks RENAME_NOREPLACE the target is looked for first; two writers could then
    pass that check together, which is why a folder has one leased writer.
    Raises: FileExistsError; OSError.
    """
    code = _renameat2(os.fspath(source), os.fspath(target))
    if code == 0:
        return
    if code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code), os.fspath(source), None, os.fspath(target))
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(source), None, os.fspath(target))
    os.rename(source, target)


def read_whole(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`, never through a symbolic link and never blocking on a pipe.

    Raises: OSError, with EFBIG if it is larger and EINVAL if it is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not _is_regular(os.fstat(fd)):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    with os.fdopen(fd, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", os.fspath(path))
    return data


def list_folder(path: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder, sorted; an absent folder has none."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def is_real_folder(path: Path) -> bool:
    """Say whether this is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def lock(fd: int) -> bool | None:
    """Take the whole file's POSIX lock; return whether we hold it, None where the file system has no locks.

    A POSIX lock, not flock: forked children (dataloader workers) do not inherit it, so it ends with the process that
    took it. It also ends when this process closes *any* descriptor of the file.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in (errno.ENOLCK, *_UNSUPPORTED):
            return None
        raise
    return True


def _is_regular(status: os.stat_result) -> bool:
    return (status.st_mode & 0o170000) == 0o100000


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _renameat2(source: str, target: str) -> int:
    """Return 0 or the errno of renameat2(..., RENAME_NOREPLACE)."""
    try:
        function = _libc().renameat2
    except AttributeError:
        return errno.ENOSYS
    result = function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    return 0 if result == 0 else ctypes.get_errno()
