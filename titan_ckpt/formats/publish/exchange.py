"""The exchange of an export: values go to the rank that writes their run of a file.

Owns the way of values between ranks, and which ranks share the rows of a tensor. Opens no file.

A shard of columns is thousands of short runs of a file, so on a disk the ranks that share rows divide these, and each
writes whole ones. A bucket has no file that several ranks write, so one rank writes all of it. In both, values go to
the rank that owns their run, which puts it together and writes it at once.

The ranks of a group exchange in rounds of bounded size, which all make in lockstep, each in a thread of its own, so
that a rank that computes its values, or waits for a collective of them, holds up nobody. No list of what comes is sent:
values travel with their box, and with the digest that their own rank took, so the rank that writes them can prove them.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Replicate

from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.disk.kernel import ALIGNMENT, Buffer, move_bytes, round_up
from titan_ckpt.disk.workers import run_workers
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import ExchangeBroken, Ranks
from titan_ckpt.errors import ExportError
from titan_ckpt.formats.publish.proof import digest
from titan_ckpt.geometry.boxes import boxes, hull
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo, chunks_at, info_of, require_range, sharding_of
from titan_ckpt.stores.object_files import no_thread
from titan_ckpt.weights.transforms import FileGroup

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

_HEAD = struct.Struct("<qqqq")
"""Values begin with the numbers of their tensor and its run, and of their dims and bytes; offsets, sizes, digest."""
_DIGEST_BYTES = 16
"""Also a multiple of the size of any element, to which all that is sent is padded."""
_MIN_ROOM = 1 << 16
"""A rank may always send another one so many bytes in a round."""
_MIN_POOLED_BYTES = 512 << 10
"""A smaller run has memory of its own size: thousands may be incomplete at a time, and a pooled one is a huge page."""
_IDLE_SECONDS = 0.01
_HEAD_ROWS = 128
"""Rows are cut at multiples of a head's rows if possible, because the rows of a head are permuted in memory."""
AT_THE_END = 1 << 62


Marks = Sequence[tuple[Chunk, bytes]]
"""(Box, digest) of each rank's part of values."""
_Filled = tuple[Block, Marks, Buffer | None]
"""What this rank writes, in host memory and in the file's dtype; its marks; memory that is free after that."""


class _Run:
    """A run that is put together in memory, which is aligned as the file is."""

    def __init__(self, chunk: Chunk, info: TensorInfo, position: int, offset: int, memory: Buffer) -> None:
        self.chunk = chunk
        self.position = position
        self.memory = memory
        first = offset % ALIGNMENT
        flat = memory.tensor[first : first + chunk.numel * info.dtype.itemsize]
        self.values = flat.view(info.dtype).view(chunk.sizes)
        self.parts: list[tuple[Chunk, bytes]] = []

    def takes(self, box: Chunk) -> bool:
        """Return whether nothing of a box is there yet: tied tensors, and replicas, may come twice."""
        return all(box.intersect(other) is None for other, _ in self.parts)

    @property
    def is_whole(self) -> bool:
        return sum(box.numel for box, _ in self.parts) == self.chunk.numel


class _Page:
    """What goes to each rank of a group in one round, and what comes. What this rank keeps is last, and is not sent."""

    def __init__(self, num_ranks: int, own: int, room: int) -> None:
        self.memory = Buffer.allocate(num_ranks * room)
        self.used = [0] * num_ranks
        self.starts = [
            room * (num_ranks - 1 if number == own else number - (number > own)) for number in range(num_ranks)
        ]
        self.own = own
        self.inbox = Buffer.allocate((num_ranks - 1) * room).tensor
        self.received = self.inbox[:0]
        """What the other ranks have sent, one after the other, when `work` has ended."""
        self.work: Any = None
        self.slowest = 0
        """How far the slowest rank was."""
        self.is_last = False

    def joined(self) -> tuple[torch.Tensor, list[int]]:
        """Move what goes to the others together; return all of it, and how much goes to each rank."""
        sent = [*self.used]
        sent[self.own] = end = 0
        for start, used in zip(self.starts, sent, strict=True):
            if used and end != start:
                move_bytes(self.memory.address + end, self.memory.address + start, used)
            end += used
        return self.memory.tensor[:end], sent

    def kept(self) -> torch.Tensor:
        """Return what stays on this rank."""
        start = self.starts[self.own]
        return self.memory.tensor[start : start + self.used[self.own]]


