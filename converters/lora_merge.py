"""Base and adapter made one weight, chunk by chunk, when it is written; and the refusal of adapters that mean nothing.

Owns the arithmetic of merging on shards. Changes nothing live; holds one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import ExportError
from titan_ckpt.tensors import (
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

_LISTED = 4
_WORK_ELEMENTS = 1 << 18
"""How much of a weight is in float32 at once."""

Form = Literal["linear", "embedding", "stack"]
"""A linear module's weight, an embedding table, or the 3-D parameter of all experts."""


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """One adapter, as far as names and state dicts know it."""

    fqn: str
    """Of the module; of a stack of experts the parameter's own."""
    form: Form
    rank: int
    alpha: float
    scaling: float
    rows: tuple[int, ...] = ()
    """A fused weight's parts, each with an adapter of its own: A holds one after another, B's rows are each part's."""
    dora: bool = False
    tied: bool = False
    """The base weight is also another module's: to merge would change that one too."""

    @property
    def weight(self) -> str:
        return self.fqn if self.form == "stack" else f"{self.fqn}.weight"

    @property
    def lora_a(self) -> str:
        return self._beside("lora_a")

    @property
    def lora_b(self) -> str:
        return self._beside("lora_b")

    @property
    def lora_magnitude(self) -> str:
        return self._beside("lora_magnitude")

    @property
    def owned(self) -> tuple[str, ...]:
        """The fqns this adapter added."""
        return (self.lora_a, self.lora_b, *((self.lora_magnitude,) if self.dora else ()))

    def _beside(self, name: str) -> str:
        if self.form != "stack":
            return f"{self.fqn}.{name}.weight"
        module, _, parameter = self.fqn.rpartition(".")
        return f"{module}.lora_{parameter}.{name}"


def merged(adapted: AdaptedWeight, tensors: Mapping[str, torch.Tensor | LazyTensor]) -> LazyTensor:
    """Return the merged weight, of which every rank computes its own chunks.

    In float32 inside (float64 for a float64 base), rounded once to the base's dtype.
    """
    weight = tensors[adapted.weight]
    a, b = (tensors[name] for name in (adapted.lora_a, adapted.lora_b))
    magnitude = tensors[adapted.lora_magnitude] if adapted.dora else None
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)

    @torch.no_grad()
    def factors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        # gathered here and dropped again: all are small against the weight, and every rank takes part
        dtype = torch.promote_types(info_of(weight).dtype, torch.float32)
        left, right = spread(_whole(b), adapted.rows).to(dtype), _whole(a).to(dtype)
        if adapted.form == "embedding":
            left, right = right.t(), left.t()
        return left, right, None if magnitude is None else _whole(magnitude).to(dtype)

    @torch.no_grad()
    def blocks() -> list[Block]:
        left, right, lengths = factors()
        factor = None if lengths is None else lengths / _row_norms(weight, left, right, adapted.scaling)
        return [_merge(block, left, right, adapted.scaling, factor) for block in blocks_of(weight)]

    @torch.no_grad()
    def freeze(stage: Stage) -> LazyTensor:
        left, right, lengths = (None if factor is None else factor.clone() for factor in factors())
        assert left is not None and right is not None
        staged = frozen(weight, stage)
        now = None  # gathering rows is for the training's own thread, all else for the one that writes
        if lengths is not None and not (_has_whole_rows(weight) and _has_whole_rows(staged)):
            now = _row_norms(weight, left, right, adapted.scaling)

        @torch.no_grad()
        def staged_blocks() -> list[Block]:
            factor = None
            if lengths is not None:
                factor = lengths / (_row_norms(staged, left, right, adapted.scaling) if now is None else now)
            return [_merge(block, left, right, adapted.scaling, factor) for block in blocks_of(staged)]

        return LazyTensor(info_of(weight), staged_blocks, like=layout_of(staged))

    parts = (weight, a, b, *(() if magnitude is None else (magnitude,)))
    collective = any(part.collective if isinstance(part, LazyTensor) else isinstance(part, DTensor) for part in parts)
    return LazyTensor(
        info_of(weight),
        blocks,
        collective=collective,
        like=layout_of(weight),
        freeze=freeze if can_freeze(weight) else None,
    )


