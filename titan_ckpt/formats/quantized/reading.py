"""Reading dequantized tensors: requests are cut into bounded pieces and fetched in batches; one batch is computed while
the next is read.

Owns memory and threads. Knows no formats; expressions (values.py) compute the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch

from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.disk.workers import run_workers
from titan_ckpt.formats.quantized.values import Values
from titan_ckpt.formats.reading.slices import put
from titan_ckpt.formats.safetensors.container import Entry, SafetensorsHeader
from titan_ckpt.formats.safetensors.reader import SafetensorsFiles
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.boxes import boxes
from titan_ckpt.geometry.chunks import Chunk, TensorInfo
from titan_ckpt.geometry.requests import FilePart, Fill

_FETCHED_ELEMENTS = 4 << 20
"""Elements of a request that are read at a time: 2 or 4 MiB in the file."""
_COMPUTED_ELEMENTS = 1 << 17
"""Elements that are computed at a time: they fit a processor's cache and need no fresh pages."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of what a request wants of a dequantized tensor, and the stored regions from which it is computed."""

    values: Values
    box: Chunk
    request: FilePart
    regions: dict[str, tuple[Chunk, torch.Tensor]] = field(default_factory=dict)

    def load(self, key: str, box: Chunk) -> torch.Tensor:
        held, values = self.regions[key]
        return values[box.within(held)]

    def boxes(self, box: Chunk, max_elements: int) -> Iterator[Chunk]:
        """Cut a box in the file's order; in that of the memory if it has not the shape of what is requested."""
        kept = self.request.view.shape == self.request.chunk.sizes
        return cut(box, max_elements, self.values.order if kept else tuple(range(len(box.sizes))))


class DequantizedFiles:
    """Open safetensors files, some of whose tensors are computed from several stored ones."""

    def __init__(self, headers: Sequence[SafetensorsHeader], values: Mapping[str, Values], hidden: Set[str]) -> None:
        """Open the files. `hidden`: stored tensors that are not listed, because they mean nothing by themselves."""
        self._values = values
        seen_as = {leaf.key: leaf.stored for value in values.values() for leaf in value.leaves()}
        self._files = SafetensorsFiles([_looked_at(header, seen_as) for header in headers])
        plain = {key: e.info for key, e in self._files.entries.items() if key not in hidden and key not in values}
        self.tensors = plain | {key: TensorInfo(value.shape, torch.float32) for key, value in values.items()}

    def plan(self, requests: Sequence[FilePart]) -> Fill:
        """Open the files of all requests; return the function that fills them. Raises: as SafetensorsFiles.plan.

        Dequantized values are computed in float32, then cast to the dtype of the memory.
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

    def _pieces(self, request: FilePart) -> Iterator[_Piece]:
        whole = _Piece(self._values[request.key], request.chunk, request)
        return (_Piece(whole.values, box, request) for box in whole.boxes(request.chunk, _FETCHED_ELEMENTS))

    def _fetch(self, pieces: Sequence[_Piece]) -> Sequence[_Piece]:
        requests = []
        for piece in pieces:
            for leaf, box in piece.values.needs(piece.box):
                memory = torch.empty(box.sizes, dtype=leaf.stored.dtype)
                piece.regions[leaf.key] = (box, memory)
                requests.append(FilePart(leaf.key, box, memory))
        self._files.read(requests)
        return pieces


def _compute(pieces: Sequence[_Piece]) -> None:
    for piece in pieces:
        for box in piece.boxes(piece.box, _COMPUTED_ELEMENTS):
            put(piece.request.view, piece.request.chunk, box, piece.values.read(box, piece.load))


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


def cut(box: Chunk, max_elements: int, order: tuple[int, ...]) -> Iterator[Chunk]:
    """Cut a box into parts of at most `max_elements` that follow `order`, the dims from the slowest to the fastest."""
    if not box.numel:
        return
    back = [order.index(dim) for dim in range(len(order))]
    turned = Chunk(tuple(box.offsets[dim] for dim in order), tuple(box.sizes[dim] for dim in order))
    for part in boxes(turned, max_elements):
        yield Chunk(tuple(part.offsets[dim] for dim in back), tuple(part.sizes[dim] for dim in back))


def _looked_at(header: SafetensorsHeader, seen_as: Mapping[str, TensorInfo]) -> SafetensorsHeader:
    """Return the header with stored tensors described as the expressions view their bytes."""
    entries = {}
    for key, entry in header.entries.items():
        info = seen_as.get(key, entry.info)
        assert info.nbytes == entry.info.nbytes, (key, info, entry.info)
        entries[key] = Entry(info, entry.start)
    return replace(header, entries=entries)
