"""Merging adapters into the base: each update is added to the live weights, chunk by chunk.

Owns the forms in which PEFT and this package's own steps store an adapter, and the check that it fits a model that has
no converter for it. The plan decides which folders are merged, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import KeyMapError, LoadMismatchError
from titan_ckpt.formats.huggingface.peft import PeftReader
from titan_ckpt.formats.huggingface.peft_fields import targets_parameter
from titan_ckpt.formats.huggingface.reader import TIED
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, Shape, info_of
from titan_ckpt.geometry.keymap import IDENTITY, KeyGroup, KeyMap, Transpose
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.loading.adapters import check_mergeable, updates_in
from titan_ckpt.loading.tables import is_other, shape_of, views_of
from titan_ckpt.types import LoadReport, Mismatch, StateDict
from titan_ckpt.weights.identity import BASE_RECORD, check_base, identify_base
from titan_ckpt.weights.lora import TrainedRows, is_conv1d
from titan_ckpt.weights.low_rank import AddedBias, LowRank, WeightUpdate
from titan_ckpt.weights.names import MODEL
from titan_ckpt.weights.wrapper import ModelWrapper


class SharedWeightError(LoadMismatchError):
    """An adapter acts on one of the modules that share a weight: it can only be merged where each has its own."""


_NO_MODULES: Mapping[str, nn.Module] = {}
_NO_CONFIG: Mapping[str, Any] = {}
_SHARED = (
    "{}: {} is another module's weight too, which a merge would change: merge it into a model of the same base that "
    "is built with tie_word_embeddings = false"
)
_NO_BIAS = "{}: its module has no bias, and neither PEFT nor a merge adds one"


@dataclass(slots=True)
class AdapterMerge:
    """The updates in an adapter folder, and the weights of the model to which they are added.

    A weight has the name that the folder's tool gives it.
    """

    reader: TensorReader
    base: StateDict
    prefix: str = ""
    """Of the adapter's tensors in the folder, which `updates` and `copies` name without it."""
    updates: list[WeightUpdate] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    """Name of each tensor of the modules that were trained in full -> the tensor of the base that it replaces."""
    groups: dict[str, KeyGroup] = field(default_factory=dict)
    """Name of a weight that is changed -> the model's weights that the tool stores in it, and their arrangement."""
    unexpected: dict[str, str] = field(default_factory=dict)
    """Keys that the model, or this rank, has no place for -> in a PEFT folder the name of the weight, in the folder if
    the model's table has none; else nothing."""
    report: LoadReport = field(default_factory=lambda: LoadReport(()))
    """The keys that do not fit the model."""
    beside: set[str] = field(default_factory=set)
    """Those of `copies` that are not trained, such as tables that PEFT saves beside: they may be as in the base."""
    unmergeable: list[str] = field(default_factory=list)
    """A line for each tensor that no weight can hold."""
    apart: set[str] = field(default_factory=set)
    """Keys of what acts on one of the modules that share a weight, and not on the others."""
    sources: dict[str, str] = field(default_factory=dict)
    """Name in `copies` -> the tensor in the folder that it stands for, which is a copy of another weight as well."""

    @torch.no_grad()
    def apply(self) -> None:
        """Add every update to the live weights, in float32 (float64 for a float64 base), rounded once to their dtype.

        Each rank computes its own part (weights/low_rank.py).
        """
        self._apply_to(self.base, self.updates, self.copies)

    def other_tables(self, base: StateDict) -> set[str]:
        """Return those of `beside` of which this rank's part of the base, rounded to its dtype, is not the same."""
        tables = self.beside & self.copies.keys()
        return {key for key in tables if is_other(self.reader, self._key(key), self.views(self.copies[key], base))}

    @property
    def changes(self) -> set[str]:
        """Return the names of the weights that `apply` changes."""
        return {fqn for group in self.groups.values() for fqn in group.fqns}

    def merged(self, fqn: str, value: LazyTensor) -> LazyTensor:
        """Return a weight of the base with its updates; block by block where that is possible."""
        groups = {weight: group for weight, group in self.groups.items() if fqn in group.fqns}
        updates = [update for update in self.updates if update.weight in groups]
        copies = {key: weight for key, weight in self.copies.items() if weight in groups}
        at_once = any(update.needs_whole for update in updates)
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
        return shape_of(self.groups[weight], weight, self.base)

    def views(self, weight: str, base: StateDict) -> Iterator[tuple[torch.Tensor, Chunk]]:
        """Yield views of this rank's memory of a weight, each with the region of it that the view holds."""
        return views_of(self.groups[weight], weight, base)

    def stored(self, update: WeightUpdate) -> list[str]:
        """Return the names of an update's tensors; older versions of PEFT store no lengths of embeddings."""
        return [name for name in update.tensors if self.prefix + name in self.reader.tensors]

    def values(self, update: WeightUpdate) -> list[torch.Tensor]:
        """Return the whole tensors of an update."""
        return [self.reader.whole(self.prefix + name) for name in self.stored(update)]

    def tensor_shape(self, name: str) -> Shape:
        """Return the shape of one of the adapter's tensors."""
        return self.reader.tensors[self.prefix + name].shape

    def base_shape(self, update: WeightUpdate) -> Shape:
        """Return the shape of the weight that an update is for."""
        return update.base_shape([*map(self.tensor_shape, self.stored(update))], self.shape(update.weight))

    def _apply_to(self, base: StateDict, updates: Sequence[WeightUpdate], copies: Mapping[str, str]) -> None:
        of_copies = [(name, *place) for name, weight in copies.items() for place in self.views(weight, base)]
        self.reader.read([Block(chunk, view, self._key(name)) for name, view, chunk in of_copies])
        for update in updates:
            factors = update.factors(*self.values(update))
            for view, chunk in self.views(update.weight, base):
                view.copy_(update.merged(view, chunk, factors).view(view.shape))

    def share(self, head: str, embeddings: str) -> None:
        """Let what is for one of two weights that are one in the adapter's base be for both, unless it has its own.

        So are tables of the base, and trained rows of the embeddings; those of the output matrix are not.
        """
        copied = {fqn: key for key, weight in self.copies.items() for fqn in self.groups[weight].fqns}
        rows = {fqn: u for u in self.updates if isinstance(u, TrainedRows) for fqn in self.groups[u.weight].fqns}
        for fqn, alias in ((embeddings, head), (head, embeddings)):
            group = KeyGroup((alias,), (alias,), IDENTITY)
            if alias not in self.base or copied.get(alias) not in {None, *self.beside}:
                continue
            if (key := copied.get(fqn)) in self.beside and alias not in copied:
                name = f"{key}, for {alias}"
                self.sources[name], self.copies[name], self.groups[alias] = str(key), alias, group
                self.beside.add(name)
            if (
                (update := rows.get(fqn))
                and alias == head
                and head not in rows
                and self.prefix + update.rows not in self.apart
            ):
                self.updates.insert(0, replace(update, weight=alias))  # pairs act on the table that has these rows
                self.groups[alias] = group

    def _key(self, name: str) -> str:
        return self.prefix + self.sources.get(name, name)


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
        embeddings = [fqn for fqn in base if TIED[1] in key_map.group_of_fqn(fqn).keys]
        shared |= {TIED[0], *embeddings}
        tied = {**({TIED[0]: embeddings[0]} if embeddings and TIED[0] not in base else {}), **tied}
    merge = AdapterMerge(reader, base)
    if isinstance(reader, PeftReader):
        _read_peft(merge, reader, key_map, modules, tied)
    else:
        _read_step(merge, key_map, modules, tied)
    tied_problems = [_SHARED.format(key, fqn) for key, fqn in merge.unexpected.items() if fqn in shared]
    mismatched: list[Mismatch] = []
    for name, weight, fits in [
        *((update.tensors[0], update.weight, merge.base_shape(update)) for update in merge.updates),
        *((name, weight, merge.tensor_shape(name)) for name, weight in merge.copies.items()),
    ]:
        key = merge.prefix + name
        if names := [fqn for fqn in merge.groups[weight].fqns if fqn in shared and key in merge.apart]:
            tied_problems.append(_SHARED.format(key, ", ".join(names)))
        elif fits != (shape := merge.shape(weight)):
            mismatched.append(Mismatch(key, f"a weight {list(shape)}", f"one for {list(fits)}"))
    problems = tied_problems + merge.unmergeable
    unexpected = tuple(key for key, fqn in merge.unexpected.items() if fqn not in shared)
    for update in merge.updates:
        chunks = (chunk for _, chunk in merge.views(update.weight, base))
        shapes = {name: merge.tensor_shape(name) for name in merge.stored(update)}
        problems += [merge.prefix + line for line in update.misfits(shapes, merge.shape(update.weight), chunks)]
    # all values are read, because a NaN must raise before a live weight changes
    acting = [update for update in merge.updates if update.acts(merge.values(update))]
    if not problems and not (merge.copies or mismatched or unexpected or acting):
        problems.append(f"none of its {len(merge.updates)} pairs has any effect: A, B or the scale is zero everywhere")
    if problems:
        where = getattr(reader, "path", "the adapter")
        kind = SharedWeightError if problems == tied_problems else LoadMismatchError
        raise kind(f"{where} cannot be merged into the base\n  " + "\n  ".join(problems))
    merge.report = LoadReport((), unexpected=unexpected, mismatched=tuple(mismatched))
    return merge


