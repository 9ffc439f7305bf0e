"""The form of a state dict in a file, in both directions: dtype, names and arrangement. Content only, never I/O.

Owns which key map a name belongs to, and its use. To write, it groups the native tensors of one file tensor, which the
formats cut into pieces; nothing is computed before. To read, it makes requests, which the formats fill, by which file
tensors fill the memory of live ones, and gives a verdict on every key.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan_ckpt.errors import ConverterError, KeyMapError, counted
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo, blocks_of, cast, dtype_name, info_of
from titan_ckpt.geometry.keymap import IDENTITY, KeyGroup, KeyMap, KeyRule, TensorOp
from titan_ckpt.process import gc_paused
from titan_ckpt.types import LoadReport, Mismatch, ModelConverter, StateDict

logger = logging.getLogger(__name__)

CASTABLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Dtypes between which tensors may be cast. float8 and smaller need scales, so a plain cast of them is wrong."""

_MAX_COMPARED_CHARS = 1_000
"""Longer names of a foreign file are not compared with the model's, because that takes the square of their length."""

FileDtype = torch.dtype | Mapping[str, torch.dtype] | None
"""Dtype of floating tensors in a file: one for all, or by file key (other tensors keep theirs), or None to keep all."""


@dataclass(frozen=True, slots=True)
class FileGroup:
    """The file tensors that one application of a rule makes, and the native tensors they come from.

    Nothing is computed until `blocks` is iterated, which resolves one native tensor at a time. If `collective` is
    set, all ranks that hold the group must iterate alike.
    """

    fqns: tuple[str, ...]
    values: tuple[torch.Tensor | LazyTensor, ...]
    infos: Mapping[str, TensorInfo]
    """file key -> global shape and dtype in the file, in the operation's order."""
    op: TensorOp

    @property
    def collective(self) -> bool:
        """Return whether resolving the group takes part in a collective."""
        return any(isinstance(value, LazyTensor) and value.collective for value in self.values)

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield (index of the native tensor, block this rank holds), replicas included.

        After an error of one native tensor the blocks of the next one follow.
        """

        def of(index: int) -> Iterator[tuple[int, Block]]:
            for block in blocks_of(self.values[index]):
                yield index, block

        return itertools.chain.from_iterable(map(of, range(len(self.values))))

    @property
    def quantized(self) -> Mapping[str, str]:
        """Return the description that files store for each file tensor that `infos` has as several parts."""
        return {}

    def parts_of(self, block: Block, shares: Sequence[Chunk] | None) -> Iterable[Block]:
        """Return the parts of a block that lie in `shares`, chunks of the native tensor; None stands for all of it."""
        if shares is None:
            return [block]
        cuts = (block.chunk.intersect(share) for share in shares)
        return [Block(cut, block.data[cut.within(block.chunk)]) for cut in cuts if cut is not None]

    def cut_shares(self, index: int, block: Block, shares: Sequence[Chunk] | None) -> Iterator[Block]:
        """Cut the parts of a block of native tensor `index` that lie in `shares` into pieces of file tensors."""
        for part in self.parts_of(block, shares):
            yield from self.cut(index, part)

    def cut(self, index: int, block: Block) -> Iterator[Block]:
        """Cut a block of native tensor `index`, or any part of it, into pieces of file tensors, zeros beside it too."""
        keys = tuple(self.infos)
        shapes = [info_of(value).shape for value in self.values]
        yield from self.op.pieces(index, shapes, block, keys)
        for file_index, region in self.op.zeros(index, block.chunk):
            yield Block(region, block.data.new_zeros(()).expand(region.sizes), keys[file_index])


def file_group(group: KeyGroup, values: Sequence[torch.Tensor | LazyTensor], dtype: FileDtype) -> FileGroup:
    """Return the file tensors of one group. Raises: KeyMapError for shapes or dtypes that do not fit."""
    infos = [info_of(value) for value in values]
    native = [info.shape for info in infos]
    shapes = group.op.file_shapes(native)
    if list(group.op.native_shapes(shapes)) != native:
        raise KeyMapError(f"shapes {native} do not fit {group.op}")
    file_infos = {}
    for key, shape in zip(group.keys, shapes, strict=True):
        wanted = dtype.get(key) if isinstance(dtype, Mapping) else dtype
        dtypes = {wanted if wanted in CASTABLE and info.dtype in CASTABLE else info.dtype for info in infos}
        if len(dtypes) > 1:
            raise KeyMapError(f"one file tensor cannot hold {', '.join(sorted(map(dtype_name, dtypes)))}")
        file_infos[key] = TensorInfo(shape, dtypes.pop())
    return FileGroup(group.fqns, tuple(values), file_infos, group.op)


class ReadPlan:
    """The requests for the wanted tensors, added one by one, and a report on every key.

    Under pipeline parallelism the report also lists other ranks' keys as unexpected; only keys that every rank reports
    are.
    """

    report: LoadReport
    """Made by `end`."""

    def __init__(self, available: Mapping[str, TensorInfo], *, cast: bool) -> None:
        self.available = available
        self.may_cast = cast
        self.requests: list[Block] = []
        self.loaded: list[str] = []
        self.missing: list[str] = []
        self.mismatched: list[Mismatch] = []
        self.cast: dict[str, str] = {}
        self.known: set[str] = set()
        self.absent: dict[str, None] = {}
        """File keys that the wanted tensors would come from and that the source does not have."""

    def near(self, key: str) -> list[str]:
        """Return the absent keys most similar to an unexpected one, such as a misspelt or wrongly prefixed name."""
        if len(key) > _MAX_COMPARED_CHARS:
            return []
        return difflib.get_close_matches(key, self.absent, n=2, cutoff=0.6)

    def add(self, fqn: str, value: torch.Tensor, group: KeyGroup | None) -> None:
        """Plan one tensor. `group`: its names in the file; None if it has the same one there."""
        keys, op, index = ((fqn,), IDENTITY, 0) if group is None else (group.keys, group.op, group.fqns.index(fqn))
        self.known.update(keys)
        absent = [key for key in keys if key not in self.available]
        if absent:
            self.absent.update(dict.fromkeys(absent))
        if len(absent) == len(keys):
            self.missing.append(fqn)
            return
        expected = info_of(value)
        if op is IDENTITY and self.available[keys[0]] == expected:  # the usual case, and a hot path
            self.requests += [Block(block.chunk, block.data, keys[0]) for block in blocks_of(value)]
            self.loaded.append(fqn)
            return
        if absent:
            fault: Mismatch | None = Mismatch(fqn, str(expected), f"no {', '.join(absent)}")
        else:
            fault = self._misfit(fqn, expected, [self.available[key] for key in keys], op, index)
        if fault is not None:
            self.mismatched.append(fault)
            return
        shapes = op.native_shapes([self.available[key].shape for key in keys])
        for block in blocks_of(value):
            self.requests += op.pieces(index, shapes, block, keys)
        self.loaded.append(fqn)

    def _misfit(
        self, fqn: str, expected: TensorInfo, infos: Sequence[TensorInfo], op: TensorOp, index: int
    ) -> Mismatch | None:
        """Return how the file's tensors do not fit, or None; note allowed casts in `cast`."""
        in_file = ", ".join(dict.fromkeys(map(str, infos)))
        try:
            shapes = [info.shape for info in infos]
            native = op.native_shapes(shapes)
            if list(op.file_shapes(native)) != shapes:
                raise KeyMapError(f"shapes {[list(s) for s in shapes]} do not fit {op}")
        except KeyMapError as error:
            return Mismatch(fqn, str(expected), f"{in_file}: {error}")
        if native[index] != expected.shape:
            return Mismatch(fqn, str(expected), in_file, shape=native[index])
        others = {info.dtype for info in infos} - {expected.dtype}
        castable = expected.dtype in CASTABLE and others <= CASTABLE
        if others and castable and self.may_cast:
            self.cast[fqn] = f"{', '.join(sorted(map(dtype_name, others)))} -> {dtype_name(expected.dtype)}"
        elif others and castable:
            return Mismatch(fqn, str(expected), f"{in_file} (set cast = true to convert while loading)", "cast")
        elif others:
            return Mismatch(fqn, str(expected), in_file, "dtype")
        return None

    def end(self, key_map: KeyMap) -> None:
        """Make the report, after every wanted tensor was added."""
        unknown = [key for key in self.available if key not in self.known]
        ignored = [key for key in unknown if key_map.ignores(key)]
        if ignored:
            what = counted(len(ignored), "key is", "keys are")
            logger.info("load: %s ignored, which the model does not use, such as %s", what, ignored[0])
        self.report = LoadReport(
            loaded=tuple(self.loaded),
            missing=tuple(fqn for fqn in self.missing if fqn not in key_map.nameless),
            unexpected=tuple(key for key in unknown if not key_map.ignores(key)),
            mismatched=tuple(self.mismatched),
            initialized=tuple(fqn for fqn in self.missing if fqn in key_map.nameless),
            cast=self.cast,
            ignored=tuple(ignored),
        )


