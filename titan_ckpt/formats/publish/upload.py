"""The files of an export in a bucket: one rank uploads each, and gets the other ranks' parts of it.

Owns which rank uploads which file, and the way of bytes between ranks. Knows no tensors.

A bucket has no file that several ranks write, so bytes go through the memory of the rank that uploads their file. The
ranks exchange them in rounds that all make in lockstep, each in a thread of its own, so that a rank that computes its
values, or waits for a collective of them, holds up nobody.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import Ranks
from titan_ckpt.errors import ExportError
from titan_ckpt.formats.publish.outputs import Outputs
from titan_ckpt.formats.safetensors.container import Layout
from titan_ckpt.stores.mounted import store_of
from titan_ckpt.stores.object_writer import no_thread
from titan_ckpt.stores.store import Place

_HEAD = struct.Struct("<qqq")
"""A frame begins with the number of the file, the offset in it, and the number of bytes that follow."""
_QUEUED_BYTES = 32 << 20
"""Bytes that wait to be sent to other ranks; a writer of more waits."""
_ROUND_BYTES = 32 << 20
"""Bytes that a rank receives in one round, from all others together."""
_IDLE_SECONDS = 0.01
_LEAD_BYTES = 128 << 20
"""A rank that is so far ahead of the slowest one in the files waits, because the files hold what comes after a hole."""
_AT_THE_END = 1 << 62


class Uploads(Outputs):
    """The files of an export in a bucket; file n is uploaded by rank n modulo their number."""

    is_sequential = True

    def __init__(self, place: Place, layouts: Mapping[str, Layout], coordinator: Coordinator) -> None:
        """Send nothing yet. `connect` and then `begin` come next."""
        self._coordinator = coordinator
        self._numbers = {name: number for number, name in enumerate(layouts)}
        self._layouts = list(layouts.values())
        self._own = {
            number: store_of(place).new_file(place / name, layouts[name].num_bytes)
            for name, number in self._numbers.items()
            if number % coordinator.world_size == coordinator.rank
        }
        self._courier: Courier | None = None
        sizes = [layout.num_bytes for layout in self._layouts]
        world = coordinator.world_size
        self._starts = [0, *accumulate(max(sizes[first : first + world]) for first in range(0, len(sizes), world))]
        """For each set of files that are written side by side, how many bytes lie before it."""

    def connect(self) -> None:
        """Connect the ranks. Collective; fails on all ranks if one fails. Raises: ExportError; PeerError."""
        if self._coordinator.world_size > 1:
            ranks = everyone(self._coordinator)
            if not self._coordinator.peers.connect(self._coordinator, lambda: {ranks}):
                raise ExportError(
                    "the ranks cannot connect to each other by gloo, and an export in a bucket needs it: open the "
                    "network between the hosts, or export to a folder on a file system that they share"
                )
            courier = Courier(self._coordinator, ranks, self._deliver)
            try:
                self._coordinator.together("export/courier", courier.start)
            except BaseException:
                courier.give_up()
                raise
            courier.begin()
            self._courier = courier

    def begin(self) -> None:
        """Write the headers of this rank's files; a long one is sent at once, in parts. Raises: StoreError."""
        for number, writer in self._own.items():
            writer.write(memoryview(self._layouts[number].header), 0)

    def file(self, name: str) -> UploadedFile:
        return UploadedFile(self, name)

    def position(self, name: str, offset: int) -> int:
        """Return a number by which all bytes are ordered; as many files as there are ranks are written side by side."""
        return self._starts[self._numbers[name] // self._coordinator.world_size] + offset

    def is_ahead(self, position: int) -> bool:
        return self._courier is not None and self._courier.is_ahead(position)

    def wait_for_others(self) -> None:
        assert self._courier is not None
        self._courier.wait_for_others()

    def end(self) -> None:
        if self._courier is not None:
            self._courier.is_ahead(_AT_THE_END)

    def write(self, name: str, view: memoryview, offset: int) -> None:
        """Write bytes of a file, whichever rank uploads it. Raises: StoreError; ExportError."""
        number = self._numbers[name]
        if number in self._own:
            self._own[number].write(view, offset)
        else:
            assert self._courier is not None
            self._courier.send(number % self._coordinator.world_size, number, offset, view)

    def _deliver(self, number: int, offset: int, view: memoryview) -> None:
        self._own[number].write(view, offset)

    def sync(self) -> None:
        """Wait until all ranks have sent everything, and this rank's files are uploaded.

        Every rank calls it, or `close` after an error. Raises: StoreError; ExportError.
        """
        if self._courier is not None:
            self._courier.finish()
        for number, writer in self._own.items():
            writer.finish(self._layouts[number].num_bytes)

    def close(self) -> None:
        """End what is under way; idempotent. Collective after an error, because the ranks end their rounds together."""
        for writer in self._own.values():
            writer.close()
        if self._courier is not None:
            self._courier.close()


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """One file of an export in a bucket."""

    uploads: Uploads
    name: str
    is_direct = False
    is_reserved = False

    def map(self, offset: int, num_bytes: int) -> memoryview:
        raise NotImplementedError("an object has no memory")

    def write(self, view: memoryview, offset: int) -> None:
        self.uploads.write(self.name, view, offset)


def everyone(coordinator: Coordinator) -> Ranks:
    """Return the group that an export in a bucket needs; a background one is connected before it runs."""
    return tuple(range(coordinator.world_size))


class Courier:
    """Carries bytes to other ranks, in rounds that all ranks make, until all have finished."""

    def __init__(self, coordinator: Coordinator, ranks: Ranks, deliver: Callable[[int, int, memoryview], None]) -> None:
        """Send nothing yet. `deliver` gets (number of a file, offset, bytes) of what arrives here, in its thread.

        `start` comes next, and `begin` or `give_up` when it is known whether all ranks have started.
        """
        self._coordinator = coordinator
        self._ranks = ranks
        self._deliver = deliver
        self._most = max(1 << 16, _ROUND_BYTES // len(ranks))
        self._queues: list[deque[tuple[int, int, memoryview]]] = [deque() for _ in ranks]
        self._queued_bytes = 0
        self._position = 0
        self._slowest = 0
        """How far the slowest rank was at the last round."""
        self._slowest_rank = ranks[0]
        self._is_finished = False
        self._is_given_up = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._may_begin = threading.Event()
        self._thread = threading.Thread(target=self._run, name="titan_ckpt-courier", daemon=True)

    def start(self) -> None:
        """Start the thread, which waits for `begin`. Raises: ExportError if there can be no more threads."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ExportError(f"the files cannot be uploaded: {no_thread(error)}") from error

    def begin(self) -> None:
        """Begin the rounds: all ranks have started."""
        self._may_begin.set()

    def give_up(self) -> None:
        """End the thread, because another rank has none."""
        self._is_given_up = True
        self._may_begin.set()

    def send(self, to: int, number: int, offset: int, view: memoryview) -> None:
        """Queue a copy of the bytes. Raises: the error of a delivery or of the exchange."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._queued_bytes < _QUEUED_BYTES)
            self._check()
            self._queues[to].append((number, offset, memoryview(bytes(view))))
            self._queued_bytes += len(view)
            self._changed.notify_all()

    def is_ahead(self, position: int) -> bool:
        """Note how far this rank is, which it tells with the next round; return whether it is far ahead of another."""
        with self._changed:
            self._position = position
            return position < _AT_THE_END and self._slowest + _LEAD_BYTES < position

    def wait_for_others(self) -> None:
        """Wait until this rank is not far ahead. The slowest rank never waits.

        Raises: ExportError if the slowest one does not move for the timeout; as `send`.
        """
        seconds = self._coordinator.timeout_seconds
        with self._changed:
            while self._error is None and self._slowest + _LEAD_BYTES < self._position:
                if not self._has_moved_from(self._slowest, seconds):
                    raise ExportError(
                        f"rank {self._slowest_rank} has not gone on with the files for {seconds:g} s, and this rank is "
                        f"{self._position - self._slowest:,} bytes ahead of it: look into the log of that rank"
                    )
            self._check()

    def _has_moved_from(self, position: int, seconds: float) -> bool:
        """Wait until the slowest rank is elsewhere, or the exchange is broken; return whether either happened."""
        return bool(self._changed.wait_for(lambda: self._error or self._slowest != position, seconds))

    def finish(self) -> None:
        """Wait until all ranks have finished, and everything is delivered. Raises: as `send`."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()
        self._thread.join()
        self._check()

    def close(self) -> None:
        """Drop what is queued, and wait until all ranks have finished or the exchange is broken. Idempotent.

        A rank whose writing is stuck goes on with the rounds and never finishes: after the timeout they end here.
        """
        with self._changed:
            self._error = self._error or ExportError("the export was given up")
            self._is_finished = True
            self._changed.notify_all()
        self._thread.join(self._coordinator.timeout_seconds)
        self._is_given_up = True
        self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise ExportError(f"the files of other ranks cannot be written: {self._error}") from self._error

    def _run(self) -> None:
        self._may_begin.wait()
        try:
            while not (self._is_given_up or self._round()):
                pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _round(self) -> bool:
        """Exchange what is queued; return whether all ranks have finished."""
        frames, is_last = self._take()
        position = _AT_THE_END if is_last else self._position
        sizes = torch.tensor([[len(data), is_last, position] for data in frames], dtype=torch.int64)
        received_sizes = torch.empty_like(sizes)
        ones = [1] * len(frames)
        self._exchange(sizes, ones, received_sizes, ones)
        num_bytes: list[int] = received_sizes[:, 0].tolist()
        with self._changed:
            positions: list[int] = received_sizes[:, 2].tolist()
            self._slowest = min(positions)
            self._slowest_rank = self._ranks[positions.index(self._slowest)]
            self._changed.notify_all()
        send = torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8)
        received = torch.empty(sum(num_bytes), dtype=torch.uint8)
        self._exchange(send, list(map(len, frames)), received, num_bytes)
        at = 0
        for size in num_bytes:
            self._open(received.numpy().data[at : at + size])
            at += size
        return bool(received_sizes[:, 1].all())

    def _exchange(self, send: torch.Tensor, sizes: list[int], into: torch.Tensor, into_sizes: list[int]) -> None:
        seconds = self._coordinator.timeout_seconds
        self._coordinator.peers.exchange(self._ranks, send, sizes, into, into_sizes, seconds).wait()

    def _take(self) -> tuple[list[bytes], bool]:
        """Return the frames for each rank, ended by an empty one, and whether none will follow."""
        deadline = time.monotonic() + _IDLE_SECONDS
        with self._changed:
            self._changed.wait_for(lambda: self._queued_bytes or self._is_finished, max(0, deadline - time.monotonic()))
            if self._error is not None:
                self._queues = [deque() for _ in self._queues]
                self._queued_bytes = 0
            taken = [b"".join(self._frames(queue)) for queue in self._queues]
            is_last = self._is_finished and not self._queued_bytes
            self._changed.notify_all()
        return [frames + _HEAD.pack(-1, 0, 0) for frames in taken], is_last

    def _frames(self, queue: deque[tuple[int, int, memoryview]]) -> list[bytes]:
        parts: list[bytes] = []
        room = self._most
        while queue and room > 0:
            number, offset, view = queue.popleft()
            piece = view[:room]
            if len(piece) < len(view):
                queue.appendleft((number, offset + len(piece), view[len(piece) :]))
            parts += [_HEAD.pack(number, offset, len(piece)), bytes(piece)]
            room -= len(piece)
            self._queued_bytes -= len(piece)
        return parts

    def _open(self, frames: memoryview) -> None:
        """Deliver frames. After an error the rounds go on, because the other ranks wait for them."""
        at = 0
        while True:
            number, offset, num_bytes = _HEAD.unpack_from(frames, at)
            at += _HEAD.size
            if number < 0:
                return
            if self._error is None:
                try:
                    self._deliver(number, offset, frames[at : at + num_bytes])
                except BaseException as error:
                    with self._changed:
                        self._error = error
                        self._changed.notify_all()
            at += num_bytes
