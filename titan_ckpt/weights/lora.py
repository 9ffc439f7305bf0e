"""LoRA's tensors by their names, and its settings: what they say an adapter does to which weight.

Owns the names of the tensors, and the record of the settings in a manifest; low_rank.py has the updates and how they
are merged. Reads no file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Self, TypeVar

import torch
from torch import nn

from titan_ckpt.errors import KeyMapError
from titan_ckpt.geometry.chunks import Chunk, Shape
from titan_ckpt.geometry.keymap import KeyMap, Split
from titan_ckpt.weights.low_rank import LowRank, Operation, WeightUpdate
from titan_ckpt.weights.names import class_named

KIND = "lora"
"""`kind` of the converter in a manifest."""
PARTS = "titan_ckpt_parts"
"""Record beside adapter_config.json: module -> the ranks of the blocks of its pair, if the pair is block diagonal."""
A, B, MAGNITUDE, COPY, ROWS, BIAS = "lora_a", "lora_b", "lora_magnitude", "trained", "trained_rows", "lora_b.bias"
_OF_MODULE = re.compile(rf"(?P<module>.+)\.(?P<role>{A}|{B}|{MAGNITUDE}|{ROWS})\.weight")
_OF_BIAS = re.compile(rf"(?P<module>.+)\.{re.escape(BIAS)}")
_OF_STACK = re.compile(rf"(?P<module>.+)\.lora_(?P<parameter>[^.]+)\.(?P<role>{A}|{B})")
_OF_COPY = re.compile(rf"(?P<module>.+)\.{COPY}\.(?P<parameter>[^.]+)")
_WILD = frozenset("*?[")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class LoRATensor:
    """A tensor's part in an adapter, as its name says it."""

    role: str
    """A, B, MAGNITUDE, COPY, ROWS or BIAS."""
    site: str
    """The adapted part, as patterns name it: a module, or a parameter of stacked experts."""
    weight: str
    """The tensor of the base that it changes."""


def lora_tensor(name: str) -> LoRATensor | None:
    """Return the part of a tensor in an adapter; None for a name that LoRA does not give."""
    if match := _OF_MODULE.fullmatch(name):
        return LoRATensor(match["role"], match["module"], f"{match['module']}.weight")
    if match := _OF_BIAS.fullmatch(name):
        return LoRATensor(BIAS, match["module"], f"{match['module']}.bias")
    if match := _OF_STACK.fullmatch(name):
        site = f"{match['module']}.{match['parameter']}"
        return LoRATensor(match["role"], site, site)
    if match := _OF_COPY.fullmatch(name):
        return LoRATensor(COPY, match["module"], f"{match['module']}.{match['parameter']}")
    return None


def sites_of(names: Iterable[str], role: str = A) -> list[str]:
    """Return the parts of a model that have an A among these tensors, or one of another role."""
    return [part.site for name in names if (part := lora_tensor(name)) is not None and part.role == role]


def is_conv1d(module: nn.Module | None) -> bool:
    """Return whether this is GPT-2's linear module, or a sharded form of it, whose weight is (in, out).

    It is found by name, because transformers is optional.
    """
    return class_named("transformers.pytorch_utils", "Conv1D", module) is not None


def matches(fqn: str, target: str) -> bool:
    """Return whether `target` selects the module: a pattern must match its full name, other text a dotted suffix."""
    if _WILD.intersection(target):
        return fnmatchcase(fqn, target)
    return fqn == target or fqn.endswith(f".{target}")


def from_patterns(fqn: str, patterns: Mapping[str, Value], default: Value) -> Value:
    """Return a module's value: that of the first name or pattern which selects it, else the default."""
    return next((value for name, value in patterns.items() if matches(fqn, name)), default)


def scale(rank: int, alpha: float, *, use_rslora: bool) -> float:
    """Return the factor of an adapter's product."""
    return alpha / (math.sqrt(rank) if use_rslora else rank)


@dataclass(frozen=True, slots=True)
class TrainedRows(WeightUpdate):
    """Rows of a table that were trained: they replace the table's own."""

    weight: str
    rows: str
    indices: tuple[int, ...]
    """Which row of the table each one replaces."""

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.rows,)

    def base_shape(self, shapes: Sequence[Shape], weight: Shape) -> Shape:
        return (max(weight[0], 1 + max(self.indices)), *shapes[0][1:])

    def misfits(self, shapes: Mapping[str, Shape], weight: Shape, chunks: Iterable[Chunk]) -> Iterator[str]:
        """Yield the reason why there is not one row for each index, if it is so."""
        if shapes[self.rows][:1] != (len(self.indices),):
            yield f"{self.rows}: expected {len(self.indices)} rows, found {list(shapes[self.rows])}"

    def change(self, values: torch.Tensor, chunk: Chunk, own: torch.Tensor) -> None:
        (first, column), (count, width) = chunk.offsets, chunk.sizes
        for row, index in enumerate(self.indices):
            if first <= index < first + count:
                values[index - first] = own[row, column : column + width].to(values)


