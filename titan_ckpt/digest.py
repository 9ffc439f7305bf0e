"""Logical digests: what a tensor's values are, whatever the sharding, the number of ranks and the file format.

Owns the digest's definition. Moves no values between ranks and knows no files; the digests of stored bytes are the
storage engine's own.

A tensor is rows (all dims but the last) of bytes, cut in 32-bit words, the last one padded with zeros. Its digest is
the sum over rows r and words w of a_r * b_w * word mod 2^64, twice with other keys, mixed with dtype and shape. The
sum is linear, so every rank adds up what it holds, at any row and any byte, and partial sums are added. 32-bit words
under 64-bit keys make it a multilinear hash: a change escapes with probability 2^-33 a lane, 2^-66 in all.
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
_PIECE_BYTES = 1 << 20
"""What is expanded to 64 bits at a time: small enough to stay in a core's cache."""


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

    block: any strides, on any device; read in pieces of 1 MiB, its shape is chunk.sizes.
    """
    if not block.numel():
        return 0, 0
    shape = info.shape or (1,)
    offsets, sizes = (chunk.offsets or (0,)), (chunk.sizes or (1,))
    columns = sizes[-1]
    rows = _row_numbers(shape[:-1], offsets[:-1], sizes[:-1])
    itemsize = info.dtype.itemsize
    skip = offsets[-1] * itemsize % 4  # bytes of the first word that lie in front of this chunk
    first_word = offsets[-1] * itemsize // 4
    num_words = -(-(skip + columns * itemsize) // 4)
    flat = block.reshape(-1, columns) if block.is_contiguous() else block.reshape(len(rows), columns)
    totals = [0, 0]
    keys = [_keys(first_word, num_words, lane).to(block.device) for lane in _LANES]
    step = max(1, _PIECE_BYTES // (columns * itemsize))
    for start in range(0, len(rows), step):
        words = _words(flat[start : start + step], skip, num_words).to(torch.int64)
        numbers = rows[start : start + step]
        for i, lane in enumerate(_LANES):
            row_sums = (words * keys[i]).sum(1)
            totals[i] += int((row_sums * _mix(numbers, lane).to(block.device)).sum())
    return totals[0] & _MASK, totals[1] & _MASK


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


@functools.lru_cache(maxsize=64)
def _keys(first: int, count: int, lane: int) -> torch.Tensor:
    """Return the keys of a range of words: odd, so that no row or word is left out of the sum."""
    return _mix(torch.arange(first, first + count), lane ^ 0x5851F42D4C957F2D)


def _mix(numbers: torch.Tensor, lane: int) -> torch.Tensor:
    """Return an odd 64-bit key for each number. Source: splitmix64, Steele, Lea and Flood (2014)."""
    z = numbers * _signed(0x9E3779B97F4A7C15) + _signed(lane)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
