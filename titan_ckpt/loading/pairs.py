"""The low-rank updates in an adapter folder, and the weight of the model that each of them changes.

Owns the forms in which PEFT and this package's own steps store an adapter. Reads names, shapes and settings, no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from titan_ckpt.errors import KeyMapError, LoadMismatchError
from titan_ckpt.formats.huggingface.peft import PeftReader
from titan_ckpt.formats.huggingface.peft_fields import targets_parameter
from titan_ckpt.geometry.chunks import Shape
from titan_ckpt.geometry.keymap import IDENTITY, KeyGroup, KeyMap, Split, Transpose
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.loading.adapters import lora_record
from titan_ckpt.types import StateDict
from titan_ckpt.weights import low_rank
from titan_ckpt.weights.low_rank import LowRank, Operation
from titan_ckpt.weights.stored_names import MODEL


@dataclass(frozen=True, slots=True)
class Contents:
    """The changes of an adapter folder, by the names that its tool gives the weights."""

    updates: list[LowRank] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    """Key of each tensor of the modules that were trained in full -> the tensor of the base that it replaces."""
    groups: dict[str, KeyGroup] = field(default_factory=dict)
    """Name of a weight that is changed -> the model's weights that the tool stores in it, and its arrangement."""
    unexpected: dict[str, str] = field(default_factory=dict)
    """Keys that the model, or this rank, has no place for -> in a PEFT folder the name of the weight, in the folder if
    the model's table has none; else nothing."""


def find_updates(reader: TensorReader, base: StateDict, key_map: KeyMap, modules: Mapping[str, nn.Module]) -> Contents:
    """Find the place of every tensor of an adapter. `modules`: the model's, by fqn; their class says how W is stored.

    Raises: LoadMismatchError for a step that says no scale.
    """
    if isinstance(reader, PeftReader):
        return _of_peft(reader, base, key_map, modules)
    return _of_step(reader, base, key_map, modules)


def _of_peft(reader: PeftReader, base: StateDict, key_map: KeyMap, modules: Mapping[str, nn.Module]) -> Contents:
    contents, config = Contents(), reader.metadata()

    def finds(key: str, weight: str) -> KeyGroup | None:
        try:
            group = key_map.group_of_key(weight)
        except KeyMapError:
            contents.unexpected[key] = weight
            return None
        if any(fqn not in base for fqn in group.fqns):
            contents.unexpected[key] = group.fqns[0]
            return None
        contents.groups[weight] = group
        return group

    for update in reader.updates():
        if group := finds(update.a, update.weight):
            by_parameter = targets_parameter(config, update.site)  # then PEFT adds B A to it, whatever it is for
            stored_so = not update.transposed and not by_parameter and _is_stored_transposed(group, modules)
            contents.updates.append(replace(update, operation="conv1d") if stored_so else update)
    contents.copies.update({key: weight for key, weight in reader.copies().items() if finds(key, weight)})
    return contents


def _of_step(reader: TensorReader, base: StateDict, key_map: KeyMap, modules: Mapping[str, nn.Module]) -> Contents:
    contents, record = Contents(), lora_record(reader)
    for key in reader.tensors:
        part = low_rank.lora_tensor(key.removeprefix(MODEL))
        if not key.startswith(MODEL) or (part is not None and part.role in (low_rank.B, low_rank.MAGNITUDE)):
            continue
        if part is None or part.weight not in base:
            contents.unexpected[key] = ""
            continue
        contents.groups[part.weight] = KeyGroup((part.weight,), (part.weight,), IDENTITY)
        if part.role == low_rank.COPY:
            contents.copies[key] = part.weight
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
        contents.updates.append(replace(update, rows=_rows(part.weight, a, b, key_map)))
    return contents


def _is_stored_transposed(group: KeyGroup, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the other tool stores a linear module's weight as (in, out).

    Its module is a Conv1D if the model's own is one, or if the table transposes the weight of a linear module.
    """
    module = modules.get(group.fqns[0].rpartition(".")[0])
    return low_rank.is_conv1d(module) != isinstance(group.op, Transpose)


def _rows(weight: str, a: Shape, b: Shape, key_map: KeyMap) -> tuple[int, ...]:
    """Return the rows of the parts of a fused weight, which A and B follow; empty for any other weight."""
    if len(a) != 2 or len(b) != 2 or a[0] == b[1]:
        return ()
    try:
        op = key_map.group_of_fqn(weight).op
    except KeyMapError:
        return ()
    return op.rows if isinstance(op, Split) and len(op.rows) * b[1] == a[0] else ()