def fused_rows(weight: str, table: KeyMap) -> tuple[int, ...]:
    """Return the rows into which a model's table splits a weight for other tools; empty if it does not."""
    with suppress(KeyMapError):
        op = table.group_of_fqn(weight).op
        return op.rows if isinstance(op, Split) else ()
    return ()


def common_settings(updates: Sequence[LowRank]) -> dict[str, Any]:
    """Return the rank and the alpha that most of these updates have, and those of the others by module."""
    ((rank, alpha), _), *_ = Counter((update.rank, update.alpha) for update in updates).most_common()
    return {
        "rank": rank,
        "alpha": alpha,
        "rank_pattern": {update.site: update.rank for update in updates if update.rank != rank},
        "alpha_pattern": {update.site: update.alpha for update in updates if update.alpha != alpha},
    }


@dataclass(frozen=True, slots=True)
class LoRARecord:
    """The settings that decide what an adapter's tensors mean, as a converter has them and a manifest records them."""

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    # an earlier version does not record the others
    lora_bias: bool = False
    trainable_token_indices: Mapping[str, Sequence[int]] = field(default_factory=dict)
    ensure_weight_tying: bool = False
    frozen_copies: Sequence[str] = ()

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Self:
        """Read a converter's description. Raises: ValueError naming a setting that is missing or has a wrong type."""
        given = {name: description[name] for name in cls.__slots__ if description.get(name) is not None}
        record = cls(**{**dict.fromkeys(cls.__slots__[:6]), **given})  # the others have defaults
        if faults := list(_faults(record)):
            raise ValueError("; ".join(faults))
        return record

    def trained_rows(self, module: str) -> TrainedRows | None:
        """Return the update that these settings give a table, if they train rows of it."""
        rows = from_patterns(module, self.trainable_token_indices, ())
        return TrainedRows(f"{module}.weight", f"{module}.{ROWS}.weight", tuple(rows)) if rows else None

    def low_rank(self, site: str, operation: Operation = "linear", rows: tuple[int, ...] = ()) -> LowRank:
        """Return the update that these settings give a module, or a parameter of stacked experts."""
        rank = from_patterns(site, self.rank_pattern, self.rank)
        alpha = from_patterns(site, self.alpha_pattern, self.alpha)
        module, _, parameter = site.rpartition(".")
        stack = operation == "stack"
        a, b, magnitude = (
            f"{module}.lora_{parameter}.{role}" if stack else f"{site}.{role}.weight" for role in (A, B, MAGNITUDE)
        )
        return LowRank(
            site if stack else f"{site}.weight", a, b, rank, alpha, scale(rank, alpha, use_rslora=self.use_rslora),
            operation, magnitude if self.use_dora else None,
            bias=f"{site}.{BIAS}" if self.lora_bias else None, rows=rows,
        )  # fmt: skip


def _faults(record: LoRARecord) -> Iterator[str]:
    """Yield a line for each setting that no run would have recorded."""
    values: dict[str, Any] = {name: getattr(record, name) for name in record.__slots__}
    numbers = {name: values[name] for name in ("rank", "alpha")}
    for name in ("rank_pattern", "alpha_pattern"):
        if isinstance(table := values[name], Mapping):
            numbers |= {f"{name}.{pattern}": value for pattern, value in table.items()}
        else:
            yield f"{name} is {table!r:.80}, expected a table"
    for name, number in numbers.items():
        kinds, expected = ((int,), "integer") if name.startswith("rank") else ((int, float), "number")
        if type(number) not in kinds or not 0 < number < math.inf:
            yield f"{name} is {number!r:.80}, expected a positive {expected}"
    rows = values["trainable_token_indices"]
    if not isinstance(rows, Mapping) or not all(
        isinstance(r, list | tuple) and all(type(index) is int and index >= 0 for index in r) for r in rows.values()
    ):
        yield f"trainable_token_indices is {rows!r:.80}, expected a table of rows"
    names = values["frozen_copies"]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        yield f"frozen_copies is {names!r:.80}, expected a list of names"
    for name in ("use_rslora", "use_dora", "lora_bias", "ensure_weight_tying"):
        if not isinstance(values[name], bool):
            yield f"{name} is {values[name]!r:.80}, expected true or false"
