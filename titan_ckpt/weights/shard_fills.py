"""Draws initial values in shards, on the device: no rank ever holds a whole tensor, or draws what it does not hold.

Owns the tiles in which values are drawn, and their seeds. single_device.py runs the model's code; what that code does
beside filling tensors and elementwise changes still happens on whole tensors.

Every fill is a list of steps that are run later, tile by tile. A tile is a box of the whole tensor, and its generator
is seeded by its number among all tiles of all fills of the model, so values do not depend on the layout or on the
number of ranks. They do depend on the kind of device, because each has its own generator, and on the seed of the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from titan_ckpt.geometry.chunks import Block, Chunk, Shape, blocks_of
from titan_ckpt.weights.single_device import CONSTANT, RANDOM, Seen, WholeTensors, key_of

Step = Callable[[torch.Tensor, torch.Generator], object]
"""(values of a tile, its generator) -> nothing that is used; fills or changes the values in place."""

_ELEMENTWISE = frozenset({
    "mul_", "add_", "sub_", "div_", "clamp_", "clamp_min_", "clamp_max_", "abs_", "neg_", "sqrt_", "exp_", "log_",
    "pow_", "erfinv_", "tanh_", "sigmoid_", "reciprocal_",
})  # fmt: skip
_NEVER_DRAWN = 16
"""Standard deviations: uniform numbers of 53 bits make no normal one so far from the mean, so none is cut off."""
_PLAIN = frozenset({type(None), bool, int, float, str})
_ROW = 512
"""Elements of a tile's last dim. Tensor parallelism cuts it in few places, FSDP2 cuts rows."""
_TILE = {"cpu": 2**15}
"""Elements of a tile by the type of device; others, which start many operations slowly, have `_LARGE`."""
_LARGE = 2**21


@dataclass(frozen=True, slots=True)
class Fill:
    """How a tensor is filled: the first of `steps` ignores its values, and the others change them."""

    steps: tuple[Step, ...]
    first_tile: int | None
    """Number of the first tile; None for values that are not random."""


