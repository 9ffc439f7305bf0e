"""Merging adapters into the base: each update is added to the live weights, chunk by chunk.

Owns the forms in which PEFT and this package's own steps store an adapter, and the check that it fits a model that has
no converter for it. The plan decides which folders are merged, and in which order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from titan_ckpt.errors import KeyMapError, LoadMismatchError
from titan_ckpt.formats.huggingface.peft import PeftReader
from titan_ckpt.formats.huggingface.peft_fields import targets_parameter
from titan_ckpt.formats.huggingface.reader import TIED
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, Shape, blocks_of, info_of
from titan_ckpt.geometry.keymap import IDENTITY, KeyGroup, KeyMap, Transpose
from titan_ckpt.geometry.requests import ReadRequest, TensorReader
from titan_ckpt.loading.adapters import check_mergeable, lora_record
from titan_ckpt.types import LoadReport, Mismatch, StateDict
from titan_ckpt.weights import low_rank
from titan_ckpt.weights.low_rank import LowRank, Operation, fused_rows
from titan_ckpt.weights.stored_names import MODEL

_NO_MODULES: Mapping[str, nn.Module] = {}
_NO_CONFIG: Mapping[str, Any] = {}
_SHARED = "{}: {} is another module's weight too, which a merge would change"


@dataclass(slots=True)
class AdapterMerge:
    """The updates in an adapter folder, and the weights of the model to which they are added.

    A weight has the name that the folder's tool gives it.
    """

    reader: TensorReader
    base: StateDict
    updates: list[LowRank] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    """Key of each tensor of the modules that were trained in full -> the tensor of the base that it replaces."""
    groups: dict[str, KeyGroup] = field(default_factory=dict)
    """Name of a weight that is changed -> the model's weights that the tool stores in it, and their arrangement."""
    unexpected: dict[str, str] = field(default_factory=dict)
    """Keys that the model, or this rank, has no place for -> in a PEFT folder the name of the weight, in the folder if
    the model's table has none; else nothing."""
    report: LoadReport = field(default_factory=lambda: LoadReport(()))
    """The keys that do not fit the model."""

    @torch.no_grad()
    def apply(self) -> None:
        """Add every update to the live weights, in float32 (float64 for a float64 base), rounded once to their dtype.

        Each rank computes its own part (weights/low_rank.py).
        """
        self._apply_to(self.base, self.updates, self.copies)

    @property
    def changes(self) -> set[str]:
        """Return the names of the weights that `apply` changes."""
        return {fqn for group in self.groups.values() for fqn in group.fqns}

    def merged(self, fqn: str, value: LazyTensor) -> LazyTensor:
        """Return a weight of the base with its updates; block by block where that is possible."""
        groups = {weight: group for weight, group in self.groups.items() if fqn in group.fqns}
        updates = [update for update in self.updates if update.weight in groups]
        copies = {key: weight for key, weight in self.copies.items() if weight in groups}
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

    def shape(self, weight: str) -> Shape:
        """Return the shape of a weight as the folder's tool stores it."""
        group = self.groups[weight]
        return group.op.file_shapes([info_of(self.base[fqn]).shape for fqn in group.fqns])[group.keys.index(weight)]

    def views(self, weight: str, base: StateDict) -> Iterator[tuple[torch.Tensor, Chunk]]:
        """Yield views of this rank's memory of a weight, each with the region of it that the view holds."""
        group = self.groups[weight]
        shapes = [info_of(base[fqn]).shape for fqn in group.fqns]
        for i, fqn in enumerate(group.fqns):
            for block in blocks_of(base[fqn]):
                for piece in group.op.pieces(i, shapes, block.chunk, block.data):
                    if piece.file_index == group.keys.index(weight):
                        yield piece.view, piece.chunk

    def _apply_to(self, base: StateDict, updates: Sequence[LowRank], copies: Mapping[str, str]) -> None:
        self.reader.read(
            [ReadRequest(k, chunk, v) for k, weight in copies.items() for v, chunk in self.views(weight, base)]
        )
        for update in updates:
            a, b, *lengths = (self.reader.whole(name) for name in update.tensors)
            factors = update.factors(a, b)
            for view, chunk in self.views(update.weight, base):
                view.copy_(update.merged(view, chunk, factors, *lengths).view(view.shape))


