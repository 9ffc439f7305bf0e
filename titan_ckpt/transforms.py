"""What a state dict looks like in a file: dtype, then names and arrangement. Content only, never I/O.

Owns the application of the tables in keymap.py to live tensors, both ways, and the verdict on every key of a load.
Reads and writes nothing; what it returns are lazy groups to write and requests to read.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.errors import ConverterError, KeyMapError
from titan_ckpt.keymap import IDENTITY, KeyGroup, KeyMap, TensorOp
from titan_ckpt.storage.base import ReadRequest
from titan_ckpt.storage.engine import collector_held
from titan_ckpt.tensors import Block, Chunk, LazyTensor, Shape, TensorInfo, blocks_of, info_of
from titan_ckpt.types import LoadReport, Mismatch, ModelHooks, StateDict

logger = logging.getLogger(__name__)

CASTABLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""A float8 or smaller tensor means nothing without its scale, so no plain cast leads there or from there."""


FileDtype = torch.dtype | Mapping[str, torch.dtype] | None
"""What floating tensors become in a file: one dtype, one by file key (others keep their own), or each its own."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Values to be written at `chunk` of file tensor `key`, cast to its dtype; `view` may be strided."""

    key: str
    chunk: Chunk
    view: torch.Tensor


@dataclass(frozen=True, slots=True)
class FileGroup:
    """The file tensors that one application of a rule makes, and the native tensors they come from.

    Nothing is computed until `blocks` is walked: it resolves one native tensor at a time, and the walk must be the same
    on all ranks that hold the group where `collective` is set.
    """

    fqns: tuple[str, ...]
    values: tuple[torch.Tensor | LazyTensor, ...]
    infos: Mapping[str, TensorInfo]
    """file key -> global shape and dtype in the file, in the operation's order."""
    op: TensorOp

    @property
    def collective(self) -> bool:
        """Say whether resolving the group takes part in a collective."""
        return any(isinstance(value, LazyTensor) and value.collective for value in self.values)

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield (index of the native tensor, block this rank holds), replicas included."""
        for index, value in enumerate(self.values):
            for block in blocks_of(value):
                yield index, block

    @property
    def quantised(self) -> Mapping[str, str]:
        """Return what the files say of each file tensor that `infos` has as several."""
        return {}

    def parts_of(self, block: Block, shares: Sequence[Chunk] | None) -> Iterable[Block]:
        """Return what of a block lies in `shares`, chunks of the native tensor; None: all of it."""
        if shares is None:
            return [block]
        cuts = (block.chunk.intersect(share) for share in shares)
        return [Block(cut, block.data[cut.within(block.chunk)]) for cut in cuts if cut is not None]

    def cut_shares(self, index: int, block: Block, shares: Sequence[Chunk] | None) -> Iterator[FilePiece]:
        """Cut what of a block of native tensor `index` lies in `shares`, as the file tensors hold it."""
        for part in self.parts_of(block, shares):
            yield from self.cut(index, part)

    def cut(self, index: int, block: Block) -> Iterator[FilePiece]:
        """Cut a block of native tensor `index`, or any part of it, as the file tensors hold it."""
        keys = tuple(self.infos)
        shapes = [info_of(value).shape for value in self.values]
        for piece in self.op.pieces(index, shapes, block.chunk, block.data):
            yield FilePiece(keys[piece.file_index], piece.chunk, piece.view)

    def pieces(self) -> Iterator[FilePiece]:
        """Yield everything this rank holds of the group, replicas included."""
        for index, block in self.blocks():
            yield from self.cut(index, block)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read for the wanted tensors, and what becomes of every key.

    Under pipeline parallelism other ranks' keys count as unexpected here: only what every rank reports is.
    """

    requests: list[ReadRequest]
    report: LoadReport
    absent_keys: tuple[str, ...] = ()
    """File keys that the wanted tensors would come from and that the source does not have."""

    def near(self, key: str) -> list[str]:
        """Return the absent keys most like an unexpected one: a misspelt or wrongly prefixed name shows its target."""
        return difflib.get_close_matches(key, self.absent_keys, n=2, cutoff=0.6)


