"""Merging adapters into the base: the product of each pair is added to the live weights, chunk by chunk.

Owns the arithmetic, and the check that an adapter fits a model that has no converter for it. pairs.py says where each
pair belongs; the plan decides which folders are merged, and in which order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, Shape, blocks_of, info_of
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.geometry.requests import ReadRequest, TensorReader
from titan_ckpt.loading.pairs import Pair, Place, find_pairs
from titan_ckpt.types import LoadReport, Mismatch, StateDict

_NO_MODULES: Mapping[str, nn.Module] = {}
_SHARED = "{}: {} is another module's weight too, which a merge would change"


@dataclass(frozen=True, slots=True)
class AdapterMerge:
    """An adapter folder that fits the model, except for the keys that `report` lists."""

    reader: TensorReader
    base: StateDict
    report: LoadReport
    _pairs: Sequence[Pair]
    _copies: Sequence[tuple[str, Place]]

    @torch.no_grad()
    def apply(self) -> None:
        """Add every pair to the live weights, in float32 (float64 for a float64 base), rounded once to their dtype.

        Shape: weight (out, in) += scaling * B (out, r) @ A (r, in); (in, out) += the transpose of it, if the weight is
        stored so. Each rank computes its own part. DoRA then scales each output feature to its length.
        """
        self._apply_to(self.base, self._pairs, self._copies)

    @property
    def changes(self) -> set[str]:
        """Return the names of the weights that `apply` changes."""
        places = [pair.place for pair in self._pairs] + [place for _, place in self._copies]
        return {fqn for place in places for fqn in place.group.fqns}

    def needs_whole(self, fqn: str) -> bool:
        """Return whether a weight can only be merged as a whole: DoRA's lengths may be those of its columns."""
        return any(
            pair.magnitude is not None and pair.transposed and fqn in pair.place.group.fqns for pair in self._pairs
        )

    @torch.no_grad()
    def apply_to_block(self, fqn: str, block: Block) -> None:
        """Add the parts of all pairs that belong to one block of one weight, which is memory of the caller's."""
        pairs = [pair for pair in self._pairs if fqn in pair.place.group.fqns]
        copies = [(key, place) for key, place in self._copies if fqn in place.group.fqns]
        fqns = {name for place in [p.place for p in pairs] + [p for _, p in copies] for name in place.group.fqns}
        alone: StateDict = {name: LazyTensor(info_of(self.base[name]), tuple) for name in fqns}
        alone[fqn] = LazyTensor(info_of(self.base[fqn]), lambda: [block])
        self._apply_to(alone, pairs, copies)

    def _apply_to(self, base: StateDict, pairs: Sequence[Pair], copies: Sequence[tuple[str, Place]]) -> None:
        self.reader.read([ReadRequest(key, chunk, v) for key, place in copies for v, chunk in _views(place, base)])
        for pair in pairs:
            left, right = _factors(self.reader, pair)
            lengths = None if pair.magnitude is None else self.reader.whole(pair.magnitude)
            for view, chunk in _views(pair.place, base):
                _add(view, chunk, left, right, pair, lengths)


def prepare_merge(
    reader: TensorReader,
    base: StateDict,
    tied: Collection[str],
    key_map: KeyMap,
    modules: Mapping[str, nn.Module] = _NO_MODULES,
) -> AdapterMerge:
    """Find the weights that an adapter changes and check that it has an effect; change nothing.

    `base`: the live tensors without converter-owned ones. `tied`: all names of those that two modules share.
    `modules`: the model's modules by fqn.
    Raises: LoadMismatchError for tied weights, DoRA without whole rows, and an adapter without effect;
    CorruptCheckpointError for NaN.
    """
    contents = find_pairs(reader, base, key_map, modules)
    problems: list[str] = []
    mismatched: list[Mismatch] = []
    for key, place, fits in [
        *((pair.a, pair.place, _product_shape(reader, pair)) for pair in contents.pairs),
        *((key, place, reader.tensors[key].shape) for key, place in contents.copies),
    ]:
        if shared := [fqn for fqn in place.group.fqns if fqn in tied]:
            problems.append(_SHARED.format(key, ", ".join(shared)))
        elif fits != (shape := place.shape(base)):
            mismatched.append(Mismatch(key, f"a weight {list(shape)}", f"one for {list(fits)}"))
    problems += [_SHARED.format(key, fqn) for key, fqn in contents.weights.items() if fqn in tied]
    unexpected = tuple(key for key in contents.unexpected if contents.weights.get(key) not in tied)
    for pair in contents.pairs:
        problems += _dora_misfits(pair, reader, base)
    acting = [pair for pair in contents.pairs if _acts(reader, pair)]
    if not problems and not (contents.copies or mismatched or unexpected or acting):
        problems.append(f"none of its {len(contents.pairs)} pairs has any effect: A, B or the scale is zero everywhere")
    if problems:
        where = getattr(reader, "path", "the adapter")
        raise LoadMismatchError(f"{where} cannot be merged into the base\n  " + "\n  ".join(problems))
    report = LoadReport((), unexpected=unexpected, mismatched=tuple(mismatched))
    return AdapterMerge(reader, base, report, contents.pairs, contents.copies)