def everyone(coordinator: Coordinator) -> Ranks:
    """Return the group that exchanges all values of an export in a bucket."""
    return tuple(range(coordinator.world_size))


def row_peers(groups: Iterable[FileGroup]) -> dict[str, Ranks]:
    """Return file key -> the ranks that share its rows with this rank, found without asking them.

    Along each axis of a tensor's mesh, the neighbour's pieces have the same rows as this rank's, or others. A key is
    left out if this rank has whole rows of it, or if tensors with different peers make it.
    """
    peers: dict[str, set[Ranks]] = {}
    known: dict[tuple[Any, ...], Ranks] = {}
    for group in groups:
        if group.quantized:
            continue
        shapes = tuple(info_of(value).shape for value in group.values)
        for index, value in enumerate(group.values):
            sharding = sharding_of(value)
            ranks: Ranks = ()
            if sharding is not None and sharding.mesh.size() > 1:
                alike = id(group.op), shapes, index, sharding
                if alike not in known:
                    known[alike] = _peers_of(group, index, sharding)
                ranks = known[alike]
            for key in group.infos:
                peers.setdefault(key, set()).add(ranks)
    return {key: ranks for key, of_key in peers.items() if len(of_key) == 1 for ranks in of_key if len(ranks) > 1}


def _peers_of(group: FileGroup, index: int, sharding: DTensorSpec) -> Ranks:
    mesh, shape = sharding.mesh, info_of(group.values[index]).shape
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()

    def bands(at: Sequence[int]) -> set[tuple[str, int, int]]:
        chunks = chunks_at(shape, sharding.placements, mesh.shape, tuple(at))
        blocks = (Block(chunk, torch.empty(chunk.sizes, device="meta")) for chunk, _ in chunks if chunk.numel)
        pieces = (piece for block in blocks for piece in group.cut(index, block) if piece.chunk.sizes)
        return {(piece.key, piece.chunk.offsets[0], piece.chunk.sizes[0]) for piece in pieces}

    own = bands(coordinate)
    place: list[int | slice] = [*coordinate]
    for axis, placement in enumerate(sharding.placements):
        neighbour = [*coordinate]
        neighbour[axis] = 1 if coordinate[axis] == 0 else 0
        if not isinstance(placement, Replicate) and mesh.shape[axis] > 1 and bands(neighbour) == own:
            place[axis] = slice(None)
    return tuple(sorted(mesh.mesh[tuple(place)].flatten().tolist()))


@cache
def runs_of(info: TensorInfo) -> tuple[Chunk, ...]:
    """Cut a file tensor into runs of the file, each of which fits one write."""
    most = (IO_BYTES - ALIGNMENT) // info.dtype.itemsize
    row = math.prod(info.shape[1:])
    if info.shape and 0 < row * _HEAD_ROWS <= most:
        most -= most % (row * _HEAD_ROWS)
    return tuple(boxes(Chunk.whole(info.shape), most)) if 0 not in info.shape else ()