def spread(b: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return B as a factor of the whole weight: of a fused weight each part's rows see their own part of A only."""
    return torch.block_diag(*b.split(list(rows))) if rows else b


def rounded(value: torch.Tensor | LazyTensor, dtype: torch.dtype) -> torch.Tensor | LazyTensor:
    """Return the tensor in another floating-point dtype, cast chunk by chunk when it is written."""
    return value if info_of(value).dtype == dtype else cast(value, dtype)


def check_adapters(adapters: Mapping[str, AdaptedWeight], tensors: StateDict, copies: Collection[str]) -> None:
    """Refuse adapters that mean nothing, before they are merged. Collective over all ranks, by the job's store.

    `copies`: trained copies of whole tensors; beside them an adapter needs no effect of its own.
    Raises: ExportError, the same on every rank, for NaN or infinite values, and where no adapter has any effect.
    """
    broken: list[Any] = [name for name in copies if name in tensors and not _finite(tensors[name])]
    effective: list[Any] = []
    for adapted in adapters.values():
        if adapted.lora_a not in tensors:
            continue
        broken += [name for name in adapted.owned if not _finite(tensors[name])]
        # a shard of A may be here and the matching shard of B on another rank: only all together have an effect
        for name in (adapted.lora_a, adapted.lora_b):
            effective += [name] if any(bool(block.data.any()) for block in blocks_of(tensors[name])) else []
    everywhere: Any = Coordinator.current().gather("adapter-check", {"broken": broken, "effective": effective})
    broken = sorted({name for rank in everywhere for name in rank["broken"]})
    union = {name for rank in everywhere for name in rank["effective"]}
    if broken:
        raise ExportError(f"{len(broken)} adapter tensor(s) hold NaN or infinite values: {_listed(broken)}")
    if not copies and not any({m.lora_a, m.lora_b} <= union for m in adapters.values()):
        raise ExportError(
            f"none of the {len(adapters)} adapters has any effect (A or B is zero everywhere): "
            "what would be exported is the base. Was anything trained, or was the adapter's source loaded?"
        )


def _merge(block: Block, left: torch.Tensor, right: torch.Tensor, scaling: float, factor: torch.Tensor | None) -> Block:
    """Return the block of left @ right * scaling + weight, with one rounding; `block.data` is left as it was."""
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
    """Cut a chunk along its first dim so that float32 values of a part take little memory beside a weight."""
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
    """Return left @ right * scaling + weight for a chunk of it; a tensor subclass in `weight` gives plain values."""
    *expert, rows, columns = (slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
    product = torch.matmul(left[(*expert, rows)], right[(*expert, slice(None), columns)], out=into)
    return product.mul_(scaling).add_(weight)


def _finite(value: torch.Tensor | LazyTensor) -> bool:
    return all(bool(torch.isfinite(block.data).all()) for block in blocks_of(value))


def _row_norms(
    weight: torch.Tensor | LazyTensor, left: torch.Tensor, right: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return the lengths of the merged rows; of those this rank does not hold, any value."""
    norms = left.new_ones(info_of(weight).shape[0])
    if not _has_whole_rows(weight):
        # decided by placement and not by what is here: a rank with an empty shard has to take part in the gather
        blocks: Iterable[Block] = [Block(Chunk.whole(info_of(weight).shape), _whole(weight))]
    else:
        blocks = blocks_of(weight)
    for block in blocks:
        for part, rows in _parts(block.chunk):
            merged_rows = _combined(rows, block.data[part], left, right, scaling)
            start, count = rows.offsets[0], rows.sizes[0]
            norms[start : start + count] = torch.linalg.vector_norm(merged_rows, dim=1)
    return norms


def _has_whole_rows(weight: torch.Tensor | LazyTensor) -> bool:
    """Say whether every rank holds its rows of a weight in full length."""
    layout = layout_of(weight)
    if isinstance(layout, tuple):
        return all(chunk.sizes[-1] == info_of(weight).shape[-1] for chunk in layout)
    return not isinstance(layout, DTensor) or all(getattr(p, "dim", 0) != 1 for p in layout.placements)


def _whole(value: torch.Tensor | LazyTensor) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
