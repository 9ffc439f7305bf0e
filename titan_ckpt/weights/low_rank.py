"""Updates of weights: `WeightUpdate` for adapters of any kind, and `LowRank` for LoRA's, with names and settings.

An adapter is a list of updates. A converter reads them from live modules (converters/lora/sites.py) and from a step
(`ModelConverter.updates`), `PeftReader` from a PEFT folder; a merge applies them to the weights, at a load and at an
export with the same operations. Reads no file.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, TypeVar

import torch
from torch import nn

from titan_ckpt.errors import KeyMapError
from titan_ckpt.geometry.chunks import Chunk, Shape
from titan_ckpt.geometry.keymap import KeyMap, Split
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
Operation = Literal["linear", "embedding", "conv1d", "stack"]
"""How a weight is used: by a linear module, as an embedding table, by GPT-2's Conv1D, whose weight is transposed, or as
the 3-D parameter of all experts."""
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


class WeightUpdate(ABC):
    """What an adapter does to one weight of the base, by the names of the tensors that it has for this weight."""

    __slots__ = ()
    weight: str

    @property
    @abstractmethod
    def tensors(self) -> tuple[str, ...]:
        """Return the names of the adapter's tensors."""

    @abstractmethod
    def base_shape(self, shapes: Sequence[Shape], weight: Shape) -> Shape:
        """Return the shape of the weight that `tensors` of these shapes are for; `weight`: the shape that it has."""

    def merged(
        self,
        weight: torch.Tensor,
        chunk: Chunk,
        factors: Sequence[torch.Tensor],
        norms: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a chunk of the merged weight in float32 (float64 for a float64 weight), a plain tensor.

        `weight`: the values of the chunk, in any shape. `factors`: whole, as by the method. `norms`: those of
        `LowRank`, None for any other update. `out`: memory for the result, which need not be used.
        """
        values = weight.reshape(chunk.sizes).to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        self.change(values, chunk, factors[0])
        return values

    def change(self, values: torch.Tensor, chunk: Chunk, own: torch.Tensor) -> None:
        """Change a chunk of the weight in place, by the whole tensor that the adapter has for it: all that merges."""
        raise NotImplementedError

    def factors(self, *values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return what `merged` computes with, made of the whole `tensors`."""
        return values

    def acts(self, values: Sequence[torch.Tensor]) -> bool:
        """Return whether `tensors` with these values change the weight."""
        return True

    @property
    def needs_whole(self) -> bool:
        """Return whether `merged` can only compute the whole weight at once."""
        return False

    def misfits(self, shapes: Mapping[str, Shape], weight: Shape, chunks: Iterable[Chunk]) -> Iterator[str]:
        """Yield the reasons why a weight of this shape, in these chunks, cannot be merged; each names a tensor first.

        `shapes`: those of `tensors`.
        """
        return iter(())


@dataclass(frozen=True, slots=True)
class StoredUpdates:
    """The content of an adapter in a step, by native names."""

    updates: Sequence[WeightUpdate]
    copies: Mapping[str, str]
    """Tensor of a module that was trained in full -> the tensor of the base that it replaces."""
    of_base: frozenset[str] = frozenset()
    """Those of `copies` that are frozen: they belong to all modules that share the weight, and may be the base's."""
    tied: bool = False
    """Whether they act on all modules that share a weight. Trained rows always do."""


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
class AddedBias(WeightUpdate):
    """The bias of B: bias + scaling * its value."""

    weight: str
    """The bias of the module that has the pair."""
    bias: str
    scaling: float

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.bias,)

    def base_shape(self, shapes: Sequence[Shape], weight: Shape) -> Shape:
        return shapes[0]

    def acts(self, values: Sequence[torch.Tensor]) -> bool:
        return self.scaling != 0 and bool(values[0].any())

    def change(self, values: torch.Tensor, chunk: Chunk, own: torch.Tensor) -> None:
        values += own[chunk.within(Chunk.whole(own.shape))].to(values) * self.scaling


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


