"""Checks before step 1 that saves will work in a folder: space, permissions, and a tiny real save.

The checks run on the folder's own file system and leave nothing behind. They know no tensors: the caller tells how many
bytes a save takes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import uuid
from pathlib import Path

from titan_ckpt.directory.names import STAGING, TRASH
from titan_ckpt.directory.trash import discard, empty
from titan_ckpt.disk import posix
from titan_ckpt.errors import PreflightError

SPACE_FACTOR = 1.05
"""Free bytes required per byte of a save, for block rounding, the manifest, and files that others write meanwhile."""

_PROBE = bytes(range(256)) * 16


def require_space(root: Path, num_bytes: int) -> None:
    """Check the free space. Raises: PreflightError if less than 1.05 x `num_bytes` is free for this user."""
    status = os.statvfs(root)
    free = status.f_bavail * status.f_frsize
    wanted = int(num_bytes * SPACE_FACTOR)
    if free < wanted:
        failure = PreflightError(
            f"{root}: a save takes {_mib(num_bytes)} MiB and wants {_mib(wanted)} MiB free, found {_mib(free)} MiB. "
            "Free some space, keep fewer steps, or choose another folder"
        )
        failure.errno = errno.ENOSPC
        raise failure


def begin_probe(root: Path) -> str:
    """Rank 0: make the staging folder of a test save; return its name. Raises: OSError."""
    name = f"step-0.{uuid.uuid4().hex}"
    posix.mkdir(root / STAGING / name)
    return name


def write_probe(root: Path, name: str, rank: int) -> None:
    """Every rank: write 4 KiB. Raises: PreflightError if this rank does not see the folder; OSError."""
    try:
        posix.write_file(root / STAGING / name / f"probe-{rank:05d}", _PROBE)
    except FileNotFoundError:
        raise PreflightError(
            f"{root}: rank {rank} on {socket.gethostname()} does not see what rank 0 makes there. The folder must be "
            "on a file system that all ranks share"
        ) from None


def end_probe(root: Path, name: str, world_size: int) -> None:
    """Rank 0: sync, rename, read back and delete the files of all ranks. Raises: PreflightError; OSError."""
    staging = root / STAGING / name
    place = root / TRASH / f"preflight-{name}"
    posix.fsync_folder(staging)
    posix.fsync_folder(staging.parent)
    posix.rename_noreplace(staging, place)
    posix.fsync_folder(place.parent)
    posix.fsync_folder(root)
    contents = [posix.read_whole(place / name, len(_PROBE)) for name in posix.list_folder(place)]
    problems = empty(place)
    if contents != [_PROBE] * world_size or problems:
        cause = "; ".join(problems) or f"{contents.count(_PROBE)} of {world_size} ranks' bytes came back"
        raise PreflightError(f"{root}: a test save failed: {cause}")


def abandon_probe(root: Path, name: str) -> None:
    """Rank 0: remove the files of a failed test save, as far as possible."""
    with contextlib.suppress(OSError):
        discard(root, root / STAGING / name, "preflight")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
