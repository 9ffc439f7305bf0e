"""Shards of columns become whole rows: ranks exchange their parts, and each writes some of the rows.

Owns which rows are put together, which rank writes which, and the exchange. Knows no folder.

A shard of columns is thousands of short runs of a file, and writing each costs more than sending it to a rank that
writes whole rows around the page cache. So the ranks of a tensor's own mesh that share rows re-shard them by
all-to-all, some MiB at a time. A part travels with the digest that its owner took, so the rank that writes the rows can
prove every part. All ranks make the same exchanges in the same order; one that fails goes on exchanging, so that no
other waits in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate

from titan_ckpt.disk.direct import IO_BYTES, bounce_buffer, run_workers
from titan_ckpt.disk.memory import ALIGNMENT, Buffer, round_up
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import Ranks
from titan_ckpt.formats.publish.proof import digest
from titan_ckpt.geometry.chunks import Block, Chunk, Shape, Sharding, info_of, sharding_of
from titan_ckpt.weights.transforms import FileGroup

Boxes = Mapping[str, Sequence[Chunk]]
"""File key -> the boxes of the tensor that one rank holds."""

_DIGEST_BYTES = 16
_ROUND_BYTES = 2 * IO_BYTES
"""Room for a round: rows of one write and the digests of their parts. Memory that no round touches costs nothing."""
_HEAD = 128
"""Rows are cut at multiples of a head's rows if possible, because the rows of a head are permuted in memory."""


class Rows(NamedTuple):
    """Whole rows of a file tensor that fit one write, and the part of each rank."""

    key: str
    chunk: Chunk
    parts: tuple[tuple[int, Chunk], ...]
    """(Rank, box) of each part; together they make up the rows."""
    writer: int
    first: int
    """First row of the ranks' boxes. These rows may be a part of them."""


class Round(NamedTuple):
    """One exchange between the ranks of a group."""

    place: tuple[int, int]
    """(Number of the key, first row), by which all ranks order their exchanges."""
    ranks: Ranks
    rows: list[Rows]


class Lost(Exception):  # noqa: N818 - no error of this rank: another one is gone or silent, or the network is
    """The exchange between some ranks broke off."""


def row_peers(groups: Iterable[FileGroup]) -> dict[str, Ranks]:
    """Return file key -> the ranks that share its rows with this rank, found without asking them.

    Along each axis of a tensor's mesh, the neighbour's pieces have the same rows as this rank's, or others. A key is
    left out if this rank has whole rows of it, or if tensors with different peers make it.
    """
    peers: dict[str, set[Ranks]] = {}
    known: dict[tuple[Any, ...], Ranks] = {}
    for group in groups:
        if group.quantised:
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


def _peers_of(group: FileGroup, index: int, sharding: Sharding) -> Ranks:
    mesh, shape = sharding.mesh, info_of(group.values[index]).shape
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()

    def bands(at: Sequence[int]) -> set[tuple[str, int, int]]:
        chunks = sharding.chunks_at(shape, tuple(at))
        blocks = (Block(chunk, torch.empty(chunk.sizes, device="meta")) for chunk in chunks)
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


def whole_rows(
    tables: Mapping[int, Boxes], shapes: Mapping[str, tuple[Shape, int]], in_order: Sequence[str]
) -> Iterator[tuple[tuple[int, int], Rows]]:
    """Yield the rows that these ranks can put together, with their places, the same on all of them and in order.

    `tables`: rank -> its boxes, none of which overlap. `shapes`: key -> (shape, bytes of an element).
    """
    count_of_rows = 0
    for number, key in enumerate(in_order):
        shape, itemsize = shapes[key]
        row = Chunk.whole(shape[1:]).numel
        bands: dict[tuple[int, int], list[tuple[int, Chunk]]] = {}
        for rank, boxes in sorted(tables.items()):
            for box in boxes.get(key, ()):
                bands.setdefault((box.offsets[0], box.sizes[0]), []).append((rank, box))
        for (start, count), parts in sorted(bands.items()):
            fits = (IO_BYTES - ALIGNMENT) // (row * itemsize)
            if not fits or sum(box.numel for _, box in parts) != count * row:
                continue
            step = fits // _HEAD * _HEAD or fits
            for first in range(start, start + count, step):
                size = min(step, start + count - first)
                pieces = tuple((r, Chunk((first, *b.offsets[1:]), (size, *b.sizes[1:]))) for r, b in parts)
                whole = Chunk((first, *(0 for _ in shape[1:])), (size, *shape[1:]))
                yield (number, first), Rows(key, whole, pieces, pieces[count_of_rows % len(pieces)][0], start)
                count_of_rows += 1


