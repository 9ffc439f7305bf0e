"""Page-aligned memory, raw copies, and views of tensors as bytes; direct I/O needs such buffers.

Knows no files and no formats.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from dataclasses import dataclass

import torch

from titan_ckpt.disk import descriptors
from titan_ckpt.disk.kernel import ANY_BYTES, advise, map_memory

ALIGNMENT = 4096
"""Bytes. Direct I/O needs offsets, lengths and memory aligned to the device's logical block; 4 KiB suits all."""

move_bytes = ctypes.memmove
"""memmove(to_address, from_address, num_bytes); releases the interpreter lock."""


def round_up(num_bytes: int, multiple: int = ALIGNMENT) -> int:
    return -(-num_bytes // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Buffer:
    """Aligned memory; `view`, `tensor` (uint8) and `address` name the same bytes."""

    view: memoryview
    tensor: torch.Tensor
    address: int

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
        tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=max(num_bytes, 1))[:num_bytes]
        return Buffer(mapping[:num_bytes], tensor, tensor.data_ptr() if num_bytes else 0)


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A buffer that other processes can map by its descriptor."""

    buffer: Buffer
    fd: int

    @staticmethod
    def allocate(num_bytes: int) -> SharedBuffer:
        """Map unnamed memory; it is freed with its last descriptor and view."""
        fd = descriptors.keep_from_children(os.memfd_create("titan_ckpt-arena", os.MFD_CLOEXEC))
        os.ftruncate(fd, num_bytes)
        return SharedBuffer(Buffer.of(map_memory(num_bytes, fd, shared=True), num_bytes), fd)


def bytes_at(address: int, num_bytes: int) -> memoryview:
    """Return a writable view of raw memory; the caller keeps the memory's owner alive."""
    return memoryview(ANY_BYTES.from_address(address)).cast("B")[:num_bytes]
