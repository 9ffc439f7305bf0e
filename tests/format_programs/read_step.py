"""Read a step, from docs/format.md and docs/format-rank-file.md alone: every tensor, every state, the base's digest.

Usage: read_step.py <folder of a step>. Prints one JSON object. Needs numpy and xxhash, and nothing of titan_ckpt.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import math
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import xxhash

DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E8M0": ("float8_e8m0fnu", 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1), "I16": ("int16", 2), "U16": ("uint16", 2), "F16": ("float16", 2),
    "BF16": ("bfloat16", 2), "I32": ("int32", 4), "U32": ("uint32", 4), "F32": ("float32", 4), "I64": ("int64", 8),
    "U64": ("uint64", 8), "F64": ("float64", 8), "C64": ("complex64", 8),
}  # fmt: skip
CARRIED = {"complex128": 16, "complex32": 4, "float4_e2m1fn_x2": 1}
SIZES = {**dict(DTYPES.values()), **CARRIED}
FACTORIES = {
    "None": None, "bool": bool, "int": int, "float": float, "str": str, "bytes": bytes, "list": list, "dict": dict,
    "set": set, "tuple": tuple, "Counter": Counter, "OrderedDict": OrderedDict, "deque": deque,
}  # fmt: skip


class Tensor(NamedTuple):
    """A tensor's dtype, shape and row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Torch(NamedTuple):
    """A value of torch that is no tensor: its tag and its text."""

    tag: str
    text: str


def read_manifest(step: pathlib.Path) -> dict[str, Any]:
    """Return MANIFEST.json, its seal and the sizes of its files checked."""
    data = (step / "MANIFEST.json").read_bytes()
    body, seal = data[:-49], data[-49:]
    assert seal == f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()
    manifest: dict[str, Any] = json.loads(data)
    assert (manifest["format"], manifest["schema_version"]) == ("titan_ckpt", 1)
    assert step.name == f"step-{manifest['step']}"
    tensor_files = [f"rank-{rank:05d}.safetensors" for rank in range(manifest["world_size"])]
    state_files = ["state.json", *(f"rank-{rank:05d}.json" for rank in range(manifest["world_size"]))]
    listed = {file["name"] for file in manifest["files"]}
    assert len(listed) == len(manifest["files"])
    assert listed in ([set(tensor_files)] if manifest["kind"] == "model" else []) + [{*tensor_files, *state_files}]
    for file in manifest["files"]:
        assert (step / file["name"]).stat().st_size == file["num_bytes"]
    return manifest


class RankFile:
    """One rank's tensors: the boxes that the file holds of them."""

    def __init__(self, path: pathlib.Path, digest: str, world_size: int) -> None:
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        assert start % 4096 == 0
        head, data = raw[:start], raw[start:]
        assert head[46 : 46 + 32].decode() == digest
        assert xxhash.xxh3_128_hexdigest(head[:46] + b"0" * 32 + head[78:]) == digest
        header = json.loads(head[8:])
        about = header.pop("__metadata__")
        assert about["titan_ckpt.version"] == "1"
        assert path.name == f"rank-{int(about['titan_ckpt.rank']):05d}.safetensors"
        assert int(about["titan_ckpt.world_size"]) == world_size
        block = int(about["titan_ckpt.block_bytes"])
        blocks = [xxhash.xxh3_128_hexdigest(data[i : i + block]) for i in range(0, len(data), block)]
        assert about["titan_ckpt.blocks"] == "".join(blocks)
        kinds = json.loads(about.get("titan_ckpt.kinds", "[]"))
        kind_of = json.loads(about.get("titan_ckpt.kind_of", json.dumps([0] * len(header))))
        fqns = json.loads(about.get("titan_ckpt.fqns", "{}"))
        self.elsewhere = json.loads(about.get("titan_ckpt.elsewhere", "{}"))
        self.boxes: list[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bytes]] = []
        """(fqn, dtype, global shape, offsets, sizes, bytes)"""
        end = 0
        for (name, entry), number in zip(header.items(), kind_of, strict=True):
            first, last = entry["data_offsets"]
            assert first == end
            end = last
            dtype, sizes = DTYPES[entry["dtype"]][0], tuple(entry["shape"])
            shape, offsets = sizes, (0,) * len(sizes)
            if number:
                shape, offsets = map(tuple, kinds[number - 1][:2])
                if len(kinds[number - 1]) > 2:
                    dtype, sizes = kinds[number - 1][2], sizes[:-1]
            assert last - first == math.prod(sizes) * SIZES[dtype]
            assert all(o + n <= size for o, n, size in zip(offsets, sizes, shape, strict=True))
            self.boxes.append((fqns.get(name, name), dtype, shape, offsets, sizes, data[first:last]))
        assert end == len(data)


