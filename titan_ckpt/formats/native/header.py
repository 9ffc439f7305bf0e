"""Reading the header of a rank's file: its entries, where they lie in global tensors, and its blocks' digests.

Owns every check of what rank_file.py writes, whatever the bytes are. Moves no tensor values and opens no files.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import add, le, mul
from typing import Any

import numpy as np
import torch
import xxhash

from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.disk.kernel import ALIGNMENT
from titan_ckpt.encoding import strict_json
from titan_ckpt.encoding.typed_json_reader import TENSOR_DTYPES
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.native.rank_file import (
    CARRIERS,
    DTYPE_NAMES,
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    STORED_DTYPES,
)
from titan_ckpt.formats.native.sealed_file import DIGEST_AT, DIGEST_CHARS, NO_DIGEST, PREFIX
from titan_ckpt.formats.reading.engine import Blocks
from titan_ckpt.geometry.chunks import Chunk, Entry, Shape, TensorInfo, dtype_name
from titan_ckpt.process import gc_paused

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_CARRIED = {dtype_name(dtype): dtype for dtype in CARRIERS}


@dataclass(frozen=True, slots=True)
class RankFile:
    """A checked header, kept in columns: 10^5 small tensors are ordinary, and an object for each is slow to make.

    `by_fqn`: fqn -> position of the tensor's entry in file order, or the positions of its chunks if it has several.
    `elsewhere`: the tensors that only other ranks' files hold; empty except in rank 0's file.
    """

    path: str
    rank: int
    world_size: int
    digest: str
    blocks: Blocks
    """The blocks of the data section, which are verified when they are read."""
    names: list[str]
    sizes: list[Shape]
    dtypes: list[torch.dtype]
    starts: list[int]
    kind_of: list[int]
    """For each entry: 0 if it is a whole tensor, else 1 + its index in `kinds`."""
    kinds: list[tuple[Shape, Shape]]
    """(Global shape, offsets) of each kind of chunk."""
    fqns: Mapping[str, str]
    """Entry name -> fqn, where the two differ."""
    by_fqn: Mapping[str, int | list[int]]
    elsewhere: Mapping[str, TensorInfo]

    def entire(self, fqn: str, chunk: Chunk) -> tuple[int, Shape, torch.dtype] | None:
        """Return (start, sizes, dtype) of the tensor's only entry, if that is exactly this chunk."""
        i = self.by_fqn.get(fqn)
        if type(i) is not int or self.sizes[i] != chunk.sizes:
            return None
        kind = self.kind_of[i]
        if (self.kinds[kind - 1][1] != chunk.offsets) if kind else any(chunk.offsets):
            return None
        return self.starts[i], chunk.sizes, self.dtypes[i]

    def entry(self, i: int) -> Entry[int]:
        """Return the i-th entry in file order: a chunk of a global tensor, and its first byte in the data section."""
        sizes, name, kind = self.sizes[i], self.names[i], self.kind_of[i]
        shape, offsets = self.kinds[kind - 1] if kind else (sizes, Chunk.whole(sizes).offsets)
        chunk = Chunk(offsets, sizes)
        return Entry(self.fqns.get(name, name), TensorInfo(shape, self.dtypes[i]), chunk, self.starts[i])

    def infos(self) -> dict[str, TensorInfo]:
        """Return every tensor with an entry in this file; tensors of equal shape and dtype share one object."""
        shapes = [self.kinds[k - 1][0] if k else sizes for k, sizes in zip(self.kind_of, self.sizes, strict=True)]
        kinds = list(zip(shapes, self.dtypes, strict=True))
        shared = {kind: TensorInfo(*kind) for kind in set(kinds)}
        return {fqn: shared[kinds[at if isinstance(at, int) else at[0]]] for fqn, at in self.by_fqn.items()}


