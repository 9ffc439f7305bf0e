"""Merge base and adapter into one weight, chunk by chunk, when it is written; refuse adapters without effect.

Owns the arithmetic of merging on shards. Does not change live tensors; holds one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ExportError, listed
from titan_ckpt.geometry.chunks import (
    Block,
    Chunk,
    LazyTensor,
    Stage,
    blocks_of,
    can_freeze,
    cast,
    frozen,
    info_of,
    layout_of,
)
from titan_ckpt.types import StateDict
from titan_ckpt.weights.lora_names import MAGNITUDE, A, B, lora_name

_WORK_ELEMENTS = 1 << 18
"""At most this many elements of a weight are held in float32 at once."""

_Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""The two whole factors of an adapter's product, in the order in which they are multiplied, and DoRA's magnitudes."""

Form = Literal["linear", "embedding", "conv1d", "stack"]
"""A linear module's weight, an embedding table, the transposed weight of GPT-2's Conv1D, or the 3-D parameter of all
experts."""


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """One adapter by its settings and the names of its tensors."""

    fqn: str
    """The fqn of the module; for a stack of experts that of the parameter."""
    form: Form
    rank: int
    alpha: float
    scaling: float
    rows: tuple[int, ...] = ()
    """Rows of each part of a fused weight. Every part has its own adapter: A holds them one after another, and B holds
    each part's rows."""
    dora: bool = False
    tied: bool = False
    """The base weight is shared with another module, so merging would change that module too."""

    @property
    def weight(self) -> str:
        return self.fqn if self.form == "stack" else f"{self.fqn}.weight"

    @property
    def lora_a(self) -> str:
        return self._name(A)

    @property
    def lora_b(self) -> str:
        return self._name(B)

    @property
    def lora_magnitude(self) -> str:
        return self._name(MAGNITUDE)

    @property
    def owned(self) -> tuple[str, ...]:
        """Return the fqns that this adapter added."""
        return (self.lora_a, self.lora_b, *((self.lora_magnitude,) if self.dora else ()))

    def _name(self, role: str) -> str:
        return lora_name(role, self.fqn, stack=self.form == "stack")


def merged(adapted: AdaptedWeight, tensors: Mapping[str, torch.Tensor | LazyTensor]) -> LazyTensor:
    """Return the merged weight as a lazy tensor; every rank computes its own chunks.

    It is computed in float32 (float64 for a float64 base) and rounded once to the base's dtype.
    """
    weight = tensors[adapted.weight]
    a, b = (tensors[name] for name in (adapted.lora_a, adapted.lora_b))
    magnitude = tensors[adapted.lora_magnitude] if adapted.dora else None
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)

    @torch.no_grad()
    def factors() -> _Factors:
        # gathered for each use, not kept: they are small compared with the weight. Every rank takes part
        dtype = torch.promote_types(info_of(weight).dtype, torch.float32)
        left, right = spread(whole(b), adapted.rows).to(dtype), whole(a).to(dtype)
        if adapted.form in ("embedding", "conv1d"):
            left, right = right.t(), left.t()
        return left, right, None if magnitude is None else whole(magnitude).to(dtype)

    @torch.no_grad()
    def blocks(base: torch.Tensor | LazyTensor, given: _Factors, norms: torch.Tensor | None = None) -> list[Block]:
        left, right, lengths = given
        factor = None
        if lengths is not None:
            factor = lengths / (_row_norms(base, left, right, adapted.scaling) if norms is None else norms)
        return [_merge(block, left, right, adapted.scaling, factor) for block in blocks_of(base)]

    @torch.no_grad()
    def freeze(stage: Stage) -> LazyTensor:
        left, right, lengths = factors()
        kept = (left.clone(), right.clone(), None if lengths is None else lengths.clone())
        staged = frozen(weight, stage)
        norms = None  # rows are gathered now, on the training thread; the writing thread does everything else
        if lengths is not None and not (_has_whole_rows(weight) and _has_whole_rows(staged)):
            norms = _row_norms(weight, left, right, adapted.scaling)
        return LazyTensor(info_of(weight), partial(blocks, staged, kept, norms), like=layout_of(staged))

    parts = (weight, a, b, *(() if magnitude is None else (magnitude,)))
    collective = any(part.collective if isinstance(part, LazyTensor) else isinstance(part, DTensor) for part in parts)
    return LazyTensor(
        info_of(weight),
        lambda: blocks(weight, factors()),
        collective=collective,
        like=layout_of(weight),
        freeze=freeze if can_freeze(weight) else None,
    )


