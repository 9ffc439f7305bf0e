"""Merge base and adapter into one weight, chunk by chunk, when it is written; refuse adapters without effect.

Owns merging on shards; weights/low_rank.py has the arithmetic. Changes no live tensor; holds one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

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
from titan_ckpt.weights.low_rank import LowRank, WeightUpdate

_WORK_ELEMENTS = 1 << 18
"""At most this many elements of a weight are held in float32 at once."""


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


def rounded(value: torch.Tensor | LazyTensor, dtype: torch.dtype, fqn: str) -> torch.Tensor | LazyTensor:
    """Return the tensor in `dtype`, cast chunk by chunk when it is written."""
    return value if info_of(value).dtype == dtype else cast(value, dtype, fqn)


def check_adapters(adapters: Mapping[str, LowRank], tensors: StateDict, copies: Collection[str]) -> None:
    """Check, before adapters are merged, that they are finite and have an effect. Collective over all ranks.

    `copies`: fqns of trained copies; if there are any, the adapters may be without effect.
    Raises: ExportError, the same on every rank, for NaN or infinite values, and if no adapter has any effect.
    """
    broken: list[Any] = [name for name in copies if name in tensors and not _finite(tensors[name])]
    effective: list[Any] = []
    for update in adapters.values():
        if update.a not in tensors:
            continue
        broken += [name for name in update.tensors if not _finite(tensors[name])]
        # a shard of A may be on this rank and the matching shard of B on a different one: judge all ranks together
        pair = (update.a, update.b)
        effective += [name for name in pair if any(bool(block.data.any()) for block in blocks_of(tensors[name]))]
    everywhere: Any = Coordinator.current().gather("adapter-check", {"broken": broken, "effective": effective})
    broken = sorted({name for rank in everywhere for name in rank["broken"]})
    union = {name for rank in everywhere for name in rank["effective"]}
    if broken:
        raise ExportError(
            f"{len(broken)} adapter tensor(s) hold NaN or infinite values: {listed(broken, ', ', ' ', most=4)}"
        )
    if not copies and not any({m.a, m.b} <= union for m in adapters.values()):
        raise ExportError(
            f"none of the {len(adapters)} adapters has any effect (A or B is zero everywhere): "
            "what would be exported is the base. Was anything trained, or was the adapter's source loaded?"
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


def _finite(value: torch.Tensor | LazyTensor) -> bool:
    return all(bool(torch.isfinite(block.data).all()) for block in blocks_of(value))


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
