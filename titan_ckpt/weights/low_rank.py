"""Updates of weights: `WeightUpdate` for adapters of any kind, `LowRank` for LoRA's, and their merge into a weight.

An adapter is a list of updates. A converter reads them from live modules (converters/lora/sites.py) and from a step
(`ModelConverter.updates`), `PeftReader` from a PEFT folder; a merge applies them to the weights, at a load and at an
export with the same operations. `merged` does so chunk by chunk, when the weight is written: it changes no live tensor,
and holds one tensor at a time. Reads no file.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_ckpt.geometry.chunks import (
    Block,
    Chunk,
    LazyTensor,
    Shape,
    Stage,
    blocks_of,
    can_freeze,
    frozen,
    info_of,
    layout_of,
)

_WORK_ELEMENTS = 1 << 18
"""At most this many elements of a weight are held in float32 at once."""
Operation = Literal["linear", "embedding", "conv1d", "stack"]
"""How a weight is used: by a linear module, as an embedding table, by GPT-2's Conv1D, whose weight is transposed, or as
the 3-D parameter of all experts."""


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


def merged(update: WeightUpdate, tensors: Mapping[str, torch.Tensor | LazyTensor]) -> LazyTensor:
    """Return the merged weight as a lazy tensor; every rank computes its own chunks.

    It is computed in float32 (float64 for a float64 base) and rounded once to the base's dtype.
    """
    weight = tensors[update.weight]
    parts = [tensors[name] for name in update.tensors]

    @torch.no_grad()
    def factors() -> Sequence[torch.Tensor]:
        # gathered for each use, not kept: they are small compared with the weight. Every rank takes part
        dtype = torch.promote_types(info_of(weight).dtype, torch.float32)
        return [factor.to(dtype) for factor in update.factors(*map(whole, parts))]

    def norms(base: torch.Tensor | LazyTensor, given: Sequence[torch.Tensor]) -> torch.Tensor | None:
        if not isinstance(update, LowRank) or update.magnitude is None:
            return None
        if update.transposed:  # its features are columns, and the parts that are merged at a time are rows
            left, right, _ = given
            values = update.merged(whole(weight), Chunk.whole(info_of(weight).shape), (left, right))
            lengths: torch.Tensor = torch.linalg.vector_norm(values, dim=0)
            return lengths
        held = _has_whole_rows(weight) and _has_whole_rows(base)
        return None if held else _row_norms(update, weight, given)

    @torch.no_grad()
    def blocks(base: torch.Tensor | LazyTensor, given: Sequence[torch.Tensor], of_rows: torch.Tensor | None) -> Any:
        return [_merge(update, block, given, of_rows) for block in blocks_of(base)]

    @torch.no_grad()
    def freeze(stage: Stage) -> LazyTensor:
        kept, staged = [factor.clone() for factor in factors()], frozen(weight, stage)
        # rows are gathered now, on the training thread; the writing thread does everything else
        return LazyTensor(info_of(weight), partial(blocks, staged, kept, norms(staged, kept)), like=layout_of(staged))

    @torch.no_grad()
    def live() -> Any:
        given = factors()
        return blocks(weight, given, norms(weight, given))

    collective = any(
        part.collective if isinstance(part, LazyTensor) else isinstance(part, DTensor) for part in (weight, *parts)
    )
    return LazyTensor(
        info_of(weight),
        live,
        collective=collective,
        like=layout_of(weight),
        freeze=freeze if can_freeze(weight) else None,
    )


def _merge(update: WeightUpdate, block: Block, given: Sequence[torch.Tensor], norms: torch.Tensor | None) -> Block:
    """Return the merged block, rounded once; `block.data` is not changed. `given`: the factors, and DoRA's lengths."""
    made = torch.empty(block.chunk.sizes, dtype=block.data.dtype, device=block.data.device)
    for part, rows in _parts(block.chunk):
        into = made[part] if made.dtype == given[0].dtype else None
        value = update.merged(block.data[part], rows, given, norms, into)
        if value is not into:
            made[part] = value
    return Block(block.chunk, made)


def _parts(chunk: Chunk) -> Iterator[tuple[slice, Chunk]]:
    """Yield parts of a chunk along its first dim, so small that their float32 values take little memory."""
    step = max(1, _WORK_ELEMENTS // max(1, math.prod(chunk.sizes[1:])))
    for first in range(0, chunk.sizes[0], step):
        count = min(step, chunk.sizes[0] - first)
        offsets = (chunk.offsets[0] + first, *chunk.offsets[1:])
        yield slice(first, first + count), Chunk(offsets, (count, *chunk.sizes[1:]))


def _row_norms(update: LowRank, weight: torch.Tensor | LazyTensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norms of the merged rows; entries of rows that this rank does not hold are arbitrary."""
    left, right, _ = given
    norms = left.new_ones(info_of(weight).shape[0])
    if not _has_whole_rows(weight):
        # decided by placement, not by local data: a rank with an empty shard must take part in the gather
        blocks: Iterable[Block] = [Block(Chunk.whole(info_of(weight).shape), whole(weight))]
    else:
        blocks = blocks_of(weight)
    for block in blocks:
        for part, rows in _parts(block.chunk):
            values = update.merged(block.data[part], rows, (left, right))
            norms[rows.offsets[0] : rows.offsets[0] + rows.sizes[0]] = torch.linalg.vector_norm(values, dim=1)
    return norms


def _has_whole_rows(weight: torch.Tensor | LazyTensor) -> bool:
    """Return whether every rank holds its rows of a weight in full length."""
    layout = layout_of(weight)
    if isinstance(layout, tuple):
        return all(chunk.sizes[-1] == info_of(weight).shape[-1] for chunk in layout)
    return not isinstance(layout, DTensor) or all(getattr(p, "dim", 0) != 1 for p in layout.placements)


def whole(value: torch.Tensor | LazyTensor) -> torch.Tensor:
    """Return all values of a tensor, apart from autograd's graph. Collective for a sharded one."""
    assert isinstance(value, torch.Tensor)
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
