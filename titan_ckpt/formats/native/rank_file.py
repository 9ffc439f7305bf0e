"""A rank's file: the layout of its entries and the space for its digests.

Owns the layout that docs/format-rank-file.md describes; sealed_file.py writes it, header.py reads it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from titan_ckpt import progress
from titan_ckpt.directory.manifest import FileRecord
from titan_ckpt.directory.names import rank_file_name
from titan_ckpt.disk.kernel import ALIGNMENT, round_up
from titan_ckpt.disk.workers import bounce_buffer
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.formats.native.sealed_file import (
    BLOCK_BYTES,
    BLOCKS_KEY,
    DIGEST_CHARS,
    NO_DIGEST,
    PREFIX,
    write_rank_file,
)
from titan_ckpt.formats.safetensors import container
from titan_ckpt.geometry.chunks import Chunk, LazyTensor, Shape, TensorInfo, as_bytes, blocks_of, dtype_name, info_of
from titan_ckpt.stores.store import Place

FORMAT_VERSION = 1

LARGE_BYTES = 64 * BLOCK_BYTES
"""Data sections from this size on start at a multiple of BLOCK_BYTES: requests for whole blocks can then be cut where a
bucket cuts the object, and the header grows by less than 2 % of the file."""

MAX_HEADER_BYTES = container.MAX_HEADER_BYTES

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    **container.DTYPE_NAMES,
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}

CARRIERS: Mapping[torch.dtype, tuple[torch.dtype, int]] = {
    torch.complex128: (torch.float64, 2),
    torch.complex32: (torch.float16, 2),
    torch.float4_e2m1fn_x2: (torch.uint8, 1),
}
"""Dtypes that not all safetensors readers know -> (dtype that carries their bytes, carriers per element)."""
STORED_DTYPES = (*DTYPE_NAMES, *CARRIERS)

_quoted = json.encoder.encode_basestring


def in_file_order(info: TensorInfo, chunk: Chunk) -> tuple[bool, int]:
    """Return the key by which a file's chunks are sorted: those of whole blocks first, then wider elements first.

    Blocks at the beginning hold one chunk each, wherever ranks cut its rows: their digests tell whether two steps hold
    the same values (`NativeReader.blocks_of`).
    """
    num_bytes = chunk.numel * info.dtype.itemsize
    return not num_bytes or num_bytes % BLOCK_BYTES > 0, -info.dtype.itemsize


def lay_out(
    chunks: Sequence[tuple[str, TensorInfo, Chunk]],
    rank: int,
    world_size: int,
    elsewhere: Mapping[str, TensorInfo] | None = None,
) -> container.Layout:
    """Lay out a rank's file for chunks of global tensors, in their order, which is that of `in_file_order`.

    So every entry starts at a multiple of its element size without gaps. The header has zeros for digests.
    `elsewhere` (rank 0): tensors of the checkpoint that this file has no chunk of, so that rank 0's file names all.
    Raises: StateEncodingError if the header is over the limit of the safetensors format.
    """
    order = [in_file_order(info, chunk) for _, info, chunk in chunks]
    assert order == sorted(order), "an entry would not be aligned"
    names = _entry_names([fqn for fqn, _, _ in chunks])
    sizes = [chunk.numel * info.dtype.itemsize for _, info, chunk in chunks]
    data_bytes = sum(sizes)
    metadata = {
        "titan_ckpt.version": str(FORMAT_VERSION),
        "titan_ckpt.rank": str(rank),
        "titan_ckpt.world_size": str(world_size),
        "titan_ckpt.block_bytes": str(BLOCK_BYTES),
        "format": "pt",
        **_chunk_texts(names, chunks),
    }
    if elsewhere:
        infos = {fqn: [dtype_name(i.dtype), list(i.shape)] for fqn, i in elsewhere.items()}
        metadata["titan_ckpt.elsewhere"] = _compact(infos)
    tensors = _tensor_rows(names, chunks, sizes)
    blocks = b"0" * (DIGEST_CHARS * -(-data_bytes // BLOCK_BYTES))
    head = PREFIX + NO_DIGEST + BLOCKS_KEY + blocks + b'",' + _compact(metadata).encode()[1:]
    text = b"".join([head, b"," if tensors else b"", tensors, b"}"])
    length = round_up(8 + len(text), BLOCK_BYTES if data_bytes >= LARGE_BYTES else ALIGNMENT) - 8
    if length > MAX_HEADER_BYTES:
        raise StateEncodingError(
            f"rank {rank} would write {len(chunks)} tensors under a header of {length} bytes, over the "
            f"{MAX_HEADER_BYTES} of the safetensors format: stack small tensors, or use more ranks"
        )
    return container.Layout(struct.pack("<Q", length) + text.ljust(length), {}, 8 + length + data_bytes)


def _entry_names(fqns: Sequence[str]) -> list[str]:
    """Name the second and later chunks of an fqn `<fqn>#<n>`, avoiding names of tensors."""
    taken = set(fqns)
    seen = {"__metadata__": 1}
    names = []
    for fqn in fqns:
        count = seen.get(fqn, 0)
        name = fqn
        while count and (name := f"{fqn}#{count}") in taken:
            count += 1
        taken.add(name)
        seen[fqn] = count + 1
        names.append(name)
    return names


def _chunk_texts(names: Sequence[str], chunks: Sequence[tuple[str, TensorInfo, Chunk]]) -> dict[str, str]:
    """Return the header's metadata on chunks; entries with equal shape, offsets and carrier share one description."""
    kinds: dict[tuple[Shape, Shape, torch.dtype | None], int] = {}
    numbers = []
    for _, info, chunk in chunks:
        carried = info.dtype if info.dtype in CARRIERS else None
        if carried is None and chunk.sizes == info.shape:
            numbers.append(0)
        else:
            numbers.append(kinds.setdefault((info.shape, chunk.offsets, carried), len(kinds) + 1))
    fqns = {name: fqn for name, (fqn, _, _) in zip(names, chunks, strict=True) if name != fqn}
    texts = {"titan_ckpt.fqns": _compact(fqns)} if fqns else {}
    if kinds:
        rows = [[*place] if carried is None else [*place, dtype_name(carried)] for *place, carried in kinds]
        texts |= {"titan_ckpt.kinds": _compact(rows), "titan_ckpt.kind_of": _compact(numbers)}
    return texts


