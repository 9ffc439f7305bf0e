"""Partial loads: tensors that a source's settings name as not loaded from it, and tables with more rows than its.

Owns the patterns of `initialize` and `ignore`, and what they select. Nothing is left out that no pattern names.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from titan_ckpt.errors import LoadMismatchError, counted, listed
from titan_ckpt.geometry.chunks import Chunk, TensorInfo, blocks_of, info_of
from titan_ckpt.geometry.keymap import IDENTITY, KeyGroup, KeyMap, selected
from titan_ckpt.geometry.requests import FilePart
from titan_ckpt.loading.plan import LoadSource
from titan_ckpt.types import StateDict
from titan_ckpt.weights.transforms import CASTABLE


@dataclass(frozen=True, slots=True)
class Partial:
    """The tensors that a source's settings name as not loaded from it, in the model and in the source."""

    fresh: frozenset[str] = frozenset()
    """Native names of tensors that are initialized, unless a second source has them."""
    passed_by: frozenset[str] = frozenset()
    """Keys of the source that are not read, or of which only rows are read."""
    grown: Mapping[str, int] = field(default_factory=dict)
    """Native name of a table that has more rows than the source's -> number of rows that are loaded."""
    requests: Sequence[FilePart] = ()
    """The requests for these rows, to be made again after the whole table was initialized."""
    unmatched: Sequence[str] = ()
    """Patterns of `initialize` that match no tensor of this rank."""
    nameless: frozenset[str] = frozenset()
    """Native names of tensors that the source's format has no name for (`KeyMap.nameless`); they stay as they are."""

    def lines(self) -> Iterator[str]:
        """Yield what the log says about it."""
        if whole := sorted(self.fresh - self.grown.keys()):
            yield f"{counted(len(whole), 'tensor is', 'tensors are')} not loaded, as asked: {listed(whole, ', ')}"
        if self.nameless:
            own = counted(len(self.nameless), "buffer keeps its", "buffers keep their")
            names = listed(sorted(self.nameless), ", ")
            yield f"{own} initial values, because such a folder has no name for them: {names}"
        for fqn, rows in self.grown.items():
            yield f"the first {rows} rows of {fqn} are loaded, the others initialized"
        if self.passed_by:
            left = counted(len(self.passed_by), "tensor of it is", "tensors of it are")
            yield f"{left} left, in whole or in part: {listed(sorted(self.passed_by))}"


def partial_of(source: LoadSource, wanted: StateDict, available: Mapping[str, TensorInfo], key_map: KeyMap) -> Partial:
    """Return what the settings of a source select.

    Raises: LoadMismatchError for patterns of `ignore` that match nothing, and for a grown table of another dtype.
    """
    refuse_unmatched(source, "ignore", [_unmatched(source.ignore, available)], available)
    fresh = selected(wanted, source.initialize)
    passed_by = set(selected(available, source.ignore))
    offered = {key: info for key, info in available.items() if key not in passed_by}
    grown: dict[str, int] = {}
    requests: list[FilePart] = []
    for fqn in wanted:
        if fqn not in fresh:
            continue
        group = key_map.group_of_fqn(fqn)
        rows = _first_rows(source, wanted[fqn], group, offered)
        if rows is not None:
            grown[fqn] = rows.sizes[0]
            requests += _requests(wanted[fqn], group.keys[0], rows)
        passed_by.update(key for key in group.keys if key in offered)
    return Partial(fresh, frozenset(passed_by), grown, requests, _unmatched(source.initialize, wanted))


def refuse_unmatched(
    source: LoadSource, setting: str, of_ranks: Sequence[Collection[str]], names: Collection[str]
) -> None:
    """Raise LoadMismatchError for patterns that match nothing on any rank, with names of this rank that are similar."""
    if patterns := sorted(set.intersection(*map(set, of_ranks))):
        near = {pattern: difflib.get_close_matches(pattern, names, n=2, cutoff=0.4) for pattern in patterns}
        lines = [f"{p!r}" + (f" (like {', '.join(near[p])}?)" if near[p] else "") for p in patterns]
        raise LoadMismatchError(
            f"{source.path}: checkpoint.initial_load.{setting} has {len(lines)} pattern(s) that match nothing: "
            f"{', '.join(lines)}. Correct them, or leave them out; nothing was loaded"
        )


def _unmatched(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    return [pattern for pattern in patterns if not selected(names, [pattern])]


def _first_rows(
    source: LoadSource, value: torch.Tensor, group: KeyGroup, available: Mapping[str, TensorInfo]
) -> Chunk | None:
    """Return the region of a table that the source has, if it has the table with fewer rows; else None."""
    info, expected = available.get(group.keys[0]), info_of(value)
    if info is None or group.op is not IDENTITY or not info.shape or info.shape[1:] != expected.shape[1:]:
        return None
    if info.shape[0] >= expected.shape[0]:
        return None
    if info.dtype != expected.dtype and not (source.cast and {info.dtype, expected.dtype} <= CASTABLE):
        raise LoadMismatchError(
            f"{source.path}: {group.keys[0]} is {info}, the first rows of {expected} here; set cast = true to convert "
            "them while loading, or name it in checkpoint.initial_load.ignore to initialize all rows"
        )
    return Chunk.whole(info.shape)


def _requests(value: torch.Tensor, key: str, rows: Chunk) -> Iterator[FilePart]:
    """Yield the requests for this rank's part of the rows that the source has."""
    for block in blocks_of(value):
        if (cut := block.chunk.intersect(rows)) is not None:
            yield FilePart(key, cut, block.data[cut.within(block.chunk)])
