"""The page cache: how much of a file it holds, and proof that what was verified there is what a second read gives.

Owns the questions to the kernel about cached files. Knows no formats and moves no bytes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from pathlib import Path
from typing import Self

from titan_ckpt.storage.memory import ALIGNMENT

_CACHESTAT = 451
_SETTLED_SECONDS = 1.0
"""A file changed more lately than this could change again without a later time: clocks of file systems tick."""


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def cached_bytes(fd: int, offset: int, num_bytes: int) -> int:
    """Return how many of a file's bytes are in the page cache, in whole pages; 0 where the kernel cannot tell.

    Source: cachestat(2), Linux 6.5.
    """
    area = (ctypes.c_uint64 * 2)(offset, num_bytes)
    counts = (ctypes.c_uint64 * 5)()
    failed = _libc().syscall(_CACHESTAT, fd, ctypes.byref(area), ctypes.byref(counts), 0)
    return 0 if failed else int(counts[0]) * ALIGNMENT


class Witness:
    """Knows whether what the page cache had of a file when the watch began is what it has of it now. Threads may ask.

    Two things could change that. Somebody writes to the file: then its times change. Or the kernel drops pages and
    reads them anew, from a disk that may answer otherwise: every sector that is read, for whomever, is counted by the
    device before the page is handed over. So where neither has changed, no page was filled since.
    Source: Linux, Documentation/block/stat.rst, and blk_update_request in block/blk-mq.c.
    """

    def __init__(self, fd: int, counters: int) -> None:
        """`counters`: a descriptor of the device's statistics, which becomes the witness's own."""
        self._fd = fd
        self._counters = counters
        self._before = self._seen()

    @classmethod
    def of(cls, fd: int) -> Self | None:
        """Begin to watch an open file; None where nothing can be told: on no disk that counts, changed just now."""
        status = os.fstat(fd)
        device = _device(status.st_dev)
        if device is None or time.time() - max(status.st_mtime, status.st_ctime) < _SETTLED_SECONDS:
            return None
        try:
            witness = cls(fd, os.open(device / "stat", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None
        if witness._before[-1] == b"0":  # some drivers never count, and a mounted disk has been read
            witness.close()
            return None
        return witness

    def holds(self) -> bool:
        """Say whether nothing was written to the file, and nothing at all read from its disk, since the watch began."""
        return self._counters >= 0 and self._seen() == self._before

    def _seen(self) -> tuple[int | bytes, ...]:
        status = os.fstat(self._fd)
        reads, _, sectors, *_ = os.pread(self._counters, 512, 0).split()
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns, reads, sectors

    def close(self) -> None:
        """End the watch; idempotent."""
        fd, self._counters = self._counters, -1
        if fd >= 0:
            os.close(fd)


@functools.cache
def _device(number: int) -> Path | None:
    """Return the folder of the disk or partition a file is on, if it is one that counts what is read from it."""
    try:
        folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
        queue = (folder if (folder / "queue").is_dir() else folder.parent) / "queue"
        return folder if (queue / "iostats").read_text().strip() == "1" else None
    except OSError:
        return None
