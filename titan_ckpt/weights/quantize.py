"""Weights that an export stores as codes and scales: one file tensor becomes several, computed when it is written.

Owns the path from sharded values to a quantizer, and the proof that the values on disk are those that were quantized.
Knows no scheme: the converters own these.

A scheme that quantizes each row by itself is applied to the rows that each rank holds. Any other scheme gets the whole
tensor, which is gathered, quantized in parts by the ranks that hold it, and dropped before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.distributed.replicas import digest_of
from titan_ckpt.errors import ExportError, listed
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo, blocks_of, computed, info_of, layout_of
from titan_ckpt.geometry.keymap import Identity, PermuteRotary, Split
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.weights.transforms import FileGroup

_RUN_ELEMENTS = 1 << 22
"""Number of elements that are quantized at once, if the scheme allows it."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """The form in which one file tensor is stored as several."""

    parts: Mapping[str, TensorInfo]
    """File key -> shape and dtype. Dim 0 counts rows, or runs of `row_unit` rows."""
    row_unit: int
    """Number of rows that are quantized together: any run of whole units gives the same values as all rows at once."""
    encode: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    """Rows of the tensor -> the values of each part."""
    decode: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    """The result of `encode` -> the values that it represents, in float32."""
    description: str = ""
    """Description in the files' headers; empty if the format has none."""


class WeightQuantizer(Protocol):
    """A scheme of quantized weights; a Hugging Face folder has one."""

    def claims(self, fqn: str) -> bool:
        """Return whether this native tensor was trained to be quantized."""

    def quantize(self, key: str, info: TensorInfo) -> QuantizedTensor | None:
        """Return how the file tensor of a claimed weight is stored, or None if it stays unquantized."""

    def header(self, infos: Mapping[str, TensorInfo], quantized: Mapping[str, str]) -> dict[str, str]:
        """Return the metadata of every file. `infos`: all tensors in the files; `quantized`: key -> description."""

    def config(self, infos: Mapping[str, TensorInfo], quantized: Mapping[str, str]) -> dict[str, Any]:
        """Return config.json's quantization_config."""