def settle_tables(merges: Sequence[AdapterMerge], others: Sequence[Collection[str]]) -> None:
    """Merge no table that is as in the base, which the adapters before may change by then.

    `others`: for each adapter, its tables that are not as in the base on some rank, as `other_tables` returns them.
    Raises: LoadMismatchError for one of these that adapters before change, because it would undo that.
    """
    before: set[str] = set()
    for merge, other in zip(merges, others, strict=True):
        merge.copies = {key: name for key, name in merge.copies.items() if key in other or key not in merge.beside}
        here = {key: merge.groups[merge.copies[key]] for key in other if key in merge.copies}  # others: on other ranks
        if undone := sorted(key for key, group in here.items() if before & {*group.fqns}):
            raise LoadMismatchError(
                f"{getattr(merge.reader, 'path', 'the adapter')} has {', '.join(undone)} of another base than this "
                "one, and an adapter before it changes the same weight: merge each into its own base"
            )
        used = {*merge.copies.values(), *(update.weight for update in merge.updates)}
        merge.groups = {weight: group for weight, group in merge.groups.items() if weight in used}
        before |= merge.changes


def merge_in_order(
    merges: Sequence[AdapterMerge],
    named: Mapping[str, Any] | None,
    model: ModelWrapper,
    coordinator: Coordinator,
    merged: Callable[[], None],
) -> None:
    """Merge adapters in order. Each may record the base as loaded, or as those before it left it. Collective.

    `named`: what names the base. `merged`: is called after each adapter.
    Raises: BaseMismatchError before an adapter that records another base is merged.
    """

    def other_tables() -> list[list[str]]:
        return [sorted(merge.other_tables(merge.base)) for merge in merges]

    of_ranks = coordinator.gather_results("load-other-tables", other_tables)
    others = [set().union(*each) for each in zip(*of_ranks, strict=True)]
    coordinator.together("load-tables", lambda: settle_tables(merges, others))
    records = [merge.reader.metadata().get(BASE_RECORD) for merge in merges]
    loaded = identify_base(model, named, coordinator) if any(records) else {}
    before: list[str] = []
    for merge, recorded in zip(merges, records, strict=True):
        if recorded and recorded["digest"] != loaded["digest"]:
            current = identify_base(model, named, coordinator) if before else loaded
            check_base(current, recorded, str(merge.reader.path), before)
        before.append(str(merge.reader.path))
        coordinator.together("load-merge", merge.apply)
        merged()


