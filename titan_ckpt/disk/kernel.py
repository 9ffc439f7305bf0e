"""The running kernel: its C library and the id of this boot."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library; a failed call sets `ctypes.get_errno`."""
    return ctypes.CDLL(None, use_errno=True)


def boot_id() -> str:
    """Return the id of this boot, which containers of one host share; "" where the system does not tell it."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
