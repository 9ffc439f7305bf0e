"""Write a step of one or several processes, from docs/format.md and docs/format-rank-file.md alone; its run resumes.

Usage: write_step.py <facts.json> <arrays.npz> <checkpoint folder>. Needs numpy and xxhash, and nothing of titan_ckpt.

facts.json: step, seconds, ranks (which divide the rows unevenly and read the same data), groups (hyperparameters, fqns
and step of each), lr_scheduler, dataloader, states, random (python, numpy). arrays.npz: the model's tensors,
"<fqn>|exp_avg", "<fqn>|exp_avg_sq", "random|torch", "random|numpy".
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import pathlib
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

DTYPES = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8", "bool": "BOOL"}
BLOCK_BYTES = 1 << 20


class Chunk(NamedTuple):
    """The rows of a tensor that one rank has."""

    fqn: str
    shape: tuple[int, ...]
    start: int
    rows: np.ndarray[Any, Any]

    @property
    def kind(self) -> list[Any] | None:
        return None if self.rows.shape == self.shape else [self.shape, [self.start, *[0] * (len(self.shape) - 1)]]


def share(tensors: Mapping[str, np.ndarray[Any, Any]], rank: int, ranks: int) -> list[Chunk]:
    """Return what a rank writes: of r ranks, rank i has 2 (i + 1) / r (r + 1) of the rows, the last one all numbers."""
    chunks = []
    for fqn, value in tensors.items():
        if not value.shape:
            chunks += [Chunk(fqn, (), 0, value)] if rank == ranks - 1 else []
            continue
        first, last = (len(value) * i * (i + 1) // (ranks * (ranks + 1)) for i in (rank, rank + 1))
        chunks += [Chunk(fqn, value.shape, first, value[first:last])] if last > first or not len(value) else []
    return sorted(chunks, key=lambda chunk: -chunk.rows.itemsize)  # wider elements first


def tensor_file(chunks: Sequence[Chunk], rank: int, ranks: int, elsewhere: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the bytes of a rank's tensor file, and its digest."""
    data = b"".join(chunk.rows.tobytes() for chunk in chunks)
    blocks = [xxhash.xxh3_128_hexdigest(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES)]
    about = {
        "titan_ckpt.digest": "0" * 32,
        "titan_ckpt.blocks": "".join(blocks),
        "titan_ckpt.block_bytes": str(BLOCK_BYTES),
        "titan_ckpt.version": "1",
        "titan_ckpt.rank": str(rank),
        "titan_ckpt.world_size": str(ranks),
        "format": "pt",
    }
    if any(chunk.kind for chunk in chunks):
        kinds = [chunk.kind for chunk in chunks if chunk.kind]
        numbers = itertools.count(1)
        about["titan_ckpt.kinds"] = json.dumps(kinds)
        about["titan_ckpt.kind_of"] = json.dumps([next(numbers) if chunk.kind else 0 for chunk in chunks])
    if elsewhere:
        about["titan_ckpt.elsewhere"] = json.dumps(elsewhere)
    header: dict[str, Any] = {"__metadata__": about}
    start = 0
    for chunk in chunks:
        value = chunk.rows
        offsets = [start, start + value.nbytes]
        header[chunk.fqn] = {"dtype": DTYPES[str(value.dtype)], "shape": list(value.shape), "data_offsets": offsets}
        start += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    head = len(text).to_bytes(8, "little") + text
    assert head[46:78] == b"0" * 32
    digest = xxhash.xxh3_128_hexdigest(head)
    return head[:46] + digest.encode() + head[78:] + data, digest