def _read_peft(
    merge: AdapterMerge,
    reader: PeftReader,
    key_map: KeyMap,
    modules: Mapping[str, nn.Module],
    tied: Mapping[str, str],
) -> None:
    """Find the place of every tensor of a PEFT folder.

    It takes the first of two that PEFT keeps equal because their modules share a weight.
    """
    reader.require_supported()
    config, beside = reader.metadata(), reader.beside()
    taken: set[tuple[type, str]] = set()

    def finds(key: str, weight: str, kind: type) -> KeyGroup | None:
        try:
            group = key_map.group_of_key(weight)
        except KeyMapError:
            if weight not in tied:
                merge.unexpected[key] = weight
                return None
            group = KeyGroup((weight,), (weight,), IDENTITY)
        alone = group.fqns
        group = replace(group, fqns=tuple(tied.get(fqn, fqn) for fqn in alone))
        if any(fqn not in merge.base for fqn in group.fqns):
            merge.unexpected[key] = alone[0]
            return None
        if not (reader.keeps_tied(key, is_alias=group.fqns != alone) or key in beside):
            merge.apart.add(key)
        elif (kind, group.fqns[0]) in taken:
            return None
        taken.add((kind, group.fqns[0]))
        merge.groups[weight] = group
        return group

    for update in reader.updates():
        if isinstance(update, LowRank) and reader.is_on_parameter(update):
            placed = reader.on_parameter(update, modules)
            if placed.weight in merge.base:
                merge.groups[placed.weight] = KeyGroup((placed.weight,), (placed.weight,), IDENTITY)
                merge.updates.append(placed)
            else:
                merge.unexpected[placed.a] = placed.weight
        elif isinstance(update, AddedBias) and update.weight.removesuffix("bias") + "weight" in merge.groups:
            if finds(update.bias, update.weight, AddedBias):
                merge.updates.append(update)
            elif merge.unexpected.pop(update.bias, None):
                merge.unmergeable.append(_NO_BIAS.format(update.bias))
        elif group := finds(update.tensors[0], update.weight, type(update)):
            if isinstance(update, LowRank):
                by_parameter = targets_parameter(config, update.site)  # then PEFT adds B A to it, whatever it is for
                stored_so = not update.transposed and not by_parameter and _is_stored_transposed(group, modules)
                update = replace(update, operation="conv1d") if stored_so else update
            merge.updates.append(update)
    merge.copies.update({key: weight for key, weight in reader.copies().items() if finds(key, weight, str)})
    merge.beside = {*beside}


