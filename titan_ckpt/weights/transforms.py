"""The form of a state dict in a file: dtype, then names and arrangement. Content only, never I/O.

This module decides which key map a name belongs to; write_view.py applies it to write, read_plan.py to read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_ckpt.errors import ConverterError, KeyMapError
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.geometry.keymap import IDENTITY, KeyGroup, KeyMap, KeyRule
from titan_ckpt.types import ModelHooks, StateDict
from titan_ckpt.weights.read_plan import ReadPlan, ReadPlanner
from titan_ckpt.weights.write_view import FileDtype, FileGroup, file_group, made_twice


@dataclass(frozen=True)
class StateDictTransforms:
    """The model's key map, and the config and assets beside the weights in a Hugging Face folder."""

    key_map: KeyMap = field(default_factory=lambda: KeyMap(identity=True))
    hf_config: Mapping[str, Any] | None = None
    assets: Path | None = None
    torchtitan: KeyMap | None = None
    """The table between the names of torchtitan's model and those in a Hugging Face folder."""

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
    def to_file(self, tensors: StateDict, hooks: ModelHooks | None, dtype: FileDtype) -> list[FileGroup]:
        """Return the file tensors, lazily, in the order of `tensors`.

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
                made.append(file_group(group, [tensors[fqn] for fqn in group.fqns], dtype))
            except KeyMapError as error:
                problems.append(f"{', '.join(group.fqns)}: {error}")
        problems += made_twice(made, self.key_map)
        if problems:
            raise KeyMapError(f"{len(problems)} problem(s) with file names\n  " + "\n  ".join(problems), unknown)
        return made

    @gc_paused()
    def from_file(
        self, wanted: StateDict, available: Mapping[str, TensorInfo], hooks: ModelHooks | None, *, cast: bool
    ) -> ReadPlan:
        """Plan how the wanted tensors' memory is filled from the available file tensors; pure.

        `wanted` holds live tensors. `cast` allows a change between floating dtypes of 16 bits or more, nothing else.
        Raises: KeyMapError listing wanted names that the tables lack.
        """
        names = _Names(self.key_map, hooks, available)
        plan = ReadPlanner(available, cast)
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
    hooks: ModelHooks | None
    found: Mapping[str, TensorInfo] | None = None
    """The tensors of the folder that is read; None to write."""

    @functools.cached_property
    def owned_map(self) -> KeyMap | None:
        """The adapter's table, built on first use: some converters cannot name their keys, which matters only then."""
        adapter = None if self.hooks is None else self.hooks.state_dict_adapter()
        if adapter is None:  # the folder holds no owned tensors, so they keep their initial values
            return None if self.found is None else KeyMap(identity=True)
        return adapter.key_map(self.key_map, self.found)

    def group_of_fqn(self, fqn: str) -> KeyGroup:
        if self.hooks is None or not self.hooks.key_filter(fqn):
            return self.key_map.group_of_fqn(fqn)
        if self.owned_map is None:
            raise ConverterError(f"a converter owns {fqn!r} and gives no adapter that names it in files")
        return self.owned_map.group_of_fqn(fqn)
