"""Logical digests: what a tensor's values are, whatever the sharding, the number of ranks and the file format.

Owns the digest's definition. Moves no values between ranks and knows no files; the digests of stored bytes are the
storage engine's own.

A tensor is rows (all dims but the last) of bytes, cut in parts of 64 KiB, and those in 32-bit words, the last one
padded with zeros. Its digest is the sum over rows r, parts p and words w of a_r * b_p * c_w * word mod 2^64, twice with
other keys, mixed with dtype and shape. The sum is linear, so every rank adds up what it holds, at any row and any byte,
and partial sums are added. 32-bit words under odd 64-bit keys make it a multilinear hash: a change escapes with
probability of about 2^-31 a lane, 2^-62 in all. Parts bound the table of word keys: long rows need no memory.
Source: Lemire and Kaser, "Strongly universal string hashing is fast" (2014).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
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
_OF_WORDS, _OF_PARTS = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D
_PIECE_BYTES = 1 << 19
"""What is expanded to 64 bits at a time: small enough to stay in a core's cache."""
_PART_BYTES = 1 << 16
"""Of the definition: changing it changes every digest."""


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

    block: any strides, on any device; read in pieces of 512 KiB, its shape is chunk.sizes.
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
    rows = block.reshape(len(numbers), sizes[-1])
    begin, end = offsets[-1], offsets[-1] + sizes[-1]
    width = _PART_BYTES // info.dtype.itemsize
    totals = [0, 0]
    for part in range(begin // width, -(-end // width)):
        first, stop = max(begin, part * width), min(end, (part + 1) * width)
        sums = _part_sums(rows[:, first - begin : stop - begin], numbers, (first - part * width) * info.dtype.itemsize)
        for i, lane in enumerate(_LANES):
            totals[i] += sums[i] * int(_mix(torch.tensor([part]), lane ^ _OF_PARTS)[0])
    return totals[0] & _MASK, totals[1] & _MASK


def _part_sums(rows: torch.Tensor, numbers: torch.Tensor, start: int) -> list[int]:
    """Return both lanes' sums over one part of some rows; `start` counts bytes from the part's begin."""
    columns, itemsize, device = rows.shape[1], rows.dtype.itemsize, rows.device
    skip = start % 4  # bytes of the first word that lie in front of this chunk
    num_words = -(-(skip + columns * itemsize) // 4)
    keys = [_word_keys(lane)[start // 4 :][:num_words].to(device) for lane in _LANES]
    totals = [0, 0]
    step = max(1, _PIECE_BYTES // (columns * itemsize))
    for at in range(0, len(rows), step):
        words = _words(rows[at : at + step], skip, num_words).to(torch.int64)
        for i, lane in enumerate(_LANES):
            row_sums = (words * keys[i]).sum(1)
            totals[i] += int((row_sums * _mix(numbers[at : at + step], lane).to(device)).sum())
    return totals


def _words(rows: torch.Tensor, skip: int, num_words: int) -> torch.Tensor:
    """Return rows of 32-bit words, with zeros where a row's first or last word is not all in this chunk."""
    as_bytes = rows.contiguous().view(torch.uint8)
    if skip == 0 and as_bytes.shape[1] == 4 * num_words and as_bytes.storage_offset() % 4 == 0:
        return as_bytes.view(torch.int32)
    padded = as_bytes.new_zeros(as_bytes.shape[0], 4 * num_words)
    padded[:, skip : skip + as_bytes.shape[1]] = as_bytes
    return padded.view(torch.int32)


def _row_numbers(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the global number of each of the chunk's rows, in row-major order."""
    numbers = torch.zeros(1, dtype=torch.int64)
    for extent, offset, size in zip(shape, offsets, sizes, strict=True):
        numbers = (numbers[:, None] * extent + torch.arange(offset, offset + size)).reshape(-1)
    return numbers


@functools.cache
def _word_keys(lane: int) -> torch.Tensor:
    """Return the keys of the words of a part."""
    return _mix(torch.arange(_PART_BYTES // 4), lane ^ _OF_WORDS)


def _mix(numbers: torch.Tensor, lane: int) -> torch.Tensor:
    """Return an odd 64-bit key for each number. Source: splitmix64, Steele, Lea and Flood (2014)."""
    z = numbers * _signed(0x9E3779B97F4A7C15) + _signed(lane)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
