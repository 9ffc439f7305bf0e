"""Writing the tensor bytes of an export: every rank writes its runs of the final files, and proves them.

Owns the way from views of memory into the files, and the record of what was written. Knows none of the folder's other
files.

A slice that is one run of the file is cut into blocks, which several threads cast and write. Slices of which several
ranks have parts, and all that goes to another rank's file, go through the exchange (exchange.py). Where that is
impossible, or if values are computed while they are written, what is no run is copied through a mapping of the file,
which measured twice as fast as a write per row. Where a file system cannot reserve space, each row is written: a store
to a mapping that finds the disk full would end the process. Every byte is digested in memory on its way, so reading the
file back proves it.
"""

from __future__ import annotations

import mmap
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter

import torch

from titan_ckpt import progress
from titan_ckpt.disk.files import NUM_WORKERS, Writer
from titan_ckpt.disk.kernel import ALIGNMENT, bytes_at
from titan_ckpt.disk.workers import bounce_buffer, run_workers
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import Ranks
from titan_ckpt.errors import ExportError
from titan_ckpt.formats.publish.exchange import (
    Exchange,
    cast_into,
    everyone,
    part_of,
    row_peers,
)
from titan_ckpt.formats.publish.plan import ExportPlan, OutputFiles
from titan_ckpt.formats.publish.proof import Written, differing, digest
from titan_ckpt.formats.reading.engine import RUN_BYTES
from titan_ckpt.formats.reading.slices import windows
from titan_ckpt.geometry.boxes import boxes, element_span, is_run, spans
from titan_ckpt.geometry.chunks import Block, Chunk, Entry, LazyTensor, is_plain_memory, run_through
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.weights.transforms import FileGroup

_QUEUED_BYTES = 256 << 20
"""Bytes of live tensors that the workers get at a time; each time all wait for the slowest worker."""
_FEW_BYTES = 1 << 20
"""One thread writes fewer bytes than this faster than other threads start."""
_ROUND_BYTES = 32 << 20
"""Bytes that a rank receives in one round for files in a bucket."""
_SHARED_ROUND_BYTES = 8 << 20
"""The same for files that ranks share. With less, ranks wait for the sizes of the next round as long as for its bytes;
with more, an export needs more than 64 MiB beside the tensors while the disk is busy."""
_MAPPED_BYTES = 16 << 20
"""Bytes of a file that are mapped at a time."""
_LEAD_ROUNDS = 4
"""A rank waits that is so many rounds ahead of the slowest one."""

_Blocks = Iterator[tuple[int, Block]]
_Source = tuple[FileGroup, _Blocks]
_Item = tuple[int, Block, int]
"""(Position among all files, piece, number of the run of which it is a part if it is exchanged)."""