def read_tensors(step: pathlib.Path, manifest: dict[str, Any]) -> dict[str, Tensor]:
    """Return every tensor, put together from the boxes of all ranks, which tile it."""
    digests = {file["name"]: file["digest"] for file in manifest["files"]}
    names = [f"rank-{rank:05d}.safetensors" for rank in range(manifest["world_size"])]
    files = [RankFile(step / name, digests[name], manifest["world_size"]) for name in names]
    whole: dict[str, tuple[str, tuple[int, ...], Any, Any]] = {}
    for fqn, dtype, shape, offsets, sizes, data in (box for file in files for box in file.boxes):
        if fqn not in whole:
            empty = np.zeros((*shape, SIZES[dtype]), np.uint8)
            whole[fqn] = dtype, shape, empty, np.zeros(shape, np.int64)
        known_dtype, known_shape, values, covered = whole[fqn]
        assert (known_dtype, known_shape) == (dtype, shape)
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        values[box] = np.frombuffer(data, np.uint8).reshape(*sizes, SIZES[dtype])
        covered[box] += 1
    assert all((covered == 1).all() for _, _, _, covered in whole.values())
    named = {fqn for fqn, *_ in files[0].boxes} | files[0].elsewhere.keys()
    assert named == whole.keys()
    return {fqn: Tensor(dtype, shape, values.tobytes()) for fqn, (dtype, shape, values, _) in whole.items()}


def read_state(step: pathlib.Path, manifest: dict[str, Any], name: str) -> Any:
    """Return the content of a state file, its digest checked."""
    data = (step / name).read_bytes()
    assert xxhash.xxh3_128_hexdigest(data) == next(f["digest"] for f in manifest["files"] if f["name"] == name)
    return decode(json.loads(data))