def _tensor_rows(names: Sequence[str], chunks: Sequence[tuple[str, TensorInfo, Chunk]], sizes: Sequence[int]) -> bytes:
    """Return `"name":{...}` of every entry as JSON, without the outer braces."""
    kinds: dict[tuple[torch.dtype, Shape], str] = {}
    rows = []
    start = 0
    for name, (_, info, chunk), num_bytes in zip(names, chunks, sizes, strict=True):
        kind = info.dtype, chunk.sizes
        text = kinds.get(kind) or kinds.setdefault(kind, _kind_of_row(*kind))
        rows.append(f"{_quoted(name)}{text}{start},{start + num_bytes}]}}")
        start += num_bytes
    return ",".join(rows).encode()


def _kind_of_row(dtype: torch.dtype, shape: Shape) -> str:
    if dtype in CARRIERS:
        dtype, count = CARRIERS[dtype]
        shape = (*shape, count)
    return f':{{"dtype":"{DTYPE_NAMES[dtype]}","shape":{_compact(shape)},"data_offsets":['


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def write_stream(folder: Place, tensors: Mapping[str, torch.Tensor | LazyTensor], count: progress.Count) -> FileRecord:
    """Write all tensors as the file of rank 0, holding one block and one I/O buffer at a time.

    The blocks of a tensor must be runs of whole rows, in order and without gaps. The file is durable when this
    returns. Raises: OSError.
    """
    infos = {fqn: info_of(value) for fqn, value in tensors.items()}
    whole = {fqn: Chunk.whole(info.shape) for fqn, info in infos.items()}
    order = sorted(infos, key=lambda fqn: in_file_order(infos[fqn], whole[fqn]))
    layout = lay_out([(fqn, infos[fqn], whole[fqn]) for fqn in order], 0, 1)
    blocks = (block.data for fqn in order for block in blocks_of(tensors[fqn]))
    rest = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def next_piece(start: int, stop: int) -> Iterator[memoryview]:
        nonlocal rest
        filled = 0
        while filled < stop - start:
            values = rest if len(rest) else as_bytes(next(blocks).cpu())
            taken = min(len(values), stop - start - filled)
            bounce.tensor[filled : filled + taken] = values[:taken]
            rest = values[taken:]
            filled += taken
        count(filled)
        yield bounce.view[: round_up(filled)]

    name = rank_file_name(0)
    with bounce_buffer() as bounce:
        digest = write_rank_file(folder / name, layout, next_piece, num_workers=1)
    return FileRecord(name, layout.num_bytes, digest)
