"""Logical digests: what a tensor's values are, whatever the sharding, the number of ranks and the file format.

Owns the digest's definition, which docs/format.md gives in full. Moves no values between ranks and knows no files; the
digests of stored bytes are the storage engine's own.

A tensor is rows (all dims but the last) of signed bytes, cut in parts of 64 KiB. A part has 16 sketches: sums of its
bytes times small keys, a product of int8 matrices, which runs at the memory's speed. The digest is the sum over rows,
parts and sketches of a_r * b_p * c_j * sketch mod 2^64, twice with other keys, mixed with dtype and shape. All of it is
linear, so every rank adds up what it holds, at any row and any byte, and partial sums are added. Keys of 7 bits hide a
change of a part from all 16 sketches with probability 2^-112; sketches of 32 bits under odd 64-bit keys make a
multilinear hash, which misses a change of sketches with about 2^-31 a sum, 2^-62 in all.
Source: Lemire and Kaser, "Strongly universal string hashing is fast" (2014).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from titan_ckpt.distributed import Coordinator
from titan_ckpt.ownership import divide
from titan_ckpt.tensors import Chunk, TensorInfo

Partial = tuple[int, int]
"""Two sums mod 2^64."""

_MASK = (1 << 64) - 1
_LANES = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
_OF_BYTES, _OF_SKETCHES, _OF_PARTS = 0x5851F42D4C957F2D, 0x9FB21C651E98DF25, 0x2545F4914F6CDD1D
_PIECE_BYTES = 1 << 22
"""What is multiplied at a time, and copied first where it is not contiguous."""
_PART_BYTES, _SKETCHES = 1 << 16, 16
"""Of the definition: changing them changes every digest."""


def logical_digests(tensors: Mapping[str, torch.Tensor], coordinator: Coordinator) -> dict[str, str]:
    """Return a digest of 32 hex digits for every tensor of every rank. Collective.

    Each value is read once, by one of the ranks that hold it; replicas are taken to be equal.
    """
    division = divide(tensors, coordinator)
    partial: dict[str, Any] = {}
    for share in division.shares:
        value = tensors[share.fqn].detach()
        local = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001 - to_local may copy
        block = local if share.index is None else local[share.index]
        here = partial_digest(share.info, share.chunk, block)
        partial[share.fqn] = [*add(partial.get(share.fqn, (0, 0)), here)]
    sums: dict[str, Partial] = dict.fromkeys(division.tensors, (0, 0))
    gathered: list[Any] = coordinator.gather("logical digests", partial)
    for table in gathered:
        for fqn, (first, second) in table.items():
            sums[fqn] = add(sums[fqn], (first, second))
    return {fqn: finish(division.tensors[fqn], total) for fqn, total in sums.items()}


def add(a: Partial, b: Partial) -> Partial:
    """Add partial sums of disjoint chunks of one tensor."""
    return (a[0] + b[0]) & _MASK, (a[1] + b[1]) & _MASK


def finish(info: TensorInfo, total: Partial) -> str:
    """Return the digest, given the sum over all of a tensor's chunks."""
    dtype = str(info.dtype).removeprefix("torch.")
    return xxhash.xxh3_128_hexdigest(f"{dtype} {list(info.shape)} {total[0]:016x}{total[1]:016x}".encode())


def partial_digest(info: TensorInfo, chunk: Chunk, block: torch.Tensor) -> Partial:
    """Return what `block`, the values of `chunk`, adds to the digest of a tensor of `info`.

    block: any strides, on any device; read in pieces of 4 MiB, its shape is chunk.sizes.
    """
    if not block.numel():
        return 0, 0
    if block.dim() > 2 and len(block) > 1 and block.nbytes > _PIECE_BYTES and not block.is_contiguous():
        total = 0, 0  # slice by slice, where one reshape could copy it all
        for i in range(len(block)):
            inside = Chunk((chunk.offsets[0] + i, *chunk.offsets[1:]), (1, *chunk.sizes[1:]))
            total = add(total, partial_digest(info, inside, block[i : i + 1]))
        return total
    shape, offsets, sizes = info.shape or (1,), chunk.offsets or (0,), chunk.sizes or (1,)
    numbers = _row_numbers(shape[:-1], offsets[:-1], sizes[:-1])
    total = 0, 0
    for start, table, parts in _parts(block.reshape(len(numbers), sizes[-1]), offsets[-1]):
        keys = [(_mix(numbers, lane)[:, None] * _mix(parts, lane ^ _OF_PARTS)).reshape(-1) for lane in _LANES]
        total = add(total, _sums(table, start, keys))
    return total