def decode(value: Any) -> Any:
    """Return the value that typed JSON stands for."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: decode(item) for key, item in value.items()}
    (payload,) = value.values()
    return decode_tag(tag, payload)


def decode_tag(tag: str, payload: Any) -> Any:
    """Return the value of an object whose only key is a tag."""
    match tag:
        case "$int":
            return int(payload, 16)
        case "$float":
            return float(payload)
        case "$complex":
            return complex(*map(float, payload))
        case "$str":
            return base64.b64decode(payload).decode("utf-8", "surrogatepass")
        case "$bytes":
            return base64.b64decode(payload)
        case "$bytearray":
            return bytearray(base64.b64decode(payload))
        case "$tuple" | "$set" | "$frozenset":
            return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](decode(item) for item in payload)
        case "$dict" | "$OrderedDict":
            return (dict if tag == "$dict" else OrderedDict)(pairs_of(payload))
        case "$Counter":
            return Counter(dict(pairs_of(payload)))
        case "$defaultdict":
            return defaultdict(FACTORIES[payload[0]], pairs_of(payload[1]))
        case "$deque":
            return deque([decode(item) for item in payload[1]], payload[0])
        case "$range":
            return range(*payload)
        case "$datetime":
            return datetime.datetime.fromisoformat(payload[0]).replace(fold=payload[1])
        case "$time":
            return datetime.time.fromisoformat(payload[0]).replace(fold=payload[1])
        case "$date":
            return datetime.date.fromisoformat(payload)
        case "$timedelta":
            return datetime.timedelta(*payload)
        case "$path" | "$posixpath":
            return pathlib.Path(payload) if tag == "$path" else pathlib.PurePosixPath(payload)
        case "$tensor":
            dtype, shape, data = payload[0], tuple(payload[1]), base64.b64decode(payload[2])
            assert len(data) == math.prod(shape) * SIZES[dtype]
            return Tensor(dtype, shape, data)
        case "$torch.dtype" | "$torch.device":
            return Torch(tag, payload)
        case "$torch.Size":
            return Torch(tag, str(payload))
        case "$numpy":
            return np.frombuffer(base64.b64decode(payload[2]), np.dtype(payload[0])).reshape(payload[1])
        case "$numpy.scalar":
            return np.frombuffer(base64.b64decode(payload[1]), np.dtype(payload[0]))[0]
        case "$numpy.str":
            return np.str_(decode(payload))
        case "$numpy.bytes":
            return np.bytes_(base64.b64decode(payload))
    raise AssertionError(tag)


def pairs_of(payload: list[Any]) -> list[tuple[Any, Any]]:
    """Return decoded (key, value) pairs."""
    return [(decode(key), decode(value)) for key, value in payload]


def described(value: Any) -> str:
    """Return a text that is equal for equal values of equal types only."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"tensor {value.dtype} {list(value.shape)} {hashlib.sha256(value.data).hexdigest()}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{kind} {value.dtype.str} {value.shape} {value.tobytes().hex()}"
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        items = ", ".join(f"{described(k)}: {described(v)}" for k, v in value.items())
        return f"{kind} {getattr(factory, '__name__', '')} {{{items}}}"
    if isinstance(value, set | frozenset):
        return f"{kind} {{{', '.join(sorted(map(described, value)))}}}"
    if isinstance(value, list | tuple | deque) and not isinstance(value, Torch):
        return f"{kind} {getattr(value, 'maxlen', '')} [{', '.join(map(described, value))}]"
    return f"{kind} {value!r}"


MASK = (1 << 64) - 1


def key(n: int, lane: int) -> int:
    """Return splitmix64's output with its lowest bit set."""
    z = (n * 0x9E3779B97F4A7C15 + lane) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def tensor_digest(tensor: Tensor) -> str:
    """Return the logical digest of a tensor."""
    length = (tensor.shape[-1] if tensor.shape else 1) * SIZES[tensor.dtype]
    totals = []
    for lane in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        total = 0
        for r in range(len(tensor.data) // length if length else 0):
            row = tensor.data[r * length : (r + 1) * length]
            words = np.frombuffer(row + b"\0" * (-length % 4), "<i4").tolist()
            for i, word in enumerate(words):
                p, w = divmod(i, 65_536)
                keys = key(r, lane) * key(p, lane ^ 0x2545F4914F6CDD1D) * key(w, lane ^ 0x9FB21C651E98DF25)
                total = (total + keys * word) & MASK
        totals.append(f"{total:016x}")
    return xxhash.xxh3_128_hexdigest(f"{tensor.dtype} {list(tensor.shape)} {''.join(totals)}".encode())


def base_digest(tensors: dict[str, Tensor]) -> str:
    """Return the digest by which an adapter knows the weights `model.<fqn>` as its base."""
    model = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    lines = [f"{fqn} {tensor_digest(model[fqn])}" for fqn in sorted(model)]
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def main(step: pathlib.Path) -> None:
    """Print what a step holds."""
    manifest = read_manifest(step)
    tensors = read_tensors(step, manifest)
    names = [file["name"] for file in manifest["files"] if file["name"].endswith(".json")]
    states = {name: described(read_state(step, manifest, name)) for name in names}
    found: dict[str, Any] = {"tensors": {name: described(tensor) for name, tensor in tensors.items()}, "states": states}
    if manifest["kind"] == "model":
        found["base_digest"] = base_digest(tensors)
    print(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
