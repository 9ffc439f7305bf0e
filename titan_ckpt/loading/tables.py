"""Tables of the base that PEFT saves beside an adapter: which they are, and whether they are as in this run's base.

A run with converters loads none of them, and so needs the same in its base; merge.py leaves those out that are the
same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import torch

from titan_ckpt.errors import KeyMapError, LoadMismatchError, listed
from titan_ckpt.formats.huggingface.peft import PeftReader
from titan_ckpt.geometry.chunks import Block, Chunk, Shape, blocks_of, info_of
from titan_ckpt.geometry.keymap import KeyGroup, KeyMap
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.stores.store import Place
from titan_ckpt.types import StateDict

Tables = Mapping[str, tuple[KeyGroup, Shape]]
"""Keys of an adapter's folder that repeat tensors of the base -> their place in it, and their shape."""


def shape_of(group: KeyGroup, key: str, base: StateDict) -> Shape:
    """Return the shape of a file tensor that these tensors of the base would have."""
    return group.op.file_shapes([info_of(base[fqn]).shape for fqn in group.fqns])[group.keys.index(key)]


def views_of(group: KeyGroup, key: str, base: StateDict) -> Iterator[tuple[torch.Tensor, Chunk]]:
    """Yield views of this rank's memory of a file tensor, each with the region of it that the view holds."""
    shapes = [info_of(base[fqn]).shape for fqn in group.fqns]
    for i, fqn in enumerate(group.fqns):
        for block in blocks_of(base[fqn]):
            for chunk, view, other in group.op.pieces(i, shapes, block, group.keys):
                if other == key:
                    yield view, chunk


def is_other(reader: TensorReader, key: str, views: Iterable[tuple[torch.Tensor, Chunk]]) -> bool:
    """Return whether a tensor of a folder, rounded to the dtype of live views, has other values than these."""
    for view, chunk in views:
        theirs = torch.empty_like(view)
        reader.read([Block(chunk, theirs, key)])
        if not torch.equal(theirs, view):
            return True
    return False


def take_tables(reader: PeftReader, names: KeyMap, key_map: KeyMap, base: StateDict, tied: Mapping[str, str]) -> Tables:
    """Take out of a folder's tensors what it has of the base and no converter loads; return its place in the base."""
    known = {key for rule in names.rules for key in rule.file}
    tables: dict[str, tuple[KeyGroup, Shape]] = {}
    loaded: dict[tuple[str, ...], str] = {}
    for key, name in sorted(reader.beside().items(), key=lambda item: item[0] not in known):
        with suppress(KeyMapError):
            group = key_map.group_of_key(name)
            fqns = tuple(tied.get(fqn, fqn) for fqn in group.fqns)
            if key in known:
                loaded[fqns] = key
            elif all(fqn in base for fqn in fqns):
                keys = tuple(key if other == name else other for other in group.keys)
                tables[key] = (KeyGroup(fqns, keys, group.op), reader.tensors[key].shape)
    repeated = {key for key, (group, _) in tables.items() if reader.are_equal(key, loaded.get(group.fqns, ""))}
    reader.pass_by(tables, known)
    return {key: place for key, place in tables.items() if key not in repeated}


def check_tables(path: Place, reader: TensorReader, tables: Tables, base: StateDict) -> None:
    """Check that what an adapter's folder has of the base is what the base is. Raises: LoadMismatchError."""
    changed = [
        key
        for key, (group, shape) in tables.items()
        if shape_of(group, key, base) != shape or is_other(reader, key, views_of(group, key, base))
    ]
    if changed:
        raise LoadMismatchError(
            f"{path} has {listed(changed, ', ')} of its base, and this run's base has other values or another shape: "
            "name the module in frozen_copies of the [[converters]] table, so that the adapter computes with its own, "
            'merge the adapter (load = "merge"), or take its base'
        )
