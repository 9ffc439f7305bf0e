"""Write a step of one process, from docs/format.md and docs/format-rank-file.md alone, so that its run can resume.

Usage: write_step.py <facts.json> <arrays.npz> <checkpoint folder>. Needs numpy and xxhash, and nothing of titan_ckpt.

facts.json: step, seconds, groups (hyperparameters, fqns and step of each), lr_scheduler, dataloader, states, random
(python, numpy). arrays.npz: the model's tensors, "<fqn>|exp_avg", "<fqn>|exp_avg_sq", "random|torch", "random|numpy".
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
import sys
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

DTYPES = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8", "bool": "BOOL"}
BLOCK_BYTES = 1 << 20


def tensor_file(tensors: Mapping[str, np.ndarray[Any, Any]]) -> tuple[bytes, str]:
    """Return the bytes of the only rank's tensor file, and its digest."""
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # wider elements first
    data = b"".join(tensors[name].tobytes() for name in order)
    blocks = [xxhash.xxh3_128_hexdigest(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES)]
    about = {
        "titan_ckpt.digest": "0" * 32,
        "titan_ckpt.blocks": "".join(blocks),
        "titan_ckpt.block_bytes": str(BLOCK_BYTES),
        "titan_ckpt.version": "1",
        "titan_ckpt.rank": "0",
        "titan_ckpt.world_size": "1",
        "format": "pt",
    }
    header: dict[str, Any] = {"__metadata__": about}
    start = 0
    for name in order:
        value = tensors[name]
        offsets = [start, start + value.nbytes]
        header[name] = {"dtype": DTYPES[str(value.dtype)], "shape": list(value.shape), "data_offsets": offsets}
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
    """Return the files state.json and rank-00000.json."""
    run = {
        "step": facts["step"],
        "optimizer": [[group(stored) for stored in facts["groups"]]],
        "lr_scheduler": [facts["lr_scheduler"]],
        "states": facts["states"],
    }
    trained = sorted(fqn for stored in facts["groups"] for fqn in stored["fqns"])
    layout = [1, 0, 0, 1, trained, {"meshes": [], "kinds": [], "names": [], "kind_of": []}]
    version, internal, gauss = facts["random"]["python"]
    name, position, has_gauss, cached = facts["random"]["numpy"]
    keys = base64.b64encode(arrays["random|numpy"].astype("<u4").tobytes()).decode()
    rank = {
        "layout": xxhash.xxh3_128_hexdigest(json.dumps(layout).encode()),
        "data_parallel": [0, 1],
        "dataloader": facts["dataloader"],
        "rng": {
            "python": {"$tuple": [version, {"$tuple": internal}, gauss]},
            "numpy": {"$tuple": [name, {"$numpy": ["<u4", [624], keys]}, position, has_gauss, cached]},
            "torch": in_json("uint8", arrays["random|torch"]),
        },
    }
    return {"state.json": json.dumps(run).encode(), "rank-00000.json": json.dumps(rank).encode()}


def manifest(facts: Mapping[str, Any], attempt: str, files: Mapping[str, tuple[bytes, str]]) -> bytes:
    """Return MANIFEST.json."""
    listed = [{"name": name, "num_bytes": len(data), "digest": digest} for name, (data, digest) in files.items()]
    fields = {
        "format": "titan_ckpt",
        "schema_version": 1,
        "step": facts["step"],
        "kind": "full",
        "attempt": attempt,
        "world_size": 1,
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
    files = {"rank-00000.safetensors": tensor_file(tensors)}
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