def part_of(piece: Block, box: Chunk) -> torch.Tensor:
    """Return the values of a box in a piece, in the order of the box's elements.

    A view may have a row per head. Of one whose rows are no rows of the file, all values are copied for each box.
    """
    view, sizes = piece.data, piece.chunk.sizes
    if view.shape == sizes or not (view.dim() and sizes) or sizes[0] % len(view):
        return view.reshape(sizes)[box.within(piece.chunk)]
    start = box.offsets[0] - piece.chunk.offsets[0]
    stop, step = start + box.sizes[0], sizes[0] // len(view)
    values = view[start // step : -(-stop // step)]
    if start % step or stop % step or box.sizes[1:] != sizes[1:]:
        first = start // step * step + piece.chunk.offsets[0]
        rows = values.reshape(-1, *sizes[1:])
        return rows[box.within(Chunk((first, *piece.chunk.offsets[1:]), tuple(rows.shape)))]
    return values


def cast_into(out: torch.Tensor, values: torch.Tensor, key: str) -> None:
    """Copy the values of a tensor to host memory, in its dtype; those of a device are cast there.

    torch would copy them as they are to fresh host memory that is not page-locked, and cast them there.
    Raises: ExportError for values beyond the dtype's range.
    """
    require_range(key, values, out.dtype)
    out.copy_(values if values.is_cpu else values.to(out.dtype))


class Exchange:
    """This rank's side of all rounds of a group. `start` comes first, `finish` or `close` last."""

    def __init__(
        self,
        coordinator: Coordinator,
        ranks: Ranks,
        infos: Mapping[str, TensorInfo],
        place_of: Callable[[str, Chunk], tuple[int, int]],
        owner_of: Callable[[str, int], int],
        write: Callable[[Block, Marks], None],
        round_bytes: int,
        lead_bytes: int,
    ) -> None:
        """Send nothing yet.

        `infos`: all file tensors, in the same order on all ranks. `place_of` returns (the position of a box among all
        files, its first byte in its own), `owner_of` the rank that writes a run of a tensor, by the run's number.
        `write` is called with what this rank writes, in several threads: runs, or boxes where one is not put together.
        `round_bytes`: about what a rank receives in one round, which may hold one write. `lead_bytes`: a rank that is
        so far ahead of the slowest one in the files waits, because runs are held until they are whole.
        """
        self.ranks = ranks
        self._coordinator = coordinator
        self._infos = infos
        self._keys = [*infos]
        self._numbers = {key: number for number, key in enumerate(infos)}
        self._place_of = place_of
        self._owner_of = owner_of
        self._write = write
        self._room = max(_MIN_ROOM, round_up(round_bytes // len(ranks), _DIGEST_BYTES))
        self._lead = lead_bytes
        self._page: _Page | None = None
        self._pages: list[_Page] = []
        self._runs: dict[tuple[int, int], _Run] = {}
        self._free: list[Buffer] = []
        self._is_filling = self._is_full = False
        self._position = self._slowest = 0
        """How far this rank and the slowest one were at the last round."""
        self._slowest_rank = ranks[0]
        self._is_finished = self._is_given_up = False
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        """Taken itself: an interrupt as `with` leaves a condition, whose methods are Python's, would leave it taken."""
        self._changed = threading.Condition(self._lock)
        self._may_begin = threading.Event()
        self._thread = threading.Thread(target=self._run, name="titan_ckpt-exchange", daemon=True)

    def start(self) -> str | None:
        """Start the thread, which waits for `begin`; return why there can be no more threads. Raises: OSError."""
        own = self.ranks.index(self._coordinator.rank)
        self._page, *self._pages = (_Page(len(self.ranks), own, self._room) for _ in range(2))
        try:
            self._thread.start()
        except RuntimeError as error:
            return no_thread(error)
        return None

    def begin(self) -> None:
        """Begin the rounds: all ranks have started."""
        self._may_begin.set()

    def give_up(self) -> None:
        """End the thread, because another rank has none."""
        self._is_given_up = True
        self._may_begin.set()

    def reach(self, position: int) -> None:
        """Tell how far this rank is; wait while it is far ahead of another one. The slowest rank never waits.

        Raises: ExportError if the slowest one does not move for the timeout; as `put`.
        """
        seconds = self._coordinator.timeout_seconds
        with self._lock:
            self._position = position
            while self._error is None and self._slowest + self._lead < position:
                self._is_full = True  # the others hear at once that this rank has come so far
                self._changed.notify_all()
                if not self._has_moved_from(self._slowest, seconds):
                    raise ExportError(
                        f"rank {self._slowest_rank} has not gone on with the files for {seconds:g} s, and this rank is "
                        f"{position - self._slowest:,} bytes ahead of it: look into the log of that rank"
                    )
            self._check()

    def _has_moved_from(self, position: int, seconds: float) -> bool:
        """Wait until the slowest rank is elsewhere, or the exchange is broken; return whether either happened."""
        return bool(self._changed.wait_for(lambda: self._error or self._slowest != position, seconds))

    def runs_in(self, piece: Block) -> Iterator[tuple[int, int]]:
        """Yield (position, number) of the runs that a piece has values of."""
        for number, run in enumerate(runs_of(self._infos[piece.key])):
            if piece.chunk.intersect(run) is not None:
                yield self._place_of(piece.key, run)[0], number

    def put(self, piece: Block, number: int) -> None:
        """Send a copy of a piece's part of a run to the rank that writes it. For one thread.

        Raises: the error of the exchange.
        """
        info = self._infos[piece.key]
        num_dims, itemsize = len(info.shape), info.dtype.itemsize
        part = piece.chunk.intersect(runs_of(info)[number])
        assert part is not None, "runs_in() names the runs"
        start = _HEAD.size + 16 * num_dims + _DIGEST_BYTES
        to = self.ranks.index(self._owner_of(piece.key, number))
        for box in boxes(part, (self._room - start) // _DIGEST_BYTES * _DIGEST_BYTES // itemsize):
            num_bytes = box.numel * itemsize
            head = _HEAD.pack(self._numbers[piece.key], number, num_dims, num_bytes)
            head += struct.pack(f"<{2 * num_dims}q", *box.offsets, *box.sizes)
            try:
                page, at = self._reserve(to, start + round_up(num_bytes, _DIGEST_BYTES))
                values, stop = part_of(piece, box), at + start + num_bytes
                memory = page.memory.tensor[at + start : stop].view(info.dtype)
                cast_into(memory.view(values.shape), values, piece.key)
                page.memory.view[at : at + start] = head + digest(page.memory.view[at + start : stop])
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                with self._lock:
                    self._is_filling = False
                    self._changed.notify_all()

    def _reserve(self, to: int, num_bytes: int) -> tuple[_Page, int]:
        """Return room on the page for a rank, and where it begins; nothing is sent until it is filled."""
        with self._lock:
            while self._error is None and (self._page is None or self._page.used[to] + num_bytes > self._room):
                self._is_full = self._page is not None
                self._changed.notify_all()
                self._changed.wait()
            self._check()
            assert self._page is not None
            at = self._page.starts[to] + self._page.used[to]
            self._page.used[to] += num_bytes
            self._is_filling = True
            return self._page, at

    def end(self) -> None:
        """Tell that this rank sends nothing more."""
        with self._lock:
            self._is_finished = True
            self._is_filling = False  # also after an interrupt at the end of `put`
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until all ranks have ended, and what this one writes is written. Raises: ExchangeBroken; its error."""
        self.end()
        self._thread.join()
        self._check()

    def close(self) -> None:
        """Drop what is to be sent, and wait until all ranks have ended or the exchange is broken. Idempotent.

        A rank whose writing is stuck goes on with the rounds and never ends: after the timeout they end here.
        """
        self._fail(ExportError("the export was given up"))
        self.end()
        if self._thread.ident is not None and self._may_begin.is_set():
            self._thread.join(self._coordinator.timeout_seconds)
        self.give_up()  # also if it is only about to run, because an interrupt has ended `start`
        if self._thread.ident is not None:
            self._thread.join()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """Make all rounds. After an error they go on, because the other ranks wait for them."""
        self._may_begin.wait()
        filled = self._filled()
        try:
            run_workers(filled, self._write_one)
        except BaseException as error:
            self._fail(error)
            with suppress(ExchangeBroken):
                for _ in filled:
                    pass

    def _write_one(self, filled: _Filled) -> None:
        part, marks, memory = filled
        self._write(part, marks)
        if memory is not None:
            self._give_back(memory)

    def _give_back(self, memory: Buffer) -> None:
        if len(memory.view) == IO_BYTES:
            self._free.append(memory)

    def _filled(self) -> Iterator[_Filled]:
        """Yield what this rank writes while the next round is under way, with memory that is free after that."""
        waiting: _Page | None = None
        while not (self._is_given_up or (waiting is not None and waiting.is_last)):
            page, is_last, position = self._take()
            self._finish(waiting)  # before the ranks agree on sizes, so that this one may fill its page meanwhile
            self._start(page, is_last, position)
            yield from self._placed(page.kept())
            yield from self._received(waiting)
            waiting = page
        self._finish(waiting)
        yield from self._received(waiting)

    def _start(self, page: _Page, is_last: bool, position: int) -> None:
        """Tell all ranks how much each gets, and start to send it."""
        sizes = torch.tensor([[used, is_last, position] for used in page.used], dtype=torch.int64)
        theirs = torch.empty_like(sizes)
        ones = [1] * len(self.ranks)
        self._wait(self._exchange(sizes, ones, theirs, ones))
        positions: list[int] = theirs[:, 2].tolist()
        with self._lock:
            self._slowest = min(positions)
            self._slowest_rank = self.ranks[positions.index(self._slowest)]
            self._changed.notify_all()
        sent, of_each = page.joined()
        counts: list[int] = theirs[:, 0].tolist()
        counts[page.own] = 0
        page.slowest, page.is_last = min(positions), bool(theirs[:, 1].all())
        page.received = page.inbox[: sum(counts)]
        page.work = self._exchange(sent, of_each, page.received, counts)

    def _take(self) -> tuple[_Page, bool, int]:
        """Return what is to be sent, whether nothing will follow, and how far this rank is."""
        deadline = time.monotonic() + _IDLE_SECONDS
        with self._lock:
            ready = lambda: self._is_full or self._is_finished or self._error  # noqa: E731
            self._changed.wait_for(ready, max(0, deadline - time.monotonic()))
            self._changed.wait_for(lambda: not self._is_filling)
            page, self._is_full = self._page, False
            self._page = self._pages.pop() if self._pages else None
            self._changed.notify_all()
            assert page is not None, "one page at a time is under way"
            if self._error is not None:
                page.used = [0] * len(page.used)
            return page, self._is_finished, AT_THE_END if self._is_finished else self._position

    def _exchange(self, send: torch.Tensor, sizes: list[int], into: torch.Tensor, into_sizes: list[int]) -> Any:
        seconds = self._coordinator.timeout_seconds
        try:
            return self._coordinator.peers.exchange(self.ranks, send, sizes, into, into_sizes, seconds)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> ExchangeBroken:
        ranks = ", ".join(map(str, self.ranks))
        return ExchangeBroken(f"the exchange between ranks {ranks} broke off: {error}")

    def _finish(self, waiting: _Page | None) -> None:
        """Wait for a round, and give its page back."""
        if waiting is None:
            return
        work, waiting.work = waiting.work, None  # it would hold the connections open
        self._wait(work)
        waiting.used = [0] * len(self.ranks)
        with self._lock:
            if self._page is None:
                self._page = waiting
            else:
                self._pages.append(waiting)
            self._changed.notify_all()

    def _received(self, waiting: _Page | None) -> Iterator[_Filled]:
        """Put what was received in its place; yield the runs that are whole, and those that can be no more."""
        if waiting is None:
            return
        yield from self._placed(waiting.received)
        for (key_number, number), run in [*self._runs.items()]:
            if run.position < waiting.slowest:  # all ranks are past it
                del self._runs[key_number, number]
                try:
                    filled = [*self._incomplete(self._keys[key_number], run)]
                except Exception as error:
                    self._fail(error)
                    return
                yield from filled

    def _placed(self, data: torch.Tensor) -> Iterator[_Filled]:
        """Put values in their place; yield the runs that are whole."""
        at = 0
        view = data.numpy().data
        while at < len(data) and self._error is None:
            key_number, number, num_dims, num_bytes = _HEAD.unpack_from(view, at)
            numbers = struct.unpack_from(f"<{2 * num_dims}q", view, at + _HEAD.size)
            start = at + _HEAD.size + 16 * num_dims + _DIGEST_BYTES
            at = start + round_up(num_bytes, _DIGEST_BYTES)
            box = Chunk(numbers[:num_dims], numbers[num_dims:])
            key = self._keys[key_number]
            values = data[start : start + num_bytes].view(self._infos[key].dtype).view(box.sizes)
            part = box, bytes(view[start - _DIGEST_BYTES : start])
            try:
                run = self._runs.get((key_number, number)) or self._begin(key, number)
                if not run.takes(box):
                    yield Block(box, values.clone(), key), [part], None
                    continue
                _place(run.values, box, run.chunk).copy_(values)
                run.parts.append(part)
            except Exception as error:
                self._fail(error)
                return
            if run.is_whole:
                del self._runs[key_number, number]
                yield Block(run.chunk, run.values, key), run.parts, run.memory

    def _incomplete(self, key: str, run: _Run) -> Iterator[_Filled]:
        """Yield what is there of a run of which other ranks write the rest, as those that have other rows of it."""
        around = hull([box for box, _ in run.parts])
        if around.numel == sum(box.numel for box, _ in run.parts):
            yield Block(around, _place(run.values, around, run.chunk), key), run.parts, run.memory
            return
        for box, mark in run.parts:
            yield Block(box, _place(run.values, box, run.chunk).clone(), key), [(box, mark)], None
        self._give_back(run.memory)

    def _begin(self, key: str, number: int) -> _Run:
        info = self._infos[key]
        chunk = runs_of(info)[number]
        position, offset = self._place_of(key, chunk)
        num_bytes = offset % ALIGNMENT + chunk.numel * info.dtype.itemsize
        try:
            memory = self._free.pop() if num_bytes >= _MIN_POOLED_BYTES else Buffer.allocate(num_bytes)
        except IndexError:  # `if self._free` first would race with other threads
            memory = Buffer.allocate(IO_BYTES)
        run = _Run(chunk, info, position, offset, memory)
        self._runs[self._numbers[key], number] = run
        return run


def _place(values: torch.Tensor, box: Chunk, run: Chunk) -> torch.Tensor:
    return values[box.within(run)]
