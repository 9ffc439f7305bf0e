"""Every change this package makes to a file system, one small function per operation.

Owns the operations; knows no checkpoints. Call them as `posix.name(...)` and never import a name from this module: the
fault tests wrap each function in `MUTATING` to number, kill, fail and record operations. A test refuses modules that
change files without this one, so that no operation escapes the fault tests.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from titan_ckpt.disk import kernel
from titan_ckpt.disk.kernel import libc, map_memory

MUTATING: set[str] = set()
"""Names of the functions of this module that change a file system."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_LOCK, _UNLOCK = (struct.pack("hhqqq", kind, os.SEEK_SET, 0, 0, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK))
"""Linux's struct flock for the whole file."""


def _mutating(function: _Function) -> _Function:
    MUTATING.add(function.__name__)
    return function


@_mutating
def open_exclusive(path: str | os.PathLike[str]) -> int:
    """Create a new file and return its descriptor, open for reading and writing.

    Raises: FileExistsError, also where a dangling link has the name.
    """
    return kernel.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)


@_mutating
def open_or_create(path: str | os.PathLike[str]) -> int:
    """Open a file for reading and writing, creating it empty where it is absent; never through a symbolic link."""
    return kernel.open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)


@_mutating
def pwrite_all(fd: int, buffer: Any, offset: int) -> None:
    """Write the whole buffer at a byte offset; a short write is continued.

    Raises: OSError; part of the buffer may have been written.
    """
    view = memoryview(buffer).cast("B")
    while len(view):
        written = os.pwrite(fd, view, offset)
        if written == 0:
            raise OSError(errno.EIO, "write made no progress")
        view = view[written:]
        offset += written


@_mutating
def map_shared(fd: int, offset: int, num_bytes: int) -> memoryview:
    """Map part of a file that is open for reading and writing; stores into the memory change the file.

    The range must be reserved by `fallocate`: a store that finds the disk full ends the process.
    """
    return map_memory(num_bytes, fd, offset, shared=True)


@_mutating
def truncate(fd: int, num_bytes: int) -> None:
    """Set the file's size."""
    os.ftruncate(fd, num_bytes)


@_mutating
def fallocate(fd: int, num_bytes: int) -> bool:
    """Give the file this size, so that a full disk fails at once; return False where space cannot be reserved.

    The C library's posix_fallocate writes one byte to every block of 4 KiB where the file system cannot reserve any.
    """
    while code := _fallocate(fd, num_bytes):
        if code in _UNSUPPORTED:
            os.ftruncate(fd, num_bytes)
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


@_mutating
def fsync(fd: int) -> None:
    """Make the file's bytes durable. A failure is final: the kernel may have dropped the dirty pages."""
    os.fsync(fd)


@_mutating
def close(fd: int) -> None:
    """Close a descriptor that was written to. Raises: OSError; network file systems report late write errors now."""
    kernel.close(fd)


@_mutating
def fsync_folder(path: str | os.PathLike[str]) -> None:
    """Make the folder's entries durable, where the file system can sync folders.

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
    """Create a folder and its missing parents; each new entry is durable in its parent."""
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    fsync_folder(path.parent)


def overwrite(fd: int, data: bytes) -> None:
    """Make this the whole and durable content of an open file. Raises: OSError."""
    pwrite_all(fd, data, 0)
    truncate(fd, len(data))
    fsync(fd)


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file whose bytes are durable; `fsync_folder` makes its entry durable. Raises: FileExistsError."""
    write_blocks(path, [data])


def write_blocks(path: str | os.PathLike[str], blocks: Iterable[bytes]) -> None:
    """Do the same with blocks that follow each other."""
    fd = open_exclusive(path)
    try:
        offset = 0
        for block in blocks:
            pwrite_all(fd, block, offset)
            offset += len(block)
        fsync(fd)
    finally:
        close(fd)


@_mutating
def unlink(path: str | os.PathLike[str], parent: int | None = None) -> None:
    """Remove one file, or a link and not what it leads to. `parent`: an open descriptor of the file's folder."""
    os.unlink(path if parent is None else os.path.basename(path), dir_fd=parent)


@_mutating
def rmdir(path: str | os.PathLike[str], parent: int | None = None) -> None:
    """Remove one empty folder; a link stays. `parent`: an open descriptor of the folder that it is in."""
    os.rmdir(path if parent is None else os.path.basename(path), dir_fd=parent)