def prepare_merge(
    reader: TensorReader,
    base: StateDict,
    tied: Mapping[str, str],
    key_map: KeyMap,
    modules: Mapping[str, nn.Module] = _NO_MODULES,
    hf_config: Mapping[str, Any] = _NO_CONFIG,
) -> AdapterMerge:
    """Find the weights that an adapter changes and check that it has an effect; change nothing.

    `base`: the live tensors without converter-owned ones. `tied`: alias -> name in `base` of the same tensor.
    `modules`: the model's modules by fqn; their class says how a weight is stored. `hf_config`: config.json.
    Raises: LoadMismatchError for tied weights, DoRA without whole rows, an adapter without effect, a step that says no
    scale, and what is no adapter; NotACheckpointError for settings that cannot be honoured; CorruptCheckpointError for
    NaN.
    """
    check_mergeable(reader)
    shared = {*tied, *tied.values()}
    if hf_config.get("tie_word_embeddings"):  # a model may use one weight twice without sharing it
        shared |= {TIED[0]} | {fqn for fqn in base if TIED[1] in key_map.group_of_fqn(fqn).keys}
    merge = AdapterMerge(reader, base)
    if isinstance(reader, PeftReader):
        _read_peft(merge, reader, key_map, modules)
    else:
        _read_step(merge, key_map, modules)
    problems: list[str] = []
    mismatched: list[Mismatch] = []
    for key, weight, fits in [
        *((update.a, update.weight, _product_shape(reader, update)) for update in merge.updates),
        *((key, weight, reader.tensors[key].shape) for key, weight in merge.copies.items()),
    ]:
        if names := [fqn for fqn in merge.groups[weight].fqns if fqn in shared]:
            problems.append(_SHARED.format(key, ", ".join(names)))
        elif fits != (shape := merge.shape(weight)):
            mismatched.append(Mismatch(key, f"a weight {list(shape)}", f"one for {list(fits)}"))
    problems += [_SHARED.format(key, fqn) for key, fqn in merge.unexpected.items() if fqn in shared]
    unexpected = tuple(key for key, fqn in merge.unexpected.items() if fqn not in shared)
    for update in merge.updates:
        problems += _dora_misfits(update, merge)
    acting = [update for update in merge.updates if _acts(reader, update)]
    if not problems and not (merge.copies or mismatched or unexpected or acting):
        problems.append(f"none of its {len(merge.updates)} pairs has any effect: A, B or the scale is zero everywhere")
    if problems:
        where = getattr(reader, "path", "the adapter")
        raise LoadMismatchError(f"{where} cannot be merged into the base\n  " + "\n  ".join(problems))
    merge.report = LoadReport((), unexpected=unexpected, mismatched=tuple(mismatched))
    return merge


def _read_peft(merge: AdapterMerge, reader: PeftReader, key_map: KeyMap, modules: Mapping[str, nn.Module]) -> None:
    """Find the place of every tensor of a PEFT folder."""
    reader.require_supported()
    config = reader.metadata()

    def finds(key: str, weight: str) -> KeyGroup | None:
        try:
            group = key_map.group_of_key(weight)
        except KeyMapError:
            merge.unexpected[key] = weight
            return None
        if any(fqn not in merge.base for fqn in group.fqns):
            merge.unexpected[key] = group.fqns[0]
            return None
        merge.groups[weight] = group
        return group

    for update in reader.updates():
        if group := finds(update.a, update.weight):
            by_parameter = targets_parameter(config, update.site)  # then PEFT adds B A to it, whatever it is for
            stored_so = not update.transposed and not by_parameter and _is_stored_transposed(group, modules)
            merge.updates.append(replace(update, operation="conv1d") if stored_so else update)
    merge.copies.update({key: weight for key, weight in reader.copies().items() if finds(key, weight)})


