"""Reversible tables between native fqns and file keys, with the tensor operations that go with the names.

Owns names and the arrangement of values. Knows no files, no dtypes and no process groups.

A `TensorOp` never computes: it cuts a block of a native tensor into *views* of the block's own memory, each arranged
as in one file tensor. Writing copies out of the views, loading copies into them, so one function serves both directions
and a table cannot be irreversible. It works on any chunk of the native tensor, so a rank needs no other rank.
The idea of aligned tables is fairseq2's (`interop.py`) and OLMo-core's (`state_converter.py`); the views are ours.
"""

from __future__ import annotations

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import torch

from titan_ckpt.errors import KeyMapError
from titan_ckpt.geometry.chunks import Block, Chunk, Shape


class TensorOp(ABC):
    """Maps the values of `num_native` native tensors to `num_file` file tensors."""

    num_native = 1
    num_file = 1

    @abstractmethod
    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the global shapes in the file for these native global shapes. Raises: KeyMapError on a misfit."""

    @abstractmethod
    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the native global shapes for these file shapes."""

    @abstractmethod
    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        """Cut `part`, a block of native tensor `index` of `shapes`, into views of it, one per file region.

        `keys`: the names of the file tensors.
        """

    def zeros(self, index: int, chunk: Chunk) -> Iterator[tuple[int, Chunk]]:
        """Yield (file index, region) of zeros that a file has beside the pieces of a chunk of native tensor `index`.

        The pieces and the zeros of all chunks make up the file tensors.
        """
        return iter(())


class Identity(TensorOp):
    """The same tensor under a second name."""

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return list(shapes)

    native_shapes = file_shapes

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        yield Block(part.chunk, part.data, keys[0])