def _product_shape(reader: TensorReader, pair: Pair) -> Shape:
    """Return the shape of the weight that a pair is for."""
    a, b = (reader.tensors[key].shape for key in (pair.a, pair.b))
    return (a[-1], b[-2]) if pair.transposed else (*b[:-1], a[-1])


def _factors(reader: TensorReader, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole factors of the product, in the order in which they are multiplied."""
    a, b = (reader.whole(key) for key in (pair.a, pair.b))
    if pair.rows:
        b = torch.block_diag(*b.split(list(pair.rows)))
    return (a.t(), b.t()) if pair.transposed else (b, a)


def _add(
    view: torch.Tensor, chunk: Chunk, left: torch.Tensor, right: torch.Tensor, pair: Pair, lengths: torch.Tensor | None
) -> None:
    """Add a pair's part to a view of live memory that holds `chunk` of the weight."""
    where: dict[str, Any] = {"dtype": torch.promote_types(view.dtype, torch.float32), "device": view.device}
    *expert, rows, columns = (slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
    merged = left[(*expert, rows)].to(**where) @ right[(*expert, slice(None), columns)].to(**where)
    merged.mul_(pair.scaling).view(view.shape).add_(view)
    if lengths is not None:
        own = lengths[columns if pair.transposed else rows].to(**where)
        norms = torch.linalg.vector_norm(merged, dim=0 if pair.transposed else 1)
        merged.mul_((own / norms) if pair.transposed else (own / norms)[:, None])
    view.copy_(merged.view(view.shape))


def _dora_misfits(pair: Pair, reader: TensorReader, base: StateDict) -> Iterator[str]:
    """Yield the reason why this weight cannot be scaled to its lengths, if there is one."""
    if pair.magnitude is None:
        return
    axis, shape = int(pair.transposed), pair.place.shape(base)
    if pair.a.endswith("_embedding_A"):
        yield f"{pair.a}: use_dora of embeddings scales columns, which is not merged; merge it with PEFT before"
    elif (found := reader.tensors[pair.magnitude].shape) != shape[axis : axis + 1]:
        yield f"{pair.magnitude}: expected {list(shape[axis : axis + 1])}, found {list(found)}"
    elif any(chunk.sizes[1 - axis] != shape[1 - axis] for _, chunk in _views(pair.place, base)):
        rows = "columns" if pair.transposed else "rows"
        yield f"{pair.a}: use_dora needs whole {rows}, and this weight's are cut: merge it in a run that cuts none"


def _views(place: Place, base: StateDict) -> Iterator[tuple[torch.Tensor, Chunk]]:
    """Yield views of this rank's live memory of a file tensor, each with the region of the tensor that it holds."""
    group = place.group
    values: list[Any] = [base[fqn] for fqn in group.fqns]
    shapes = [info_of(value).shape for value in values]
    for i, value in enumerate(values):
        for block in blocks_of(value):
            for piece in group.op.pieces(i, shapes, block.chunk, block.data):
                if piece.file_index == place.index:
                    yield piece.view, piece.chunk


def _acts(reader: TensorReader, pair: Pair) -> bool:
    """Return whether a pair has an effect, which DoRA's row lengths may have alone.

    It reads all values, because a NaN must raise before a live weight changes.
    """
    keys = (pair.a, pair.b, *([pair.magnitude] if pair.magnitude in reader.tensors else []))
    values = [bool(reader.whole(key).any()) for key in keys if key is not None]
    return (pair.scaling != 0 and all(values[:2])) or any(values[2:])
