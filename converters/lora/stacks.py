"""Factors that PEFT stores in a form of its own: one pair for all experts, and the pair of a tied table twice.

Owns the arrangement of the factors. Source: peft, tuners/lora/layer.py ParamWrapper; tuners/lora/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from titan_ckpt.errors import KeyMapError
from titan_ckpt.geometry.chunks import Chunk, Shape
from titan_ckpt.geometry.keymap import Piece, TensorOp


@dataclass(frozen=True)
class StackedFactor(TensorOp):
    """The factors of all experts as one matrix.

    Shape: (experts, a, b) native, or (experts, b, a) with `transpose`. In the file, with `by_rows`, (experts * a, b),
    one expert after another; else (a, b * experts), in which the first columns of all experts come first.
    """

    experts: int
    by_rows: bool
    transpose: bool

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if len(shapes[0]) != 3 or shapes[0][0] != self.experts:
            raise KeyMapError(f"{list(shapes[0])} is not of {self.experts} experts")
        a, b = self._inner(shapes[0][1:])
        return [(self.experts * a, b) if self.by_rows else (a, b * self.experts)]

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        dim = 0 if self.by_rows else 1
        if len(shapes[0]) != 2 or shapes[0][dim] % self.experts:
            raise KeyMapError(f"{list(shapes[0])} cannot be divided among {self.experts} experts")
        inner = tuple(size // self.experts if i == dim else size for i, size in enumerate(shapes[0]))
        return [(self.experts, *self._inner(inner))]

    def pieces(self, index: int, shapes: Sequence[Shape], chunk: Chunk, block: torch.Tensor) -> Iterator[Piece]:
        rank = self._inner(shapes[0][1:])[0 if self.by_rows else 1]
        (row, column), (rows, columns) = self._inner(chunk.offsets[1:]), self._inner(chunk.sizes[1:])
        for i in range(chunk.sizes[0]):
            expert, view = chunk.offsets[0] + i, block[i].t() if self.transpose else block[i]
            if self.by_rows:
                yield Piece(0, Chunk((expert * rank + row, column), (rows, columns)), view)
                continue
            for j in range(columns):
                yield Piece(0, Chunk((row, (column + j) * self.experts + expert), (rows, 1)), view[:, j : j + 1])

    def _inner(self, sizes: Shape) -> Shape:
        return sizes[::-1] if self.transpose else sizes


class AlsoTransposed(TensorOp):
    """A matrix that is stored as it is and transposed. A table to read has the first form alone."""

    num_file = 2

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0], shapes[0][::-1]]

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0]]

    def pieces(self, index: int, shapes: Sequence[Shape], chunk: Chunk, block: torch.Tensor) -> Iterator[Piece]:
        yield Piece(0, chunk, block)
        yield Piece(1, Chunk(chunk.offsets[::-1], chunk.sizes[::-1]), block.t())
