"""The plan of a load, decided before anything is read: pure, printable, the same on every rank.

Owns the precedence of sources, the patterns of `initialize` and `ignore` with what they select. Nothing
is left out that no pattern names. Reads nothing; the caller passes the facts.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from titan_ckpt.config import CheckpointConfig, InitialLoadConfig
from titan_ckpt.directory.manifest import Kind
from titan_ckpt.encoding.paths import snapshot_of
from titan_ckpt.errors import CheckpointNotFoundError, LoadMismatchError, counted, listed
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo, blocks_of, info_of
from titan_ckpt.geometry.keymap import IDENTITY, KeyGroup, KeyMap, selected
from titan_ckpt.stores.store import Place
from titan_ckpt.types import Format, StateDict
from titan_ckpt.weights.transforms import CASTABLE


@dataclass(frozen=True, slots=True)
class ResumeStep:
    """The facts about a committed step of the run's own folder that planning needs."""

    step: int
    kind: Kind
    path: Place


@dataclass(frozen=True, slots=True)
class LoadSource:
    """One folder to read model weights from."""

    path: Place
    format: Format
    cast: bool = False
    revision: str | None = None
    adapter: bool = False
    """The folder holds converter-owned keys only."""
    merge: bool = False
    """The folder is an adapter to be merged into the base."""
    initialize: tuple[str, ...] = ()
    """Patterns of the model's tensors that are not loaded from it."""
    ignore: tuple[str, ...] = ()
    """Patterns of its tensors that are not used."""
    base_only: bool = False
    """Tensors of converters in the folder are passed by, because an adapter-only step has newer ones."""
    prefix: str | None = None
    """Prefix of the model's names in a DCP folder; None: found from the names."""

    def __str__(self) -> str:
        what = "adapter" if self.adapter else "adapter to be merged" if self.merge else "weights"
        return f"{what} from {self.path} ({self.format}{', cast' if self.cast else ''})"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The sources of weights and, when resuming, of training state."""

    resume: ResumeStep | None = None
    sources: tuple[LoadSource, ...] = ()
    exclude: frozenset[str] = frozenset()
    external: bool = False
    """Weights come from outside."""

    @property
    def title(self) -> str:
        """Return what is loaded, in a few words."""
        if self.resume:
            return f"step {self.resume.step}"
        return "the initial sources" if self.sources or self.external else "initial values"

    @property
    def has_new_weights(self) -> bool:
        """Return whether the weights of a resume are those of the initial sources."""
        return self.resume is not None and "model" in self.exclude and bool(self.sources)

    @property
    def base(self) -> dict[str, Any] | None:
        """Return what names the base of a run: its first source, by id and commit if the hub's cache holds it."""
        first = next((source for source in self.sources if not source.adapter), None)
        if first is None:
            return None
        path, revision = snapshot_of(str(first.path)) or (str(first.path), first.revision)
        return {"path": path, "revision": revision, "format": first.format}

    def __str__(self) -> str:
        afresh = "start from step 0: no checkpoint, no initial source"
        starts = "initial load" if self.sources or self.external else afresh
        head = f"resume step {self.resume.step}" if self.resume else starts
        lines = [head, *(f"  {i}. {source}" for i, source in enumerate(self.sources, 1))]
        if self.external:
            lines.append("  weights from outside")
        if self.exclude:
            lines.append(f"  not loaded: {', '.join(sorted(self.exclude))}")
        return "\n".join(lines)


def resolve(
    config: CheckpointConfig,
    step: ResumeStep | None,
    describe: Callable[[InitialLoadConfig], tuple[Place, Format, bool]],
) -> LoadPlan:
    """Return the plan. A committed step wins over initial sources; an adapter-only step also needs its base.

    If a resume excludes the model, its weights come from the initial sources, as in a new run.

    `describe` returns the place of an initial source, its format, and whether it is an adapter.
    Raises: CheckpointNotFoundError for a step whose weights are not on disk.
    """
    exclude = frozenset(config.resume.exclude) | config.left_out()
    if config.external:
        return LoadPlan(step, (), exclude, external=True)
    if step is not None and step.kind == "external" and "model" not in exclude:
        raise CheckpointNotFoundError(
            f'{step.path} holds no model weights: its run took them from outside. Leave "model" out of '
            "checkpoint.components and give the manager external_weights, or choose another folder"
        )
    initial = []
    if step is None or step.kind == "adapter" or "model" in exclude:
        for source in config.initial_load:
            path, format_, adapter = describe(source)
            merge = source.load == "merge"
            initial.append(
                LoadSource(
                    path, format_, source.cast, source.revision, adapter and not merge, merge,
                    source.initialize, source.ignore, prefix=source.prefix,
                )
            )  # fmt: skip
    if step is None:
        return LoadPlan(None, tuple(initial), config.left_out())
    if "model" in exclude:
        return LoadPlan(step, tuple(initial), exclude)
    own = LoadSource(step.path, "native", adapter=step.kind == "adapter")
    bases = tuple(replace(source, base_only=True) for source in initial if not source.adapter)
    if step.kind == "adapter" and not bases:
        raise CheckpointNotFoundError(
            f"{step.path} holds only adapter weights, and no base is configured: name the base it was trained on in "
            "[[checkpoint.initial_load]]"
        )
    return LoadPlan(step, (*bases, own), exclude)


@dataclass(frozen=True, slots=True)
class Partial:
    """The tensors that a source's settings name as not loaded from it, in the model and in the source."""

    fresh: frozenset[str] = frozenset()
    """Native names of tensors that are initialized, unless a second source has them."""
    passed_by: frozenset[str] = frozenset()
    """Keys of the source that are not read, or of which only rows are read."""
    grown: Mapping[str, int] = field(default_factory=dict)
    """Native name of a table that has more rows than the source's -> number of rows that are loaded."""
    requests: Sequence[Block] = ()
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
    requests: list[Block] = []
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


def _requests(value: torch.Tensor, key: str, rows: Chunk) -> Iterator[Block]:
    """Yield the requests for this rank's part of the rows that the source has."""
    for block in blocks_of(value):
        if (cut := block.chunk.intersect(rows)) is not None:
            yield Block(cut, block.data[cut.within(block.chunk)], key)