@dataclass(frozen=True)
class StateDictTransforms:
    """The model's table, and what goes beside the weights of a Hugging Face folder."""

    key_map: KeyMap = field(default_factory=lambda: KeyMap(identity=True))
    hf_config: Mapping[str, Any] | None = None
    assets: Path | None = None

    @collector_held()
    def to_file(self, tensors: StateDict, hooks: ModelHooks | None, dtype: FileDtype) -> list[FileGroup]:
        """Return how the tensors look in a file, lazily, in the order of `tensors`.

        `dtype` applies to floating tensors of 16 bits or more.
        Raises: KeyMapError listing names the tables lack, groups that are incomplete and shapes that do not fit.
        """
        names = _Names(self.key_map, hooks)
        groups: dict[tuple[str, ...], KeyGroup] = {}
        problems: list[str] = []
        unknown: list[str] = []
        for fqn in tensors:
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
                made.append(_file_group(group, [tensors[fqn] for fqn in group.fqns], dtype))
            except KeyMapError as error:
                problems.append(f"{', '.join(group.fqns)}: {error}")
        problems += _made_twice(made, self.key_map)
        if problems:
            raise KeyMapError(f"{len(problems)} problem(s) with file names\n  " + "\n  ".join(problems), unknown)
        return made

    @collector_held()
    def from_file(
        self, wanted: StateDict, available: Mapping[str, TensorInfo], hooks: ModelHooks | None, *, cast: bool
    ) -> ReadPlan:
        """Plan how the wanted tensors' memory is filled from the available file tensors; pure.

        `wanted` holds live tensors. `cast` allows a change between floating dtypes of 16 bits or more, nothing else.
        Raises: KeyMapError listing wanted names that the tables lack.
        """
        names = _Names(self.key_map, hooks, available)
        plan = _Planner(available, cast)
        unknown: list[str] = []
        problems: list[str] = []
        for fqn, value in wanted.items():
            try:
                plan.add(fqn, value, names.group_of_fqn(fqn))
            except KeyMapError as error:
                problems.append(str(error))
                unknown.append(fqn)
        if problems:
            raise KeyMapError(f"{len(problems)} problem(s) with the model's names\n  " + "\n  ".join(problems), unknown)
        return plan.result(self.key_map)


class _Names:
    """Which table a name belongs to: converter-owned names to the adapter's, the rest to the model's."""

    def __init__(
        self, key_map: KeyMap, hooks: ModelHooks | None, found: Mapping[str, TensorInfo] | None = None
    ) -> None:
        self.key_map = key_map
        self.hooks = hooks
        self.found = found

    @functools.cached_property
    def owned_map(self) -> KeyMap | None:
        """The adapter's table, made when the first owned name is asked for: what nobody names needs no name."""
        adapter = None if self.hooks is None else self.hooks.state_dict_adapter()
        if adapter is None:  # whatever is read holds none of these, and they keep their initial values
            return None if self.found is None else KeyMap(identity=True)
        return adapter.key_map(self.key_map, self.found)

    def group_of_fqn(self, fqn: str) -> KeyGroup:
        if self.hooks is None or not self.hooks.key_filter(fqn):
            return self.key_map.group_of_fqn(fqn)
        if self.owned_map is None:
            raise ConverterError(f"a converter owns {fqn!r} and gives no adapter that names it in files")
        return self.owned_map.group_of_fqn(fqn)


