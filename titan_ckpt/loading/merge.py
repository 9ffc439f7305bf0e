"""Merging PEFT adapters into the base: the product of each pair is added to the live weights, chunk by chunk.

Owns the arithmetic, and the check that an adapter folder fits a model that has no converter for it. Reads through
PeftReader; the plan decides which folders are merged, and in which order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from titan_ckpt.errors import KeyMapError, LoadMismatchError
from titan_ckpt.formats.huggingface.peft import MAGNITUDE, PAIRS, PREFIX, scaling_of
from titan_ckpt.geometry.chunks import Chunk, Shape, blocks_of, info_of
from titan_ckpt.geometry.keymap import KeyGroup, KeyMap
from titan_ckpt.geometry.requests import ReadRequest, TensorReader
from titan_ckpt.types import LoadReport, Mismatch, StateDict


@dataclass(frozen=True, slots=True)
class _Pair:
    """One adapted weight: the keys of its factors, and its place in the model."""

    a: str
    b: str
    scaling: float
    group: KeyGroup
    index: int
    """Index of the weight among the file tensors of the group."""
    magnitude: str | None = None
    """The key of DoRA's row lengths."""


@dataclass(frozen=True, slots=True)
class AdapterMerge:
    """An adapter folder that fits the model, except for the keys that `report` lists."""

    reader: TensorReader
    base: StateDict
    report: LoadReport
    _pairs: Sequence[_Pair]
    _copies: Sequence[ReadRequest]

    @torch.no_grad()
    def apply(self) -> None:
        """Add every pair to the live weights, in float32 (float64 for a float64 base), rounded once to their dtype.

        Shape: weight (out, in) += scaling * B (out, r) @ A (r, in); each rank computes its own part. DoRA then scales
        each row to its length.
        """
        self.reader.read(self._copies)
        for pair in self._pairs:
            a, b = (_whole(self.reader, key) for key in (pair.a, pair.b))
            left, right = (a.t(), b.t()) if pair.a.endswith("_embedding_A") else (b, a)
            lengths = None if pair.magnitude is None else _whole(self.reader, pair.magnitude)
            for view, chunk in _views(pair.group, pair.index, self.base):
                dtype = torch.promote_types(view.dtype, torch.float32)
                rows, columns = (slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
                merged = (left[rows].to(dtype) @ right[:, columns].to(dtype)).mul_(pair.scaling)
                merged.view(view.shape).add_(view)
                if lengths is not None:
                    merged.mul_((lengths[rows].to(dtype) / torch.linalg.vector_norm(merged, dim=1))[:, None])
                view.copy_(merged.view(view.shape))


def prepare_merge(reader: TensorReader, base: StateDict, tied: Collection[str], key_map: KeyMap) -> AdapterMerge:
    """Find the weights that an adapter changes and check that it has an effect; change nothing.

    `base`: the live tensors without converter-owned ones. `tied`: the names of those that two modules share.
    Raises: LoadMismatchError for tied weights, DoRA without whole rows, and an adapter without effect;
    CorruptCheckpointError for NaN.
    """
    config, where = reader.metadata(), getattr(reader, "path", "the adapter")
    problems: list[str] = []
    pairs: list[_Pair] = []
    copies: list[ReadRequest] = []
    unexpected: list[str] = []
    mismatched: list[Mismatch] = []
    for key, info in reader.tensors.items():
        suffix = next((s for s in PAIRS if key.endswith(s)), None)
        module = key.removeprefix(PREFIX).removesuffix(suffix or "")
        if suffix is None and key.endswith((*PAIRS.values(), MAGNITUDE)):
            continue
        place = _place(f"{module}.weight" if suffix else module, key_map, base)
        if place is None:
            unexpected.append(key)
            continue
        group, index = place
        shape = group.op.file_shapes([info_of(base[fqn]).shape for fqn in group.fqns])[index]
        if shared := [fqn for fqn in group.fqns if fqn in tied]:
            problems.append(f"{key}: {', '.join(shared)} is another module's weight too, which a merge would change")
            continue
        if suffix is None:
            fits = info.shape
            copies += [ReadRequest(key, chunk, view) for view, chunk in _views(group, index, base)]
        else:
            b = reader.tensors[f"{PREFIX}{module}{PAIRS[suffix]}"].shape
            fits = (info.shape[1], b[0]) if suffix.endswith("_embedding_A") else (b[0], info.shape[1])
            magnitude = f"{PREFIX}{module}{MAGNITUDE}" if config.get("use_dora") else None
            pair = _Pair(key, f"{PREFIX}{module}{PAIRS[suffix]}", scaling_of(module, config), group, index, magnitude)
            pairs.append(pair)
            problems += _dora_misfits(pair, reader, base, shape)
        if fits != shape:
            mismatched.append(Mismatch(key, f"a weight {list(shape)}", f"one for {list(fits)}"))
    acting = [pair for pair in pairs if _acts(reader, pair)]
    if not problems and not (copies or mismatched or unexpected or acting):
        problems.append(f"none of its {len(pairs)} pairs has any effect: A, B or the scale is zero everywhere")
    if problems:
        raise LoadMismatchError(f"{where} cannot be merged into the base\n  " + "\n  ".join(problems))
    report = LoadReport((), unexpected=tuple(unexpected), mismatched=tuple(mismatched))
    return AdapterMerge(reader, base, report, pairs, copies)


def _dora_misfits(pair: _Pair, reader: TensorReader, base: StateDict, shape: Shape) -> Iterator[str]:
    """Yield the reason why the rows of this weight cannot be scaled to their lengths, if there is one."""
    if pair.magnitude is None:
        return
    if pair.a.endswith("_embedding_A"):
        yield f"{pair.a}: use_dora of embeddings scales columns, which is not merged; merge it with PEFT before"
    elif (found := reader.tensors[pair.magnitude].shape) != shape[:1]:
        yield f"{pair.magnitude}: expected {list(shape[:1])}, found {list(found)}"
    elif any(chunk.sizes[1:] != shape[1:] for _, chunk in _views(pair.group, pair.index, base)):
        yield f"{pair.a}: use_dora needs whole rows, and this weight's are cut: merge it without tensor parallelism"


def _place(key: str, key_map: KeyMap, base: StateDict) -> tuple[KeyGroup, int] | None:
    """Return the group of a file tensor and its index in it; None if this rank, or the model, does not have it."""
    try:
        group = key_map.group_of_key(key)
    except KeyMapError:
        return None
    return (group, group.keys.index(key)) if all(fqn in base for fqn in group.fqns) else None


def _views(group: KeyGroup, index: int, base: StateDict) -> Iterator[tuple[torch.Tensor, Chunk]]:
    """Yield views of this rank's live memory of a file tensor, each with the region of the tensor that it holds."""
    values: list[Any] = [base[fqn] for fqn in group.fqns]
    shapes = [info_of(value).shape for value in values]
    for i, value in enumerate(values):
        for block in blocks_of(value):
            for piece in group.op.pieces(i, shapes, block.chunk, block.data):
                if piece.file_index == index:
                    yield piece.view, piece.chunk


def _whole(reader: TensorReader, key: str) -> torch.Tensor:
    info = reader.tensors[key]
    value = torch.empty(info.shape, dtype=info.dtype)
    reader.read([ReadRequest(key, Chunk.whole(info.shape), value)])
    return value


def _acts(reader: TensorReader, pair: _Pair) -> bool:
    """Return whether a pair has an effect, which DoRA's row lengths may have alone.

    It reads all values, because a NaN must raise before a live weight changes.
    """
    keys = (pair.a, pair.b, *([pair.magnitude] if pair.magnitude in reader.tensors else []))
    values = [bool(_whole(reader, key).any()) for key in keys if key is not None]
    return (pair.scaling != 0 and all(values[:2])) or any(values[2:])
