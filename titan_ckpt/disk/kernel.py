"""Asks the running kernel: for its C library, mapped memory, open files, and the identity of this process.

Owns the descriptors that this process keeps open and no process that it forks keeps. A DataLoader's worker may live as
long as the training: a descriptor that it inherited would keep a deleted file on the disk, a pipe open and a lock held.
So each becomes one of /dev/null in a forked process. It is not closed there, because a copy of the object that holds it
may close it later, when a file of that process has its number. A file that another thread is opening at the moment of a
fork is not in the list yet: that one is inherited.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import mmap
import os
import socket
import uuid
import weakref
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

ALIGNMENT = 4096
"""Bytes. Direct I/O needs offsets, lengths and memory aligned to the device's logical block; 4 KiB suits all."""

move_bytes = ctypes.memmove
"""memmove(to_address, from_address, num_bytes); releases the interpreter lock."""

_MAP_FAILED = ctypes.c_void_p(-1).value

ANY_BYTES = ctypes.c_char * (1 << 46)
"""An array longer than any memory, of which views are cut: a type for each length would be made anew each time."""

_read_mappings: dict[int, int] = {}
"""Bytes at each address where a file is mapped for reading: madvise for each of them slows a load down by 4 %."""

_open: set[int] = set()

_MAX_HOLDER_BYTES = 4096


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


def advise(view: memoryview, advice: int) -> None:
    """Call madvise for memory of `map_memory`. Raises: OSError."""
    if libc().madvise(address_of(view), len(view), advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def bytes_at(address: int, num_bytes: int) -> memoryview:
    """Return a writable view of raw memory; the caller keeps the memory's owner alive."""
    return memoryview(ANY_BYTES.from_address(address)).cast("B")[:num_bytes]


def _unmap(pid: int, address: int, num_bytes: int) -> None:
    if os.getpid() == pid:
        _read_mappings.pop(address, None)
        libc().munmap(address, num_bytes)


def round_up(num_bytes: int, multiple: int = ALIGNMENT) -> int:
    return -(-num_bytes // multiple) * multiple


class Buffer:
    """Memory, which is aligned if it is our own; `view`, `tensor` (uint8) and `address` name the same bytes."""

    __slots__ = ("_tensor", "address", "is_own", "view")

    def __init__(self, view: memoryview, address: int, *, is_own: bool, tensor: torch.Tensor | None = None) -> None:
        self.view, self._tensor, self.address, self.is_own = view, tensor, address, is_own

    @property
    def tensor(self) -> torch.Tensor:
        """Made when it is asked for: with several threads, each call of torch costs a wait."""
        if self._tensor is None:
            import torch  # the commands that show a folder do not wait for it, and the writer process has none

            memory = self.view if self.is_own else bytes_at(self.address, len(self.view))
            self._tensor = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
        return self._tensor

    @staticmethod
    def over(memory: memoryview) -> Buffer:
        """Take a mapping, or a client's answer, which nobody may write to. The caller keeps `memory`."""
        import numpy as np

        address = np.frombuffer(memory, np.uint8).ctypes.data if memory.readonly else address_of(memory)
        return Buffer(memory, address, is_own=False)

    @staticmethod
    def allocate(num_bytes: int) -> Buffer:
        """Map anonymous zero pages, huge ones where the kernel gives them; they are not touched yet."""
        return Buffer.of(map_memory(max(num_bytes, 1)), num_bytes)

    @staticmethod
    def of(mapping: memoryview, num_bytes: int) -> Buffer:
        """Wrap memory of `map_memory`, which lives as long as the tensor or the view."""
        if num_bytes >= 2 << 20:
            with contextlib.suppress(OSError):  # a kernel without huge pages copies a little slower
                advise(mapping, mmap.MADV_HUGEPAGE)
        return Buffer(mapping[:num_bytes], address_of(mapping) if num_bytes else 0, is_own=True)


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A buffer that other processes can map by its descriptor."""

    buffer: Buffer
    fd: int

    @staticmethod
    def allocate(num_bytes: int) -> SharedBuffer:
        """Map unnamed memory; it is freed with its last descriptor and view."""
        fd = keep_from_children(os.memfd_create("titan_ckpt-arena", os.MFD_CLOEXEC))
        os.ftruncate(fd, num_bytes)
        return SharedBuffer(Buffer.of(map_memory(num_bytes, fd, shared=True), num_bytes), fd)


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


@dataclass(frozen=True, slots=True)
class Holder:
    """Identity of a process that holds a lock, unique over machines and time, as a record in the locked file names it.

    A lock may not reach to another host.
    """

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

    def record(self) -> bytes:
        """Return the content of a file that names this process."""
        return json.dumps(asdict(self)).encode()

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
        return holder_from(json.loads(os.pread(fd, _MAX_HOLDER_BYTES, 0)))
    except (ValueError, RecursionError):
        return None


def boot_id() -> str:
    """Return the id of this boot, which containers of one host share; "" where the system does not tell it."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


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


def _give_up_in_child() -> None:
    for address, num_bytes in _read_mappings.items():  # first: a process that has all its descriptors opens no other
        libc().munmap(address, num_bytes)
    _read_mappings.clear()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _open:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _open.clear()


os.register_at_fork(after_in_child=_give_up_in_child)
