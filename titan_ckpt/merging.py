"""PEFT adapters as part of the base: what each pair adds, added to the live weights, chunk by chunk.

Owns the fit of an adapter folder to a model that has no converter for it, and the arithmetic. Reads through PeftReader;
which folders, and in which order, is the plan's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from titan_ckpt.errors import KeyMapError, LoadMismatchError
from titan_ckpt.keymap import KeyGroup, KeyMap
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.peft import MAGNITUDE, PAIRS, PREFIX, scaling_of
from titan_ckpt.tensors import Chunk, Shape, blocks_of, info_of
from titan_ckpt.types import LoadReport, Mismatch, StateDict


@dataclass(frozen=True, slots=True)
class _Pair:
    """One adapted weight: the keys of its factors, and the place of the weight in the model."""

    a: str
    b: str
    scaling: float
    group: KeyGroup
    index: int
    """Which of the group's file tensors the weight is."""
    magnitude: str | None = None
    """The key of DoRA's row lengths."""


@dataclass(frozen=True, slots=True)
class AdapterMerge:
    """An adapter folder that is known to fit; `report` says what of it does not."""

    reader: TensorReader
    base: StateDict
    report: LoadReport
    _pairs: Sequence[_Pair]
    _copies: Sequence[ReadRequest]

    @torch.no_grad()
    def apply(self) -> None:
        """Add every pair to the live weights, in float32 (float64 for such a base), rounded once to their dtype.

        Shape: weight (out, in) += scaling * B (out, r) @ A (r, in), of which each rank computes its own part; DoRA then
        gives each row its length.
        """
        self.reader.read(self._copies)
        for pair in self._pairs:
            a, b = (_whole(self.reader, key) for key in (pair.a, pair.b))
            left, right = (a.t(), b.t()) if pair.a.endswith("_embedding_A") else (b, a)
            lengths = None if pair.magnitude is None else _whole(self.reader, pair.magnitude)
            for view, chunk in _views(pair, self.base):
                dtype = torch.promote_types(view.dtype, torch.float32)
                rows, columns = (slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
                merged = (left[rows].to(dtype) @ right[:, columns].to(dtype)).mul_(pair.scaling)
                merged.view(view.shape).add_(view)
                if lengths is not None:
                    merged.mul_((lengths[rows].to(dtype) / torch.linalg.vector_norm(merged, dim=1))[:, None])
                view.copy_(merged.view(view.shape))


def prepare_merge(reader: TensorReader, base: StateDict, tied: Collection[str], key_map: KeyMap) -> AdapterMerge:
    """Find out which weights an adapter means, and that it means something; changes nothing.

    `base`: the live tensors without converter-owned ones. `tied`: those that are another module's too.
    Raises: LoadMismatchError for tied weights, DoRA without whole rows, and an adapter without effect;
    CorruptCheckpointError for NaN.
    """
    config, where = reader.metadata(), getattr(reader, "path", "the adapter")
    problems: list[str] = []
    pairs: list[_Pair] = []
    copies: list[ReadRequest] = []
    loaded: dict[str, None] = {}
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
            found = info.shape
            copies += [ReadRequest(key, chunk, view) for view, chunk in _views(_Pair("", "", 0, group, index), base)]
        else:
            b = reader.tensors[f"{PREFIX}{module}{PAIRS[suffix]}"].shape
            found = (info.shape[1], b[0]) if suffix.endswith("_embedding_A") else (b[0], info.shape[1])
            magnitude = f"{PREFIX}{module}{MAGNITUDE}" if config.get("use_dora") else None
            pair = _Pair(key, f"{PREFIX}{module}{PAIRS[suffix]}", scaling_of(module, config), group, index, magnitude)
            pairs.append(pair)
            problems += _dora_misfits(pair, reader, base, shape)
        if found != shape:
            mismatched.append(Mismatch(key, f"a weight {list(shape)}", f"one for {list(found)}"))
        loaded |= dict.fromkeys(group.fqns)
    acting = [pair for pair in pairs if _acts(reader, pair)]
    if not problems and not (copies or mismatched or unexpected or acting):
        problems.append(f"none of its {len(pairs)} pairs has any effect: A, B or the scale is zero everywhere")
    if problems:
        raise LoadMismatchError(f"{where} cannot be merged into the base\n  " + "\n  ".join(problems))
    report = LoadReport((), unexpected=tuple(unexpected), mismatched=tuple(mismatched))
    return AdapterMerge(reader, base, report, pairs, copies)


def _dora_misfits(pair: _Pair, reader: TensorReader, base: StateDict, shape: Shape) -> Iterator[str]:
    """Yield why rows of this weight cannot be given their lengths here."""
    if pair.magnitude is None:
        return
    if pair.a.endswith("_embedding_A"):
        yield f"{pair.a}: use_dora of embeddings scales columns, which is not merged; merge it with PEFT before"
    elif (found := reader.tensors[pair.magnitude].shape) != shape[:1]:
        yield f"{pair.magnitude}: expected {list(shape[:1])}, found {list(found)}"
    elif any(chunk.sizes[1:] != shape[1:] for _, chunk in _views(pair, base)):
        yield f"{pair.a}: use_dora needs whole rows, and this weight's are cut: merge it without tensor parallelism"


def _place(key: str, key_map: KeyMap, base: StateDict) -> tuple[KeyGroup, int] | None:
    """Return where the model has a file tensor; None where this rank has not, or no rank."""
    try:
        group = key_map.group_of_key(key)
    except KeyMapError:
        return None
    return (group, group.keys.index(key)) if all(fqn in base for fqn in group.fqns) else None


def _views(pair: _Pair, base: StateDict) -> Iterator[tuple[torch.Tensor, Chunk]]:
    """Yield this rank's live memory of the file tensor, with the region of it that each view holds."""
    values: list[Any] = [base[fqn] for fqn in pair.group.fqns]
    shapes = [info_of(value).shape for value in values]
    for i, value in enumerate(values):
        for block in blocks_of(value):
            for piece in pair.group.op.pieces(i, shapes, block.chunk, block.data):
                if piece.file_index == pair.index:
                    yield piece.view, piece.chunk


def _whole(reader: TensorReader, key: str) -> torch.Tensor:
    info = reader.tensors[key]
    value = torch.empty(info.shape, dtype=info.dtype)
    reader.read([ReadRequest(key, Chunk.whole(info.shape), value)])
    return value


def _acts(reader: TensorReader, pair: _Pair) -> bool:
    """Say whether a pair has an effect; a row length has one of its own. All is read: no NaN may meet a live weight."""
    keys = (pair.a, pair.b, *([pair.magnitude] if pair.magnitude in reader.tensors else []))
    values = [bool(_whole(reader, key).any()) for key in keys if key is not None]
    return (pair.scaling != 0 and all(values[:2])) or any(values[2:])
