"""Safetensors files: the header, read with every check or laid out from shapes alone, and which file holds a key.

Owns the header's format and limits. Moves no tensor bytes: the engine (formats/reading) reads the slices that are
planned here, for all formats that store plain files. Knows no folder and no index.
Source: safetensors, `safetensors/src/tensor.rs` (limits, order of tensors, alignment). The checks are the same, and
duplicate names are refused too.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.disk.files import Reader
from titan_ckpt.encoding import strict_json
from titan_ckpt.errors import CorruptCheckpointError, listed
from titan_ckpt.formats.reading.engine import SliceFill
from titan_ckpt.formats.reading.slices import Slice
from titan_ckpt.geometry.chunks import Block, Chunk, Entry, TensorInfo
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.store import Place, store_of

MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself (tensor.rs, MAX_HEADER_SIZE): every reader refuses more."""
MAX_DIMS = 64

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""In upstream's order. Tensors lie in a file in the reverse order of their dtypes."""
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a safetensors file holds and where: by its header, which was checked, or before it is written."""

    header: bytes
    """The bytes before the data, of a file that is to be written."""
    entries: Mapping[str, Entry[int]]
    """In the order of the file, which they tile without holes; a rank's file has a table of its own instead."""
    num_bytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    path: Place = Path()
    """Where it was read."""


@gc_paused()
def read_header(path: Place) -> Layout:
    """Read and check a file's header, and check that the file is exactly as long as the header says.

    Raises: CorruptCheckpointError naming the file and the cause; OSError.
    """
    try:
        file = store_of(path).open(path, through_links=True)
    except CorruptCheckpointError:
        raise _corrupt(path, "no regular file") from None
    with closing(file):
        num_bytes = file.num_bytes
        raw = file.read(8, _header_bytes(file.read(0, 8), num_bytes, path))
    if raw[:1] != b"{":
        raise _corrupt(path, "the header does not start with '{': this is no safetensors file")
    header = strict_json.parse(raw, MAX_HEADER_BYTES, f"{path}: header")
    assert isinstance(header, dict)  # it starts with a brace
    metadata = _metadata(header.pop("__metadata__", {}), path)
    start = 8 + len(raw)
    entries = sorted((_entry(key, value, start, path) for key, value in header.items()), key=itemgetter(0, 1))
    position = start
    for first, stop, entry in entries:
        key, info = entry.name, entry.info
        if first != position:
            raise _corrupt(path, f"tensor {key!r} starts at byte {first}, expected {position}: a hole or an overlap")
        if stop - first != info.nbytes:
            raise _corrupt(path, f"tensor {key!r} is {info}, {info.nbytes} bytes, but has {stop - first}")
        position = stop
    if position != num_bytes:
        what = "it is cut short" if num_bytes < position else "something was appended"
        raise _corrupt(path, f"expected {position} bytes from the header, found {num_bytes}; {what}")
    return Layout(b"", {entry.name: entry for _, _, entry in entries}, num_bytes, metadata, path)


def _header_bytes(prefix: bytes, num_bytes: int, path: Place) -> int:
    """Return the length of the header. Raises: CorruptCheckpointError if the file cannot be so long."""
    if len(prefix) < 8:
        raise _corrupt(path, f"{num_bytes} bytes are too few for a safetensors file; it is cut short")
    if prefix == b"version ":
        raise _corrupt(path, "this is the pointer of a file in Git LFS; run `git lfs pull` where it was cloned")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise _corrupt(path, f"the header claims {length} bytes, more than the limit of {MAX_HEADER_BYTES}")
    if 8 + length > num_bytes:
        raise _corrupt(path, f"the header claims {length} bytes and the file has {num_bytes}; it is cut short")
    return int(length)


def lay_out(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> Layout:
    """Place tensors in a file as safetensors itself does: widest dtype first, then by name, data 8-byte aligned.

    Raises: ValueError for a dtype that the format has no name for.
    """
    ranks = {dtype: i for i, dtype in enumerate(DTYPES.values())}
    if "__metadata__" in infos:
        raise ValueError("safetensors keeps the name __metadata__ to itself: no tensor can have it")
    unknown = [f"{key}: {info.dtype}" for key, info in infos.items() if info.dtype not in ranks]
    if unknown:
        raise ValueError(f"safetensors has no name for the dtype of {', '.join(unknown)}")
    order = sorted(infos, key=lambda key: (-ranks[infos[key].dtype], key))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for key in order:
        info = infos[key]
        header[key] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [position, position + info.nbytes],
        }
        position += info.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is over the format's limit of {MAX_HEADER_BYTES}")
    base = 8 + len(text)
    entries = {
        key: Entry(key, info := infos[key], Chunk.whole(info.shape), base + header[key]["data_offsets"][0])
        for key in order
    }
    return Layout(struct.pack("<Q", len(text)) + text, entries, base + position, metadata)


