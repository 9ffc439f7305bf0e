"""The manifest comes back exactly, and any other bytes are one typed error."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from titan_ckpt.directory.manifest import MAX_BYTES, FileRecord, Manifest
from titan_ckpt.errors import CorruptCheckpointError, StateEncodingError


def example(**changes: Any) -> Manifest:
    manifest = Manifest(
        step=500,
        kind="full",
        attempt="0123456789abcdef" * 2,
        world_size=2,
        created_unix_seconds=1754000000.25,
        components=("model", "optimizer"),
        converters=[{"kind": "lora", "rank": 8, "alpha": 16.0, "targets": ["wq", "wv"]}],
        base={"path": "assets/ü", "revision": None, "format": "hf", "digest": "d" * 32},
        resumed_from={"step": 400, "attempt": "f" * 32},
        files=(
            FileRecord("rank-00000.safetensors", 12345, "a" * 32),
            FileRecord("rank-00001.safetensors", 0, "b" * 32),
            FileRecord("state.json", 17, "c" * 32),
        ),
    )
    return replace(manifest, **changes)


def seal(document: Any) -> bytes:
    """Give any JSON document a digest that holds, as someone who means harm could."""
    body = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")[:-1]
    return body + f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def test_a_manifest_comes_back_exactly() -> None:
    """All fields, to equal values and the same bytes; the file is plain JSON with a line per file."""
    manifest = example()
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data) == manifest
    assert Manifest.from_bytes(data).to_bytes() == data
    assert json.loads(data)["files"][2] == {"name": "state.json", "num_bytes": 17, "digest": "c" * 32}
    assert len([line for line in data.splitlines() if b'"name"' in line]) == 3
    assert Manifest.from_bytes(example(base=None, resumed_from=None, converters=[]).to_bytes()).base is None


def test_allowed_classes_are_written_only_if_there_are_any() -> None:
    assert "allowed" not in json.loads(example().to_bytes())
    named = example(allowed=("a.B", "c.D"))
    assert Manifest.from_bytes(named.to_bytes()) == named
    document = json.loads(example().to_bytes())
    del document["digest"]
    for wrong in ([], ["a", "a"], [""], [1], "a"):
        with pytest.raises(CorruptCheckpointError, match="allowed"):
            Manifest.from_bytes(seal({**document, "allowed": wrong}))


def test_two_thousand_ranks_fit_easily() -> None:
    """The manifest grows by files, a hundred-odd bytes each, and stays far below its cap."""
    files = tuple(FileRecord(f"rank-{rank:05d}.safetensors", 10**12, f"{rank:032x}") for rank in range(2048))
    data = example(files=files, world_size=2048).to_bytes()
    assert len(data) < 300_000 < MAX_BYTES
    assert Manifest.from_bytes(data).files == files


def test_every_flipped_bit_is_noticed() -> None:
    """The digest covers every byte before it, and the seal itself cannot change unnoticed."""
    data = example().to_bytes()
    for index in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[index] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError, match=r"step-500/MANIFEST\.json"):
                Manifest.from_bytes(bytes(changed), "step-500/MANIFEST.json")


def test_every_truncation_and_extension_is_noticed() -> None:
    """A torn manifest is never taken for one."""
    data = example().to_bytes()
    for end in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_bytes(data[:end])
    for extra in (b"\n", b"\x00" * 4096, data):
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_bytes(data + extra)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema_version", 2),
        ("schema_version", True),
        ("format", "other"),
        ("step", -1),
        ("step", 2**63),
        ("step", 10**400),
        ("step", 1.0),
        ("step", True),
        ("step", "1"),
        ("kind", "partial"),
        ("kind", ["full"]),
        ("attempt", "../../../../../../../../etc/x"),
        ("attempt", "A" * 32),
        ("world_size", 0),
        ("created_unix_seconds", -1.0),
        ("created_unix_seconds", 5),
        ("components", ["model", "model"]),
        ("components", [""]),
        ("components", ["model", "teleporter"]),
        ("components", "model"),
        ("converters", [1]),
        ("converters", {}),
        ("converters", [{"rank": 8}]),
        ("base", []),
        ("base", {"x": "y" * 1_000_001}),
        ("base", {"path": "x", "revision": None, "digest": None}),
        ("base", {"path": 1, "revision": None, "format": None, "digest": None}),
        ("base", {"path": None, "revision": None, "format": None, "digest": "../../x"}),
        ("resumed_from", 5),
        ("resumed_from", {"step": 5}),
        ("resumed_from", {"step": "5", "attempt": "f" * 32}),
        ("resumed_from", {"step": 5, "path": 1}),
        ("files", []),
        ("files", [{"name": "a", "num_bytes": 1, "digest": "a" * 32}] * 2),
        ("files", [{"name": "a", "num_bytes": 1}]),
        ("files", [{"name": "a", "num_bytes": 1, "digest": "a" * 32, "x": 1}]),
        ("files", [["a", 1, "a" * 32]]),
        *(
            ("files", [{"name": name, "num_bytes": 1, "digest": "a" * 32}])
            for name in (
                "../x",
                "/etc/passwd",
                "a/b",
                "",
                ".",
                "..",
                ".hidden",
                "a\x00",
                "a\n",
                "MANIFEST.json",
                "x" * 201,
                "ü",
                5,
            )
        ),
        ("files", [{"name": "a", "num_bytes": -1, "digest": "a" * 32}]),
        ("files", [{"name": "a", "num_bytes": 2**63, "digest": "a" * 32}]),
        ("files", [{"name": "a", "num_bytes": 1, "digest": "a" * 31}]),
    ],
)
def test_impossible_values_are_refused_though_sealed(field: str, value: Any) -> None:
    """Validation does not rest on the digest: each field has its type, its range and no path in it."""
    document = json.loads(example().to_bytes())
    del document["digest"]
    assert Manifest.from_bytes(seal(document)) == example()
    document[field] = value
    with pytest.raises(CorruptCheckpointError, match=field):
        Manifest.from_bytes(seal(document))


def test_missing_and_unknown_fields_are_refused() -> None:
    """Each field is needed, none may be added, and the error names which."""
    document = json.loads(example().to_bytes())
    del document["digest"]
    for field in list(document):
        short = {key: value for key, value in document.items() if key != field}
        with pytest.raises(CorruptCheckpointError, match=field):
            Manifest.from_bytes(seal(short))
    with pytest.raises(CorruptCheckpointError, match="surprise"):
        Manifest.from_bytes(seal(document | {"surprise": 1}))


def test_a_newer_schema_says_so() -> None:
    """The error for a later version tells what to do about it."""
    document = json.loads(example().to_bytes())
    del document["digest"]
    document["schema_version"] = 7
    with pytest.raises(
        CorruptCheckpointError, match="schema_version 7 is not 1: take the titan_ckpt version that wrote it"
    ):
        Manifest.from_bytes(seal(document))


@pytest.mark.parametrize(
    "changes",
    [
        {"converters": [{"kind": "x", "value": (1, 2)}]},
        {"converters": [{"kind": "x", "value": object}]},
        {"base": {1: 2}},
        {"base": {"x": math.nan}},
        {"base": {"path": "a folder whose name is no UTF-8: \udcff", "revision": None, "format": None, "digest": None}},
        {"resumed_from": {"x": {1}}},
        {"files": ()},
        {"files": (FileRecord("a/b", 1, "a" * 32),)},
        {"attempt": "short"},
        {"step": -1},
    ],
    ids=str,
)
def test_what_would_not_come_back_is_not_written(changes: dict[str, Any]) -> None:
    """Writing proves itself: a converter that describes itself by a tuple learns it at the save, not at the resume."""
    with pytest.raises(StateEncodingError, match=r"MANIFEST\.json of step"):
        example(**changes).to_bytes()


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000, b'"' + b"\\u0000" * 100_000])
def test_deep_and_large_documents_are_refused_quickly(text: bytes) -> None:
    """Nesting and digits that would exhaust a parser raise the typed error even under a valid seal."""
    sealed = text + f',\n"digest": "{xxhash.xxh3_128_hexdigest(text)}"\n}}\n'.encode()
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(sealed)