def _read_step(merge: AdapterMerge, key_map: KeyMap, modules: Mapping[str, nn.Module], tied: Mapping[str, str]) -> None:
    """Find the place of every tensor of a step. Raises: LoadMismatchError if nothing says what they do."""
    reader, merge.prefix = merge.reader, MODEL
    tensors = {key.removeprefix(MODEL): info for key, info in reader.tensors.items() if key.startswith(MODEL)}
    stored = updates_in(reader, tensors, modules, key_map)
    of_update = {name: update for update in stored.updates for name in update.tensors}
    for name in tensors:
        update = of_update.get(name)
        weight = stored.copies.get(name) if update is None else update.weight
        place = tied.get(weight or "", weight)
        if weight is None or place not in merge.base:
            if isinstance(update, AddedBias) and update.weight.removesuffix("bias") + "weight" in merge.base:
                merge.unmergeable.append(_NO_BIAS.format(MODEL + name))
            elif update is None or name == update.tensors[0]:
                merge.unexpected[MODEL + name] = ""
            continue
        merge.groups[weight] = KeyGroup((place,), (weight,), IDENTITY)
        if place != weight or not (stored.tied or name in stored.of_base or isinstance(update, TrainedRows)):
            merge.apart.add(MODEL + name)
        if update is None:
            merge.copies[name] = weight
            merge.beside |= {name} & stored.of_base
        elif name == update.tensors[0]:
            if lost := {*update.tensors} - tensors.keys():
                names = ", ".join(MODEL + other for other in lost)
                raise LoadMismatchError(f"{reader.path}: {MODEL + name} has no {names}. Take another step")
            merge.updates.append(update)


def _is_stored_transposed(group: KeyGroup, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the other tool stores a linear module's weight as (in, out).

    Its module is a Conv1D if the model's own is one, or if the table transposes the weight of a linear module.
    """
    module = modules.get(group.fqns[0].rpartition(".")[0])
    return is_conv1d(module) != isinstance(group.op, Transpose)


def _whole(value: LazyTensor) -> Block:
    chunk = Chunk.whole(value.info.shape)
    data = torch.empty(value.info.shape, dtype=value.info.dtype)
    for block in value.blocks():
        data[block.chunk.within(chunk)] = block.data
    return Block(chunk, data)