def parse_header(raw: bytes, file_bytes: int, path: str) -> RankFile:
    """Check and read a header. `raw` holds the file's bytes before the data section.

    Raises: CorruptCheckpointError for anything but a header that rank_file.py wrote, whatever the bytes are.
    """
    digest = raw[DIGEST_AT : DIGEST_AT + DIGEST_CHARS]
    if raw[8:DIGEST_AT] != PREFIX:
        raise _corrupt(path, "it is not a rank's file of this package (no titan_ckpt header)")
    state = xxhash.xxh3_128(raw[:DIGEST_AT])
    state.update(NO_DIGEST)
    state.update(memoryview(raw)[DIGEST_AT + DIGEST_CHARS :])
    if state.hexdigest().encode() != digest:
        raise _corrupt(path, f"its header has digest {state.hexdigest()}, expected {digest.decode('ascii', 'replace')}")
    try:
        with gc_paused():
            header: Any = strict_json.loads(raw[8:].decode())
            return _read(header, digest.decode("ascii"), len(raw), file_bytes, path)
    except CorruptCheckpointError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError, IndexError, OverflowError) as error:
        raise _corrupt(path, f"its header cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


def header_bytes(prefix: bytes, file_bytes: int, path: str) -> int:
    """Return the offset of the data section, given the file's first 8 bytes. Raises: CorruptCheckpointError."""
    if len(prefix) < 8:
        raise _corrupt(path, f"it has {file_bytes} bytes, too few for a header")
    length = int(struct.unpack("<Q", prefix[:8])[0])
    if length > min(MAX_HEADER_BYTES, file_bytes - 8) or (8 + length) % ALIGNMENT:
        raise _corrupt(path, f"its first 8 bytes claim a header of {length} bytes in a file of {file_bytes}")
    return 8 + length


def _read(header: dict[str, Any], digest: str, data_start: int, file_bytes: int, path: str) -> RankFile:
    metadata = header.pop("__metadata__")
    _require(set(map(type, metadata.values())) <= {str}, "metadata that is no text")
    version = _number(metadata["titan_ckpt.version"])
    if version != FORMAT_VERSION:
        raise _corrupt(path, f"its format version is {version}; this release reads {FORMAT_VERSION}: use a newer one")
    rank, world_size = _number(metadata["titan_ckpt.rank"]), _number(metadata["titan_ckpt.world_size"])
    _require(0 <= rank < world_size <= 1 << 24, "rank outside its world")
    block_bytes = _number(metadata["titan_ckpt.block_bytes"])
    _require(ALIGNMENT <= block_bytes <= IO_BYTES and block_bytes & (block_bytes - 1) == 0, "odd block size")
    names, tensors = list(header), list(header.values())
    sizes = [tensor["shape"] for tensor in tensors]
    _numbers(sizes)
    dtypes = [_DTYPES[tensor["dtype"]] for tensor in tensors]
    starts, data_bytes = _check_offsets([tensor["data_offsets"] for tensor in tensors], sizes, dtypes)
    if data_start + data_bytes != file_bytes:
        raise _corrupt(path, f"it has {file_bytes} bytes, expected {data_start + data_bytes}; it was cut or grew")
    boxes = list(map(tuple, sizes))
    rows: Any = strict_json.loads(metadata.get("titan_ckpt.kinds", "[]"))
    _require(bool(rows) == ("titan_ckpt.kind_of" in metadata), "kinds and kind_of go together")
    kind_of: Any = strict_json.loads(metadata["titan_ckpt.kind_of"]) if rows else [0] * len(names)
    kinds = _check_kinds(rows, kind_of, boxes, dtypes)
    fqns: Any = strict_json.loads(metadata.get("titan_ckpt.fqns", "{}"))
    _require(type(fqns) is dict and set(map(type, fqns.values())) <= {str} and fqns.keys() <= header.keys(), "a name")
    digests = metadata["titan_ckpt.blocks"]
    _require(len(digests) == DIGEST_CHARS * -(-data_bytes // block_bytes), "a digest per block")
    blocks = Blocks(
        data_start,
        data_start + data_bytes,
        block_bytes,
        lambda number: digests[number * DIGEST_CHARS : (number + 1) * DIGEST_CHARS],
    )
    by_fqn = _index([fqns.get(name, name) for name in names] if fqns else names)
    elsewhere = _read_elsewhere(metadata.get("titan_ckpt.elsewhere", "{}"))
    _require(by_fqn.keys().isdisjoint(elsewhere), "a tensor both here and elsewhere")
    return RankFile(
        path, rank, world_size, digest, blocks, names, boxes, dtypes, starts, kind_of, kinds, fqns, by_fqn, elsewhere,
    )  # fmt: skip


def _number(text: str) -> int:
    _require(text.isascii() and text.isdigit(), f"a number, not {text!r:.40}")
    return int(text)


def _read_elsewhere(text: str) -> dict[str, TensorInfo]:
    """Return the tensors that only other ranks' files hold; those of equal shape and dtype share one object."""
    rows: Any = strict_json.loads(text)
    _numbers([shape for _, shape in rows.values()])
    unknown = [name for name in {dtype for dtype, _ in rows.values()} if TENSOR_DTYPES.get(name) not in STORED_DTYPES]
    _require(not unknown, f"dtype {unknown}")
    kinds: dict[tuple[torch.dtype, Shape], TensorInfo] = {}
    elsewhere = {}
    for fqn, (dtype, shape) in rows.items():
        kind = TENSOR_DTYPES[dtype], tuple(shape)
        elsewhere[fqn] = kinds.get(kind) or kinds.setdefault(kind, TensorInfo(kind[1], kind[0]))
    return elsewhere


def _numbers(lists: list[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Check that these are lists of sizes or offsets; return all their numbers in one array."""
    _require(set(map(type, lists)) <= {list} and max(map(len, lists), default=0) <= 64, "a shape")
    flat = list(chain.from_iterable(lists))
    _require(set(map(type, flat)) <= {int}, "a number")
    numbers = np.asarray(array("q", flat))
    _require(not ((numbers < 0) | (numbers > strict_json.MAX_SIZE)).any(), "a size")
    return numbers


def _check_offsets(offsets: list[Any], sizes: list[list[int]], dtypes: list[torch.dtype]) -> tuple[list[int], int]:
    """Check that tensors follow each other and have as many bytes as their shapes; return their starts and the end."""
    numbers = _numbers(offsets)
    _require(set(map(len, offsets)) <= {2}, "two offsets")
    starts, stops = numbers[0::2], numbers[1::2]
    ends = np.append(0, stops)
    _require(np.array_equal(ends[:-1], starts), "a hole or an overlap between tensors")
    itemsize_of = {dtype: dtype.itemsize for dtype in set(dtypes)}
    itemsizes = list(map(itemsize_of.__getitem__, dtypes))
    expected = map(mul, map(prod, sizes), itemsizes)  # numpy's products could wrap around
    _require((stops - starts).tolist() == list(expected), "bytes of a tensor")
    _require(not (starts % np.array(itemsizes, dtype=np.int64)).any(), "a tensor that is not aligned to its elements")
    return starts.tolist(), int(ends[-1])


def _check_kinds(
    rows: list[Any], kind_of: list[int], boxes: list[Shape], dtypes: list[torch.dtype]
) -> list[tuple[Shape, Shape]]:
    """Check the chunk of every entry and return the kinds of chunks.

    Changes `boxes` and `dtypes` of carried entries to those of the tensor itself.
    """
    _require(set(map(type, kind_of)) <= {int} and type(rows) is list, "a kind")
    used = set(kind_of)
    _require(min(used, default=0) >= 0 and max(used, default=0) <= len(rows), "an unknown kind")
    _require(all(type(row) is list and 2 <= len(row) <= 3 for row in rows), "a kind")
    _numbers([part for row in rows for part in row[:2]])
    carried = {number: _CARRIED[row[2]] for number, row in enumerate(rows, 1) if len(row) > 2}
    for i in (i for i, kind in enumerate(kind_of) if kind in carried) if carried else ():
        carrier, count = CARRIERS[carried[kind_of[i]]]
        _require(carrier == dtypes[i] and boxes[i][-1:] == (count,), "an odd carrier")
        dtypes[i], boxes[i] = carried[kind_of[i]], boxes[i][:-1]
    kinds = [(tuple(shape), tuple(offsets)) for shape, offsets, *_ in rows]
    for kind, sizes in set(zip(kind_of, boxes, strict=True)):
        if kind:
            shape, offsets = kinds[kind - 1]
            _require(len(shape) == len(offsets) == len(sizes), "dims of a chunk")
            _require(all(map(le, map(add, offsets, sizes), shape)), "a chunk outside its tensor")
    return kinds


def _index(fqns: list[str]) -> dict[str, int | list[int]]:
    index: dict[str, int | list[int]] = dict(zip(fqns, range(len(fqns)), strict=True))
    if len(index) < len(fqns):
        several: dict[str, list[int]] = {}
        for i, fqn in enumerate(fqns):
            several.setdefault(fqn, []).append(i)
        index.update({fqn: at for fqn, at in several.items() if len(at) > 1})
    return index


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _corrupt(path: str, cause: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {cause}. Load another step, or copy the file again from where it is whole", path
    )