def _read_step(merge: AdapterMerge, key_map: KeyMap, modules: Mapping[str, nn.Module]) -> None:
    """Find the place of every tensor of a step. Raises: LoadMismatchError if nothing says its scale."""
    reader, record = merge.reader, lora_record(merge.reader)
    for key in reader.tensors:
        part = low_rank.lora_tensor(key.removeprefix(MODEL))
        if not key.startswith(MODEL) or (part is not None and part.role in (low_rank.B, low_rank.MAGNITUDE)):
            continue
        if part is None or part.weight not in merge.base:
            merge.unexpected[key] = ""
            continue
        merge.groups[part.weight] = KeyGroup((part.weight,), (part.weight,), IDENTITY)
        if part.role == low_rank.COPY:
            merge.copies[key] = part.weight
            continue
        module = modules.get(part.site)
        operation: Operation = "stack" if part.site == part.weight else "linear"
        if isinstance(module, nn.Embedding):
            operation = "embedding"
        elif low_rank.is_conv1d(module):
            operation = "conv1d"
        update = record.low_rank(part.site, operation, prefix=MODEL)
        if lost := {*update.tensors} - reader.tensors.keys():
            raise LoadMismatchError(f"{reader.path}: {key} has no {', '.join(lost)}. Take another step")
        a, b = (reader.tensors[name].shape for name in (update.a, update.b))
        rows = fused_rows(part.weight, key_map)  # A and B follow them if each part has its own
        of_parts = len(a) == len(b) == 2 and a[0] != b[1] and a[0] == len(rows) * b[1]
        merge.updates.append(replace(update, rows=rows if of_parts else ()))


def _is_stored_transposed(group: KeyGroup, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the other tool stores a linear module's weight as (in, out).

    Its module is a Conv1D if the model's own is one, or if the table transposes the weight of a linear module.
    """
    module = modules.get(group.fqns[0].rpartition(".")[0])
    return low_rank.is_conv1d(module) != isinstance(group.op, Transpose)


def _product_shape(reader: TensorReader, update: LowRank) -> Shape:
    """Return the shape of the weight that an update is for."""
    a, b = (reader.tensors[key].shape for key in (update.a, update.b))
    return (a[-1], b[-2]) if update.transposed else (*b[:-1], a[-1])


def _whole(value: LazyTensor) -> Block:
    chunk = Chunk.whole(value.info.shape)
    data = torch.empty(value.info.shape, dtype=value.info.dtype)
    for block in value.blocks():
        data[block.chunk.within(chunk)] = block.data
    return Block(chunk, data)


def _dora_misfits(update: LowRank, merge: AdapterMerge) -> Iterator[str]:
    """Yield the reason why this weight cannot be scaled to its lengths, if there is one."""
    if update.magnitude is None:
        return
    axis, shape = int(update.transposed), merge.shape(update.weight)
    if update.operation == "embedding":
        yield f"{update.a}: use_dora of embeddings scales columns, which is not merged; merge it with PEFT before"
    elif (found := merge.reader.tensors[update.magnitude].shape) != shape[axis : axis + 1]:
        yield f"{update.magnitude}: expected {list(shape[axis : axis + 1])}, found {list(found)}"
    elif any(chunk.sizes[1 - axis] != shape[1 - axis] for _, chunk in merge.views(update.weight, merge.base)):
        rows = "columns" if update.transposed else "rows"
        yield f"{update.a}: use_dora needs whole {rows}, and this weight's are cut: merge it in a run that cuts none"


def _acts(reader: TensorReader, update: LowRank) -> bool:
    """Return whether an update has an effect, which DoRA's row lengths may have alone.

    It reads all values, because a NaN must raise before a live weight changes.
    """
    values = [bool(reader.whole(key).any()) for key in update.tensors if key in reader.tensors]
    return (update.scaling != 0 and all(values[:2])) or any(values[2:])
