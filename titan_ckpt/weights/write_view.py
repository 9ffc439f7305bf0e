"""The form of native tensors in a file when they are written: dtype, then names and arrangement, lazily.

This module applies a key map to live tensors. It writes nothing: it makes groups of file tensors, which the formats cut
into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from titan_ckpt.errors import KeyMapError
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo, blocks_of, cast, dtype_name, info_of
from titan_ckpt.geometry.keymap import KeyGroup, KeyMap, TensorOp
from titan_ckpt.types import StateDict

CASTABLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Dtypes between which tensors may be cast. float8 and smaller need scales, so a plain cast of them is wrong."""

FileDtype = torch.dtype | Mapping[str, torch.dtype] | None
"""Dtype of floating tensors in a file: one for all, or by file key (other tensors keep theirs), or None to keep all."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Values to be written at `chunk` of file tensor `key`, cast to its dtype; `view` may be strided."""

    key: str
    chunk: Chunk
    view: torch.Tensor


@dataclass(frozen=True, slots=True)
class FileGroup:
    """The file tensors that one application of a rule makes, and the native tensors they come from.

    Nothing is computed until `blocks` is iterated, which resolves one native tensor at a time. If `collective` is
    set, all ranks that hold the group must iterate alike.
    """

    fqns: tuple[str, ...]
    values: tuple[torch.Tensor | LazyTensor, ...]
    infos: Mapping[str, TensorInfo]
    """file key -> global shape and dtype in the file, in the operation's order."""
    op: TensorOp

    @property
    def collective(self) -> bool:
        """Return whether resolving the group takes part in a collective."""
        return any(isinstance(value, LazyTensor) and value.collective for value in self.values)

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield (index of the native tensor, block this rank holds), replicas included."""
        return ((index, block) for index, value in enumerate(self.values) for block in blocks_of(value))

    @property
    def quantised(self) -> Mapping[str, str]:
        """Return the description that files store for each file tensor that `infos` has as several parts."""
        return {}

    def parts_of(self, block: Block, shares: Sequence[Chunk] | None) -> Iterable[Block]:
        """Return the parts of a block that lie in `shares`, chunks of the native tensor; None stands for all of it."""
        if shares is None:
            return [block]
        cuts = (block.chunk.intersect(share) for share in shares)
        return [Block(cut, block.data[cut.within(block.chunk)]) for cut in cuts if cut is not None]

    def cut_shares(self, index: int, block: Block, shares: Sequence[Chunk] | None) -> Iterator[FilePiece]:
        """Cut the parts of a block of native tensor `index` that lie in `shares` into pieces of file tensors."""
        for part in self.parts_of(block, shares):
            yield from self.cut(index, part)

    def cut(self, index: int, block: Block) -> Iterator[FilePiece]:
        """Cut a block of native tensor `index`, or any part of it, into pieces of file tensors."""
        keys = tuple(self.infos)
        shapes = [info_of(value).shape for value in self.values]
        for piece in self.op.pieces(index, shapes, block.chunk, block.data):
            yield FilePiece(keys[piece.file_index], piece.chunk, piece.view)

    def pieces(self) -> Iterator[FilePiece]:
        """Yield every piece that this rank holds of the group, replicas included."""
        for index, block in self.blocks():
            yield from self.cut(index, block)


def file_group(group: KeyGroup, values: Sequence[torch.Tensor | LazyTensor], dtype: FileDtype) -> FileGroup:
    """Return the file tensors of one group. Raises: KeyMapError for shapes or dtypes that do not fit."""
    infos = [info_of(value) for value in values]
    native = [info.shape for info in infos]
    shapes = group.op.file_shapes(native)
    if list(group.op.native_shapes(shapes)) != native:
        raise KeyMapError(f"shapes {native} do not fit {group.op}")
    file_infos = {}
    for key, shape in zip(group.keys, shapes, strict=True):
        wanted = dtype.get(key) if isinstance(dtype, Mapping) else dtype
        dtypes = {wanted if wanted in CASTABLE and info.dtype in CASTABLE else info.dtype for info in infos}
        if len(dtypes) > 1:
            raise KeyMapError(f"one file tensor cannot hold {', '.join(sorted(map(dtype_name, dtypes)))}")
        file_infos[key] = TensorInfo(shape, dtypes.pop())
    return FileGroup(group.fqns, tuple(values), file_infos, group.op)


def cast_all(tensors: StateDict, dtype: torch.dtype | None) -> StateDict:
    """Return the tensors with floating ones of 16 bits or more cast when they are written; None casts none."""
    if dtype is None:
        return tensors
    return {fqn: cast(value, dtype) if info_of(value).dtype in CASTABLE else value for fqn, value in tensors.items()}


def made_twice(groups: Sequence[FileGroup], key_map: KeyMap) -> list[str]:
    """Return a line for each file key that several groups make and that is not tied."""
    makers: dict[str, list[str]] = {}
    for group in groups:
        for key in group.infos:
            makers.setdefault(key, []).append(", ".join(group.fqns))
    twice = {key: fqns for key, fqns in makers.items() if len(fqns) > 1 and not key_map.ties(key)}
    return [f"{key} would be made from {' and from '.join(fqns)}" for key, fqns in twice.items()]