class ShardFills(WholeTensors):
    """A WholeTensors for the construction and initialization of a model, in which fills are drawn in shards.

    All ranks run the same code, from the same state of the generators.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, building=True)
        self._on = device
        self._seed = int(torch.randint(2**32, ()))
        self._num_tiles = 0
        self._torchs_trunc_normal: Any = None

    def __enter__(self) -> Self:
        # it looks at what it has drawn, and is the only fill of nn.init that hides this from a TorchFunctionMode
        self._torchs_trunc_normal = nn.init._no_grad_trunc_normal_
        nn.init._no_grad_trunc_normal_ = self._trunc_normal
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        nn.init._no_grad_trunc_normal_ = self._torchs_trunc_normal
        super().__exit__(kind, error, traceback)
        if error is None:
            for record in {id(record): record for record in (*self._seen.values(), *self._at.values())}.values():
                if record.fill is not None and record.places:
                    self._draw(record, record.fill, (block for t in record.targets() for block in blocks_of(t)))
                    record.written = True

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        into = args[0] if args else kwargs.get("tensor")
        record = self._unopened(into)
        if record is not None and self._deferred(record, func.__name__, args[1:], kwargs):
            return into
        return super().__torch_function__(func, types, args, kwargs)

    def _unopened(self, value: object) -> Seen | None:
        """Return the record of a tensor without whole values; None for any other."""
        record = self._seen.get(key_of(value)) if isinstance(value, torch.Tensor) else None
        return record if record is not None and record.whole is None else None

    def _deferred(self, record: Seen, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Note what a function would do to a tensor; return False if that needs whole values."""
        options = {key: value for key, value in kwargs.items() if key != "tensor"}
        if options.pop("generator", None) is not None or not {*map(type, (*args, *options.values()))} <= _PLAIN:
            return False
        if "tensor" in kwargs:  # a function of nn.init: its options come in the order of the method's arguments
            if name == "kaiming_uniform_":
                bound = _kaiming_bound(record.seen, **options)
                name, args = "uniform_", (-bound, bound)
            else:
                name, args = {"constant_": "fill_"}.get(name, name), (*options.values(),)
            options = {}
        if name in RANDOM:
            self._fill(record, lambda x, g: getattr(x, name)(*args, **options, generator=g))
        elif name in CONSTANT:
            record.fill = Fill((lambda x, _: getattr(x, name)(*args, **options),), None)
        elif name in _ELEMENTWISE and record.fill is not None:
            step: Step = lambda x, _: getattr(x, name)(*args, **options)  # noqa: E731 - one of three
            record.fill = Fill((*record.fill.steps, step), record.fill.first_tile)
        else:
            return False
        return True

    def _trunc_normal(
        self, tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> torch.Tensor:
        """Stand in for nn.init's function of this name."""
        fill = self._torchs_trunc_normal
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - has no public name
            record = self._unopened(tensor)
        if record is None or generator is not None:
            return fill(tensor, mean, std, a, b, generator=generator)  # type: ignore[no-any-return]
        if min(mean - a, b - mean) > _NEVER_DRAWN * std:
            self._fill(record, lambda x, g: x.normal_(mean, std, generator=g))
        else:
            self._fill(record, lambda x, g: fill(x, mean, std, a, b, generator=g))
        return tensor

    def _fill(self, record: Seen, step: Step) -> None:
        record.fill = Fill((step,), self._num_tiles)
        shape = tuple(record.seen.shape)
        self._num_tiles += math.prod(_counts(shape, self._tile(shape)))

    def _open_whole(self, record: Seen, in_use: Sequence[Seen], *, fresh: bool) -> None:
        """Give a record its whole tensor; draw it if it was filled and the code needs its values."""
        fill, record.fill = record.fill, None
        super()._open_whole(record, in_use, fresh=fresh or fill is not None)
        if fill is not None and not fresh:
            assert record.whole is not None
            self._draw(record, fill, [Block(Chunk.whole(tuple(record.whole.shape)), record.whole)])
            record.version = -1  # it has changed, whatever the code does with it

    def _tile(self, shape: Shape) -> Shape:
        return tile_of(shape, _TILE.get(self._on.type, _LARGE))

    def _draw(self, record: Seen, fill: Fill, blocks: Iterable[Block]) -> None:
        """Draw the tiles that overlap these blocks, and copy what lies in them."""
        shape = tuple(record.seen.shape)
        for block in blocks:
            if fill.first_tile is None:
                for step in fill.steps:
                    step(block.data, _UNUSED)
                continue
            generator, tile = torch.Generator(self._on), self._tile(shape)
            memory = torch.empty(math.prod(tile), dtype=record.seen.dtype, device=self._on)
            for number, box in tiles_in(shape, tile, block.chunk):
                values = memory[: box.numel].view(box.sizes)
                generator.manual_seed(scrambled(self._seed + fill.first_tile + number))
                for step in fill.steps:
                    step(values, generator)
                if (part := box.intersect(block.chunk)) is not None:
                    block.data[part.within(block.chunk)].copy_(values[part.within(box)])


_UNUSED = torch.Generator()
"""For steps that draw nothing."""


def tile_of(shape: Shape, num_elements: int) -> Shape:
    """Return the sizes of a tile: a part of the last dim, and of the others as much as makes `num_elements`."""
    sizes: list[int] = []
    room = num_elements
    for size in reversed(shape):
        sizes.append(max(1, min(size, room, _ROW if not sizes and len(shape) > 1 else room)))
        room //= sizes[-1]
    return tuple(reversed(sizes))


def tiles_in(shape: Shape, tile: Shape, chunk: Chunk) -> Iterator[tuple[int, Chunk]]:
    """Yield the number and the box of each tile of a tensor that overlaps a chunk of it."""
    counts = _counts(shape, tile)
    if not chunk.numel:
        return
    ranges = [
        range(offset // size, (offset + length - 1) // size + 1)
        for offset, length, size in zip(chunk.offsets, chunk.sizes, tile, strict=True)
    ]
    for indices in itertools.product(*ranges):
        number = 0
        for index, count in zip(indices, counts, strict=True):
            number = number * count + index
        offsets = tuple(index * size for index, size in zip(indices, tile, strict=True))
        yield number, Chunk(offsets, tuple(map(min, tile, (n - o for n, o in zip(shape, offsets, strict=True)))))


def scrambled(number: int) -> int:
    """Return a seed of 32 bits, all that torch's CPU generator takes; no two numbers below 2^32 have the same.

    Source: MurmurHash3, fmix32.
    """
    number &= 0xFFFFFFFF
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


def _counts(shape: Shape, tile: Shape) -> Shape:
    return tuple(-(-size // part) for size, part in zip(shape, tile, strict=True))


def _kaiming_bound(seen: torch.Tensor, a: float = 0, mode: Any = "fan_in", nonlinearity: Any = "leaky_relu") -> float:
    """Return the largest value that nn.init.kaiming_uniform_ draws."""
    fan = nn.init._calculate_correct_fan(seen, mode)  # noqa: SLF001 - as kaiming_uniform_ does
    return math.sqrt(3.0) * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
