"""Reading dequantised tensors: requests are cut into bounded pieces and fetched in batches; one batch is computed while
the next is read.

Owns memory and threads. Knows no formats; expressions (values.py) compute the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch

from titan_ckpt.disk.direct import IO_BYTES, run_workers
from titan_ckpt.formats.quantised.values import Values
from titan_ckpt.formats.safetensors.container import Entry, SafetensorsHeader
from titan_ckpt.formats.safetensors.reader import SafetensorsFiles
from titan_ckpt.formats.safetensors.regions import boxes, copy_from_host, windows
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.boxes import boxes_of_range
from titan_ckpt.geometry.chunks import Chunk, TensorInfo
from titan_ckpt.geometry.requests import Fill, ReadRequest

_FETCHED_ELEMENTS = 4 << 20
"""Elements of a request that are read at a time: 2 or 4 MiB in the file."""
_COMPUTED_ELEMENTS = 1 << 17
"""Elements that are computed at a time: they fit a processor's cache and need no fresh pages."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a dequantised tensor, and memory with as many elements in the same order."""

    values: Values
    box: Chunk
    into: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A piece and the stored regions that it needs, in memory."""

    piece: _Piece
    regions: Mapping[str, tuple[Chunk, torch.Tensor]]

    def load(self, key: str, box: Chunk) -> torch.Tensor:
        held, values = self.regions[key]
        return values[box.within(held)]


class DequantisedFiles:
    """Open safetensors files, some of whose tensors are computed from several stored ones."""

    def __init__(self, headers: Sequence[SafetensorsHeader], values: Mapping[str, Values], hidden: Set[str]) -> None:
        """Open the files. `hidden`: stored tensors that are not listed, because they mean nothing by themselves."""
        self._values = values
        seen_as = {leaf.key: leaf.stored for value in values.values() for leaf in value.leaves()}
        self._files = SafetensorsFiles([_looked_at(header, seen_as) for header in headers])
        plain = {key: e.info for key, e in self._files.entries.items() if key not in hidden and key not in values}
        self.tensors = plain | {key: TensorInfo(value.shape, torch.float32) for key, value in values.items()}

    def plan(self, requests: Sequence[ReadRequest]) -> Fill:
        """Open the files of all requests; return the function that fills them. Raises: as SafetensorsFiles.plan.

        Dequantised values are computed in float32, then cast to the dtype of the memory.
        """
        fill_plain = self._files.plan([request for request in requests if request.key not in self._values])
        computed = [request for request in requests if request.key in self._values]
        self._files.open({leaf.key for request in computed for leaf in self._values[request.key].leaves()})

        def fill() -> None:
            fill_plain()
            pieces = (piece for request in computed for piece in self._pieces(request))
            with gc_paused():
                # one thread fetches while another computes: items are made under the workers' lock
                run_workers(map(self._fetch, _batches(pieces)), _compute)

        return fill

    def close(self) -> None:
        """Close all files; idempotent."""
        self._files.close()

    def _pieces(self, request: ReadRequest) -> Iterator[_Piece]:
        values = self._values[request.key]
        for box, into in cut(request.chunk, request.into.detach(), _FETCHED_ELEMENTS, values.order):
            yield _Piece(values, box, into)

    def _fetch(self, pieces: Sequence[_Piece]) -> list[_Fetched]:
        fetched, requests = [], []
        for piece in pieces:
            regions = {}
            for leaf, box in piece.values.needs(piece.box):
                memory = torch.empty(box.sizes, dtype=leaf.stored.dtype)
                regions[leaf.key] = (box, memory)
                requests.append(ReadRequest(leaf.key, box, memory))
            fetched.append(_Fetched(piece, regions))
        self._files.read(requests)
        return fetched


def _compute(batch: Sequence[_Fetched]) -> None:
    for fetched in batch:
        piece = fetched.piece
        for box, into in cut(piece.box, piece.into, _COMPUTED_ELEMENTS, piece.values.order):
            copy_from_host(into, piece.values.read(box, fetched.load).reshape(into.shape))


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Gather small pieces, so that one read of the files serves many of them."""
    batch: list[_Piece] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += sum(box.numel * leaf.stored.dtype.itemsize for leaf, box in piece.values.needs(piece.box))
        if num_bytes >= IO_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def cut(
    box: Chunk, into: torch.Tensor, max_elements: int, order: tuple[int, ...]
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Cut a box and its memory alike into parts of at most `max_elements`.

    The memory has the box's elements in row-major order, in any shape and strides. If it has the box's shape, the parts
    follow `order`, the dims from the slowest to the fastest.
    """
    if not box.numel:
        return
    if into.shape == box.sizes:
        back = [order.index(dim) for dim in range(len(order))]
        turned = Chunk(tuple(box.offsets[dim] for dim in order), tuple(box.sizes[dim] for dim in order))
        for part in boxes(turned, max_elements):
            part = Chunk(tuple(part.offsets[dim] for dim in back), tuple(part.sizes[dim] for dim in back))
            yield part, into[part.within(box)]
        return
    start = 0
    for window in windows(into, max_elements):
        yield from _fit(box, window, start)
        start += window.numel()


def _fit(box: Chunk, window: torch.Tensor, start: int) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield the boxes of elements [start, start + window.numel()) of a box, each with its part of the window."""
    parts = list(boxes_of_range(box.sizes, start, start + window.numel()))
    if len(parts) > 1 and window.dim() > 1:
        for row in window:
            yield from _fit(box, row, start)
            start += row.numel()
        return
    position = 0
    for part in parts:
        offsets = tuple(a + b for a, b in zip(box.offsets, part.offsets, strict=True))
        into = window if len(parts) == 1 else window[position : position + part.numel]
        yield Chunk(offsets, part.sizes), into
        position += part.numel


def _looked_at(header: SafetensorsHeader, seen_as: Mapping[str, TensorInfo]) -> SafetensorsHeader:
    """Return the header with stored tensors described as the expressions view their bytes."""
    entries = {}
    for key, entry in header.entries.items():
        info = seen_as.get(key, entry.info)
        assert info.nbytes == entry.info.nbytes, (key, info, entry.info)
        entries[key] = Entry(info, entry.start)
    return replace(header, entries=entries)