class ExportWriter:
    """Writes this rank's part of the files. `connect` and `create` come first; `close` it, whatever happens."""

    def __init__(self, outputs: OutputFiles, plan: ExportPlan, coordinator: Coordinator, count: progress.Count) -> None:
        """Write nothing yet. `count` is called with the bytes that are written, and again with those that are proved.

        `outputs`: the files, which `close` closes.
        """
        self._outputs = outputs
        self._count = count
        self._plan = plan
        self._coordinator = coordinator
        self._exchanges: dict[Ranks, Exchange] = {}
        self._exchange_of: dict[str, Exchange] = {}
        """By key. On a disk a rank writes what has none itself."""
        self._written: list[Written] = []
        self._queue: list[Block] = []
        self._queued_bytes = 0
        self.undivided: dict[str, list[list[tuple[int, ...]]]] = {}
        """key -> [offsets, sizes] of each written part, for tensors that the plan does not divide among the ranks."""

    def connect(self, groups: Sequence[FileGroup]) -> None:
        """Connect the ranks that exchange values of these groups. Collective. Raises: ExportError; PeerError."""
        coordinator, is_shared = self._coordinator, self._outputs.is_shared
        if coordinator.world_size == 1:
            return
        infos = {k: entry.info for layout in self._plan.layouts.values() for k, entry in layout.entries.items()}
        numbers = {key: number for number, key in enumerate(infos)}
        peers: dict[str, Ranks] = {}

        def wanted() -> set[Ranks]:
            peers.update(row_peers(groups) if is_shared else dict.fromkeys(infos, everyone(coordinator)))
            return {*peers.values()}

        connected = coordinator.peers.connect(coordinator, wanted)
        if not connected and not is_shared:
            raise ExportError(
                "the ranks cannot connect to each other by gloo, and an export in a bucket needs it: open the "
                "network between the hosts, or export to a folder on a file system that they share"
            )
        round_bytes = _SHARED_ROUND_BYTES if is_shared else _ROUND_BYTES
        for ranks in connected:

            def owner(key: str, number: int, ranks: Ranks = ranks) -> int:
                if is_shared:
                    return ranks[(numbers[key] + number) % len(ranks)]
                return self._outputs.owners[self._plan.file_of[key]]

            self._exchanges[ranks] = Exchange(
                coordinator,
                ranks,
                infos,
                self._place_of,
                owner,
                self._write_exchanged,
                round_bytes,
                _LEAD_ROUNDS * round_bytes * (len(ranks) if is_shared else 1),
            )
        self._exchange_of = {key: self._exchanges[ranks] for key, ranks in peers.items() if ranks in self._exchanges}

    def create(self) -> None:
        """Create the files, and begin the exchanges. Collective. Raises: OSError; ExportError; PeerError."""

        def begin() -> list[str]:
            self._outputs.begin()
            return [fault for one in self._exchanges.values() if (fault := one.start())]

        faults = [fault for of_rank in self._coordinator.gather_results("export/create", begin) for fault in of_rank]
        if faults and not self._outputs.is_shared:
            raise ExportError(f"the files cannot be uploaded: {faults[0]}")
        if faults:  # each rank writes what it has
            for one in self._exchanges.values():
                one.give_up()
            self._exchanges, self._exchange_of = {}, {}
        for one in self._exchanges.values():
            one.begin()

    def write(self, groups: Sequence[FileGroup]) -> None:
        """Resolve the groups one tensor at a time, on this thread, and write this rank's part of them.

        What is exchanged comes first. A group that takes part in collectives is resolved even after an error or an
        interrupt, so that other ranks do not wait in vain. Raises: the first error of this rank; ExchangeBroken.
        """
        blocks = [group.blocks() for group in groups]  # nothing is computed yet
        makers = Counter(key for group in groups for key in group.infos)

        def is_exchanged(group: FileGroup) -> bool:
            has_exchange = all(key in self._exchange_of for key in group.infos)
            alone = _is_in_memory(group) and all(makers[key] == 1 for key in group.infos)
            return has_exchange and (alone or not self._outputs.is_shared)

        exchanged: list[_Source] = []
        others: list[_Source] = []
        for pair in zip(groups, blocks, strict=True):
            (exchanged if is_exchanged(pair[0]) else others).append(pair)
        try:
            self._send(exchanged)
            self._write_others(others)
        except BaseException:
            for group, left in sorted(exchanged + others, key=lambda pair: min(map(self._position, pair[0].infos))):
                for _ in group.values if group.collective else ():  # in the order in which other ranks resolve them
                    run_through(partial(iter, left))
            raise
        self._outputs.flush()

    def _send(self, groups: Sequence[_Source]) -> None:
        """Send values to the ranks that write them. However that ends, no other rank waits for this one afterwards."""
        exchanges = self._exchanges.values()

        def runs_of(piece: Block) -> Iterator[_Item]:
            return ((at, piece, number) for at, number in self._exchange_of[piece.key].runs_in(piece))

        try:
            for position, items, _ in self._in_order(groups, self._position, runs_of):
                for one in exchanges:
                    one.reach(position)
                for _, piece, number in items:
                    self._exchange_of[piece.key].put(piece, number)
        finally:
            for one in exchanges:
                one.end()
        for one in exchanges:
            one.finish()
        self._exchanges.clear()  # and their memory
        self._exchange_of.clear()

    def _write_others(self, groups: Sequence[_Source]) -> None:
        """Write what this rank writes itself, in another order on each rank: writers of one file wait for each other.

        Ranks that compute values together, and those of a bucket, keep the order of the files.
        """
        names = [*self._plan.layouts]
        first = self._coordinator.rank * len(names) // self._coordinator.world_size
        if not self._outputs.is_shared or any(group.collective for group, _ in groups):
            first = 0
        turns = {name: (number - first) % len(names) for number, name in enumerate(names)}

        def position(key: str, chunk: Chunk | None = None) -> int:
            return (turns[self._plan.file_of[key]] << 48) + self._offset(key, chunk)

        def whole(piece: Block) -> Iterator[_Item]:
            yield position(piece.key, piece.chunk), piece, 0

        for _, items, is_computed in self._in_order(groups, position, whole):
            for _, piece, _ in items:
                self._queue_piece(piece)
            if is_computed:  # values of a lazy tensor are written before the next ones are computed
                self._write_queued()
        self._write_queued()

    def _in_order(
        self,
        groups: Sequence[_Source],
        position: Callable[[str], int],
        cut: Callable[[Block], Iterator[_Item]],
    ) -> Iterator[tuple[int, Sequence[_Item], bool]]:
        """Yield this rank's pieces in the order of the files, with their position and whether they are computed.

        What is in memory comes where it lies, so that nothing of a group is held while what lies between its tensors,
        as between those of experts, is to come. What is computed comes where the first tensor of its group lies.
        """
        items = (
            item
            for group, blocks in groups
            if _is_in_memory(group) and self._plan.writes(group)
            for index, block in blocks
            for piece in self._cut(group, index, block)
            for item in cut(piece)
        )
        ready = deque(sorted(items, key=itemgetter(0)))
        computed = [(min(map(position, pair[0].infos)), pair) for pair in groups if not _is_in_memory(pair[0])]
        for start, (group, blocks) in sorted(computed, key=itemgetter(0)):
            while ready and ready[0][0] < start:
                yield ready[0][0], [ready.popleft()], False
            yield start, [], False
            if group.collective or self._plan.writes(group):
                for index, block in blocks:
                    pieces = self._cut(group, index, block)
                    is_computed = isinstance(group.values[index], LazyTensor)
                    yield start, [item for piece in pieces for item in cut(piece)], is_computed
        while ready:
            yield ready[0][0], [ready.popleft()], False

    def prove(self, reader: TensorReader) -> None:
        """Read every region that this rank wrote and compare it. Raises: ExportError naming the tensors that differ."""
        if wrong := differing(self._written, reader, self._count):
            number = sum(map(len, wrong.values()))
            names = {key: self._plan.sources[key] for key in wrong}
            tied = {key: f" (tied, and not equal: {', '.join(fqns)})" for key, fqns in names.items() if len(fqns) > 1}
            listed = ", ".join(key + tied.get(key, "") for key in wrong)
            raise ExportError(f"{number} region(s) read back differ from what was written, of {listed}")

    def _cut(self, group: FileGroup, index: int, block: Block) -> Iterator[Block]:
        """Cut a block into this rank's pieces."""
        for piece in group.cut_shares(index, block, self._plan.shares_of(group.fqns[index])):
            if not self._plan.is_divided(group):
                chunks = self.undivided.setdefault(piece.key, [])
                chunks.append([piece.chunk.offsets, piece.chunk.sizes])
            yield piece

    def _queue_piece(self, piece: Block) -> None:
        """Queue a piece. Values of a live tensor need no memory while they are queued."""
        self._queue.append(piece)
        self._queued_bytes += piece.data.nbytes
        if self._queued_bytes >= _QUEUED_BYTES:
            self._write_queued()

    def _entry(self, key: str) -> Entry[int]:
        return self._plan.layouts[self._plan.file_of[key]].entries[key]

    def _offset(self, key: str, chunk: Chunk | None = None) -> int:
        """Return the byte of the file at which the first element of a tensor, or of a part of it, lies."""
        entry = self._entry(key)
        first = 0 if chunk is None else element_span(entry.info.shape, chunk)[0]
        return entry.at + first * entry.info.dtype.itemsize

    def _position(self, key: str) -> int:
        return self._outputs.starts[self._plan.file_of[key]] + self._offset(key)

    def _place_of(self, key: str, chunk: Chunk) -> tuple[int, int]:
        """Return the place of a part of a tensor in the order of all files, and its first byte in its own."""
        offset = self._offset(key, chunk)
        return self._outputs.starts[self._plan.file_of[key]] + offset, offset

    def _write_exchanged(self, part: Block, parts: Sequence[tuple[Chunk, bytes]]) -> None:
        """Write what came through the exchange: a run that is whole, or a box; `parts` are its ranks' digests."""
        chunk, values, key = part
        info = self._entry(key).info
        offset = self._offset(key, chunk) if is_run(info.shape, chunk) else None
        written = Written(key, chunk, info, offset, 0, values.nbytes, tuple(parts))
        self._put(written, values)
        self._count(values.nbytes)
        self._written.append(written)

    def _write_queued(self) -> None:
        queue, self._queue = self._queue, []
        few, self._queued_bytes = self._queued_bytes < _FEW_BYTES, 0
        blocks = (block for piece in queue for block in self._blocks(piece))
        run_workers(blocks, self._write_block, 1 if few else NUM_WORKERS)

    def _blocks(self, piece: Block) -> Iterator[tuple[Written, torch.Tensor]]:
        """Cut a piece into what fits a bounce buffer, in row-major order; one run is cut at blocks of the file.

        Not thread-safe: one worker at a time asks for the next block.
        """
        entry = self._entry(piece.key)
        info, itemsize = entry.info, entry.info.dtype.itemsize
        assert entry.at % itemsize == 0, "a view of a mapping must be aligned, or it would be a copy"
        if not is_run(info.shape, piece.chunk):
            for box in boxes(piece.chunk, RUN_BYTES // itemsize):
                written = Written(piece.key, box, info, None, 0, box.numel * itemsize)
                self._written.append(written)
                yield written, part_of(piece, box)
            return
        start = self._offset(piece.key, piece.chunk)
        first = 0
        for window in _run_windows(piece.data, start, itemsize):
            written = Written(piece.key, piece.chunk, info, start + first, first, window.numel() * itemsize)
            self._written.append(written)
            yield written, window
            first += written.num_bytes

    def _write_block(self, block: tuple[Written, torch.Tensor]) -> None:
        """Cast, digest and write one block; without a bounce buffer if its own memory can be written as it is."""
        written, view = block
        dtype, num_bytes = written.info.dtype, written.num_bytes
        self._count(num_bytes)
        as_it_is = written.offset is not None and view.dtype == dtype and is_plain_memory(view)
        if as_it_is and (num_bytes < ALIGNMENT or not self._output(written.key).is_direct):
            written.parts = [(None, digest(bytes_at(view.data_ptr(), num_bytes)))]
            self._put(written, view)
            return
        first = (written.offset or 0) % ALIGNMENT
        with bounce_buffer() as bounce:
            values = bounce.tensor[first : first + num_bytes].view(dtype).view(view.shape)
            cast_into(values, view, written.key)
            written.parts = [(None, digest(bounce.view[first : first + num_bytes]))]
            self._put(written, values)

    def _put(self, written: Written, values: torch.Tensor) -> None:
        """Write values in host memory, in the file's dtype: a run of the file, or the rows of a box.

        Rows are stored to a mapping of the file where its space is reserved.
        """
        file = self._output(written.key)
        if written.offset is not None:
            file.write(bytes_at(values.data_ptr(), values.nbytes), written.offset)
            return
        entry, chunk, values = self._entry(written.key), written.chunk, values.reshape(written.chunk.sizes)
        if file.is_reserved:
            _store_rows(file, entry, chunk, values)
            return
        itemsize, rows = values.dtype.itemsize, values.contiguous()
        data, at = bytes_at(rows.data_ptr(), rows.nbytes), 0
        for start, stop in spans(entry.info.shape, chunk, 0):
            num_bytes = (stop - start) * itemsize
            file.write(data[at : at + num_bytes], entry.at + start * itemsize)
            at += num_bytes

    def _output(self, key: str) -> Writer:
        return self._outputs.file(self._plan.file_of[key])

    def close(self) -> None:
        """End the exchanges, and close the files; idempotent. Collective after an error: rounds end together.

        Raises: OSError if a network file system reports a late error.
        """
        with ExitStack() as stack:
            stack.callback(self._outputs.close)
            for one in self._exchanges.values():
                stack.callback(one.close)
            if not self._outputs.is_shared:  # an upload that is given up holds up no exchange
                self._outputs.close()


def _is_in_memory(group: FileGroup) -> bool:
    """Return whether the pieces of a group are views of memory, so that they cost nothing and may be kept."""
    return not group.quantized and all(isinstance(value, torch.Tensor) or value.in_memory for value in group.values)


def _run_windows(view: torch.Tensor, offset: int, itemsize: int) -> Iterator[torch.Tensor]:
    """Cut values that are written from byte `offset` of a file on; contiguous ones at whole blocks of the file."""
    if not view.is_contiguous():
        yield from windows(view, RUN_BYTES // itemsize)
        return
    flat = view.view(-1)
    start = 0
    while start < len(flat):
        stop = start + (RUN_BYTES - (offset + start * itemsize) % ALIGNMENT) // itemsize
        yield flat[start:stop]
        start = stop


def _store_rows(file: Writer, entry: Entry[int], chunk: Chunk, values: torch.Tensor) -> None:
    """Copy a box's values, of its shape, to mappings of the file, which are aligned as its elements are."""
    shape, dtype = entry.info.shape, entry.info.dtype
    strides = torch.empty(shape, device="meta").stride()
    step = max(1, _MAPPED_BYTES // (strides[0] * dtype.itemsize))
    for row in range(0, chunk.sizes[0], step):
        part = values[row : row + step]
        first, stop = element_span(shape, Chunk((chunk.offsets[0] + row, *chunk.offsets[1:]), tuple(part.shape)))
        begin = entry.at + first * dtype.itemsize
        skipped = begin % mmap.ALLOCATIONGRANULARITY
        mapping = file.map(begin - skipped, skipped + (stop - first) * dtype.itemsize)
        rows = torch.frombuffer(mapping, dtype=torch.uint8)[skipped:].view(dtype)
        rows.as_strided(part.shape, strides).copy_(part)