@dataclass(frozen=True)
class PermuteRotary(TensorOp):
    """Rows of interleaved rotary pairs (native) as two halves per head (Hugging Face).

    Shape: (num_heads * head_dim, ...) both ways; 1-D tensors (biases, DoRA magnitudes) too.
    Source: transformers, models/llama/convert_llama_weights_to_hf.py.
    """

    num_heads: int

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if not shapes[0] or shapes[0][0] % (2 * self.num_heads):
            raise KeyMapError(f"rows of {list(shapes[0])} do not divide by 2 * {self.num_heads} heads")
        return list(shapes)

    native_shapes = file_shapes

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        chunk, block, _ = part
        head_dim = shapes[0][0] // self.num_heads
        half = head_dim // 2
        start, rest, rest_sizes = chunk.offsets[0], chunk.offsets[1:], chunk.sizes[1:]
        stop = start + chunk.sizes[0]
        first, last = -(-start // head_dim), stop // head_dim
        if first < last:  # whole heads stay contiguous in the file
            rows = block[first * head_dim - start : last * head_dim - start]
            view = rows.view(last - first, half, 2, *rest_sizes).transpose(1, 2)
            yield Block(Chunk((first * head_dim, *rest), (rows.shape[0], *rest_sizes)), view, keys[0])
        ragged = [(start, stop)] if first > last else [(start, first * head_dim), (last * head_dim, stop)]
        for a, b in ragged:
            for parity in (0, 1):  # rows of one parity are together in one half of their head
                row = a + (a + parity) % 2
                if row >= b:
                    continue
                view = block[row - start : b - start : 2]
                head = row // head_dim * head_dim
                offset = head + parity * half + (row - head) // 2
                yield Block(Chunk((offset, *rest), (view.shape[0], *rest_sizes)), view, keys[0])


@dataclass(frozen=True)
class PermuteRows(TensorOp):
    """The rows of a tensor in another order: row i of the file is row `order[i]` of the native tensor."""

    order: tuple[int, ...]

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if not shapes[0] or shapes[0][0] != len(self.order):
            raise KeyMapError(f"{list(shapes[0])} does not have {len(self.order)} rows")
        return list(shapes)

    native_shapes = file_shapes

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        chunk, block, _ = part
        start, stop = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
        held = [(i, row) for i, row in enumerate(self.order) if start <= row < stop]
        while held:
            run = self._run(held)
            del held[: len(run)]
            (first, row), (_, last) = run[0], run[-1]
            step = run[1][1] - row if len(run) > 1 else 1
            view = block[row - start : last - start + 1 : step]
            yield Block(Chunk((first, *chunk.offsets[1:]), (len(run), *chunk.sizes[1:])), view, keys[0])

    @staticmethod
    def _run(held: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Return the longest start of (row in the file, native row) that one strided view can hold."""
        step = held[1][1] - held[0][1] if len(held) > 1 else 0
        end = 1
        while (
            end < len(held)
            and step > 0
            and (held[end][0] - held[end - 1][0], held[end][1] - held[end - 1][1]) == (1, step)
        ):
            end += 1
        return held[:end]


@dataclass(frozen=True)
class Unstack(TensorOp):
    """One native tensor whose dim 0 counts experts, as one file tensor per expert, optionally transposed.

    Shape: (num_file, a, b) native; num_file tensors of (a, b), or (b, a) with `transpose`, in the file.
    """

    num_file: int
    transpose: bool = False

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if not shapes[0] or shapes[0][0] != self.num_file:
            raise KeyMapError(f"dim 0 of {list(shapes[0])} is not {self.num_file} experts")
        if self.transpose and len(shapes[0]) != 3:
            raise KeyMapError(f"experts can be transposed if they are matrices, not {list(shapes[0][1:])}")
        expert = shapes[0][1:]
        return [expert[::-1] if self.transpose else expert] * self.num_file

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        expert = shapes[0]
        if differing := [list(s) for s in shapes if s != expert]:
            raise KeyMapError(f"experts differ in shape: {list(expert)} and {differing[0]}")
        return [(self.num_file, *(expert[::-1] if self.transpose else expert))]

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        chunk, block, _ = part
        inner = Chunk(chunk.offsets[1:], chunk.sizes[1:])
        if self.transpose:
            inner = Chunk(inner.offsets[::-1], inner.sizes[::-1])
        for i in range(chunk.sizes[0]):
            view = block[i].transpose(-1, -2) if self.transpose else block[i]
            yield Block(inner, view, keys[chunk.offsets[0] + i])


class Transpose(TensorOp):
    """A matrix, or each of a stack, stored transposed. Shape: (..., a, b) native, (..., b, a) in the file."""

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if len(shapes[0]) < 2:
            raise KeyMapError(f"only matrices can be transposed, not {list(shapes[0])}")
        return [_turned(shapes[0])]

    native_shapes = file_shapes

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        chunk, block, _ = part
        yield Block(Chunk(_turned(chunk.offsets), _turned(chunk.sizes)), block.transpose(-1, -2), keys[0])


def _turned(values: Shape) -> Shape:
    return (*values[:-2], values[-1], values[-2])


@dataclass(frozen=True)
class Concat(TensorOp):
    """Several native tensors as one file tensor, row after row (gate and up as gate_up)."""

    rows: tuple[int, ...]

    @property
    def num_native(self) -> int:  # type: ignore[override]
        return len(self.rows)

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if any(not s or s[0] != n or s[1:] != shapes[0][1:] for s, n in zip(shapes, self.rows, strict=True)):
            raise KeyMapError(f"{[list(s) for s in shapes]} cannot be one tensor of rows {list(self.rows)}")
        return [(sum(self.rows), *shapes[0][1:])]

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if not shapes[0] or shapes[0][0] != sum(self.rows):
            raise KeyMapError(f"{list(shapes[0])} cannot be split into rows {list(self.rows)}")
        return [(n, *shapes[0][1:]) for n in self.rows]

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        chunk, block, _ = part
        row = sum(self.rows[:index]) + chunk.offsets[0]
        yield Block(Chunk((row, *chunk.offsets[1:]), chunk.sizes), block, keys[0])


@dataclass(frozen=True)
class Split(TensorOp):
    """One native tensor as several file tensors, cut by rows (fused qkv as q, k and v)."""

    rows: tuple[int, ...]

    @property
    def num_file(self) -> int:  # type: ignore[override]
        return len(self.rows)

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return Concat(self.rows).native_shapes(shapes)

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return Concat(self.rows).file_shapes(shapes)

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        chunk, block, _ = part
        start = 0
        for i, n in enumerate(self.rows):
            rows = chunk.intersect(Chunk((start, *chunk.offsets[1:]), (n, *chunk.sizes[1:])))
            if rows is not None:
                region = Chunk((rows.offsets[0] - start, *rows.offsets[1:]), rows.sizes)
                yield Block(region, block[rows.within(chunk)], keys[i])
            start += n


@dataclass(frozen=True)
class Repeat(TensorOp):
    """One native tensor as several equal file tensors (the A of a fused weight's adapter, for each of its parts).

    A table to read has the first of them; its `repeats` names the others, which must be equal.
    """

    num_file: int = 2

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0]] * self.num_file

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0]]

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        for key in keys:
            yield Block(part.chunk, part.data, key)


@dataclass(frozen=True)
class Chain(TensorOp):
    """`first`, then `then` on each of its file tensors: unstacks experts, then splits the fused rows of each.

    The file tensors of `first`'s first file tensor come first, then those of its second, and so on.
    """

    first: TensorOp
    then: TensorOp

    def __post_init__(self) -> None:
        assert self.then.num_native == 1, "each tensor goes on alone"
        assert not isinstance(self.first, PermuteRotary), "its views are not shaped as their chunks"

    @property
    def num_native(self) -> int:  # type: ignore[override]
        return self.first.num_native

    @property
    def num_file(self) -> int:  # type: ignore[override]
        return self.first.num_file * self.then.num_file

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shape for between in self.first.file_shapes(shapes) for shape in self.then.file_shapes([between])]

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        step = self.then.num_file
        runs = [shapes[i : i + step] for i in range(0, len(shapes), step)]
        return self.first.native_shapes([self.then.native_shapes(run)[0] for run in runs])

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        step, between = self.then.num_file, self.first.file_shapes(shapes)
        runs = {keys[i * step]: i for i in range(len(between))}
        for piece in self.first.pieces(index, shapes, part, [*runs]):
            i = runs[piece.key]
            yield from self.then.pieces(0, [between[i]], piece, keys[i * step : (i + 1) * step])


@dataclass(frozen=True)
class Shared(TensorOp):
    """Several native tensors that are one tensor in the file.

    A rule with it is for reading: nothing makes the native tensors equal before they are written.
    """

    num_native: int = 2

    def file_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if differing := [list(shape) for shape in shapes if shape != shapes[0]]:
            raise KeyMapError(f"tensors that are one in the file differ in shape: {list(shapes[0])} and {differing[0]}")
        return [shapes[0]]

    def native_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0]] * self.num_native

    def pieces(self, index: int, shapes: Sequence[Shape], part: Block, keys: Sequence[str]) -> Iterator[Block]:
        yield Block(part.chunk, part.data, keys[0])


class Tie(Shared):
    """Several names of one tensor (embeddings and output matrix), which the file has once.

    A table applies it to each name separately, so a model may hold any of the names, as one tensor or as copies on
    several pipeline stages. A load fills each from the file's tensor; an export writes each to the same place, so its
    proof fails if they differ. The file's key maps to the first name.
    """


IDENTITY = Identity()
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class KeyRule:
    """One row of a table: native name pattern(s) <-> file key pattern(s), and the operation between them.

    `{name}` in a pattern stands for one dot-free segment, the same on both sides.
    """

    native: tuple[str, ...]
    file: tuple[str, ...]
    op: TensorOp = IDENTITY

    @staticmethod
    def of(native: str | Iterable[str], file: str | Iterable[str], op: TensorOp = IDENTITY) -> KeyRule:
        natives = (native,) if isinstance(native, str) else tuple(native)
        files = (file,) if isinstance(file, str) else tuple(file)
        if (len(natives), len(files)) != (op.num_native, op.num_file):
            raise KeyMapError(f"{natives} <-> {files} does not fit {op}: {op.num_native} <-> {op.num_file} names")
        if len({frozenset(_PLACEHOLDER.findall(pattern)) for pattern in (*natives, *files)}) > 1:
            raise KeyMapError(f"{natives} <-> {files} is not reversible: every name needs the same placeholders")
        return KeyRule(natives, files, op)


@dataclass(frozen=True)
class KeyGroup:
    """The names that one application of a rule ties together."""

    fqns: tuple[str, ...]
    keys: tuple[str, ...]
    op: TensorOp


_Rows = tuple[tuple[str, re.Pattern[str], KeyRule], ...]


@dataclass(frozen=True)
class KeyMap:
    """A reversible table of rules. An unknown name raises, with the nearest known ones.

    `identity=True`: names that no rule matches are the same on both sides (a model trained under its own names).
    """

    rules: tuple[KeyRule, ...] = ()
    identity: bool = False
    ignored: tuple[str, ...] = ()
    """Patterns of file keys in old folders that no model needs: a load skips and logs them."""
    left_out: frozenset[str] = frozenset()
    """File keys of one folder that a load skips and logs, as those that `ignored` matches."""
    repeats: tuple[tuple[str, str], ...] = ()
    """(File key, file key that it repeats) of tied tensors that a folder has twice; both must be equal."""
    nameless: frozenset[str] = frozenset()
    """Native names of tensors that these files have no name for, such as those that the model computes: a load leaves
    them as they are, and an export leaves them out."""
    verified: bool = False
    """Names come from the library that opens the folder, so an export need not guess whether config.json fits them."""
    float32: Mapping[torch.dtype, Collection[str]] = field(default_factory=dict, repr=False, compare=False)
    """dtype of a folder -> the tensors that the program which opens it holds in float32 all the same."""

    def __post_init__(self) -> None:
        _ = self._native, self._file  # a malformed pattern is an error where the table is built

    @cached_property
    def _native(self) -> _Rows:
        return tuple((p, _compile(p), r) for r in self.rules for p in r.native)

    @cached_property
    def _file(self) -> _Rows:
        return tuple((p, _compile(p), r) for r in self.rules for p in r.file)

    def group_of_fqn(self, fqn: str) -> KeyGroup:
        """Return the group a native fqn belongs to. Raises: KeyMapError naming the nearest known patterns."""
        return self._group(fqn, self._native, "native name")

    def group_of_key(self, key: str) -> KeyGroup:
        """Return the group a file key belongs to. Raises: KeyMapError naming the nearest known patterns."""
        return self._group(key, self._file, "file key")

    def fqns_of_key(self, key: str) -> tuple[str, ...]:
        """Return all native names of a file key, of tied tensors every one. Raises: KeyMapError."""
        for _, pattern, rule in self._file:
            if match := pattern.fullmatch(key):
                return tuple(p.format(**match.groupdict()) for p in rule.native)
        return self.group_of_key(key).fqns

    def casts(self, fqns: Collection[str], dtype: object) -> bool:
        """Return whether an export in this dtype casts these tensors. Rounded in the file, the others stayed wrong."""
        return not isinstance(dtype, torch.dtype) or not set(fqns) & set(self.float32.get(dtype, ()))

    def ignores(self, key: str) -> bool:
        """Return whether a load skips this file key."""
        return key in self.left_out or any(_compile(pattern).fullmatch(key) for pattern in self.ignored)

    def of_folder(self, keys: Collection[str]) -> KeyMap:
        """Return the table for a folder with these keys; a model's library may know several names of a tensor."""
        return self

    def ties(self, key: str) -> bool:
        """Return whether several native names may map to this file key."""
        return any(isinstance(rule.op, Tie) and pattern.fullmatch(key) for _, pattern, rule in self._file)

    def _group(self, name: str, table: _Rows, what: str) -> KeyGroup:
        for text, pattern, rule in table:
            if match := pattern.fullmatch(name):
                values = match.groupdict()
                native, op = rule.native, rule.op
                if isinstance(op, Tie):
                    native, op = ((text,) if text in native else native[:1]), IDENTITY
                return KeyGroup(
                    tuple(p.format(**values) for p in native), tuple(p.format(**values) for p in rule.file), op
                )
        if self.identity:
            return KeyGroup((name,), (name,), IDENTITY)
        known = [text for text, _, _ in table]
        near = difflib.get_close_matches(re.sub(r"\.\d+\.", ".{i}.", name), known, n=3, cutoff=0.3)
        hint = f"; nearest known: {', '.join(near)}" if near else ""
        raise KeyMapError(f"the model's table has no {what} {name!r}{hint}", (name,))


def selected(names: Iterable[str], patterns: Collection[str]) -> frozenset[str]:
    """Return the names that any of the shell patterns matches, which people write in settings."""
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _compile(pattern: str) -> re.Pattern[str]:
    """Turn a name pattern into a regular expression; a placeholder's second use must repeat its first."""
    seen: set[str] = set()
    text = ""
    for i, part in enumerate(_PLACEHOLDER.split(pattern)):
        if i % 2 == 0:
            text += re.escape(part)
        else:
            text += f"(?P={part})" if part in seen else f"(?P<{part}>[^.]+)"
            seen.add(part)
    return re.compile(text)