def in_json(dtype: str, value: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return a small tensor in typed JSON."""
    return {"$tensor": [dtype, list(value.shape), base64.b64encode(value.tobytes()).decode()]}


def group(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group, all of whose parameters were stepped equally often."""
    settings = {name: {"$tuple": v} if name == "betas" else v for name, v in stored["hyperparameters"].items()}
    shared = {"step": in_json("float32", np.array(stored["step"], np.float32))}
    return {"hyperparameters": settings, "shared": shared, "fqns": stored["fqns"], "stateless": [], "own": {}}


def state_files(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, bytes]:
    """Return the files state.json and rank-<r>.json."""
    run = {
        "step": facts["step"],
        "optimizer": [[group(stored) for stored in facts["groups"]]],
        "lr_scheduler": [facts["lr_scheduler"]],
        "states": facts["states"],
    }
    trained = sorted(fqn for stored in facts["groups"] for fqn in stored["fqns"])
    layout = [facts["ranks"], 0, 0, 1, trained, {"meshes": [], "kinds": [], "names": [], "kind_of": []}]
    version, internal, gauss = facts["random"]["python"]
    name, position, has_gauss, cached = facts["random"]["numpy"]
    keys = base64.b64encode(arrays["random|numpy"].astype("<u4").tobytes()).decode()
    rank = {
        "layout": "",
        "data_parallel": [0, 1],
        "dataloader": facts["dataloader"],
        "rng": {
            "python": {"$tuple": [version, {"$tuple": internal}, gauss]},
            "numpy": {"$tuple": [name, {"$numpy": ["<u4", [624], keys]}, position, has_gauss, cached]},
            "torch": in_json("uint8", arrays["random|torch"]),
        },
    }
    files = {"state.json": json.dumps(run).encode()}
    for layout[1] in range(facts["ranks"]):
        rank["layout"] = xxhash.xxh3_128_hexdigest(json.dumps(layout).encode())
        files[f"rank-{layout[1]:05d}.json"] = json.dumps(rank).encode()
    return files


def manifest(facts: Mapping[str, Any], attempt: str, files: Mapping[str, tuple[bytes, str]]) -> bytes:
    """Return MANIFEST.json."""
    listed = [{"name": name, "num_bytes": len(data), "digest": digest} for name, (data, digest) in files.items()]
    fields = {
        "format": "titan_ckpt",
        "schema_version": 1,
        "step": facts["step"],
        "kind": "full",
        "attempt": attempt,
        "world_size": facts["ranks"],
        "created_unix_seconds": float(facts["seconds"]),
        "components": ["model", "optimizer", "lr_scheduler", "dataloader", "rng", "states"],
        "converters": [],
        "base": None,
        "resumed_from": None,
        "files": listed,
        "metrics": {},
    }
    body = json.dumps(fields)[:-1].encode()
    return body + f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def main(facts_file: pathlib.Path, arrays_file: pathlib.Path, root: pathlib.Path) -> None:
    """Write a step as a whole, and rename it into place."""
    facts = json.loads(facts_file.read_text())
    arrays = dict(np.load(arrays_file))
    tensors = {}
    for name, value in arrays.items():
        fqn, _, of_optimizer = name.partition("|")
        if fqn != "random":
            tensors[f"optimizer.{fqn}.{of_optimizer}" if of_optimizer else f"model.{fqn}"] = value
    ranks = facts["ranks"]
    shares = [share(tensors, rank, ranks) for rank in range(ranks)]
    others = tensors.keys() - {chunk.fqn for chunk in shares[0]}
    elsewhere = {fqn: [str(tensors[fqn].dtype), tensors[fqn].shape] for fqn in others}
    files = {
        f"rank-{rank:05d}.safetensors": tensor_file(chunks, rank, ranks, elsewhere if rank == 0 else {})
        for rank, chunks in enumerate(shares)
    }
    files |= {name: (data, xxhash.xxh3_128_hexdigest(data)) for name, data in state_files(facts, arrays).items()}
    attempt = uuid.uuid4().hex
    staging = root / ".staging" / f"step-{facts['step']}.{attempt}"
    staging.mkdir(parents=True)
    contents = {name: data for name, (data, _) in files.items()} | {"MANIFEST.json": manifest(facts, attempt, files)}
    for name, data in contents.items():
        with open(staging / name, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    staging.rename(root / f"step-{facts['step']}")


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
