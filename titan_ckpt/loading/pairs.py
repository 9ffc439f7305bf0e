"""The pairs of low-rank factors in an adapter folder, and the weight of the model that each of them changes.

Owns the forms in which PEFT and this package's own steps store an adapter. Reads names, shapes and settings, no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from titan_ckpt.errors import KeyMapError, LoadMismatchError
from titan_ckpt.formats.huggingface.peft import MAGNITUDE, PAIRS, PREFIX, ModuleNumbers, stored_weights
from titan_ckpt.formats.huggingface.peft_fields import targets_parameter
from titan_ckpt.geometry.chunks import Shape, info_of
from titan_ckpt.geometry.keymap import IDENTITY, KeyGroup, KeyMap, Split, Transpose
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.loading.adapters import lora_record
from titan_ckpt.types import StateDict
from titan_ckpt.weights import lora_names
from titan_ckpt.weights.stored_names import MODEL


@dataclass(frozen=True, slots=True)
class Place:
    """A weight as the folder's tool stores it: a group of names, and its index among the file tensors of the group."""

    group: KeyGroup
    index: int = 0

    def shape(self, base: StateDict) -> Shape:
        return self.group.op.file_shapes([info_of(base[fqn]).shape for fqn in self.group.fqns])[self.index]


@dataclass(frozen=True, slots=True)
class Pair:
    """One adapted weight: the keys of its factors, and its place in the model."""

    a: str
    b: str
    scaling: float
    place: Place
    transposed: bool = False
    """The weight is stored as (in, out), as embeddings and GPT-2's Conv1D are: the product is transposed."""
    magnitude: str | None = None
    """The key of DoRA's lengths of output features."""
    rows: tuple[int, ...] = ()
    """Rows of each part of a fused weight; every part has its own adapter (converters/lora/merge.py)."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The changes of an adapter folder. `copies`: (key, place) of the tensors of modules that were trained in full."""

    pairs: list[Pair] = field(default_factory=list)
    copies: list[tuple[str, Place]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    """Keys that the model, or this rank, has no place for."""
    weights: dict[str, str] = field(default_factory=dict)
    """Each of them in a PEFT folder -> the name of its weight, in the folder if the model's table has none."""


def find_pairs(reader: TensorReader, base: StateDict, key_map: KeyMap, modules: Mapping[str, nn.Module]) -> Contents:
    """Find the place of every tensor of an adapter. `modules`: the model's, by fqn; their class says how W is stored.

    Raises: LoadMismatchError for a step that says no scale.
    """
    of_format = _of_peft if reader.format == "peft" else _of_step
    return of_format(reader, base, key_map, modules)


def _of_peft(reader: TensorReader, base: StateDict, key_map: KeyMap, modules: Mapping[str, nn.Module]) -> Contents:
    contents, config = Contents(), reader.metadata()
    numbers = ModuleNumbers(config)
    for key, weight, module, suffix in stored_weights(reader.tensors):
        place = _place(weight, key_map, base)
        if place is None:
            contents.unexpected.append(key)
            contents.weights[key] = _name_of(weight, key_map)
        elif suffix is None:
            contents.copies.append((key, place))
        else:
            by_parameter = targets_parameter(config, module)  # then PEFT adds B A to the parameter, whatever it is for
            transposed = suffix.endswith("_embedding_A") or (not by_parameter and _is_stored_transposed(place, modules))
            magnitude = f"{PREFIX}{module}{MAGNITUDE}" if config.get("use_dora") else None
            partner = f"{PREFIX}{module}{PAIRS[suffix]}"
            contents.pairs.append(Pair(key, partner, numbers.scaling(module), place, transposed, magnitude))
    return contents


def _of_step(reader: TensorReader, base: StateDict, key_map: KeyMap, modules: Mapping[str, nn.Module]) -> Contents:
    contents, record = Contents(), lora_record(reader)
    for key in reader.tensors:
        part = lora_names.lora_tensor(key.removeprefix(MODEL))
        if not key.startswith(MODEL) or (part is not None and part.role in (lora_names.B, lora_names.MAGNITUDE)):
            continue
        if part is None or part.weight not in base:
            contents.unexpected.append(key)
            continue
        place = Place(KeyGroup((part.weight,), (part.weight,), IDENTITY))
        if part.role == lora_names.COPY:
            contents.copies.append((key, place))
            continue
        b, lengths = (
            MODEL + lora_names.lora_name(role, part.site, stack=part.site == part.weight)
            for role in (lora_names.B, lora_names.MAGNITUDE)
        )
        magnitude = lengths if record.use_dora else None
        if lost := {b, magnitude or b} - reader.tensors.keys():
            raise LoadMismatchError(f"{reader.path}: {key} has no {', '.join(lost)}. Take another step")
        module = modules.get(part.site)
        transposed = isinstance(module, nn.Embedding) or lora_names.is_conv1d(module)
        rows = _rows(part.weight, reader.tensors[key].shape, reader.tensors[b].shape, key_map)
        contents.pairs.append(Pair(key, b, record.scaling_of(part.site), place, transposed, magnitude, rows))
    return contents


def _place(key: str, key_map: KeyMap, base: StateDict) -> Place | None:
    """Return the place of a file tensor; None if this rank, or the model, does not have it."""
    try:
        group = key_map.group_of_key(key)
    except KeyMapError:
        return None
    return Place(group, group.keys.index(key)) if all(fqn in base for fqn in group.fqns) else None


def _name_of(key: str, key_map: KeyMap) -> str:
    try:
        return key_map.group_of_key(key).fqns[0]
    except KeyMapError:
        return key


def _is_stored_transposed(place: Place, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the other tool stores a linear module's weight as (in, out).

    Its module is a Conv1D if the model's own is one, or if the table transposes the weight of a linear module.
    """
    module = modules.get(place.group.fqns[0].rpartition(".")[0])
    return lora_names.is_conv1d(module) != isinstance(place.group.op, Transpose)


def _rows(weight: str, a: Shape, b: Shape, key_map: KeyMap) -> tuple[int, ...]:
    """Return the rows of the parts of a fused weight, which A and B follow; empty for any other weight."""
    if len(a) != 2 or len(b) != 2 or a[0] == b[1]:
        return ()
    try:
        op = key_map.group_of_fqn(weight).op
    except KeyMapError:
        return ()
    return op.rows if isinstance(op, Split) and len(op.rows) * b[1] == a[0] else ()
