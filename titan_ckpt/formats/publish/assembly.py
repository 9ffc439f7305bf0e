"""Assembling rows of a file from parts that several ranks of one machine hold, in shared memory.

Owns the shared slots, which rank writes which rows, and the messages between the ranks. Knows no folder, and not what a
tensor is made of.

A shard of columns is thousands of short runs of a file. Written through a mapping of the file, every page costs a
fault, a page of memory and its writeback. Instead each rank copies its columns of some MiB of rows into memory that is
reused, and one rank in turn writes the whole rows around the page cache. The message that a part is ready carries the
part's digest, so the rank that writes the rows can prove every part later.

Memory and pipes are opened through /proc/<pid>/fd: the kernel checks the permission, and nothing stays behind when a
process is killed. If one rank cannot open those of another rank, all ranks write through mappings instead.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from titan_ckpt.disk.kernel import BOOT_ID
from titan_ckpt.disk.memory import ALIGNMENT, Buffer, SharedBuffer, round_up
from titan_ckpt.errors import PeerError
from titan_ckpt.geometry.chunks import Chunk, Shape

SLOT_BYTES = 4 << 20
NUM_SLOTS = 8
"""So many keep a disk busy to which two ranks write."""
_MESSAGE = struct.Struct("<B3xIQ16s")
"""Kind, number of the part, number of the rows, digest. Far smaller than what a pipe writes atomically."""
_PART, _WRITTEN, _GAVE_UP, _QUIT = range(4)

Boxes = Mapping[str, Sequence[Chunk]]
"""File key -> the boxes of the tensor that one rank holds."""


class GaveUp(Exception):  # noqa: N818 - no error of this rank: the rank that gave up raises it
    """Another rank has failed, so no more rows will be completed."""


class Rows(NamedTuple):
    """Whole rows of a file tensor that fit a slot, and the part of each rank."""

    number: int
    key: str
    chunk: Chunk
    parts: tuple[tuple[int, Chunk], ...]
    """(Rank, box) of each part; together they make up the rows."""
    writer: int
    first: int
    """First row of the ranks' boxes. These rows may be a part of them."""


def whole_rows(
    tables: Mapping[int, Boxes], shapes: Mapping[str, tuple[Shape, int]], in_order: Sequence[str]
) -> Iterator[Rows]:
    """Yield the rows that these ranks can assemble, the same on all of them, in the order in which all do it.

    `tables`: rank -> its boxes, none of which overlap. `shapes`: key -> (shape, bytes of an element).
    """
    number = 0
    for key in in_order:
        shape, itemsize = shapes[key]
        row = Chunk.whole(shape[1:]).numel
        bands: dict[tuple[int, int], list[tuple[int, Chunk]]] = {}
        for rank, boxes in sorted(tables.items()):
            for box in boxes.get(key, ()):
                bands.setdefault((box.offsets[0], box.sizes[0]), []).append((rank, box))
        for (start, count), parts in sorted(bands.items()):
            fits = (SLOT_BYTES - ALIGNMENT) // (row * itemsize)
            if not fits or sum(box.numel for _, box in parts) != count * row:
                continue
            step = fits // _HEAD * _HEAD or fits
            for first in range(start, start + count, step):
                size = min(step, start + count - first)
                pieces = tuple((r, Chunk((first, *b.offsets[1:]), (size, *b.sizes[1:]))) for r, b in parts)
                whole = Chunk((first, *(0 for _ in shape[1:])), (size, *shape[1:]))
                yield Rows(number, key, whole, pieces, pieces[number % len(pieces)][0], start)
                number += 1


_HEAD = 128
"""Rows are cut at multiples of a head's rows if possible, because the rows of a head are permuted in memory."""


