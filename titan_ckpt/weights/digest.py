"""Logical digests: a tensor's digest depends on its values, dtype and shape, not on sharding, ranks or file format.

This module owns the definition, which docs/format.md gives in full. It knows no files; digests of stored bytes are
taken by the formats.

A tensor is a table of rows (all dims but the last), each padded to whole 32-bit words and cut in parts of 256 KiB.
The digest is the sum over all words of key(row) * key(part) * key(word) * word mod 2^64, taken twice with different
keys and hashed together with dtype and shape. The sum is linear, so each rank adds up the bytes that it holds, wherever
a shard is cut, and the partial sums are added. The keys are odd: a single changed word is always seen. Several changed
words cancel in one sum with a probability of about 2^-31, in both with 2^-62.
Source: Lemire and Kaser, "Strongly universal string hashing is fast" (2014); splitmix64: Steele, Lea and Flood (2014).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import xxhash

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.sharing import divide
from titan_ckpt.geometry.chunks import Chunk, LazyTensor, TensorInfo, as_bytes, dtype_name, local_tensor

Partial = tuple[int, int]
"""Two sums mod 2^64."""

_MASK = (1 << 64) - 1
_LANES = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
_WORDS, _PARTS = 0x9FB21C651E98DF25, 0x2545F4914F6CDD1D
_PART_BYTES = 1 << 18
"""Part of the definition, as are the constants above: changing one changes every digest."""
_PIECE_BYTES, _PIECE_BYTES_ON_DEVICE = 1 << 18, 1 << 26
"""Bytes that are processed at a time: they fit a processor's cache, or keep a device busy."""


def logical_digests(tensors: Mapping[str, torch.Tensor], coordinator: Coordinator) -> dict[str, str]:
    """Return a digest of 32 hex digits for every tensor of every rank. Collective.

    Each value is read once, by one of the ranks that hold it; replicas are taken to be equal.
    """
    shares, infos, _ = divide(tensors, coordinator)

    def partial_sums() -> dict[str, Partial]:
        sums: dict[str, Partial] = {}
        for share in shares:
            local = local_tensor(tensors[share.name]).detach()
            block = local if share.at is None else local[share.at]
            sums[share.name] = add(sums.get(share.name, (0, 0)), partial_digest(share.info, share.chunk, block))
        return sums

    sums: dict[str, Partial] = dict.fromkeys(infos, (0, 0))
    for table in coordinator.gather_results("logical digests", partial_sums):
        for fqn, (first, second) in table.items():
            sums[fqn] = add(sums[fqn], (first, second))
    return {fqn: finish(infos[fqn], total) for fqn, total in sums.items()}


def digest_of(value: LazyTensor) -> str:
    """Return the digest of a tensor that one process holds; its blocks are read one by one."""
    total = 0, 0
    for block in value.blocks():
        total = add(total, partial_digest(value.info, block.chunk, block.data))
    return finish(value.info, total)


def add(a: Partial, b: Partial) -> Partial:
    """Add partial sums of disjoint chunks of one tensor."""
    return (a[0] + b[0]) & _MASK, (a[1] + b[1]) & _MASK


def finish(info: TensorInfo, total: Partial) -> str:
    """Return the digest, given the sum over all of a tensor's chunks."""
    return xxhash.xxh3_128_hexdigest(
        f"{dtype_name(info.dtype)} {list(info.shape)} {total[0]:016x}{total[1]:016x}".encode()
    )


def partial_digest(info: TensorInfo, chunk: Chunk, block: torch.Tensor) -> Partial:
    """Return the summands of `block`, the values of `chunk`, in the sums of a tensor of `info`.

    block: shape chunk.sizes, any strides, any device; at most one slice along its first dim is copied at a time.
    """
    if not block.numel():
        return 0, 0
    if block.dim() > 2 and len(block) > 1 and block.nbytes > _PIECE_BYTES and not block.is_contiguous():
        total = 0, 0  # slice by slice, because one reshape could copy all of it
        for i in range(len(block)):
            inside = Chunk((chunk.offsets[0] + i, *chunk.offsets[1:]), (1, *chunk.sizes[1:]))
            total = add(total, partial_digest(info, inside, block[i : i + 1]))
        return total
    shape, offsets, sizes = info.shape or (1,), chunk.offsets or (0,), chunk.sizes or (1,)
    row_numbers = _row_numbers(shape[:-1], offsets[:-1], sizes[:-1])
    rows = block.reshape(len(row_numbers), sizes[-1])
    width, start, stop = _PART_BYTES // rows.dtype.itemsize, offsets[-1], offsets[-1] + sizes[-1]
    parts = range(start // width, (stop - 1) // width + 1)
    row_keys = torch.stack([_keys(row_numbers, lane) for lane in _LANES])
    part_keys = torch.stack([_keys(torch.tensor(parts), lane ^ _PARTS) for lane in _LANES])
    total = 0, 0
    for i, part in enumerate(parts):
        first, last = max(start, part * width), min(stop, (part + 1) * width)
        columns = rows[:, first - start : last - start]
        total = add(
            total, _sums(columns, (first - part * width) * rows.dtype.itemsize, row_keys * part_keys[:, i, None])
        )
    return total


def _sums(columns: torch.Tensor, first_byte: int, row_keys: torch.Tensor) -> Partial:
    """Return both sums over columns that start at this byte of a part; row_keys: one for each sum and row.

    Columns that start or end inside a word are padded with zeros, so that the parts of a word in several shards add up.
    """
    num_bytes, device = columns.shape[1] * columns.dtype.itemsize, columns.device
    before, after = first_byte % 4, -(first_byte + num_bytes) % 4
    word_keys = _word_keys()[:, first_byte // 4 : (first_byte + num_bytes + after) // 4].to(device)
    row_keys, totals = row_keys.to(device), torch.zeros(len(_LANES), dtype=torch.int64, device=device)
    step = max(1, (_PIECE_BYTES if device.type == "cpu" else _PIECE_BYTES_ON_DEVICE) // num_bytes)
    for row in range(0, len(columns), step):
        piece = as_bytes(columns[row : row + step]).view(-1, num_bytes)
        if before or after or piece.storage_offset() % 4:  # pad copies, to an offset that can be viewed as words
            piece = torch.nn.functional.pad(piece, (before, after))
        words = piece.view(torch.int32).to(torch.int64)
        for lane in range(len(_LANES)):
            totals[lane] += ((words * word_keys[lane]).sum(1) * row_keys[lane, row : row + step]).sum()
    first, second = totals.tolist()
    return first & _MASK, second & _MASK


@functools.cache
def _word_keys() -> torch.Tensor:
    """Return the keys of a part's words for each sum."""
    return torch.stack([_keys(torch.arange(_PART_BYTES // 4), lane ^ _WORDS) for lane in _LANES])


def _row_numbers(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the global number of each of the chunk's rows, in row-major order."""
    numbers = torch.zeros(1, dtype=torch.int64)
    for extent, offset, size in zip(shape, offsets, sizes, strict=True):
        numbers = (numbers[:, None] * extent + torch.arange(offset, offset + size)).reshape(-1)
    return numbers


def _keys(numbers: torch.Tensor, lane: int) -> torch.Tensor:
    """Return an odd 64-bit key for each number: splitmix64's output with the lowest bit set."""
    z = numbers * _signed(0x9E3779B97F4A7C15) + _signed(lane)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