@dataclass(frozen=True)
class StateDictTransforms:
    """The model's key map, and the config and assets beside the weights in a Hugging Face folder."""

    key_map: KeyMap = field(default_factory=lambda: KeyMap(identity=True))
    hf_config: Mapping[str, Any] | None = None
    assets: Path | None = None
    torchtitan: KeyMap | None = None
    """The table between the names of torchtitan's model and those in a Hugging Face folder."""
    check_folder: Callable[[str, Mapping[str, Any]], None] | None = None
    """Raises if the config.json of a folder to load, given with its path, does not describe the model; absent: the
    shape in `hf_config` is compared."""
    generation_config: Mapping[str, Any] | None = None
    """The generation_config.json of an export whose assets have none; absent: one made from `hf_config`."""

    @staticmethod
    def from_transformers(model: nn.Module) -> StateDictTransforms:
        """Return table, config.json and generation config of a model of transformers, also inside of DDP or FSDP2.

        CheckpointManager calls it for a model of transformers that it is given without `sd_transforms`. Call it
        yourself before converters change the model's modules.
        Raises: ConfigError for other models, and for one with adapters of PEFT or with quantized weights; KeyMapError
        for parameters that folders have in a form that no operation produces.
        """
        models = import_module("titan_ckpt.models.hf_transforms")  # it stands above
        return models.transforms_of(model)  # type: ignore[no-any-return]

    def names_in_torchtitan(self, fqns: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return native name -> torchtitan's names of the same tensor, several for a tied one.

        Names that either table lacks are left out; so are tensors that the two tables arrange in different ways.
        """
        names: dict[str, tuple[str, ...]] = {}
        if self.torchtitan is None:
            return names
        for fqn in fqns:
            try:
                (key,) = (group := self.key_map.group_of_fqn(fqn)).keys
                if self.torchtitan.group_of_key(key).op == group.op:
                    names[fqn] = self.torchtitan.fqns_of_key(key)
            except (KeyMapError, ValueError):
                continue
        return names

    @gc_paused()
    def to_file(self, tensors: StateDict, converter: ModelConverter | None, dtype: FileDtype) -> list[FileGroup]:
        """Return the file tensors, lazily, in the order of `tensors`.

        `dtype` applies to floating tensors of 16 bits or more. Tensors that the table calls nameless are left out.
        Raises: KeyMapError listing names the tables lack, groups that are incomplete and shapes that do not fit.
        """
        names = _Names(self.key_map, converter)
        groups: dict[tuple[str, ...], KeyGroup] = {}
        problems: list[str] = []
        unknown: list[str] = []
        for fqn in tensors:
            if fqn in self.key_map.nameless:
                continue
            try:
                group = names.group_of_fqn(fqn)
                groups.setdefault(group.fqns, group)
            except KeyMapError as error:
                problems.append(str(error))
                unknown.append(fqn)
        made: list[FileGroup] = []
        for group in groups.values():
            if absent := [fqn for fqn in group.fqns if fqn not in tensors]:
                problems.append(f"{', '.join(group.keys)} cannot be made without {', '.join(absent)}")
                unknown += absent
                continue
            try:
                wanted = dtype if self.key_map.casts(group.fqns, dtype) else None
                made.append(file_group(group, [tensors[fqn] for fqn in group.fqns], wanted))
            except KeyMapError as error:
                problems.append(f"{', '.join(group.fqns)}: {error}")
        problems += made_twice(made, self.key_map)
        if problems:
            raise KeyMapError(f"{len(problems)} problem(s) with file names\n  " + "\n  ".join(problems), unknown)
        return made

    @gc_paused()
    def from_file(
        self, wanted: StateDict, available: Mapping[str, TensorInfo], converter: ModelConverter | None, *, cast: bool
    ) -> ReadPlan:
        """Plan how the wanted tensors' memory is filled from the available file tensors; pure.

        `wanted` holds live tensors. `cast` allows a change between floating dtypes of 16 bits or more, nothing else.
        Raises: KeyMapError listing wanted names that the tables lack.
        """
        names = _Names(self.key_map, converter, available)
        are_equal = converter is None and self.key_map.identity and not self.key_map.rules
        plan = ReadPlan(available, cast=cast)
        unknown: list[str] = []
        problems: list[str] = []
        for fqn, value in wanted.items():
            try:
                plan.add(fqn, value, None if are_equal else names.group_of_fqn(fqn))
            except KeyMapError as error:
                if fqn in self.key_map.nameless:
                    plan.missing.append(fqn)
                    continue
                problems.append(str(error))
                unknown.append(fqn)
        if problems:
            raise KeyMapError(f"{len(problems)} problem(s) with the model's names\n  " + "\n  ".join(problems), unknown)
        plan.end(self.key_map)
        return plan


def with_tied_names(
    key_map: KeyMap, tied: Mapping[str, str], linear: Collection[str], folder: Collection[str] | None
) -> KeyMap:
    """Return the table in which a tied tensor has the file key of one of its names, that of no linear module if it can.

    transformers looks for the embeddings, and ties the output matrix to them.

    `tied`: alias -> first name of the same tensor, by which the model's state dict knows it. A folder may know it by a
    second name, such as that of the embeddings if the output matrix is registered first. `linear`: names of the weights
    of linear modules. `folder`: the file keys of the folder that is read or written like; None if there is none. If
    several fit, `repeats` has those that the chosen one stands for.
    """
    names: dict[str, list[str]] = {}
    for alias, first in tied.items():
        names.setdefault(first, [first]).append(alias)
    rules: list[KeyRule] = []
    repeats = list(key_map.repeats)
    for first, same in names.items():
        plain = [group for group in _known(key_map, same) if group.op is IDENTITY]
        fitting = [group for group in plain if folder is None or group.keys[0] in folder]
        groups = sorted(fitting, key=lambda group: group.fqns[0] in linear)
        if not groups:
            continue
        if groups[0].fqns != (first,):
            rules.append(KeyRule.of(first, groups[0].keys))
        repeats += [(group.keys[0], groups[0].keys[0]) for group in groups[1:] if group.keys != groups[0].keys]
    return replace(key_map, rules=(*rules, *key_map.rules), repeats=tuple(dict.fromkeys(repeats)))


def _known(key_map: KeyMap, fqns: Sequence[str]) -> Iterator[KeyGroup]:
    """Yield the groups of the names that the table has."""
    for fqn in fqns:
        with contextlib.suppress(KeyMapError):
            yield key_map.group_of_fqn(fqn)


@dataclass(frozen=True)
class _Names:
    """Chooses the table of a name: the adapter's for converter-owned names, the model's for all others."""

    key_map: KeyMap
    converter: ModelConverter | None
    found: Mapping[str, TensorInfo] | None = None
    """The tensors of the folder that is read; None to write."""

    @functools.cached_property
    def owned_map(self) -> KeyMap | None:
        """The adapter's table, built on first use: some converters cannot name their keys, which matters only then."""
        adapter = None if self.converter is None else self.converter.state_dict_adapter()
        if adapter is None:  # the folder holds no owned tensors, so they keep their initial values
            return None if self.found is None else KeyMap(identity=True)
        return adapter.key_map(self.key_map, self.found)

    def group_of_fqn(self, fqn: str) -> KeyGroup:
        if self.converter is None or not self.converter.key_filter(fqn):
            return self.key_map.group_of_fqn(fqn)
        if self.owned_map is None:
            raise ConverterError(f"a converter owns {fqn!r} and gives no adapter that names it in files")
        return self.owned_map.group_of_fqn(fqn)


def casts_to(dtype: torch.dtype | None) -> dict[torch.dtype, torch.dtype]:
    """Return the dtypes that a file with `dtype` holds otherwise, each with it; none if it is None."""
    return {} if dtype is None else {own: dtype for own in CASTABLE if own is not dtype}


def cast_all(tensors: StateDict, dtype: torch.dtype | None) -> StateDict:
    """Return the tensors with floating ones of 16 bits or more cast when they are written; None casts none."""
    if dtype is None:
        return tensors
    return {
        fqn: cast(value, dtype, fqn) if info_of(value).dtype in CASTABLE else value for fqn, value in tensors.items()
    }


def made_twice(groups: Sequence[FileGroup], key_map: KeyMap) -> list[str]:
    """Return a line for each file key that several groups make and that is not tied."""
    makers: dict[str, list[str]] = {}
    for group in groups:
        for key in group.infos:
            makers.setdefault(key, []).append(", ".join(group.fqns))
    twice = {key: fqns for key, fqns in makers.items() if len(fqns) > 1 and not key_map.ties(key)}
    return [f"{key} would be made from {' and from '.join(fqns)}" for key, fqns in twice.items()]
