"""The training state of a run as a DCP export holds it: by torchtitan's flat names, which its items know."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash

from titan_ckpt.components.items.item import Item
from titan_ckpt.distributed.replicas import digest_of
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import ExportError, listed
from titan_ckpt.formats.dcp.writer import StoredValue
from titan_ckpt.types import StateDict


def flat_tensors(items: Iterable[Item]) -> StateDict:
    """Return the tensors of the training state: live memory of the optimizers, and those of other items."""
    return {".".join(path): value for item in items for path, value in item.leaves() if isinstance(value, torch.Tensor)}


def state_digests(items: Iterable[Item]) -> dict[str, str]:
    """Return a digest of each tensor of the run that is stored once and not sharded: ranks must have them alike."""
    leaves = [leaf for item in items if item.scope == "run" and not item.is_stepped for leaf in item.leaves()]
    plain = {path: v for path, v in leaves if type(v) is torch.Tensor and v.layout is torch.strided}
    return {".".join(path): digest_of(value.detach()) for path, value in plain.items()}


def flat_values(items: Iterable[Item], model_values: Mapping[str, Any]) -> dict[str, StoredValue]:
    """Return everything else, as it is written. `model_values`: the model's state that is no tensor, by name.

    Raises: ExportError listing values that are no plain data, because torchtitan would have to run code to read them.
    """
    made: dict[str, StoredValue] = {}
    faults: list[str] = []
    known: dict[bytes, bytes] = {}
    of_model = (((name,), value, True) for name, value in model_values.items())
    of_items = (
        (path, value, item.scope == "run")
        for item in items
        for path, value in item.leaves()
        if not isinstance(value, torch.Tensor)
    )
    for path, value, is_compared in (*of_model, *of_items):
        name = ".".join(path)
        try:
            text = typed_json.dumps(value)
            if text not in known:  # thousands of parameters have equal hyperparameters
                known[text] = _pickled(value)
        except Exception as error:
            faults.append(f"{name} ({str(error) or type(error).__name__:.120})")
            continue
        made[name] = StoredValue(path, known[text], xxhash.xxh3_64_hexdigest(text) if is_compared else None)
    if faults:
        raise ExportError(f'not plain data: {listed(faults, ", ", " ")}. Export format = "torchtitan_weights" instead')
    return made


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)  # so that a reader who executes nothing reads it too
    return buffer.getvalue()