@dataclass(frozen=True, slots=True)
class Stack:
    """How PEFT's `target_parameters` stores the pairs of stacked experts: as one pair for the parameter."""

    experts: int
    in_first: bool
    """Whether the weight is (experts, in, out), as transformers' `is_transposed` says; else (experts, out, in)."""

    def factors(self, a: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the factors of the stacked weight. Shape: A (experts * rank, in), B (out, rank * experts)."""
        right = a.reshape(self.experts, -1, a.shape[1])
        left = b.reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)
        return (right.mT, left.mT) if self.in_first else (left, right)


def stack_of(module: nn.Module, parameter: str) -> Stack:
    """Return how PEFT stores the pairs of a module's stacked experts."""
    return Stack(module.get_parameter(parameter).shape[0], bool(getattr(module, "is_transposed", False)))


@dataclass(frozen=True, slots=True)
class LowRank(WeightUpdate):
    """A low-rank update of one weight, by the names of its tensors: weight + scaling * B @ A, scaled again by DoRA.

    Shape: weight (out, in), A (rank, in), B (out, rank), of stacked experts with one more dim before each. Embeddings
    and Conv1D modules have a weight (in, out), to which the transposed product is added.
    """

    weight: str
    a: str
    b: str
    rank: int
    alpha: float
    scaling: float
    operation: Operation = "linear"
    magnitude: str | None = None
    """DoRA's lengths of the output features."""
    stack: Stack | None = None
    """How a PEFT folder has the pair of stacked experts; None for one that is stored as the weight is."""
    bias: str | None = None
    """The bias of B, which changes the module's bias: see `added_bias`."""
    rows: tuple[int, ...] = ()
    """Rows of each part of a fused weight. Every part has its own adapter: A holds them one after another, and B holds
    each part's rows."""

    @property
    def site(self) -> str:
        """Return the adapted part, as patterns name it: a module, or a parameter of stacked experts."""
        return self.weight if self.operation == "stack" else self.weight.removesuffix(".weight")

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of A, B and DoRA's lengths, if it has some."""
        return (self.a, self.b, *((self.magnitude,) if self.magnitude else ()))

    @property
    def added_bias(self) -> AddedBias | None:
        """Return the update of the module's bias, if B has one."""
        return AddedBias(f"{self.site}.bias", self.bias, self.scaling) if self.bias else None

    @property
    def transposed(self) -> bool:
        return self.operation in ("embedding", "conv1d")

    @property
    def needs_whole(self) -> bool:
        """Return whether DoRA's lengths are those of columns, which no block of rows holds whole."""
        return self.magnitude is not None and self.transposed

    def base_shape(self, shapes: Sequence[Shape], weight: Shape) -> Shape:
        """Return the shape of the product."""
        a, b, *_ = shapes
        if self.stack is not None:
            return (self.stack.experts, *((a[1], b[0]) if self.stack.in_first else (b[0], a[1])))
        return (a[-1], b[-2]) if self.transposed else (*b[:-1], a[-1])

    def acts(self, values: Sequence[torch.Tensor]) -> bool:
        """Return whether the product, or DoRA's row lengths alone, have an effect."""
        has_values = [bool(value.any()) for value in values]
        return (self.scaling != 0 and all(has_values[:2])) or any(has_values[2:])

    def misfits(self, shapes: Mapping[str, Shape], weight: Shape, chunks: Iterable[Chunk]) -> Iterator[str]:
        """Yield the reason why this weight cannot be scaled to DoRA's lengths, if there is one."""
        if self.magnitude is None:
            return
        axis = int(self.transposed)
        if self.operation == "embedding":
            yield f"{self.a}: use_dora of embeddings scales columns, which is not merged; merge it with PEFT before"
        elif (found := shapes[self.magnitude]) != weight[axis : axis + 1]:
            yield f"{self.magnitude}: expected {list(weight[axis : axis + 1])}, found {list(found)}"
        elif any(chunk.sizes[1 - axis] != weight[1 - axis] for chunk in chunks):
            rows = "columns" if self.transposed else "rows"
            yield f"{self.a}: use_dora needs whole {rows}, and this weight's are cut: merge it in a run that cuts none"

    def factors(self, *values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the whole factors of the product, in the order in which they are multiplied, and DoRA's lengths."""
        a, b, *lengths = values
        if self.stack is not None:
            return self.stack.factors(a, b)
        left, right = spread(b, self.rows), a
        return (right.t(), left.t(), *lengths) if self.transposed else (left, right, *lengths)

    def combined(
        self, weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return left @ right * scaling + weight in float32, or in float64 for a float64 weight.

        Differentiable without `out`, which is memory for the result. Training and merges compute it here, so what is
        exported equals what was trained.
        """
        dtype = torch.promote_types(weight.dtype, torch.float32)
        product = torch.matmul(left.to(dtype), right.to(dtype), out=out)
        product = torch.mul(product, self.scaling, out=out)
        as_weight = None if out is None else out.view(weight.shape)
        return torch.add(product if as_weight is None else as_weight, weight, out=as_weight)

    def merged(
        self,
        weight: torch.Tensor,
        chunk: Chunk,
        factors: Sequence[torch.Tensor],
        norms: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a chunk of the merged weight, scaled to DoRA's lengths if `factors` has them.

        `norms`: of all output features before they are scaled; None if the chunk holds them whole.
        """
        *expert, rows, columns = (slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        left, right, *lengths = factors
        if out is None:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            out = torch.empty(chunk.sizes, dtype=dtype, device=weight.device)
        left, right = left[(*expert, rows)], right[(*expert, slice(None), columns)]
        self.combined(weight, left.to(weight.device), right.to(weight.device), out)
        for wanted in lengths:
            dim, features = (0, columns) if self.transposed else (1, rows)
            found = torch.linalg.vector_norm(out, dim=dim) if norms is None else norms[features]
            out.mul_((wanted[features].to(out) / found).unsqueeze(dim))
        return out


def spread(b: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return B as a factor of the whole weight; in a fused weight, each part's rows use only their part of A."""
    return torch.block_diag(*b.split(list(rows))) if rows else b


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