class Assembly:
    """The shared slots of one export, seen from one rank. A context manager; leave it when no rank needs it."""

    def __init__(self, rank: int, boxes: Boxes, timeout_seconds: float) -> None:
        """Offer this rank's boxes to the other ranks. Raises: OSError."""
        self.rank = rank
        self._timeout = timeout_seconds
        token = uuid.uuid4().bytes
        table = {key: [[*box.offsets, *box.sizes] for box in held] for key, held in boxes.items()}
        text = token + json.dumps(table).encode()
        boot = BOOT_ID.read_text().strip()
        memory = SharedBuffer.allocate(round_up(len(text)) + NUM_SLOTS * SLOT_BYTES)
        memory.buffer.view[: len(text)] = text
        self._memory_fd = memory.fd
        self._inbox, self._outbox = os.pipe2(os.O_CLOEXEC)
        self.address: list[Any] = [boot, os.getpid(), self._memory_fd, self._outbox, token.hex(), len(text)]
        """JSON by which other ranks find this one's memory and pipe."""
        self._pipes: dict[int, int] = {}
        self._slots: list[Buffer] = []
        self._changed = threading.Condition()
        self._parts: dict[int, dict[int, bytes]] = {}
        self._written: set[int] = set()
        self._gave_up = False
        self._receiver: threading.Thread | None = None

    def connect(self, addresses: Sequence[Any]) -> dict[int, Boxes]:
        """Open what the ranks of this machine offer; return rank -> the boxes that it holds.

        Raises: OSError, ValueError if an offer cannot be opened.
        """
        boot = addresses[self.rank][0]
        ranks = [rank for rank, address in enumerate(addresses) if address and address[0] == boot]
        tables: dict[int, Boxes] = {}
        for rank in ranks:
            _, pid, memory_fd, pipe_fd, token, length = addresses[rank]
            buffer = _open(pid, memory_fd)
            if bytes(buffer.view[:16]).hex() != token:
                raise ValueError(f"process {pid} is not rank {rank}")
            tables[rank] = _parse(bytes(buffer.view[16:length]))
            if rank == ranks[0]:
                self._slots = [buffer.part(round_up(length) + i * SLOT_BYTES, SLOT_BYTES) for i in range(NUM_SLOTS)]
            if rank != self.rank:
                self._pipes[rank] = os.open(f"/proc/{pid}/fd/{pipe_fd}", os.O_WRONLY | os.O_CLOEXEC)
        self._receiver = threading.Thread(target=self._receive, name="titan_ckpt-assembly", daemon=True)
        self._receiver.start()
        return tables

    def slot(self, rows: Rows) -> Buffer:
        """Wait until the slot of these rows is free, and return it. Raises: GaveUp; PeerError."""
        before = rows.number - NUM_SLOTS
        self._wait(lambda: before < 0 or before in self._written, lambda: f"rows {before} are not written")
        return self._slots[rows.number % NUM_SLOTS]

    def put(self, rows: Rows, part: int, digest: bytes) -> None:
        """Tell the writer of these rows that one of their parts is in the slot."""
        self._send([rows.writer], _PART, rows.number, part, digest)

    def complete(self, rows: Rows) -> tuple[tuple[Chunk, bytes], ...]:
        """Wait until the slot has all parts; return each with its digest. Raises: GaveUp; PeerError."""
        digests = self._parts.setdefault(rows.number, {})

        def missing() -> str:
            ranks = sorted({rank for i, (rank, _) in enumerate(rows.parts) if i not in digests})
            return f"rank {', '.join(map(str, ranks))} has not put its part of {rows.key}"

        self._wait(lambda: len(digests) == len(rows.parts), missing)
        del self._parts[rows.number]
        return tuple((box, digests[i]) for i, (_, box) in enumerate(rows.parts))

    def written(self, rows: Rows) -> None:
        """Tell all ranks that the slot of these rows is free."""
        self._send([self.rank, *self._pipes], _WRITTEN, rows.number)

    def give_up(self) -> None:
        """Tell all ranks that this one has failed."""
        self._send([self.rank, *self._pipes], _GAVE_UP)

    def _send(self, ranks: Collection[int], kind: int, rows: int = 0, part: int = 0, digest: bytes = b"") -> None:
        for rank in ranks:
            if rank == self.rank:
                self._take(kind, rows, part, digest)
                continue
            try:
                os.write(self._pipes[rank], _MESSAGE.pack(kind, part, rows, digest))
            except BrokenPipeError:  # that rank has ended; the next exchange of all ranks names it
                self._take(_GAVE_UP, 0, 0, b"")

    def _receive(self) -> None:
        while True:
            for kind, part, rows, digest in _MESSAGE.iter_unpack(os.read(self._inbox, 64 * _MESSAGE.size)):
                if kind == _QUIT:
                    return
                self._take(kind, rows, part, digest)

    def _take(self, kind: int, rows: int, part: int, digest: bytes) -> None:
        with self._changed:
            if kind == _PART:
                self._parts.setdefault(rows, {})[part] = digest
            elif kind == _WRITTEN:
                self._written.add(rows)
            else:
                self._gave_up = True
            self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool], what: Callable[[], str]) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._gave_up or is_so(), self._timeout)
            if self._gave_up:
                raise GaveUp
            if not in_time:
                raise PeerError(f"export: {what()} within {self._timeout:g} s", [])

    def close(self) -> None:
        """Close all descriptors and end the receiving thread; idempotent."""
        if self._receiver is not None:
            os.write(self._outbox, _MESSAGE.pack(_QUIT, 0, 0, b""))
            self._receiver.join()
            self._receiver = None
        pipes, self._pipes = self._pipes, {}
        fds = [*pipes.values(), self._inbox, self._outbox, self._memory_fd] if self._inbox >= 0 else []
        self._inbox = -1
        self._slots = []
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(pid: int, fd: int) -> Buffer:
    """Map another process's shared memory. Raises: OSError; ValueError if it has none."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        num_bytes = os.fstat(own).st_size
        return Buffer.of(mmap.mmap(own, num_bytes), num_bytes)
    finally:
        os.close(own)


def _parse(text: bytes) -> dict[str, list[Chunk]]:
    table: dict[str, list[list[int]]] = json.loads(text)
    return {
        key: [Chunk(tuple(box[: len(box) // 2]), tuple(box[len(box) // 2 :])) for box in boxes]
        for key, boxes in table.items()
    }