class _Planner:
    """Collects requests and verdicts of one load, key by key."""

    def __init__(self, available: Mapping[str, TensorInfo], cast: bool) -> None:
        self.available = available
        self.may_cast = cast
        self.requests: list[ReadRequest] = []
        self.loaded: list[str] = []
        self.missing: list[str] = []
        self.mismatched: list[Mismatch] = []
        self.cast: dict[str, str] = {}
        self.known: set[str] = set()
        self.absent: dict[str, None] = {}

    def add(self, fqn: str, value: torch.Tensor, group: KeyGroup) -> None:
        self.known.update(group.keys)
        absent = [key for key in group.keys if key not in self.available]
        if absent:
            self.absent.update(dict.fromkeys(absent))
        if len(absent) == len(group.keys):
            self.missing.append(fqn)
            return
        expected = info_of(value)
        if group.op is IDENTITY and self.available[group.keys[0]] == expected:  # nearly all, by the ten thousand
            self.requests += [ReadRequest(group.keys[0], block.chunk, block.data) for block in blocks_of(value)]
            self.loaded.append(fqn)
            return
        fault = f"no {', '.join(absent)}" if absent else self._misfit(fqn, expected, group)
        if fault:
            self.mismatched.append(Mismatch(fqn, str(expected), fault))
            return
        index = group.fqns.index(fqn)
        shapes = group.op.native_shapes([self.available[key].shape for key in group.keys])
        for block in blocks_of(value):
            for piece in group.op.pieces(index, shapes, block.chunk, block.data):
                self.requests.append(ReadRequest(group.keys[piece.file_index], piece.chunk, piece.view))
        self.loaded.append(fqn)

    def _misfit(self, fqn: str, expected: TensorInfo, group: KeyGroup) -> str:
        """Return how the file's tensors do not fit, or an empty string; note casts that were asked for."""
        infos = [self.available[key] for key in group.keys]
        found = ", ".join(dict.fromkeys(map(str, infos)))
        try:
            shape = _native_shapes(group.op, [info.shape for info in infos])[group.fqns.index(fqn)]
        except KeyMapError as error:
            return f"{found}: {error}"
        if shape != expected.shape:
            return found
        others = {info.dtype for info in infos} - {expected.dtype}
        if not others:
            return ""
        castable = expected.dtype in CASTABLE and others <= CASTABLE
        if castable and self.may_cast:
            self.cast[fqn] = f"{', '.join(sorted(map(_name, others)))} -> {_name(expected.dtype)}"
            return ""
        return f"{found} (set cast = true to convert while loading)" if castable else found

    def result(self, key_map: KeyMap) -> ReadPlan:
        unknown = [key for key in self.available if key not in self.known]
        ignored = [key for key in unknown if key_map.ignores(key)]
        if ignored:
            logger.info("load: %d old keys that this model computes itself, such as %s", len(ignored), ignored[0])
        report = LoadReport(
            loaded=tuple(self.loaded),
            missing=tuple(self.missing),
            unexpected=tuple(key for key in unknown if not key_map.ignores(key)),
            mismatched=tuple(self.mismatched),
            cast=self.cast,
        )
        return ReadPlan(self.requests, report, tuple(self.absent))


def _file_group(group: KeyGroup, values: Sequence[torch.Tensor | LazyTensor], dtype: FileDtype) -> FileGroup:
    infos = [info_of(value) for value in values]
    native = [info.shape for info in infos]
    shapes = group.op.file_shapes(native)
    if list(group.op.native_shapes(shapes)) != native:
        raise KeyMapError(f"shapes {native} do not fit {group.op}")
    file_infos = {}
    for key, shape in zip(group.keys, shapes, strict=True):
        wanted = dtype.get(key) if isinstance(dtype, Mapping) else dtype
        dtypes = {_file_dtype(info.dtype, wanted) for info in infos}
        if len(dtypes) > 1:
            raise KeyMapError(f"one file tensor cannot hold {', '.join(sorted(map(_name, dtypes)))}")
        file_infos[key] = TensorInfo(shape, dtypes.pop())
    return FileGroup(group.fqns, tuple(values), file_infos, group.op)


def _native_shapes(op: TensorOp, shapes: list[Shape]) -> list[Shape]:
    """Return the native shapes for the file's. Raises: KeyMapError unless they lead back to the same file shapes."""
    native = op.native_shapes(shapes)
    if list(op.file_shapes(native)) != shapes:
        raise KeyMapError(f"shapes {[list(s) for s in shapes]} do not fit {op}")
    return native


def _file_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted in CASTABLE and own in CASTABLE else own


def _made_twice(groups: Sequence[FileGroup], key_map: KeyMap) -> list[str]:
    makers: dict[str, list[str]] = {}
    for group in groups:
        for key in group.infos:
            makers.setdefault(key, []).append(", ".join(group.fqns))
    twice = {key: fqns for key, fqns in makers.items() if len(fqns) > 1 and not key_map.ties(key)}
    return [f"{key} would be made from {' and from '.join(fqns)}" for key, fqns in twice.items()]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