def rounds_of(
    ranks: Ranks, rows: Iterable[tuple[tuple[int, int], Rows]], itemsizes: Mapping[str, int]
) -> Iterator[Round]:
    """Put rows together into exchanges in which no rank sends or receives much more than one write."""
    made: list[Rows] = []
    at = (0, 0)
    traffic: dict[tuple[str, int], int] = {}
    for place, some in rows:
        more: dict[tuple[str, int], int] = {}
        for rank, box in some.parts:
            num_bytes = _room(box, itemsizes[some.key])
            for end in (("from", rank), ("to", some.writer)):
                more[end] = more.get(end, 0) + num_bytes
        if made and any(traffic.get(end, 0) + num_bytes > IO_BYTES for end, num_bytes in more.items()):
            yield Round(at, ranks, made)
            made, traffic = [], {}
        at = at if made else place
        made.append(some)
        traffic = {end: traffic.get(end, 0) + more.get(end, 0) for end in {*traffic, *more}}
    if made:
        yield Round(at, ranks, made)


def _room(box: Chunk, itemsize: int) -> int:
    """Return the bytes that a part takes in an exchange, with its digest; a multiple of every element's size."""
    return round_up(box.numel * itemsize, _DIGEST_BYTES) + _DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Assembled:
    """Rows in memory that this rank writes at byte `offset` of their file. Closing `lease` gives the memory back."""

    rows: Rows
    data: memoryview
    offset: int
    parts: tuple[tuple[Chunk, bytes], ...]
    """(Box, digest) of each part."""
    lease: ExitStack


_Part = tuple[Rows, Chunk]


class _Exchange(NamedTuple):
    """A round that is under way."""

    round: Round
    parts: list[_Part]
    """The parts that this rank receives, in the order in which they lie in `memory`."""
    memory: Buffer
    work: Any


