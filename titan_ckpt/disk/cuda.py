"""CUDA as checkpoints use it: page-locked host memory, and copies on streams of their own.

Owns every call of CUDA's runtime and every side stream. Knows no files and no names of tensors. Imports no driver, and
without a CUDA device nothing here is called.

A copy engine reads and writes page-locked memory at the link's speed, other memory at a fraction of it, and then the
host waits. Pages are locked after threads have touched them, because registering faults untouched pages in one by one;
and in pieces, so that a refusal shows early and no call holds the process's memory map for seconds. No copy crosses the
end of a piece: CUDA refuses memory that is registered in part, and promises nothing for two registrations in a row.

Source: CUDA Runtime API, cudaHostRegister and the section on error handling; CUDA Driver API, cuMemcpyAsync;
torch/cuda/_pin_memory_utils.py; torch/distributed/checkpoint/staging.py, which copies on a stream of its own; sglang,
pull request 37285, for what torch's own page-locked memory takes; FastPersist (arXiv 2406.13768), which overlaps a
checkpoint's way to the disk with training.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from titan_ckpt.disk.kernel import ALIGNMENT, Buffer, bytes_at

logger = logging.getLogger(__name__)

REGISTERED_BYTES = 256 << 20
"""Most bytes of one registration."""

_PORTABLE = 1
"""Page-locked for all devices of this process (cudaHostRegisterPortable)."""

_PIECES_IN_FLIGHT = 2
"""A copy of training waits behind at most so many pieces of a save's copy."""


def pin(buffer: Buffer) -> bool:
    """Page-lock memory that was touched before; return whether CUDA has accepted all of it.

    CUDA keeps a refusal for the thread's next check, which may be that of a kernel of training; so
    it is called in a thread that then ends.
    """
    try:
        with ThreadPoolExecutor(1, "titan_ckpt-pin", torch.cuda.set_stream, (torch.cuda.current_stream(),)) as thread:
            status = thread.submit(_register, buffer).result()
    except RuntimeError as error:  # no thread can be started while Python exits
        logger.warning("cannot page-lock %d bytes (%s): copies will be slower", len(buffer.view), error)
        return False
    if status:
        logger.warning("CUDA error %d: it does not register %d bytes of host memory", status, len(buffer.view))
    return not status


def _pieces(buffer: Buffer) -> list[tuple[int, int]]:
    size = len(buffer.view)
    return [(buffer.address + at, min(REGISTERED_BYTES, size - at)) for at in range(0, size, REGISTERED_BYTES)]


def _register(buffer: Buffer) -> int:
    """Register all pieces and return 0, or register none and return CUDA's error."""
    runtime = torch.cuda.cudart()
    pieces = _pieces(buffer)
    for done, (address, num_bytes) in enumerate(pieces):
        if status := int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE)):
            for registered, _ in pieces[:done]:
                runtime.cudaHostUnregister(registered)
            return status
    return 0


def unpin(buffer: Buffer) -> None:
    """Undo `pin`, before the memory is freed and after the last copy."""
    runtime = torch.cuda.cudart()
    for address, _ in _pieces(buffer):
        runtime.cudaHostUnregister(address)


def allocate_pinned(num_bytes: int) -> Buffer | None:
    """Return page-locked memory of CUDA's own, where it registers none; None if it has none.

    torch rounds its size up to a power of two, and keeps it for later allocations when it is freed.
    """
    try:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        logger.warning("no page-locked memory of %d bytes (%s): copies will be slower", num_bytes, error)
        return None
    address = tensor.data_ptr()
    return (
        Buffer(bytes_at(address, num_bytes), address, is_own=True, tensor=tensor) if address % ALIGNMENT == 0 else None
    )


class CopyStreams:
    """A side stream on each of some devices, on which a thread copies to the host while training goes on.

    Copies come in pieces, and few pieces are in flight at a time: a device has one copy engine per direction, and a
    copy of training would wait behind everything that was enqueued before.
    """

    def __init__(self, devices: Collection[torch.device]) -> None:
        """Let the copies follow all work on the current streams. Called by the thread that trains."""
        self._streams = [stream_of(device) for device in devices]
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._in_flight: deque[Sequence[torch.cuda.Event]] = deque()
        self._last: Sequence[torch.cuda.Event] = ()

    def enter(self) -> None:
        """Make this thread copy on the side streams; it does nothing else, and ends with the copy."""
        for stream in self._streams:
            torch.cuda.set_stream(stream)

    def end_piece(self, *, wait: bool) -> None:
        """End a piece of the copy. `wait`: until few enough pieces are in flight."""
        self._last = [stream.record_event(torch.cuda.Event(blocking=True)) for stream in self._streams]
        self._in_flight.append(self._last)
        while wait and len(self._in_flight) >= _PIECES_IN_FLIGHT:
            self._await_oldest()

    def _await_oldest(self) -> None:
        for event in self._in_flight.popleft():
            event.synchronize()

    def finish(self) -> None:
        """Wait until everything has been copied."""
        while self._in_flight:
            self._await_oldest()  # without a processor, unlike the next line
        for stream in self._streams:
            stream.synchronize()

    def join(self) -> None:
        """Let the current streams, but not this thread, wait for all pieces. Called by the thread that trains."""
        for stream, event in zip(self._streams, self._last, strict=False):
            torch.cuda.current_stream(stream.device).wait_event(event)


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a device; it is made once."""
    return torch.cuda.Stream(device)


def settle(devices: Collection[torch.device]) -> None:
    """Wait for this thread's current streams of some CUDA devices."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
