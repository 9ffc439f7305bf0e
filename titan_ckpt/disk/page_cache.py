"""The page cache: how much of a file it holds, and whether it can have changed between a check and a second read.

Owns the questions to the kernel about cached files. Knows no formats and moves no bytes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from pathlib import Path
from typing import Self

from titan_ckpt.disk.kernel import libc
from titan_ckpt.disk.memory import ALIGNMENT

_CACHESTAT = 451
_SETTLED_SECONDS = 1.0
"""A file that changed more recently could change again without a later mtime, because file system clocks tick."""


def cached_bytes(fd: int, offset: int, num_bytes: int) -> int:
    """Return how many of a file's bytes are in the page cache, in whole pages; 0 where the kernel cannot tell.

    Source: cachestat(2), Linux 6.5.
    """
    area = (ctypes.c_uint64 * 2)(offset, num_bytes)
    counts = (ctypes.c_uint64 * 5)()
    failed = libc().syscall(_CACHESTAT, fd, ctypes.byref(area), ctypes.byref(counts), 0)
    return 0 if failed else int(counts[0]) * ALIGNMENT


class Witness:
    """Watches whether the cached pages of a file can have changed since the watch began. Threads may share it.

    Two things can change cached pages. A process writes to the file; its times then change. Or the kernel drops pages
    and reads them again from a disk that may return other bytes; the device counts every sector it reads, for any
    process, before the page is handed over. If neither the times nor the counters changed, no page was filled.
    Source: Linux, Documentation/block/stat.rst, and blk_update_request in block/blk-mq.c.
    """

    def __init__(self, fd: int, counters: int) -> None:
        """Start the watch. `counters` is a descriptor of the device's statistics, which `close` closes."""
        self._fd = fd
        self._counters = counters
        self._before = self._seen()

    @classmethod
    def of(cls, fd: int) -> Self | None:
        """Watch an open file; None where that is impossible: its disk counts no reads, or the file changed just now."""
        status = os.fstat(fd)
        device = _device(status.st_dev)
        if device is None or time.time() - max(status.st_mtime, status.st_ctime) < _SETTLED_SECONDS:
            return None
        try:
            witness = cls(fd, os.open(device / "stat", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None
        if witness._before[-1] == b"0":  # a mounted disk has been read, so this driver does not count
            witness.close()
            return None
        return witness

    def holds(self) -> bool:
        """Return whether the file was not written to and nothing was read from its disk since the watch began."""
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
    """Return the sysfs folder of the disk or partition with this device number; None if it counts no reads."""
    try:
        folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
        queue = (folder if (folder / "queue").is_dir() else folder.parent) / "queue"
        return folder if (queue / "iostats").read_text().strip() == "1" else None
    except OSError:
        return None
