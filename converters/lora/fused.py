"""Factors that another tool has in a form of its own: one pair for a fused weight, or for all experts; a pair twice.

Our q, k and v have a pair (A, B) each, its qkv has one pair. Owns the exact conversion in both directions. Pairs of
ranks r1, r2, ... become one pair of rank r1 + r2 + ..., in which every B has its own rows and columns. To split one
pair, every part takes the whole A and its own rows of B. Source of the other forms: peft, tuners/lora/layer.py
ParamWrapper; tuners/lora/model.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from titan_ckpt.errors import KeyMapError
from titan_ckpt.geometry.chunks import Block, Chunk, Shape, TensorInfo
from titan_ckpt.geometry.keymap import Concat, KeyGroup, KeyMap, Shared, TensorOp
from titan_ckpt.weights.low_rank import LowRank


@dataclass(frozen=True)
class BlockDiagonal(TensorOp):
    """Arrange several matrices as the diagonal blocks of one, which is zero elsewhere. A part of 0 columns has none."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def num_native(self) -> int:  # type: ignore[override]
        return len(self._blocks)

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if list(shapes) != (wanted := [block.sizes for block in self._blocks]):
            raise KeyMapError(f"{[list(s) for s in shapes]} are not blocks {[list(s) for s in wanted]}")
        return [(sum(self.rows), sum(self.columns))]

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if shapes[0] != (whole := (sum(self.rows), sum(self.columns))):
            raise KeyMapError(f"{list(shapes[0])} is not {list(whole)}, blocks of ranks {list(self.columns)}")
        return [block.sizes for block in self._blocks]

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        chunk, block, _ = part
        row, column = (a + b for a, b in zip(self._blocks[index].offsets, chunk.offsets, strict=True))
        yield Block(Chunk((row, column), chunk.sizes), block, keys[0])

    def zeros(self, index: int, chunk: Chunk) -> Iterator[tuple[int, Chunk]]:
        """Yield what is left and right of a chunk, and of rows without a matrix those above it, below the last one."""
        above = self._blocks[index - 1] if index else Chunk((0, 0), (0, 0))
        block, is_last = self._blocks[index], index == len(self._blocks) - 1
        row, column = (a + b for a, b in zip(block.offsets, chunk.offsets, strict=True))
        row_stop, column_stop = row + chunk.sizes[0], column + chunk.sizes[1]
        top = above.offsets[0] + above.sizes[0] if chunk.offsets[0] == 0 else row
        bottom = sum(self.rows) if is_last and row_stop == block.offsets[0] + block.sizes[0] else row_stop
        left = 0 if chunk.offsets[1] == 0 else column
        right = sum(self.columns) if column_stop == block.offsets[1] + block.sizes[1] else column_stop
        for start, stop, first, last in (
            (top, row, left, right),
            (row, row_stop, left, column),
            (row, row_stop, column_stop, right),
            (row_stop, bottom, left, right),
        ):
            if start < stop and first < last:
                yield 0, Chunk((start, first), (stop - start, last - first))

    @property
    def _blocks(self) -> list[Chunk]:
        starts = zip(accumulate(self.rows, initial=0), accumulate(self.columns, initial=0), strict=True)
        sizes = zip(self.rows, self.columns, strict=True)
        return [Chunk(start, size) for start, size in zip(starts, sizes, strict=False) if size[1]]


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

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        chunk, block, _ = part
        rank = self._inner(shapes[0][1:])[0 if self.by_rows else 1]
        (row, column), (rows, columns) = self._inner(chunk.offsets[1:]), self._inner(chunk.sizes[1:])
        for i in range(chunk.sizes[0]):
            expert, view = chunk.offsets[0] + i, block[i].t() if self.transpose else block[i]
            if self.by_rows:
                yield Block(Chunk((expert * rank + row, column), (rows, columns)), view, keys[0])
                continue
            for j in range(columns):
                yield Block(Chunk((row, (column + j) * self.experts + expert), (rows, 1)), view[:, j : j + 1], keys[0])

    def _inner(self, sizes: Shape) -> Shape:
        return sizes[::-1] if self.transpose else sizes


