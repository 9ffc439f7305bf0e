"""Headers of rank files made wrong, under digests that fit: one typed error, or a file that reads as it says."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
from pathlib import Path
from typing import Any

import torch
import xxhash

from tests.faults.scenarios import SOAK
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import CheckpointError, CorruptCheckpointError
from titan_ckpt.storage.base import ReadRequest
from titan_ckpt.storage.native import NativeReader, NativeWriter
from titan_ckpt.storage.native_header import header_bytes, parse_header
from titan_ckpt.tensors import Chunk

NUMBER = 1_000_000 if SOAK else 10_000
FILE = "rank-00000.safetensors"
DIGEST_AT = 46
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 1 << 31, 1 << 62, 1 << 63, 1 << 70, 10**40, 0.5, 1e308),
    *("", "0", "-1", "1e9", "F32", "F64", "BOOL", "complex128", "float32", "\x00", "é" * 50, "[" * 2000, "[0,0,0]"),
    *([], [0], [[]], {}, {"a": 1}, [0, 0], [1, 2], [[2, 3], [0, 0]], [[2, 3], [0, 0], "a"], [10**12, 10**12]),
    *([[2, 3], [0, 0], "a", "complex128"], '{"a":["float32",[1]]}'),
)
INNER = ("titan_ckpt.kinds", "titan_ckpt.kind_of", "titan_ckpt.fqns", "titan_ckpt.elsewhere")
"""Texts of the metadata that are JSON again."""


def sealed(header: Any) -> bytes:
    """Return the begin of a file with this header, its digest right, wherever the header keeps it."""
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    data = bytearray(struct.pack("<Q", len(text)) + text)
    data[DIGEST_AT : DIGEST_AT + 32] = b"0" * 32
    data[DIGEST_AT : DIGEST_AT + 32] = xxhash.xxh3_128_hexdigest(bytes(data)).encode()
    return bytes(data)


def canonical(header: dict[str, Any]) -> bytes:
    """Write JSON as the writer does: no spaces, the digest first."""
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the way to every value inside a JSON value."""
    found = [path] if path else []
    if isinstance(node, dict):
        return found + [p for key, value in node.items() for p in places(value, (*path, key))]
    if isinstance(node, list):
        return found + [p for i, value in enumerate(node) for p in places(value, (*path, i))]
    return found


def changed(header: dict[str, Any], choose: random.Random) -> Any:
    """Replace, remove or shift up to three values, at any depth, also inside the JSON texts of the metadata."""
    opened = json.loads(json.dumps(header))
    for key in INNER:
        opened["__metadata__"][key] = json.loads(opened["__metadata__"][key])
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        *way, last = choose.choice(places(opened) or [("__metadata__",)])
        node = opened
        for step in way:
            node = node[step]
        if not isinstance(node, dict | list) or (isinstance(node, dict) and last not in node):
            continue
        if choose.random() < 0.15:
            del node[last]
        elif type(node[last]) is int and choose.random() < 0.5:
            node[last] += choose.choice((-1, 1, 4, 4096, -4096))
        else:
            node[last] = copy.deepcopy(choose.choice(ODD))
    metadata = opened.get("__metadata__")
    for key in INNER if isinstance(metadata, dict) else ():
        if key in metadata and choose.random() < 0.95:
            metadata[key] = json.dumps(metadata[key])
    return opened


def sample(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Write a file with every feature of the format; return its header and its data."""
    tensors = {
        "a": torch.randn(2, 3),
        "b": torch.randn(5, dtype=torch.complex128),
        "c": torch.ones(0, 2),
        "d": torch.tensor(3),
    }
    writer = NativeWriter()
    writer.plan(tensors, Coordinator.current())
    writer.write(folder, tensors)
    content = (folder / FILE).read_bytes()
    start = header_bytes(content[:8], len(content), FILE)
    header = json.loads(content[8:start])
    metadata = header["__metadata__"]
    metadata["titan_ckpt.kinds"] = json.dumps([[[5], [0], "complex128"], [[4, 3], [2, 0]]])
    metadata["titan_ckpt.kind_of"] = json.dumps([1, 0, 2, 0])
    metadata["titan_ckpt.fqns"] = json.dumps({"c": "other name"})
    metadata["titan_ckpt.elsewhere"] = json.dumps({"other": ["bfloat16", [4, 4]]})
    return header, content[start:]


def read_everything(folder: Path) -> None:
    """Open, read what the header says there is, and verify."""
    with NativeReader(folder) as reader:
        for fqn, info in reader.tensors.items():
            if info.nbytes < 1 << 20:
                into = torch.empty(info.shape, dtype=info.dtype)
                reader.read([ReadRequest(fqn, Chunk.whole(info.shape), into)])
        reader.verify()


def test_changed_headers_give_typed_errors_only(tmp_path: Path) -> None:
    """Every value of the header, at any depth, replaced, removed or shifted, under a digest that fits."""
    header, data = sample(tmp_path)
    parse_header(sealed(canonical(header)), len(sealed(canonical(header))) + len(data), FILE)
    choose = random.Random(0)
    refused = 0
    path = tmp_path / FILE
    for i in range(NUMBER):
        raw = sealed(canonical(changed(header, choose)))
        try:
            parse_header(raw, len(raw) + len(data), FILE)
        except CorruptCheckpointError:
            refused += 1
            continue
        if i % 10 == 0:  # a header that makes sense: reading by it stays within the file and is verified
            path.write_bytes(raw + data)
            with contextlib.suppress(CheckpointError):
                read_everything(tmp_path)
    assert 0.5 * NUMBER < refused < NUMBER, "the changes are neither all harmless nor all absurd"


def test_random_bytes_and_deep_nesting_give_typed_errors_only(tmp_path: Path) -> None:
    """Noise after the magic, JSON nested without end, numbers without end."""
    header, data = sample(tmp_path)
    good = canonical(header)
    choose = random.Random(1)
    prefix = good[: DIGEST_AT - 8 + 32]
    cases = [
        prefix + b'",' + b'"x":' + b"[" * 100_000,
        prefix + b'"},"a":' + b"9" * 5000 + b"}",
        prefix + b'"}}{}',
        b"",
        b"{}",
    ]
    for _ in range(NUMBER // 10):
        noisy = bytearray(good)
        for _ in range(choose.randrange(1, 20)):
            noisy[choose.randrange(len(good))] = choose.randrange(256)
        cases.append(bytes(noisy))
        cases.append(prefix + choose.randbytes(choose.randrange(300)))
    for text in cases:
        raw = sealed(text)
        try:
            parse_header(raw, len(raw) + len(data), FILE)
        except CorruptCheckpointError:
            continue


def test_lengths_that_lie_give_typed_errors_only() -> None:
    """The first 8 bytes are checked before anything of that size is read."""
    for length in (0, 1, 4087, 4088, 10**8, 10**8 + 1, 1 << 40, (1 << 64) - 1):
        for size in (8, 4096, 8192):
            try:
                start = header_bytes(struct.pack("<Q", length), size, FILE)
            except CorruptCheckpointError:
                continue
            assert start <= size
