"""Hostile bytes: a manifest or a state file turned into anything gives a value or the one typed error.

10,000 documents of each, 1,000,000 in a soak; half of them edits of the text, half of them well-formed JSON with other
things in it, under digests that hold.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import math
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from tests.faults.scenarios import SOAK
from tests.unit.directory.test_manifest import example, seal
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.encoding.typed_json import decode, dumps, encode, loads
from titan_ckpt.errors import CorruptCheckpointError

FUZZ = 500_000 if SOAK else 5_000
HOSTILE: list[Any] = [
    *(None, True, False, -1, 0, 0.5, 2**62, 2**64, 10**400, 1e308, "", "$", "../x", "eval", "AAAA", "\ud800"),
    *("a" * 300, [], {}, [[]], [2**62, 2**62], [0, 2**62]),
    *({"$set": [[]]}, {"$type": "os.system"}, {"__reduce__": ["os.system"]}),
]


def fuzz_text(original: bytes, read: Callable[[bytes], object]) -> int:
    """Read edits of a text; return how many were refused. Anything but the typed error comes through."""
    generator = random.Random(0)
    refused = 0
    for _ in range(FUZZ):
        data = bytearray(original)
        for _ in range(generator.randint(1, 5)):
            edit(data, generator)
        try:
            read(bytes(data))
        except CorruptCheckpointError:
            refused += 1
    return refused


def fuzz_structure(original: Any, read: Callable[[Any], object]) -> int:
    """Read documents in which one to three nodes are replaced by others or by hostile ones; count refusals."""
    generator = random.Random(1)
    refused = 0
    for _ in range(FUZZ):
        document = copy.deepcopy(original)
        for _ in range(generator.randint(1, 3)):
            nodes = list(walk(document))
            container, key = generator.choice(nodes)
            other, other_key = generator.choice(nodes)
            new = other[other_key] if generator.random() < 0.5 else generator.choice(HOSTILE)
            if isinstance(container, dict) and generator.random() < 0.2:
                container[str(generator.choice(HOSTILE))[:20]] = container.pop(key)
            else:
                container[key] = copy.deepcopy(new)
        try:
            read(document)
        except CorruptCheckpointError:
            refused += 1
    return refused


def test_manifests() -> None:
    """An edited manifest is always refused; one with other content under a valid seal is a manifest or refused."""
    original = example().to_bytes()

    def read(data: bytes) -> None:
        if data != original:
            with contextlib.suppress(CorruptCheckpointError):
                Manifest.from_bytes(data)
                raise AssertionError(f"accepted an edited manifest: {data!r}")
        body = data[:-49]
        Manifest.from_bytes(body + f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode())

    assert fuzz_text(original, read) > FUZZ // 2
    plain = json.loads(original)
    del plain["digest"]
    assert fuzz_structure(plain, lambda document: Manifest.from_bytes(seal(document)).to_bytes()) > FUZZ // 2


def test_state_files() -> None:
    """Typed JSON of every kind of value, edited and rearranged."""
    moment = datetime.datetime(2024, 10, 27, 2, 30, 0, 123456, fold=1)  # noqa: DTZ001 - what a state may hold.
    rich = {
        "np": np.random.PCG64(1).state,
        "arrays": [np.arange(3, dtype=">f4"), np.array(["a", "bc"]), np.float16(1), np.str_("x")],
        "t": torch.arange(6.0),
        "d": [defaultdict(list, {"a": [1]}), Counter("aab"), OrderedDict(a=1), {1: 2}],
        "s": [{1, (2, 3)}, frozenset("ab"), deque([1], 3), range(3), b"xyz", bytearray(b"x"), "\ud800", 2**80],
        "f": [math.nan, -math.inf, 1 + 2j],
        "dt": [moment, moment.date(), moment.time(), datetime.timedelta(1)],
        "z": [torch.device("cpu"), torch.float16, torch.Size([1]), pathlib.Path("x")],
    }
    assert fuzz_text(dumps(rich), loads) > FUZZ // 2
    assert fuzz_structure(encode(rich), decode) > FUZZ // 10


def edit(data: bytearray, generator: random.Random) -> None:
    """Flip, insert, delete, duplicate or overwrite a few bytes in place."""
    place = generator.randrange(len(data) + 1)
    kind = generator.randrange(5)
    if kind == 0 and place < len(data):
        data[place] ^= 1 << generator.randrange(8)
    elif kind == 1:
        pieces = [b'"', b"[", b"}", b"9", b"-", b"$", b"null", b"1e999", b"\xff", b"NaN", b'"step":1,', b'{"$set":']
        data[place:place] = generator.choice(pieces)
    elif kind == 2:
        del data[place : place + generator.randrange(1, 9)]
    elif kind == 3:
        data[place:place] = data[generator.randrange(len(data) + 1) :][: generator.randrange(1, 40)]
    else:
        data[place : place + 1] = bytes([generator.randrange(256)])


def walk(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every node."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from walk(node[key])