class AlsoTransposed(TensorOp):
    """A matrix that is stored as it is and transposed. A table to read has the first form alone."""

    num_file = 2

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0], shapes[0][::-1]]

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0]]

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        yield Block(part.chunk, part.data, keys[0])
        yield Block(Chunk(part.chunk.offsets[::-1], part.chunk.sizes[::-1]), part.data.t(), keys[1])


@dataclass(frozen=True, slots=True)
class Target:
    """One weight of another tool's model and its adapters: one adapter, or one for each part of a fused weight."""

    group: KeyGroup
    adapters: tuple[LowRank, ...]

    @property
    def modules(self) -> list[str]:
        """Return the other tool's module names."""
        return modules_of(self.group)

    @property
    def ranks(self) -> list[int]:
        """Return the rank of each part; 0 for a part without an adapter."""
        ranks = {adapted.weight: adapted.rank for adapted in self.adapters}
        return [ranks.get(fqn, 0) for fqn in self.group.fqns]

    @property
    def is_fused(self) -> bool:
        return len(self.group.fqns) > 1

    @property
    def rank(self) -> int:
        """Return the rank of the exported pair."""
        return sum(self.ranks)

    @property
    def scaling(self) -> float:
        return self.adapters[0].scaling

    @property
    def expected(self) -> str:
        """Return a description of the pair that a folder must have."""
        alone = f" of {', '.join(a.site for a in self.adapters)} alone, exported here" if 0 in self.ranks else ""
        return f"rank {self.adapters[0].rank} scaled by {self.scaling:g}{alone}"

    def alpha(self, use_rslora: bool) -> float:
        """Return the alpha that gives the exported pair the scale of its parts."""
        if not self.is_fused:
            return self.adapters[0].alpha
        return self.scaling * (math.sqrt(self.rank) if use_rslora else self.rank)

    def accepts(self, rank: int, module: str, parts: Mapping[str, Sequence[int]]) -> bool:
        """Return whether a folder's pair of this rank can be read; `parts`: the folder's value of PARTS."""
        if not self.is_fused:
            return rank == self.rank
        return {*self.ranks} == {rank} or (rank == self.rank and list(parts.get(module, ())) == self.ranks)

    def operations(self, a: TensorInfo | None) -> tuple[TensorOp, TensorOp]:
        """Return how the parts' As and Bs lie in the pair of a fused weight.

        `a`: that of the folder that is read; None for a write.
        Raises: KeyMapError if the parts have different scales, and for DoRA on only some parts.
        """
        what = f"{', '.join(self.modules)} is one module there"
        if any(not math.isclose(a.scaling, self.scaling) for a in self.adapters):
            scales = ", ".join(f"{a.site} by {a.scaling:g}" for a in self.adapters)
            raise KeyMapError(f"{what} and has one scale, and here {scales}: give them equal ones")
        if self.adapters[0].magnitude and 0 in self.ranks:
            others = [fqn for fqn, rank in zip(self.group.fqns, self.ranks, strict=True) if not rank]
            raise KeyMapError(f"{what}, and DoRA gives all its rows lengths: adapt {', '.join(others)} as well")
        assert isinstance(self.group.op, Concat)
        if a is not None and {*self.ranks} == {a.shape[0]}:
            return Shared(len(self.ranks)), self.group.op
        return Concat(tuple(filter(None, self.ranks))), BlockDiagonal(self.group.op.rows, tuple(self.ranks))


def modules_of(group: KeyGroup) -> list[str]:
    """Return the names of the other tool's modules that hold a weight."""
    return [key.removesuffix(".weight") for key in group.keys]


def targets_of(adapted: Iterable[LowRank], base: KeyMap) -> list[Target]:
    """Return the other tool's weights with their adapters. Raises: KeyMapError for weights that `base` lacks."""
    by_weight = {a.weight: a for a in adapted}
    groups: dict[KeyGroup, None] = {}
    problems: list[str] = []
    for weight in by_weight:
        try:
            groups[base.group_of_fqn(weight)] = None
        except KeyMapError as error:
            problems.append(str(error))
    if problems:
        raise KeyMapError(f"{len(problems)} adapted weight(s) are unknown\n  " + "\n  ".join(problems))
    return [Target(group, tuple(by_weight[fqn] for fqn in group.fqns if fqn in by_weight)) for group in groups]
