"""The running kernel: its C library, the id of this boot, and memory that it maps."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_MAP_FAILED = ctypes.c_void_p(-1).value

ANY_BYTES = ctypes.c_char * (1 << 46)
"""An array longer than any memory, of which views are cut: a type for each length would be made anew each time."""

_read_mappings: dict[int, int] = {}
"""Bytes at each address where a file is mapped for reading: madvise for each of them slows a load down by 4 %."""


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library; a failed call sets `ctypes.get_errno`."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    return library


def boot_id() -> str:
    """Return the id of this boot, which containers of one host share; "" where the system does not tell it."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def map_memory(num_bytes: int, fd: int = -1, offset: int = 0, *, shared: bool = False) -> memoryview:
    """Map zero pages, or bytes of an open file; they are unmapped with the last view of them.

    Processes that are forked from now on have no such memory: a fork would share its pages, the next write to each
    would copy it first, and a worker would keep a deleted file on the disk. A forked process does not unmap it later,
    because memory of its own may be at that address. Python's mmap would, and it holds a descriptor that is inherited.
    Raises: OSError.
    """
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | (mmap.MAP_ANONYMOUS if fd < 0 else 0)
    is_read = fd >= 0 and not shared  # memory that nobody writes to needs no swap, however large the file is
    protection = mmap.PROT_READ if is_read else mmap.PROT_READ | mmap.PROT_WRITE
    address = libc().mmap(None, num_bytes, protection, flags, fd, offset)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if is_read:
        _read_mappings[address] = num_bytes
    else:
        libc().madvise(address, num_bytes, mmap.MADV_DONTFORK)
    memory = ANY_BYTES.from_address(address)
    weakref.finalize(memory, _unmap, os.getpid(), address, num_bytes).atexit = False
    return memoryview(memory).cast("B")[:num_bytes]


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of memory that may be written to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def release(view: memoryview) -> None:
    """Take the pages that hold a part of a mapped file out of this process; they stay in the page cache."""
    first = address_of(view)
    skipped = first % mmap.ALLOCATIONGRANULARITY
    libc().madvise(first - skipped, skipped + len(view), mmap.MADV_DONTNEED)


def advise(view: memoryview, advice: int) -> None:
    """Call madvise for memory of `map_memory`. Raises: OSError."""
    if libc().madvise(address_of(view), len(view), advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _unmap(pid: int, address: int, num_bytes: int) -> None:
    if os.getpid() == pid:
        _read_mappings.pop(address, None)
        libc().munmap(address, num_bytes)


def _give_up_in_child() -> None:
    for address, num_bytes in _read_mappings.items():
        libc().munmap(address, num_bytes)
    _read_mappings.clear()


os.register_at_fork(after_in_child=_give_up_in_child)