def remove_tree(path: Path, parent: int | None = None, *, first: str = "", nested: bool = True) -> list[OSError]:
    """Delete a folder and what is in it; return an error for each thing that stays.

    Every deletion of a folder is made here. What a link leads to is never reached: a folder that is a link stays, and
    of a link in a folder the link itself is deleted. `parent`: as in `rmdir`. `first`: the name of the file that goes
    before the others. `nested`: whether folders in it are deleted, too.
    """
    stays: list[OSError] = []
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path if parent is None else path.name, flags, dir_fd=parent)
        try:
            for name in sorted(os.listdir(fd), key=lambda name: (name != first, name)):
                stays += _remove_entry(path / name, fd, nested)
        finally:
            os.close(fd)
        if not stays:
            rmdir(path, parent)
    except FileNotFoundError:
        pass  # another process has removed it
    except OSError as error:
        stays.append(OSError(error.errno, error.strerror, str(path)))
    return stays


def _remove_entry(path: Path, parent: int, nested: bool) -> list[OSError]:
    try:
        if not stat.S_ISDIR(os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode):
            unlink(path, parent)
            return []
    except FileNotFoundError:
        return []
    except OSError as error:
        return [OSError(error.errno, error.strerror, str(path))]
    return remove_tree(path, parent) if nested else [OSError(errno.EISDIR, "a folder that is not ours", str(path))]


@_mutating
def rename_noreplace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file or folder within one file system, never over an existing target.

    If the kernel or the file system lacks RENAME_NOREPLACE, this function first checks that the target does not exist.
    Two writers could pass that check together, which is why a folder has one leased writer.
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


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file in the place of an earlier one; a reader finds either of them whole, or for a moment neither.

    Raises: OSError; then nothing of the new file is left, and the earlier one may be gone.
    """
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        write_file(draft, data)
        with suppress(FileNotFoundError):
            unlink(path)
        rename_noreplace(draft, path)
    except OSError:
        with suppress(OSError):
            unlink(draft)
        raise


def read_whole(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`; never follows a symbolic link, never blocks on a pipe.

    Raises: OSError, with EFBIG if the file is larger and EINVAL if it is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    with os.fdopen(fd, "rb") as file:
        data = file.read(min(status.st_size, max_bytes) + 1)  # memory for as many bytes is taken before the read
        if len(data) > status.st_size:  # it has grown
            data += file.read(max_bytes + 1 - len(data))
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", os.fspath(path))
    return data


def why_no_folder(path: Path) -> str | None:
    """Return why a folder cannot be made, or be written to if it is there; None if it can. Changes nothing."""
    for place in (path, *path.absolute().parents):
        try:
            os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{place}: {error.strerror}"
        if not place.is_dir():
            return f"{place} is a {'link to nothing' if place.is_symlink() else 'file'}, and {path} is to be a folder"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"{path} cannot be written to: {place} does not allow it"
        return None
    return None


def list_folder(path: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder, sorted; [] if the folder is absent."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def is_real_folder(path: Path) -> bool:
    """Return whether `path` is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def lock(fd: int) -> bool | None:
    """Lock the whole file for this descriptor; return whether we hold it, None where the file system has no locks.

    The lock ends by `unlock`, or when this process ends or closes this descriptor by `close`, if no process that it
    forked still has the descriptor; other descriptors of the file do not matter, also of this process. A POSIX lock of
    another process is in its way, and the reverse.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in (errno.ENOLCK, *_UNSUPPORTED):
            return None
        raise
    return True


def unlock(fd: int) -> None:
    """End the lock of this descriptor, also for a forked process that has not closed it yet."""
    with suppress(OSError):  # there are no locks here
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _UNLOCK)


def _fallocate(fd: int, num_bytes: int) -> int:
    """Return 0, or the errno of fallocate(2)."""
    return 0 if libc().fallocate(fd, 0, 0, num_bytes) == 0 else ctypes.get_errno()


def _renameat2(source: str, target: str) -> int:
    """Return 0, or the errno of renameat2(..., RENAME_NOREPLACE)."""
    try:
        function = libc().renameat2
    except AttributeError:
        return errno.ENOSYS
    result = function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    return 0 if result == 0 else ctypes.get_errno()