@dataclass(frozen=True, slots=True)
class QuantizedGroup(FileGroup):
    """File tensors that are quantized when they are cut; `infos` are those of their parts."""

    weights: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    """File key of each tensor, in the operation's order -> how it is stored."""
    dtype: torch.dtype = torch.float32
    """Dtype to which values are rounded before they are quantized."""
    by_rows: bool = False
    """Blocks are the shards themselves, whole rows; otherwise each block is the whole tensor."""
    written: list[tuple[str, Chunk, str]] = field(default_factory=list)
    """(file key, region, digest of the decoded float32 values) of everything that this rank has quantized."""

    @property
    def quantized(self) -> Mapping[str, str]:
        """Return the description of each file tensor that is stored as parts."""
        return {key: weight.description for key, weight in self.weights.items()}

    def cut_shares(self, index: int, block: Block, shares: Sequence[Chunk] | None) -> Iterator[Block]:
        """Quantize this rank's part of a block: its own rows, or its share of a tensor that every rank has whole."""
        shapes, keys = [info_of(value).shape for value in self.values], [*self.weights]
        for part in self.parts_of(block, shares) if self.by_rows else [block]:
            for chunk, view, key in self.op.pieces(index, shapes, part, keys):
                values = view.reshape(chunk.sizes)
                start, stop = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
                unit = self.weights[key].row_unit
                runs = [(start, stop)] if self.by_rows else _row_runs(shares, shapes[index], stop - start, unit)
                for first, last in runs:
                    yield from self._encoded(key, first, values[first - start : last - start])

    def _encoded(self, key: str, row: int, values: torch.Tensor) -> Iterator[Block]:
        """Quantize a run of whole rows, a few at a time."""
        weight = self.weights[key]
        shapes = self.op.file_shapes([info_of(value).shape for value in self.values])
        num_rows = shapes[tuple(self.weights).index(key)][:1]
        step = max(1, _RUN_ELEMENTS // max(1, values[:1].numel()) // weight.row_unit) * weight.row_unit
        for first in range(0, len(values), step):
            rows = values[first : first + step].to(self.dtype).contiguous()
            if not bool(torch.isfinite(rows).all()):
                raise ExportError(f"{key} holds NaN or infinite values, and no scale stands for those")
            parts = weight.encode(rows)
            first_row = row + first
            region = Chunk((first_row, *(0 for _ in rows.shape[1:])), tuple(rows.shape))
            self.written.append((key, region, digest_of(weight.decode(parts).float())))
            for name, data in parts.items():
                by_row = weight.parts[name].shape[:1] == num_rows
                offset = first_row if by_row else first_row // weight.row_unit
                start = (offset, *(0 for _ in data.shape[1:]))[: data.dim()]
                yield Block(Chunk(start, tuple(data.shape)), data, name)


def quantized(groups: Sequence[FileGroup], quantizer: WeightQuantizer) -> list[FileGroup]:
    """Return the groups with claimed weights in their stored form; pure, computes no value.

    Raises: ExportError listing claimed weights that the file combines with others in one tensor.
    """
    made: list[FileGroup] = []
    problems: list[str] = []
    for group in groups:
        claimed = [fqn for fqn in group.fqns if quantizer.claims(fqn)]
        if not claimed:
            made.append(group)
            continue
        if len(group.fqns) > 1:
            problems.append(f"{', '.join(group.fqns)} are stored as one tensor, which cannot be quantized by parts")
            continue
        stored = {key: quantizer.quantize(key, info) for key, info in group.infos.items()}
        weights = {key: weight for key, weight in stored.items() if weight is not None}
        made.append(_quantized(group, weights) if len(weights) == len(stored) else group)
    if problems:
        raise ExportError(f"{len(problems)} weight(s) cannot be quantized\n  " + "\n  ".join(problems))
    return made


def check_quantized(groups: Sequence[FileGroup], reader: TensorReader) -> None:
    """Read this rank's part of every quantized weight back, and compare it with the values that were written.

    Raises: ExportError naming each weight that is not equal bit for bit.
    """
    wrong: dict[str, None] = {}
    for group in groups:
        for key, chunk, digest in group.written if isinstance(group, QuantizedGroup) else ():
            into = torch.empty(chunk.sizes, dtype=torch.float32)
            reader.read([Block(chunk, into, key)])
            if digest_of(into) != digest:
                wrong[key] = None
    if wrong:
        names = listed([*wrong], ", ", " ")
        raise ExportError(f"{len(wrong)} quantized weight(s) come back as other values than were written: {names}")


def _quantized(group: FileGroup, weights: Mapping[str, QuantizedTensor]) -> QuantizedGroup:
    (value,) = group.values
    alone = all(weight.row_unit == 1 for weight in weights.values())
    layout = _layout(value)
    # whether each rank holds rows of its own; the answer is the same on all ranks
    is_cut = layout is not None and all(isinstance(p, Shard) and p.dim == 0 for p in layout.placements)
    by_rows = alone and isinstance(group.op, Identity | PermuteRotary | Split) and is_cut
    parts = {name: info for weight in weights.values() for name, info in weight.parts.items()}
    (dtype,) = {info.dtype for info in group.infos.values()}
    collective = isinstance(value, LazyTensor) and value.collective
    # lazy, so that its codes, which take memory, are written before the next are made
    rows = LazyTensor(info_of(value), lambda: blocks_of(value), collective=collective, like=layout)
    values = (rows if by_rows else _gathered(value),)
    return QuantizedGroup(group.fqns, values, parts, group.op, weights=weights, dtype=dtype, by_rows=by_rows)


def _layout(value: torch.Tensor | LazyTensor) -> DTensor | None:
    """Return the DTensor whose placements the tensor has, or None."""
    layout = layout_of(value)
    return layout if isinstance(layout, DTensor) else None


def _gathered(value: torch.Tensor | LazyTensor) -> LazyTensor:
    """Return a lazy tensor that every rank has whole, gathered on demand."""
    info, layout = info_of(value), _layout(value)

    @torch.no_grad()
    def blocks() -> Iterator[Block]:
        if layout is None:
            (block,) = blocks_of(value)
            yield block
        else:
            sharded: Any = computed(value, layout)
            yield Block(Chunk.whole(info.shape), sharded.full_tensor().detach())

    collective = layout is not None or (isinstance(value, LazyTensor) and value.collective)
    stand_in = torch.empty(info.shape, dtype=info.dtype, device="meta")  # a replica, so that ranks divide the writing
    return LazyTensor(info, blocks, collective=collective, like=stand_in)


def _row_runs(shares: Sequence[Chunk] | None, shape: Sequence[int], rows: int, unit: int) -> list[tuple[int, int]]:
    """Return runs of rows of a file tensor that correspond to this rank's shares of the native one, cut at whole units.

    Every rank rounds a boundary between two shares to the same row, so if shares tile the native tensor, the runs tile
    the file tensor.
    """
    if shares is None:
        return [(0, rows)]
    runs = []
    for share in shares:
        cut = [dim for dim, (size, total) in enumerate(zip(share.sizes, shape, strict=True)) if size != total]
        dim = cut[0] if cut else 0
        ends = (share.offsets[dim], share.offsets[dim] + share.sizes[dim])
        first, last = (min(rows, -(-end * rows // (shape[dim] * unit)) * unit) for end in ends)
        if last > first:
            runs.append((first, last))
    return runs