def _parts(rows: torch.Tensor, begin: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield rows' elements part by part: the byte of the part that comes first, the elements, the part's number.

    Whole parts that follow each other in memory come at once, each a row of the table, with all their numbers.
    """
    width, at, end = _PART_BYTES // rows.dtype.itemsize, begin, begin + rows.shape[1]
    while at < end:
        part, whole = at // width, (end - at) // width
        together = len(rows) == 1 or (rows.is_contiguous() and rows.shape[1] == whole * width)
        count = whole if whole and together and at % width == 0 else 1
        stop = min(end, (part + count) * width)
        table = rows[:, at - begin : stop - begin]
        if count > 1:
            table = table.reshape(-1, width)
        yield (at - part * width) * rows.dtype.itemsize, table, torch.arange(part, part + count)
        at = stop


def _sums(table: torch.Tensor, start: int, row_keys: list[torch.Tensor]) -> Partial:
    """Return both sums over a table whose rows begin `start` bytes into a part and have these keys."""
    columns, device = table.shape[1] * table.dtype.itemsize, table.device
    byte_keys, sketch_keys = (keys.to(device) for keys in _small_keys())
    totals = [0, 0]
    step = max(1, _PIECE_BYTES // columns)
    for at in range(0, len(table), step):
        as_bytes = table[at : at + step].contiguous().view(torch.int8)
        sketches = _multiply(as_bytes, byte_keys[start : start + columns])
        for i, keys in enumerate(row_keys):
            totals[i] += int(((sketches * sketch_keys[i]).sum(1) * keys[at : at + step].to(device)).sum())
    return totals[0] & _MASK, totals[1] & _MASK


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the exact product of two int8 matrices as int64."""
    if a.device.type == "cpu" and _int8_products_are_exact():
        return torch._int_mm(a, b).to(torch.int64)  # noqa: SLF001 - the one door to integer products
    return (a.to(torch.float64) @ b.to(torch.float64)).to(torch.int64)


@functools.cache
def _int8_products_are_exact() -> bool:
    """Whether this machine has exact and fast int8 products; without VNNI, sums of two products may saturate."""
    a = torch.tensor([-128, 127], dtype=torch.int8).repeat_interleave(64).view(2, 64).repeat(9, 1)
    b = torch.tensor([-64, 63], dtype=torch.int8).repeat(64, _SKETCHES // 2)
    exact = a.to(torch.int64) @ b.to(torch.int64)
    return torch.backends.mkldnn.is_available() and torch.equal(torch._int_mm(a, b), exact.to(torch.int32))  # noqa: SLF001


def _row_numbers(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the global number of each of the chunk's rows, in row-major order."""
    numbers = torch.zeros(1, dtype=torch.int64)
    for extent, offset, size in zip(shape, offsets, sizes, strict=True):
        numbers = (numbers[:, None] * extent + torch.arange(offset, offset + size)).reshape(-1)
    return numbers


@functools.cache
def _small_keys() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of a part's bytes, -64 to 63 for every sketch, and those of the sketches for both sums."""
    mixed = _mix(torch.arange(_PART_BYTES * _SKETCHES), _OF_BYTES)
    byte_keys = (((mixed >> 32) & 127) - 64).to(torch.int8).view(_PART_BYTES, _SKETCHES)
    return byte_keys, torch.stack([_mix(torch.arange(_SKETCHES), lane ^ _OF_SKETCHES) for lane in _LANES])


def _mix(numbers: torch.Tensor, lane: int) -> torch.Tensor:
    """Return an odd 64-bit key for each number. Source: splitmix64, Steele, Lea and Flood (2014)."""
    z = numbers * _signed(0x9E3779B97F4A7C15) + _signed(lane)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