class ColumnExchange:
    """This rank's side of all rounds of an export."""

    def __init__(
        self,
        coordinator: Coordinator,
        rounds: Sequence[Round],
        dtypes: Mapping[str, torch.dtype],
        offset_of: Callable[[Rows], int],
        put: Callable[[Rows, Chunk, torch.Tensor], None],
    ) -> None:
        """Take the rounds in which this rank takes part, in order of their places.

        `dtypes`: by file key. `offset_of` returns the byte of the file at which rows start. `put` copies this rank's
        part of rows into a tensor, as the file has it.
        """
        self.rounds = rounds
        self._coordinator = coordinator
        self._dtypes = dtypes
        self._offset_of = offset_of
        self._put = put
        self._error: Exception | None = None
        """The first error of `put`; the rank goes on exchanging."""

    def run(self, write: Callable[[Assembled], None]) -> None:
        """Take part in all rounds, and call `write` with the rows that this rank writes, in several threads.

        After an error of this rank the rounds go on, because the other ranks wait for them.
        Raises: the first error; Lost.
        """
        assembled = self._assembled()
        try:
            run_workers(assembled, write)
        except Lost:
            raise
        except Exception as error:
            self._error = error
            with suppress(Lost):
                for _ in assembled:
                    pass
        if self._error is not None:
            raise self._error

    def _assembled(self) -> Iterator[Assembled]:
        """Yield rows while the next round is under way."""
        memories = [(Buffer.allocate(_ROUND_BYTES), Buffer.allocate(_ROUND_BYTES)) for _ in range(2)]
        waiting: _Exchange | None = None
        for number, following in enumerate([*self.rounds, None]):
            started = None if following is None else self._start(following, *memories[number % 2])
            if waiting is not None:
                self._wait(waiting, started)
                if self._error is None:
                    yield from self._rows(waiting)
            waiting = started

    def _start(self, one: Round, send: Buffer, receive: Buffer) -> _Exchange:
        """Copy this rank's parts, ordered by the ranks that write them, and start the exchange."""
        me = self._coordinator.rank
        parts = [(rank, (rows, box)) for rows in one.rows for rank, box in rows.parts]
        sent = [[part for rank, part in parts if rank == me and part[0].writer == to] for to in one.ranks]
        received = [[part for rank, part in parts if rank == source and part[0].writer == me] for source in one.ranks]
        at = 0
        for part in chain.from_iterable(sent):
            self._fill(part, send, at)
            at += self._room(part)
        sizes, received_sizes = ([sum(map(self._room, part)) for part in to] for to in (sent, received))
        work = self._coordinator.peers.exchange(
            one.ranks,
            send.tensor[:at],
            sizes,
            receive.tensor[: sum(received_sizes)],
            received_sizes,
            self._coordinator.timeout_seconds,
        )
        return _Exchange(one, list(chain.from_iterable(received)), receive, work)

    def _fill(self, part: _Part, send: Buffer, at: int) -> None:
        """Copy a part of this rank and its digest; after an error whatever is there is sent, and nobody uses it."""
        rows, box = part
        values = self._values(part, send, at)
        try:
            if self._error is None:
                self._put(rows, box, values)
                stop = at + values.nbytes
                send.view[at + self._room(part) - _DIGEST_BYTES : at + self._room(part)] = digest(send.view[at:stop])
        except Exception as error:
            self._error = error

    def _wait(self, waiting: _Exchange, started: _Exchange | None) -> None:
        try:
            waiting.work.wait()
        except RuntimeError as error:
            if started is not None:
                with suppress(RuntimeError):  # the group is broken, and its memory must not be freed before it ends
                    started.work.wait()
            ranks = ", ".join(map(str, waiting.round.ranks))
            raise Lost(f"the exchange of columns between ranks {ranks} broke off: {error}") from error

    def _rows(self, exchange: _Exchange) -> Iterator[Assembled]:
        """Put the received parts together as rows."""
        of_rows: dict[int, list[tuple[Chunk, int]]] = {}
        at = 0
        for rows, box in exchange.parts:
            of_rows.setdefault(id(rows), []).append((box, at))
            at += self._room((rows, box))
        for rows in exchange.round.rows:
            if rows.writer != self._coordinator.rank:
                continue
            offset, dtype = self._offset_of(rows), self._dtypes[rows.key]
            first, num_bytes = offset % ALIGNMENT, rows.chunk.numel * dtype.itemsize
            lease = ExitStack()
            buffer = lease.enter_context(bounce_buffer())
            whole = buffer.tensor[first : first + num_bytes].view(dtype).view(rows.chunk.sizes)
            parts = []
            for box, start in of_rows[id(rows)]:
                values = self._values((rows, box), exchange.memory, start)
                _part_of(whole, box, rows.chunk).copy_(values)
                stop = start + self._room((rows, box))
                parts.append((box, bytes(exchange.memory.view[stop - _DIGEST_BYTES : stop])))
            yield Assembled(rows, buffer.view[first : first + num_bytes], offset, tuple(parts), lease)

    def _values(self, part: _Part, memory: Buffer, at: int) -> torch.Tensor:
        """Return the place of a part's values in a buffer."""
        rows, box = part
        dtype = self._dtypes[rows.key]
        return memory.tensor[at : at + box.numel * dtype.itemsize].view(dtype).view(box.sizes)

    def _room(self, part: _Part) -> int:
        return _room(part[1], self._dtypes[part[0].key].itemsize)


def _part_of(whole: torch.Tensor, box: Chunk, rows: Chunk) -> torch.Tensor:
    return whole[box.within(rows)]


def agree(
    coordinator: Coordinator,
    groups: Sequence[Ranks],
    boxes: Mapping[Ranks, Boxes],
    shapes: Mapping[str, tuple[Shape, int]],
    in_order: Sequence[str],
) -> list[Round]:
    """Return the rounds of this rank, in the order in which all ranks make theirs. Collective over each group.

    `boxes`: what this rank has to put together with each group. The others are as in `whole_rows`.
    """
    itemsizes = {key: itemsize for key, (_, itemsize) in shapes.items()}
    rounds: list[Round] = []
    for ranks in groups:
        own = {key: [[*box.offsets, *box.sizes] for box in held] for key, held in boxes.get(ranks, {}).items()}
        posted = coordinator.peers.gather(ranks, own, coordinator.timeout_seconds)
        tables = {rank: {key: list(map(_box, held)) for key, held in table.items()} for rank, table in posted.items()}
        rounds += rounds_of(ranks, whole_rows(tables, shapes, in_order), itemsizes)
    return sorted(rounds, key=lambda one: (one.place, one.ranks))


def _box(numbers: Sequence[int]) -> Chunk:
    return Chunk(tuple(numbers[: len(numbers) // 2]), tuple(numbers[len(numbers) // 2 :]))