def _metadata(value: strict_json.Json, path: Place) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise _corrupt(path, "__metadata__ is not a map from strings to strings")
    return {name: str(text) for name, text in value.items()}


def _entry(key: str, value: object, base: int, path: Place) -> tuple[int, int, Entry[int]]:
    """Check one header row; return the first byte of its values in the file, the byte after the last, and the entry."""
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise _corrupt(path, f"tensor {key!r} does not have exactly dtype, shape and data_offsets")
    name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise _corrupt(path, f"tensor {key!r} has dtype {name!r}, which is not one of {', '.join(DTYPES)}")
    if not _counts(shape) or len(shape) > MAX_DIMS:
        raise _corrupt(path, f"tensor {key!r} has shape {str(shape)[:80]}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _corrupt(path, f"tensor {key!r} has data_offsets {str(offsets)[:80]}")
    if math.prod(shape) >= 2**63:
        raise _corrupt(path, f"tensor {key!r} has shape {shape}: more elements than a file can hold")
    info = TensorInfo(tuple(shape), DTYPES[name])
    first, stop = base + offsets[0], base + offsets[1]
    return first, stop, Entry(key, info, Chunk.whole(info.shape), first)


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _corrupt(path: Place, cause: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: {cause}", str(path))


class SafetensorsFiles:
    """Open safetensors files whose headers were checked before. Each key is in one file."""

    def __init__(self, headers: Sequence[Layout]) -> None:
        """Index the files' keys. Raises: CorruptCheckpointError if two files hold one key."""
        self._files: dict[Place, Reader] = {}
        self._lock = threading.Lock()
        self._places: dict[str, tuple[Layout, Entry[int]]] = {}
        faults = []
        for header in headers:
            for key, entry in header.entries.items():
                if key in self._places:
                    faults.append(f"{key} is in {self._places[key][0].path.name} and in {header.path.name}")
                self._places[key] = (header, entry)
        if faults:
            folder = headers[0].path.parent
            raise CorruptCheckpointError(f"{folder}: {len(faults)} tensor(s) twice: {listed(faults)}", str(folder))
        self._headers = headers

    @property
    def entries(self) -> Mapping[str, Entry[int]]:
        return {key: entry for key, (_, entry) in self._places.items()}

    def read(self, requests: Sequence[Block]) -> None:
        """Fill every request. Several threads may call it. Raises: as `plan`, and as the function that it returns."""
        self.plan(requests)()

    @gc_paused()
    def plan(self, requests: Sequence[Block]) -> SliceFill:
        """Open the files of all requests; return the function that fills them.

        Raises: CorruptCheckpointError if a file has changed since its header was read; OSError. The function raises
        CorruptCheckpointError if a file ends early; OSError.
        """
        slices: dict[Place, list[Slice]] = {}
        for chunk, into, key in requests:
            header, entry = self._places[key]
            if chunk.numel:
                box = None if chunk.sizes == entry.info.shape else chunk
                made = Slice(key, entry.at, entry.info.shape, entry.info.dtype, box, into.detach())
                slices.setdefault(header.path, []).append(made)
                self._open(header)
        of_files = [(self._files[path], None, of_file) for path, of_file in slices.items()]
        return SliceFill(of_files, f"loading {self._headers[0].path.parent.name}")

    def open(self, keys: Iterable[str]) -> None:
        """Open the files of these tensors. Raises: CorruptCheckpointError if one has changed since; OSError."""
        for key in keys:
            self._open(self._places[key][0])

    def _open(self, header: Layout) -> None:
        with self._lock:
            if header.path not in self._files:
                # download caches hold links to their files
                file = store_of(header.path).open(header.path, through_links=True)
                if file.num_bytes != header.num_bytes:
                    file.close()
                    raise CorruptCheckpointError(f"{header.path}: it has changed since it was opened", str(header.path))
                self._files[header.path] = file

    def close(self) -> None:
        """Close all files; idempotent."""
        for file in self._files.values():
            file.close()
        self._files = {}
