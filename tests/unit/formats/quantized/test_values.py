"""The algebra of dequantized tensors: any box of any expression is that box of the whole, into any memory."""

from __future__ import annotations

import runpy
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.interop.folders import a_box
from titan_ckpt.formats.quantized import values
from titan_ckpt.formats.quantized.open import cut
from titan_ckpt.formats.quantized.values import (
    Codes,
    Constant,
    Joined,
    Leaf,
    Load,
    Numbers,
    Quotient,
    Scaled,
    Transposed,
    Unflattened,
    Values,
)
from titan_ckpt.formats.reading.slices import put
from titan_ckpt.geometry.chunks import Chunk, Shape, TensorInfo

Stored = dict[str, torch.Tensor]


def numbers(stored: Stored, key: str, value: torch.Tensor) -> Numbers:
    stored[key] = value
    return Numbers(key, TensorInfo(tuple(value.shape), value.dtype))


def codes(stored: Stored, key: str, shape: Shape, table: torch.Tensor) -> Codes:
    pairs = table.shape[1] == 2
    held = (*shape[:-1], -(-shape[-1] // 2)) if pairs else shape
    stored[key] = torch.randint(0, 256, held, dtype=torch.uint8)
    return Codes(key, TensorInfo(held, torch.uint8), shape, table)


def load_from(stored: Stored) -> Load:
    def load(key: str, box: Chunk) -> torch.Tensor:
        return stored[key][box.within(Chunk.whole(stored[key].shape))]

    return load


def whole(value: Values, stored: Stored) -> torch.Tensor:
    return value.read(Chunk.whole(value.shape), load_from(stored))


def check_box(value: Values, stored: Stored, box: Chunk) -> None:
    """Compare a box with the same box of the whole, and what it read with what it said it needs."""
    needed: dict[str, Chunk] = {leaf.key: region for leaf, region in value.needs(box)}

    def load(key: str, region: Chunk) -> torch.Tensor:
        assert needed[key] == region
        return load_from(stored)(key, region)

    before = {key: tensor.clone() for key, tensor in stored.items()}
    found = value.read(box, load)
    expected = whole(value, stored)[box.within(Chunk.whole(value.shape))]
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    found.zero_()
    assert all(torch.equal(tensor, before[key]) for key, tensor in stored.items())


@given(st.data())
def test_a_box_of_scaled_blocks_is_that_box_of_the_whole(data: st.DataObject) -> None:
    """Blocks of any size, also cut off at the ends; scale, zero point and offset; boxes that cross blocks anywhere."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    block = tuple(data.draw(st.integers(1, n)) for n in shape)
    grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    stored: Stored = {}
    table = data.draw(st.sampled_from([values.E2M1_PAIRS, values.offset_integers(4), values.offset_integers(8)]))
    parts = [numbers(stored, name, torch.randn(grid)) for name in ("scale", "zero", "offset")]
    zero, offset = (part if data.draw(st.booleans()) else None for part in parts[1:])
    value = Scaled(codes(stored, "codes", shape, table), parts[0], block, zero=zero, offset=offset)
    spread = [stored[n] for n in ("scale", "zero", "offset")]
    for dim, (length, size) in enumerate(zip(block, shape, strict=True)):
        spread = [part.repeat_interleave(length, dim).narrow(dim, 0, size) for part in spread]
    dense = whole(value.values, stored)
    dense = dense - spread[1] if zero else dense
    dense = dense * spread[0]
    assert torch.equal(whole(value, stored), dense + spread[2] if offset else dense)
    check_box(value, stored, a_box(data, shape))


@given(st.data())
def test_a_box_of_rearranged_values_is_that_box_of_the_whole(data: st.DataObject) -> None:
    """Transposed dims, joined and cut dims, and one dim as many: each is what torch makes of the whole."""
    stored: Stored = {}
    a, b, c, d = (data.draw(st.integers(1, 5)) for _ in range(4))
    base = numbers(stored, "base", torch.randn(a, b, c, d))
    dims = tuple(data.draw(st.permutations(range(4))))
    turned = Transposed(base, dims)
    assert torch.equal(whole(turned, stored), stored["base"].permute(dims))
    check_box(turned, stored, a_box(data, turned.shape))
    runs = data.draw(st.sampled_from([(2, 2), (1, 3), (3, 1), (4,), (1, 1, 2)]))
    sizes, dim = [], 0
    for run in runs:
        sizes.append(prod(turned.shape[dim : dim + run]))
        dim += run
    shape = tuple(data.draw(st.integers(1, n)) for n in sizes)
    joined = Joined(turned, runs, shape)
    dense = stored["base"].permute(dims).reshape(sizes)[tuple(slice(n) for n in shape)]
    assert torch.equal(whole(joined, stored), dense)
    check_box(joined, stored, a_box(data, shape))
    flat = codes(stored, "flat", (a * b * c,), values.E2M1_PAIRS)
    many = Unflattened(flat, (a, b, c))
    assert torch.equal(whole(many, stored), whole(flat, stored).view(a, b, c))
    check_box(many, stored, a_box(data, many.shape))


def test_a_divisor_and_a_constant_hold_for_the_whole_tensor() -> None:
    """A global scale divides every block's, and a constant is the same anywhere."""
    stored: Stored = {}
    scale = numbers(stored, "scale", torch.randn(4, 6))
    divisor = numbers(stored, "divisor", torch.tensor([[3.0]]))
    value = Scaled(Quotient(scale, divisor), Constant((1, 1), 0.5), (4, 6))
    assert torch.equal(whole(value, stored), stored["scale"] / 3 * 0.5)
    check_box(value, stored, Chunk((1, 2), (2, 3)))


@given(st.data())
def test_cutting_covers_a_box_and_putting_fills_its_memory(data: st.DataObject) -> None:
    """Whatever the memory's shape and strides and the order of cutting, each element lands once in its place."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    box = a_box(data, shape)
    source = torch.arange(prod(shape)).reshape(shape)
    limit = data.draw(st.integers(1, 30))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    sizes = data.draw(st.sampled_from([*_factorings(box.numel), box.sizes]))
    memory = torch.full([2 * n for n in sizes], -1)[tuple(slice(None, None, 2) for _ in sizes)]
    parts = list(cut(box, limit, order))
    assert sum(part.numel for part in parts) == box.numel and max(part.numel for part in parts) <= limit
    for part in parts:
        put(memory, box, part, source[part.within(Chunk.whole(shape))])
    assert torch.equal(memory.reshape(-1), source[box.within(Chunk.whole(shape))].reshape(-1))


def _factorings(n: int) -> list[tuple[int, ...]]:
    pairs = [(a, n // a) for a in range(1, n + 1) if n % a == 0]
    return [(n,), *pairs, *((1, a, b) for a, b in pairs)]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_tables_of_numbers_are_what_torch_casts(dtype: torch.dtype) -> None:
    """Every byte has the value that torch gives it, not-a-number included."""
    every = torch.arange(256).to(torch.uint8).view(dtype).float()
    assert torch.equal(values.floats(dtype).view(256).view(torch.int32), every.view(torch.int32))


def test_tables_of_codes_are_what_the_formats_say() -> None:
    """E8M0 is a power of two, subnormal ones too; nibbles come low or high first, signed or with an offset."""
    powers = torch.arange(255).to(torch.uint8)
    assert torch.equal(values.EXPONENTS.view(256)[:255], powers.view(torch.float8_e8m0fnu).float())
    assert values.INT4_PAIRS[0x8F].tolist() == [-1, -8]
    assert values.offset_integers(4)[0x8F].tolist() == [7, 0]
    assert values.offset_integers(8)[[0, 128, 255]].view(-1).tolist() == [-128, 0, 127]
    assert values.E2M1_PAIRS[0xF7].tolist() == [6, -6]
    assert values.nibbles(torch.arange(16), high_first=True)[0x2A].tolist() == [2, 10]


def test_tables_are_the_same_where_a_model_is_built() -> None:
    """A builder may import them, under another device and another dtype than torch's own."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            made = runpy.run_path(values.__file__)
            made["FLOAT8"], made["OFFSET"] = made["floats"](torch.float8_e4m3fn), made["offset_integers"](8)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = {name: getattr(values, name) for name in ("EXPONENTS", "E2M1_PAIRS", "INT4_PAIRS")}
    expected |= {"FLOAT8": values.floats(torch.float8_e4m3fn), "OFFSET": values.offset_integers(8)}
    for name, table in expected.items():
        assert made[name].dtype == torch.float32
        assert torch.equal(made[name].view(torch.int32), table.view(torch.int32)), name


def test_leaves_are_the_stored_tensors() -> None:
    """An expression names every tensor that it is computed from, once."""
    stored: Stored = {}
    scale = numbers(stored, "scale", torch.ones(2, 2))
    value = Transposed(Scaled(codes(stored, "codes", (4, 6), values.E2M1_PAIRS), scale, (2, 3)), (1, 0))
    assert sorted(leaf.key for leaf in value.leaves()) == ["codes", "scale"]
    assert all(isinstance(leaf, Leaf) for leaf in value.leaves())
