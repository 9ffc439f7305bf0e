"""The header of a rank's file: which entries it holds, where they lie in global tensors, the digests of its blocks.

Owns the layout written down in docs/format.md, and every check of it. Moves no tensor values and opens no files.

The file is a safetensors file. Digests are of the data section, so they are known only when it is written, while the
header stands before it: their room is fixed when the file is laid out, and `Layout.seal` fills it in at the end. The
header's own digest covers the digests of all blocks, so it stands for the whole file (a tree of two levels).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from operator import add, le, mod, mul, sub
from typing import Any

import torch
import xxhash

from titan_ckpt.errors import CorruptCheckpointError, StateEncodingError
from titan_ckpt.storage.engine import collector_held
from titan_ckpt.storage.memory import ALIGNMENT, round_up
from titan_ckpt.tensors import Chunk, Shape, TensorInfo

FORMAT_VERSION = 1
BLOCK_BYTES = 1 << 20
"""Bytes of the data section under one digest: small enough that a resharded load reads little beside what it wants."""

MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself (tensor.rs, MAX_HEADER_SIZE); beyond it no other reader opens the file."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_CARRIERS: Mapping[torch.dtype, tuple[torch.dtype, int]] = {
    torch.complex128: (torch.float64, 2),
    torch.complex32: (torch.float16, 2),
    torch.float4_e2m1fn_x2: (torch.uint8, 1),
}
"""Dtypes that safetensors readers do not share, each with the one that carries its bytes and how many make one."""
STORED_DTYPES = (*DTYPE_NAMES, *_CARRIERS)
_CARRIED = {str(dtype).removeprefix("torch."): dtype for dtype in _CARRIERS}

_PREFIX = b'{"__metadata__":{"titan_ckpt.digest":"'
_DIGEST_AT = 8 + len(_PREFIX)
_DIGEST_CHARS = 32
_NO_DIGEST = b"0" * _DIGEST_CHARS
_BLOCKS_KEY = b'","titan_ckpt.blocks":"'
_quoted = json.encoder.encode_basestring


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a rank's file: a chunk of the global tensor `fqn`. `start` counts from the data section's begin."""

    name: str
    fqn: str
    info: TensorInfo
    chunk: Chunk
    start: int

    @property
    def nbytes(self) -> int:
        return self.chunk.numel * self.info.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """A rank's file before it is written."""

    entries: tuple[Entry, ...]
    data_start: int
    data_bytes: int
    template: bytes
    """The header with zeros for digests."""

    @property
    def num_bytes(self) -> int:
        return self.data_start + self.data_bytes

    @property
    def num_blocks(self) -> int:
        return -(-self.data_bytes // BLOCK_BYTES)

    def seal(self, block_digests: Sequence[str]) -> tuple[bytes, str]:
        """Return the header's bytes and its digest, which stands for the whole file."""
        assert len(block_digests) == self.num_blocks
        header = bytearray(self.template)
        at = _DIGEST_AT + _DIGEST_CHARS + len(_BLOCKS_KEY)
        header[at : at + _DIGEST_CHARS * self.num_blocks] = "".join(block_digests).encode()
        digest = xxhash.xxh3_128_hexdigest(header)
        header[_DIGEST_AT : _DIGEST_AT + _DIGEST_CHARS] = digest.encode()
        return bytes(header), digest


def lay_out(
    chunks: Sequence[tuple[str, TensorInfo, Chunk]],
    rank: int,
    world_size: int,
    elsewhere: Mapping[str, TensorInfo] | None = None,
) -> Layout:
    """Lay out a rank's file for chunks of global tensors.

    `elsewhere` (rank 0): tensors of the checkpoint that this file has no chunk of, so that rank 0's file names all.
    Wider elements come first, so that every entry starts at a multiple of its element size without gaps.
    Raises: StateEncodingError if the header is over the limit of the safetensors format.
    """
    order = sorted(chunks, key=lambda c: -c[1].dtype.itemsize)
    names = _entry_names([fqn for fqn, _, _ in order])
    sizes = [chunk.numel * info.dtype.itemsize for _, info, chunk in order]
    starts = list(accumulate(sizes, initial=0))
    data_bytes = starts.pop()
    entries = tuple(
        Entry(name, fqn, info, chunk, start)
        for name, (fqn, info, chunk), start in zip(names, order, starts, strict=True)
    )
    metadata = {
        "titan_ckpt.version": str(FORMAT_VERSION),
        "titan_ckpt.rank": str(rank),
        "titan_ckpt.world_size": str(world_size),
        "titan_ckpt.block_bytes": str(BLOCK_BYTES),
        "format": "pt",
    }
    if rows := _chunk_rows(entries):
        metadata["titan_ckpt.chunks"] = rows
    if elsewhere:
        infos = {fqn: [str(i.dtype).removeprefix("torch."), list(i.shape)] for fqn, i in elsewhere.items()}
        metadata["titan_ckpt.elsewhere"] = _compact(infos)
    tensors = _tensor_rows(entries)
    blocks = b"0" * (_DIGEST_CHARS * -(-data_bytes // BLOCK_BYTES))
    head = _PREFIX + _NO_DIGEST + _BLOCKS_KEY + blocks + b'",' + _compact(metadata).encode()[1:]
    text = b"".join([head, b"," if tensors else b"", tensors, b"}"])
    length = round_up(8 + len(text)) - 8
    if length > MAX_HEADER_BYTES:
        raise StateEncodingError(
            f"rank {rank} would write {len(entries)} tensors under a header of {length} bytes, over the "
            f"{MAX_HEADER_BYTES} of the safetensors format: stack small tensors, or use more ranks"
        )
    return Layout(entries, 8 + length, data_bytes, struct.pack("<Q", length) + text.ljust(length))


def _entry_names(fqns: Sequence[str]) -> list[str]:
    """Give further chunks of one fqn a name of their own, `<fqn>#<n>`, not taken by any tensor."""
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


def _chunk_rows(entries: Sequence[Entry]) -> str:
    """Return a JSON list: 0 for a whole tensor under its own name; else [shape, offsets, fqn and dtype if they differ].

    Nothing where all are 0. Entries of a kind share their text.
    """
    kinds: dict[tuple[Shape, Shape], str] = {}
    rows = []
    for entry in entries:
        carried = entry.info.dtype in _CARRIERS
        named = entry.name == entry.fqn
        if named and not carried and entry.chunk.sizes == entry.info.shape:
            rows.append("0")
            continue
        kind = entry.info.shape, entry.chunk.offsets
        text = kinds.get(kind) or kinds.setdefault(kind, _compact(kind)[1:-1])
        if carried or not named:
            text += f",{_quoted(entry.fqn)}"
        if carried:
            text += f',"{str(entry.info.dtype).removeprefix("torch.")}"'
        rows.append(f"[{text}]")
    return "" if set(rows) <= {"0"} else f"[{','.join(rows)}]"


def _tensor_rows(entries: Sequence[Entry]) -> bytes:
    """Return `"name":{...}` of every entry as JSON, without the braces around; entries of a kind share most of it."""
    kinds: dict[tuple[torch.dtype, Shape], tuple[str, int]] = {}
    rows = []
    for entry in entries:
        kind = entry.info.dtype, entry.chunk.sizes
        if kind not in kinds:
            kinds[kind] = _kind_of_row(*kind), entry.nbytes
        text, nbytes = kinds[kind]
        rows.append(f"{_quoted(entry.name)}{text}{entry.start},{entry.start + nbytes}]}}")
    return ",".join(rows).encode()


def _kind_of_row(dtype: torch.dtype, shape: Shape) -> str:
    if dtype in _CARRIERS:
        dtype, count = _CARRIERS[dtype]
        shape = (*shape, count)
    return f':{{"dtype":"{DTYPE_NAMES[dtype]}","shape":{_compact(shape)},"data_offsets":['


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class RankFile:
    """A checked header, kept in columns: 10^5 small tensors are ordinary, and an object for each is slow to make.

    `by_fqn`: the position in file order of the entry of a tensor, or of several chunks' entries.
    `elsewhere`: only in rank 0's file.
    """

    path: str
    rank: int
    world_size: int
    digest: str
    block_bytes: int
    block_digests: str
    data_start: int
    data_bytes: int
    names: list[str]
    sizes: list[Shape]
    dtypes: list[torch.dtype]
    starts: list[int]
    rows: list[Any]
    by_fqn: Mapping[str, int | list[int]]
    elsewhere: Mapping[str, TensorInfo]

    def block_digest(self, block: int) -> str:
        return self.block_digests[block * _DIGEST_CHARS : (block + 1) * _DIGEST_CHARS]

    def entire(self, fqn: str, chunk: Chunk) -> tuple[int, Shape, torch.dtype] | None:
        """Return (start, sizes, dtype) of the entry that is exactly this chunk, if there is one and it is the only."""
        at = self.by_fqn.get(fqn)
        if type(at) is not int or self.sizes[at] != chunk.sizes:
            return None
        row = self.rows[at]
        if any(chunk.offsets) if row == 0 else tuple(row[1]) != chunk.offsets:
            return None
        return self.starts[at], chunk.sizes, self.dtypes[at]

    def entries_of(self, fqn: str) -> list[Entry]:
        """Return the chunks of a tensor that this file holds."""
        at = self.by_fqn.get(fqn)
        if at is None:
            return []
        return [self.entry(i) for i in ([at] if isinstance(at, int) else at)]

    def entry(self, i: int) -> Entry:
        """Return the i-th entry in file order."""
        row, sizes, name = self.rows[i], self.sizes[i], self.names[i]
        if row == 0:
            return Entry(name, name, TensorInfo(sizes, self.dtypes[i]), Chunk.whole(sizes), self.starts[i])
        fqn = row[2] if len(row) > 2 else name
        info = TensorInfo(tuple(row[0]), self.dtypes[i])
        return Entry(name, fqn, info, Chunk(tuple(row[1]), sizes), self.starts[i])

    def infos(self) -> dict[str, TensorInfo]:
        """Return every tensor with an entry in this file; tensors of one shape and dtype share their object."""
        shapes = [s if row == 0 else tuple(row[0]) for s, row in zip(self.sizes, self.rows, strict=True)]
        kinds = list(zip(shapes, self.dtypes, strict=True))
        shared = {kind: TensorInfo(*kind) for kind in set(kinds)}
        return {fqn: shared[kinds[at if isinstance(at, int) else at[0]]] for fqn, at in self.by_fqn.items()}


def parse_header(raw: bytes, file_bytes: int, path: str) -> RankFile:
    """Check and read a header. `raw` is the file's begin, up to the data section.

    Raises: CorruptCheckpointError for anything but a header that this module wrote, whatever the bytes are.
    """
    digest = raw[_DIGEST_AT : _DIGEST_AT + _DIGEST_CHARS]
    if raw[8:_DIGEST_AT] != _PREFIX:
        raise _corrupt(path, "it is not a rank's file of this package (no titan_ckpt header)")
    state = xxhash.xxh3_128(raw[:_DIGEST_AT])
    state.update(_NO_DIGEST)
    state.update(memoryview(raw)[_DIGEST_AT + _DIGEST_CHARS :])
    if state.hexdigest().encode() != digest:
        raise _corrupt(path, f"its header has digest {state.hexdigest()}, expected {digest.decode('ascii', 'replace')}")
    try:
        with collector_held():
            header = json.loads(raw[8:])
            return _read(header, digest.decode("ascii"), len(raw), file_bytes, path)
    except CorruptCheckpointError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError, IndexError, OverflowError) as error:
        raise _corrupt(path, f"its header cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


def header_bytes(prefix: bytes, file_bytes: int, path: str) -> int:
    """Return where the data section begins, from the file's first 8 bytes. Raises: CorruptCheckpointError."""
    if len(prefix) < 8:
        raise _corrupt(path, f"it has {file_bytes} bytes, too few for a header")
    length = int(struct.unpack("<Q", prefix[:8])[0])
    if length > min(MAX_HEADER_BYTES, file_bytes - 8) or (8 + length) % ALIGNMENT:
        raise _corrupt(path, f"its first 8 bytes claim a header of {length} bytes in a file of {file_bytes}")
    return 8 + length


def _read(header: dict[str, Any], digest: str, data_start: int, file_bytes: int, path: str) -> RankFile:
    metadata = header.pop("__metadata__")
    version = int(metadata["titan_ckpt.version"])
    if version != FORMAT_VERSION:
        raise _corrupt(path, f"its format version is {version}; this release reads {FORMAT_VERSION}: use a newer one")
    rank, world_size = int(metadata["titan_ckpt.rank"]), int(metadata["titan_ckpt.world_size"])
    _require(0 <= rank < world_size <= 1 << 24, "rank outside its world")
    block_bytes = int(metadata["titan_ckpt.block_bytes"])
    _require(ALIGNMENT <= block_bytes <= 64 << 20 and block_bytes & (block_bytes - 1) == 0, "odd block size")
    rows = json.loads(metadata["titan_ckpt.chunks"]) if "titan_ckpt.chunks" in metadata else [0] * len(header)
    _require(type(rows) is list and len(rows) == len(header), "one chunk row per tensor")
    names, tensors = list(header), list(header.values())
    sizes = [tensor["shape"] for tensor in tensors]
    _check_shapes(sizes)
    dtypes = [_DTYPES[tensor["dtype"]] for tensor in tensors]
    starts, data_bytes = _check_offsets([tensor["data_offsets"] for tensor in tensors], sizes, dtypes)
    if data_start + data_bytes != file_bytes:
        raise _corrupt(path, f"it has {file_bytes} bytes, expected {data_start + data_bytes}; it was cut or grew")
    fqns = _check_rows(rows, names, sizes, dtypes)
    blocks = metadata["titan_ckpt.blocks"]
    _require(type(blocks) is str and len(blocks) == _DIGEST_CHARS * -(-data_bytes // block_bytes), "a digest per block")
    elsewhere = {}
    if "titan_ckpt.elsewhere" in metadata:
        for fqn, (dtype, shape) in json.loads(metadata["titan_ckpt.elsewhere"]).items():
            _check_shapes([shape])
            elsewhere[fqn] = TensorInfo(tuple(shape), _dtype_by_name(dtype))
    return RankFile(
        path, rank, world_size, digest, block_bytes, blocks, data_start, data_bytes,
        names, list(map(tuple, sizes)), dtypes, starts, rows, _index(fqns), elsewhere,
    )  # fmt: skip


def _check_shapes(shapes: list[Any]) -> None:
    _require(set(map(type, shapes)) <= {list} and max(map(len, shapes), default=0) <= 64, "a shape")
    flat = list(chain.from_iterable(shapes))
    _require(set(map(type, flat)) <= {int} and min(flat, default=0) >= 0 and max(flat, default=0) < 1 << 62, "a size")


def _check_offsets(offsets: list[Any], sizes: list[list[int]], dtypes: list[torch.dtype]) -> tuple[list[int], int]:
    """Check that tensors follow each other and have the bytes of their shape; return their starts and the end."""
    _check_shapes(offsets)
    _require(set(map(len, offsets)) <= {2}, "two offsets")
    starts, stops = [pair[0] for pair in offsets], [pair[1] for pair in offsets]
    _require([0, *stops] == [*starts, stops[-1] if stops else 0], "a hole or an overlap between tensors")
    itemsizes = [dtype.itemsize for dtype in dtypes]
    expected = map(mul, map(prod, sizes), itemsizes)
    _require(list(map(sub, stops, starts)) == list(expected), "bytes of a tensor")
    _require(not any(map(mod, starts, itemsizes)), "a tensor that is not aligned to its elements")
    return starts, stops[-1] if stops else 0


def _check_rows(rows: list[Any], names: list[str], sizes: list[list[int]], dtypes: list[torch.dtype]) -> list[str]:
    """Check the chunk of every entry; put carried dtypes and their sizes in place; return the fqns."""
    chunks = [i for i, row in enumerate(rows) if row != 0]
    if not chunks:
        return names
    fqns = list(names)
    lengths = [len(rows[i]) if type(rows[i]) is list else 0 for i in chunks]
    _require(set(lengths) <= {2, 3, 4}, "a chunk row")
    for i in (i for i, length in zip(chunks, lengths, strict=True) if length > 2):
        row = rows[i]
        _require(type(row[2]) is str, "a name")
        fqns[i] = row[2]
        if len(row) > 3:
            carrier, count = _CARRIERS[_CARRIED[row[3]]]
            _require(carrier == dtypes[i] and sizes[i][-1:] == [count], "an odd carrier")
            dtypes[i], sizes[i] = _CARRIED[row[3]], sizes[i][:-1]
    shapes, offsets = [rows[i][0] for i in chunks], [rows[i][1] for i in chunks]
    inner = [sizes[i] for i in chunks]
    _check_shapes(shapes)
    _check_shapes(offsets)
    _require(list(map(len, shapes)) == list(map(len, offsets)) == list(map(len, inner)), "dims of a chunk")
    ends = map(add, chain.from_iterable(offsets), chain.from_iterable(inner))
    _require(all(map(le, ends, chain.from_iterable(shapes))), "a chunk outside its tensor")
    return fqns


def _index(fqns: list[str]) -> dict[str, int | list[int]]:
    index: dict[str, int | list[int]] = dict(zip(fqns, range(len(fqns)), strict=True))
    if len(index) < len(fqns):
        several: dict[str, list[int]] = {}
        for i, fqn in enumerate(fqns):
            several.setdefault(fqn, []).append(i)
        index.update({fqn: at for fqn, at in several.items() if len(at) > 1})
    return index


def _dtype_by_name(name: str) -> torch.dtype:
    for dtype in STORED_DTYPES:
        if str(dtype) == f"torch.{name}":
            return dtype
    raise ValueError(f"dtype {name!r}")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _corrupt(path: str, cause: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {cause}. Load another step, or copy the file again from where it is whole", path
    )
