"""Headers of rank files made wrong, under digests that fit: one typed error, or a file that reads as it says."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from tests.faults.scenarios import SOAK
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointError, CorruptCheckpointError
from titan_ckpt.formats.native.header import header_bytes, parse_header
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.writer import WritePlan

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
    WritePlan.of(tensors, Coordinator.current()).write(folder, tensors)
    content = (folder / FILE).read_bytes()
    start = header_bytes(content[:8], len(content), FILE)
    header = json.loads(content[8:start])
    metadata = header["__metadata__"]
    metadata["titan_ckpt.kinds"] = json.dumps([[[4, 3], [2, 0]], [[5], [0], "complex128"]])
    metadata["titan_ckpt.kind_of"] = json.dumps([2, 0, 1, 0])
    metadata["titan_ckpt.fqns"] = json.dumps({"c": "other name"})
    metadata["titan_ckpt.elsewhere"] = json.dumps({"other": ["bfloat16", [4, 4]]})
    return header, content[start:]


def read_everything(folder: Path) -> None:
    """Open, read what the header says there is, and verify."""
    with NativeReader(folder) as reader:
        for fqn, info in reader.tensors.items():
            if info.nbytes < 1 << 20:
                reader.whole(fqn)
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


def test_metadata_holds_text_and_its_numbers_are_digits(tmp_path: Path) -> None:
    """A safetensors reader refuses a file whose metadata has a number; so do we, and a number in another spelling."""
    header, data = sample(tmp_path)
    for key in ("version", "rank", "world_size", "block_bytes"):
        right = header["__metadata__"][f"titan_ckpt.{key}"]
        for wrong in (int(right), float(right), f" {right}", f"+{right}", f"0_{right}", f"\u0660{right}"):
            raw = sealed(canonical({**header, "__metadata__": {**header["__metadata__"], f"titan_ckpt.{key}": wrong}}))
            with pytest.raises(CorruptCheckpointError, match=r"a number, not|no text"):
                parse_header(raw, len(raw) + len(data), FILE)


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


def put(header: Any, way: Sequence[Any], value: Any) -> None:
    """Set a value inside a header; on the way texts of the metadata are opened and written again."""
    step, *rest = way
    if not rest:
        header[step] = value
    elif isinstance(header[step], str):
        inner = json.loads(header[step])
        put(inner, rest, value)
        header[step] = json.dumps(inner)
    else:
        put(header[step], rest, value)


META = "__metadata__"
KINDS, KIND_OF, FQNS, ELSEWHERE = ((META, key) for key in INNER)
WRONG: tuple[tuple[str, Sequence[Any], Any], ...] = (
    ("no-such-rank", (META, "titan_ckpt.rank"), "1"),
    ("odd-block", (META, "titan_ckpt.block_bytes"), "1048577"),
    ("block-larger-than-a-buffer", (META, "titan_ckpt.block_bytes"), "8388608"),
    ("too-few-digests", (META, "titan_ckpt.blocks"), ""),
    ("shape-no-list", ("a", "shape"), "23"),
    ("shape-too-long", ("c", "shape"), [0] * 65),
    ("shape-fraction", ("a", "shape"), [2.0, 3]),
    ("shape-truth", ("d", "shape"), [True]),
    ("shape-negative", ("c", "shape"), [0, -2]),
    ("shape-huge", ("c", "shape"), [0, 1 << 62]),
    ("dtype", ("a", "dtype"), "F33"),
    ("one-offset", ("c", "data_offsets"), [112]),
    ("three-offsets", ("c", "data_offsets"), [112, 112, 112]),
    ("overlap", ("a", "data_offsets"), [84, 112]),
    ("bytes-of-shape", ("a", "shape"), [2, 2]),
    ("kind-missing", KIND_OF, "[2, 0, 1]"),
    ("kind-of-no-list", KIND_OF, '"2010"'),
    ("kind-fraction", (*KIND_OF, 2), 1.0),
    ("kind-truth", (*KIND_OF, 1), False),
    ("kind-unknown", (*KIND_OF, 2), 3),
    ("kind-negative", (*KIND_OF, 2), -1),
    ("no-kinds", KINDS, "[]"),
    ("kinds-no-list", KINDS, '{"0": 1, "1": 2}'),
    ("kind-no-list", (*KINDS, 0), "ab"),
    ("kind-too-long", (*KINDS, 1), [[5], [0], "complex128", 0]),
    ("kind-too-short", (*KINDS, 0), [[4, 3]]),
    ("kind-offset-negative", (*KINDS, 0, 1), [-1, 0]),
    ("carrier-unknown", (*KINDS, 1, 2), "complex1"),
    ("carrier-of-another", (*KINDS, 1, 2), "complex32"),
    ("dims", (*KINDS, 0), [[4, 3, 1], [2, 0, 0]]),
    ("outside", (*KINDS, 0, 1), [3, 0]),
    ("name-of-nothing", FQNS, '{"e": "f"}'),
    ("name-no-text", FQNS, '{"c": 5}'),
    ("names-no-object", FQNS, '["c"]'),
    ("elsewhere-dtype", (*ELSEWHERE, "other", 0), "float33"),
    ("elsewhere-shape", (*ELSEWHERE, "other", 1), [-1]),
    ("elsewhere-no-object", ELSEWHERE, "[]"),
    ("elsewhere-and-here", ELSEWHERE, '{"a": ["float32", [2, 3]]}'),
    ("elsewhere-twice", ELSEWHERE, '{"other": ["float32", [1]], "other": ["float32", [2]]}'),
    ("a-name-twice", FQNS, '{"c": "e", "c": "f"}'),
    ("shape-no-number", KINDS, '[[[NaN, 3], [2, 0]], [[5], [0], "complex128"]]'),
)
"""Each breaks one rule of docs/format-rank-file.md."""


@pytest.mark.parametrize(("way", "value"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_every_rule_of_a_header_is_checked(tmp_path: Path, way: Sequence[Any], value: Any) -> None:
    """Under a digest that fits, where everything else holds."""
    header, data = sample(tmp_path)
    put(header, way, value)
    raw = sealed(canonical(header))
    with pytest.raises(CorruptCheckpointError, match="its header cannot be read"):
        parse_header(raw, len(raw) + len(data), FILE)


@pytest.mark.parametrize("name", ["a", "__metadata__", "shape"])
def test_a_key_that_is_there_twice_is_named(tmp_path: Path, name: str) -> None:
    """Readers of JSON take the first, or the last, and would read different tensors from one file."""
    header, data = sample(tmp_path)
    text = canonical(header)
    doubled = {
        "a": text[:-1] + b',"a":' + canonical(header["a"]) + b"}",
        "__metadata__": text[:-1] + b',"__metadata__":' + canonical(header["__metadata__"]) + b"}",
        "shape": text.replace(b'"shape":[2,3]', b'"shape":[3,2],"shape":[2,3]'),
    }
    raw = sealed(doubled[name])
    with pytest.raises(CorruptCheckpointError, match=f"a key is there twice: '{name}'"):
        parse_header(raw, len(raw) + len(data), FILE)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": ("U8", [1], [0, 1]), "b": ("I64", [], [1, 9])},
        {"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [16, 24])},
        {"a": ("F32", [2], [8, 16])},
        {"a": ("F32", [2], [0]), "b": ("F32", [2], [8, 8, 16])},
        {"a": ("F32", [1 << 40, 1 << 24], [0, 0])},
    ],
    ids=["unaligned", "hole", "hole-at-the-begin", "not-in-pairs", "bytes-wrap-around"],
)
def test_places_of_tensors_are_checked(tensors: dict[str, tuple[str, list[int], list[int]]]) -> None:
    """Tensors lie one after the other, aligned, each with the bytes of its shape."""
    end = max(offsets[-1] for _, _, offsets in tensors.values())
    metadata = {
        "titan_ckpt.digest": "0" * 32,
        "titan_ckpt.blocks": "0" * (32 if end else 0),
        "titan_ckpt.version": "1",
        "titan_ckpt.rank": "0",
        "titan_ckpt.world_size": "1",
        "titan_ckpt.block_bytes": "1048576",
    }
    entries = {n: {"dtype": d, "shape": s, "data_offsets": o} for n, (d, s, o) in tensors.items()}
    raw = sealed(canonical({META: metadata, **entries}))
    with pytest.raises(CorruptCheckpointError, match="its header cannot be read"):
        parse_header(raw, len(raw) + end, FILE)