def spread(b: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return B as a factor of the whole weight; in a fused weight, each part's rows use only their part of A."""
    return torch.block_diag(*b.split(list(rows))) if rows else b


def rounded(value: torch.Tensor | LazyTensor, dtype: torch.dtype) -> torch.Tensor | LazyTensor:
    """Return the tensor in `dtype`, cast chunk by chunk when it is written."""
    return value if info_of(value).dtype == dtype else cast(value, dtype)


def check_adapters(adapters: Mapping[str, AdaptedWeight], tensors: StateDict, copies: Collection[str]) -> None:
    """Check, before adapters are merged, that they are finite and have an effect. Collective over all ranks.

    `copies`: fqns of trained copies; if there are any, the adapters may be without effect.
    Raises: ExportError, the same on every rank, for NaN or infinite values, and if no adapter has any effect.
    """
    broken: list[Any] = [name for name in copies if name in tensors and not _finite(tensors[name])]
    effective: list[Any] = []
    for adapted in adapters.values():
        if adapted.lora_a not in tensors:
            continue
        broken += [name for name in adapted.owned if not _finite(tensors[name])]
        # a shard of A may be on this rank and the matching shard of B on a different one: judge all ranks together
        pair = (adapted.lora_a, adapted.lora_b)
        effective += [name for name in pair if any(bool(block.data.any()) for block in blocks_of(tensors[name]))]
    everywhere: Any = Coordinator.current().gather("adapter-check", {"broken": broken, "effective": effective})
    broken = sorted({name for rank in everywhere for name in rank["broken"]})
    union = {name for rank in everywhere for name in rank["effective"]}
    if broken:
        raise ExportError(
            f"{len(broken)} adapter tensor(s) hold NaN or infinite values: {listed(broken, ', ', ' ', most=4)}"
        )
    if not copies and not any({m.lora_a, m.lora_b} <= union for m in adapters.values()):
        raise ExportError(
            f"none of the {len(adapters)} adapters has any effect (A or B is zero everywhere): "
            "what would be exported is the base. Was anything trained, or was the adapter's source loaded?"
        )


def _merge(block: Block, left: torch.Tensor, right: torch.Tensor, scaling: float, factor: torch.Tensor | None) -> Block:
    """Return the block of left @ right * scaling + weight, rounded once; `block.data` is not changed."""
    made = torch.empty(block.chunk.sizes, dtype=block.data.dtype, device=block.data.device)
    exact = made.dtype == left.dtype
    for part, rows in _parts(block.chunk):
        into = made[part] if exact else None
        value = _combined(rows, block.data[part], left, right, scaling, into)
        if factor is not None:
            value.mul_(factor[rows.offsets[0] : rows.offsets[0] + rows.sizes[0], None])
        if not exact:
            made[part] = value
    return Block(block.chunk, made)


def _parts(chunk: Chunk) -> Iterator[tuple[slice, Chunk]]:
    """Yield parts of a chunk along its first dim, so small that their float32 values take little memory."""
    step = max(1, _WORK_ELEMENTS // max(1, math.prod(chunk.sizes[1:])))
    for first in range(0, chunk.sizes[0], step):
        count = min(step, chunk.sizes[0] - first)
        offsets = (chunk.offsets[0] + first, *chunk.offsets[1:])
        yield slice(first, first + count), Chunk(offsets, (count, *chunk.sizes[1:]))


def _combined(
    chunk: Chunk,
    weight: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    scaling: float,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return left @ right * scaling + weight for one chunk, as a plain tensor even if `weight` is a subclass."""
    *expert, rows, columns = (slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
    product = torch.matmul(left[(*expert, rows)], right[(*expert, slice(None), columns)], out=into)
    return product.mul_(scaling).add_(weight)


def _finite(value: torch.Tensor | LazyTensor) -> bool:
    return all(bool(torch.isfinite(block.data).all()) for block in blocks_of(value))


def _row_norms(
    weight: torch.Tensor | LazyTensor, left: torch.Tensor, right: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return the norms of the merged rows; entries of rows that this rank does not hold are arbitrary."""
    norms = left.new_ones(info_of(weight).shape[0])
    if not _has_whole_rows(weight):
        # decided by placement, not by local data: a rank with an empty shard must take part in the gather
        blocks: Iterable[Block] = [Block(Chunk.whole(info_of(weight).shape), whole(weight))]
    else:
        blocks = blocks_of(weight)
    for block in blocks:
        for part, rows in _parts(block.chunk):
            merged_rows = _combined(rows, block.data[part], left, right, scaling)
            start, count = rows.offsets[0], rows.sizes[0]
            norms[start : start + count] = torch.linalg.vector_norm(merged_rows, dim=1)
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
