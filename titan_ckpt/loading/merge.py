"""Merging adapters into the base: each update is added to the live weights, chunk by chunk.

Owns the check that an adapter fits a model that has no converter for it. pairs.py says where each update belongs; the
plan decides which folders are merged, and in which order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, Shape, blocks_of, info_of
from titan_ckpt.geometry.keymap import KeyGroup, KeyMap
from titan_ckpt.geometry.requests import ReadRequest, TensorReader
from titan_ckpt.loading.pairs import Contents, find_updates
from titan_ckpt.types import LoadReport, Mismatch, StateDict
from titan_ckpt.weights.low_rank import LowRank

_NO_MODULES: Mapping[str, nn.Module] = {}
_SHARED = "{}: {} is another module's weight too, which a merge would change"


@dataclass(frozen=True, slots=True)
class AdapterMerge:
    """An adapter folder that fits the model, except for the keys that `report` lists."""

    reader: TensorReader
    base: StateDict
    report: LoadReport
    _contents: Contents

    @torch.no_grad()
    def apply(self) -> None:
        """Add every update to the live weights, in float32 (float64 for a float64 base), rounded once to their dtype.

        Each rank computes its own part (weights/low_rank.py).
        """
        self._apply_to(self.base, self._contents.updates, self._contents.copies)

    @property
    def changes(self) -> set[str]:
        """Return the names of the weights that `apply` changes."""
        return {fqn for group in self._contents.groups.values() for fqn in group.fqns}

    def merged(self, fqn: str, value: LazyTensor) -> LazyTensor:
        """Return a weight of the base with its updates; block by block where that is possible."""
        groups = {weight: group for weight, group in self._contents.groups.items() if fqn in group.fqns}
        updates = [update for update in self._contents.updates if update.weight in groups]
        copies = {key: weight for key, weight in self._contents.copies.items() if weight in groups}
        # DoRA's lengths may be those of columns
        at_once = any(update.magnitude is not None and update.transposed for update in updates)
        others = {name: LazyTensor(info_of(self.base[name]), tuple) for g in groups.values() for name in g.fqns}

        @torch.no_grad()
        def blocks() -> Iterator[Block]:
            for block in [_whole(value)] if at_once else value.blocks():
                alone = LazyTensor(value.info, partial(list, [block]))
                self._apply_to({**others, fqn: alone}, updates, copies)
                yield block

        return LazyTensor(value.info, blocks)

    def _apply_to(self, base: StateDict, updates: Sequence[LowRank], copies: Mapping[str, str]) -> None:
        self.reader.read(
            [ReadRequest(k, chunk, v) for k, w in copies.items() for v, chunk in _views(w, self._contents.groups, base)]
        )
        for update in updates:
            a, b, *lengths = (self.reader.whole(name) for name in update.tensors)
            for view, chunk in _views(update.weight, self._contents.groups, base):
                merged = update.merged(view, chunk, update.factors(a, b), *lengths)
                view.copy_(merged.view(view.shape))


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
    contents = find_updates(reader, base, key_map, modules)
    problems: list[str] = []
    mismatched: list[Mismatch] = []
    for key, weight, fits in [
        *((update.a, update.weight, _product_shape(reader, update)) for update in contents.updates),
        *((key, weight, reader.tensors[key].shape) for key, weight in contents.copies.items()),
    ]:
        if shared := [fqn for fqn in contents.groups[weight].fqns if fqn in tied]:
            problems.append(_SHARED.format(key, ", ".join(shared)))
        elif fits != (shape := _shape(weight, contents.groups, base)):
            mismatched.append(Mismatch(key, f"a weight {list(shape)}", f"one for {list(fits)}"))
    problems += [_SHARED.format(key, fqn) for key, fqn in contents.unexpected.items() if fqn in tied]
    unexpected = tuple(key for key, fqn in contents.unexpected.items() if fqn not in tied)
    for update in contents.updates:
        problems += _dora_misfits(update, contents.groups, reader, base)
    acting = [update for update in contents.updates if _acts(reader, update)]
    if not problems and not (contents.copies or mismatched or unexpected or acting):
        problems.append(
            f"none of its {len(contents.updates)} pairs has any effect: A, B or the scale is zero everywhere"
        )
    if problems:
        where = getattr(reader, "path", "the adapter")
        raise LoadMismatchError(f"{where} cannot be merged into the base\n  " + "\n  ".join(problems))
    report = LoadReport((), unexpected=unexpected, mismatched=tuple(mismatched))
    return AdapterMerge(reader, base, report, contents)


def _product_shape(reader: TensorReader, update: LowRank) -> Shape:
    """Return the shape of the weight that an update is for."""
    a, b = (reader.tensors[key].shape for key in (update.a, update.b))
    return (a[-1], b[-2]) if update.transposed else (*b[:-1], a[-1])


def _shape(weight: str, groups: Mapping[str, KeyGroup], base: StateDict) -> Shape:
    """Return the shape of a weight as the folder's tool stores it."""
    group = groups[weight]
    return group.op.file_shapes([info_of(base[fqn]).shape for fqn in group.fqns])[group.keys.index(weight)]


def _views(weight: str, groups: Mapping[str, KeyGroup], base: StateDict) -> Iterator[tuple[torch.Tensor, Chunk]]:
    """Yield views of this rank's live memory of a weight, each with the region of it that the view holds."""
    group = groups[weight]
    shapes = [info_of(base[fqn]).shape for fqn in group.fqns]
    for i, fqn in enumerate(group.fqns):
        for block in blocks_of(base[fqn]):
            for piece in group.op.pieces(i, shapes, block.chunk, block.data):
                if piece.file_index == group.keys.index(weight):
                    yield piece.view, piece.chunk


def _whole(value: LazyTensor) -> Block:
    chunk = Chunk.whole(value.info.shape)
    data = torch.empty(value.info.shape, dtype=value.info.dtype)
    for block in value.blocks():
        data[block.chunk.within(chunk)] = block.data
    return Block(chunk, data)


def _dora_misfits(
    update: LowRank, groups: Mapping[str, KeyGroup], reader: TensorReader, base: StateDict
) -> Iterator[str]:
    """Yield the reason why this weight cannot be scaled to its lengths, if there is one."""
    if update.magnitude is None:
        return
    axis, shape = int(update.transposed), _shape(update.weight, groups, base)
    if update.operation == "embedding":
        yield f"{update.a}: use_dora of embeddings scales columns, which is not merged; merge it with PEFT before"
    elif (found := reader.tensors[update.magnitude].shape) != shape[axis : axis + 1]:
        yield f"{update.magnitude}: expected {list(shape[axis : axis + 1])}, found {list(found)}"
    elif any(chunk.sizes[1 - axis] != shape[1 - axis] for _, chunk in _views(update.weight, groups, base)):
        rows = "columns" if update.transposed else "rows"
        yield f"{update.a}: use_dora needs whole {rows}, and this weight's are cut: merge it in a run that cuts none"


def _acts(reader: TensorReader, update: LowRank) -> bool:
    """Return whether an update has an effect, which DoRA's row lengths may have alone.

    It reads all values, because a NaN must raise before a live weight changes.
    """
    values = [bool(reader.whole(key).any()) for key in update.tensors if key in reader.tensors]
    return (update.scaling != 0 and all(values[:2])) or any(values[2:])
