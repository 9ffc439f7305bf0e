"""Logical digests: the same for every way of holding the values, another for every other value."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.geometry.chunks import Chunk, info_of
from titan_ckpt.weights.digest import Partial, add, finish, logical_digests, partial_digest

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype) if dtype != torch.bool else raw > 127


def digest(tensor: torch.Tensor) -> str:
    return logical_digests({"x": tensor}, Coordinator.current())["x"]


def cut(n: int, at: list[int]) -> list[tuple[int, int]]:
    edges = sorted({0, n, *(a for a in at if a < n)})
    return list(itertools.pairwise(edges))


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(1, 6), max_size=2), min_size=3, max_size=3),
)
def test_any_cutting_into_chunks_gives_the_same_digest(
    dtype: torch.dtype, shape: list[int], cuts: list[list[int]]
) -> None:
    """Chunks of any rows and columns, aligned to nothing, add up to the digest of the whole."""
    tensor = values(tuple(shape), dtype)
    info = info_of(tensor)
    total: Partial = (0, 0)
    for box in itertools.product(*(cut(n, at) for n, at in zip(shape, cuts, strict=False))):
        chunk = Chunk(tuple(a for a, _ in box), tuple(b - a for a, b in box))
        total = add(total, partial_digest(info, chunk, tensor[tuple(slice(a, b) for a, b in box)]))
    assert finish(info, total) == digest(tensor)


@given(st.sampled_from(DTYPES), st.integers(1, 6), st.integers(2, 9), st.data())
def test_a_flipped_bit_is_another_digest(dtype: torch.dtype, rows: int, columns: int, data: st.DataObject) -> None:
    """Any single bit of any element counts; a bool has one."""
    tensor = values((rows, columns), dtype)
    other = tensor.clone()
    flat = other.view(torch.uint8).reshape(-1)
    at = data.draw(st.integers(0, flat.numel() - 1))
    flat[at] ^= 1 << (0 if dtype == torch.bool else data.draw(st.integers(0, 7)))
    assert digest(other) != digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sign_flips_in_pairs_do_not_cancel(dtype: torch.dtype) -> None:
    """Negating any two elements, which cancels in a plain sum mod 2^64, is another digest."""
    tensor = torch.ones(3, 8, dtype=dtype)
    seen = {digest(tensor)}
    for a, b in itertools.combinations(range(24), 2):
        other = tensor.clone()
        other.view(-1)[[a, b]] *= -1
        seen.add(digest(other))
    assert len(seen) == 1 + 24 * 23 // 2


@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 99_999), max_size=3))
def test_long_rows_may_be_cut_anywhere(dtype: torch.dtype, cuts: list[int]) -> None:
    """Rows of several parts give the same digest in pieces, and another when two of their parts are swapped."""
    tensor = values((2, 100_000), dtype)
    info = info_of(tensor)
    total: Partial = (0, 0)
    for a, b in cut(100_000, cuts):
        total = add(total, partial_digest(info, Chunk((0, a), (2, b - a)), tensor[:, a:b]))
    assert finish(info, total) == digest(tensor)
    part = (1 << 18) // dtype.itemsize
    if 2 * part <= 100_000:
        swapped = torch.cat([tensor[:, part : 2 * part], tensor[:, :part], tensor[:, 2 * part :]], 1)
        assert digest(swapped) != digest(tensor)


def test_shape_and_dtype_count() -> None:
    """The same bytes under another shape or dtype are another tensor; strides do not count."""
    tensor = torch.zeros(4, 6)
    assert digest(tensor) == digest(torch.zeros(6, 4).t())
    assert len({digest(t) for t in [tensor, tensor.view(6, 4), tensor.view(24), tensor.to(torch.int32)]}) == 4


def test_scalars_and_empty_tensors_have_digests() -> None:
    """0-d tensors and tensors without elements are ordinary."""
    digests = {digest(torch.tensor(1.0)), digest(torch.tensor(2.0)), digest(torch.zeros(0)), digest(torch.zeros(0, 3))}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("tensor", "recorded"),
    [
        (torch.arange(60_000, dtype=torch.float32).view(3, 20_000), "3b6370b7608b512eb8851f78677dae4f"),
        ((torch.arange(810_012) % 251 - 125).to(torch.int8).view(3, 270_004), "b703dc84147423c79f6b21309372e0dd"),
        ((torch.arange(12_291) % 251 - 125).to(torch.int8).view(3, 4_097), "ebb1a2619a8183fa7af36e33504e056f"),
        ((torch.arange(810_003) % 251 - 125).to(torch.int8).view(3, 270_001), "643a116f6ef91bde002ac278a01cc4bd"),
    ],
    ids=["one part", "two parts", "padded words", "two parts, padded words"],
)
def test_the_digest_is_what_it_was(tensor: torch.Tensor, recorded: str) -> None:
    """Recorded adapters hold digests of their base: the definition (docs/format.md) must not move."""
    info = info_of(tensor)
    total = partial_digest(info, Chunk.whole(info.shape), tensor)
    rows = tensor.numpy().view(numpy.uint8)
    words = numpy.pad(rows, ((0, 0), (0, -rows.shape[1] % 4))).view("<i4").tolist()
    by_hand = [0, 0]
    for i, lane in enumerate((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)):
        of_rows, of_parts = keys(numpy.arange(3), lane), keys(numpy.arange(2), lane ^ 0x2545F4914F6CDD1D)
        of_words = keys(numpy.arange(65_536), lane ^ 0x9FB21C651E98DF25).tolist()
        for r, p in itertools.product(range(3), range(2)):
            part = words[r][p * 65_536 : (p + 1) * 65_536]
            inside = sum(key * word for key, word in zip(of_words, part, strict=False))
            by_hand[i] += int(of_rows[r]) * int(of_parts[p]) * inside
    assert total == tuple(n % 2**64 for n in by_hand)
    assert finish(info, total) == recorded


def keys(numbers: numpy.ndarray, lane: int) -> numpy.ndarray:
    """splitmix64 in unsigned integers, made odd."""
    u = numpy.uint64
    z = numbers.astype(u) * u(0x9E3779B97F4A7C15) + u(lane)
    z = (z ^ (z >> u(30))) * u(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u(27))) * u(0x94D049BB133111EB)
    return (z ^ (z >> u(31))) | u(1)


def test_changes_that_one_byte_alone_would_hide_are_seen() -> None:
    """Bytes that move their value to a neighbour, in one row, between rows and between parts."""
    tensor = torch.zeros(3, 300_000, dtype=torch.int8)
    seen = set()
    for r, c in itertools.product(range(3), (0, 1, 65_535, 65_536, 262_143, 262_144, 299_999)):
        for value in (-128, -1, 1, 127):
            tensor[r, c] = value
            seen.add(digest(tensor))
            tensor[r, c] = 0
    assert len(seen) == 3 * 7 * 4


def test_the_order_in_memory_does_not_count() -> None:
    """A large tensor with other strides, which is read slice by slice, has the digest of its contiguous copy."""
    value = torch.randn(40, 30, 200, generator=torch.Generator().manual_seed(0)).permute(2, 0, 1)
    info, whole = info_of(value), Chunk.whole(value.shape)
    assert partial_digest(info, whole, value) == partial_digest(info, whole, value.contiguous())


@pytest.mark.parametrize(
    "tensor",
    [
        values((131_075,), torch.bfloat16),  # the row has an odd number of elements in two parts
        values((2, 131_075), torch.bfloat16),
        values((3, 262_145), torch.int8),
        values((1, 5), torch.bfloat16).t(),  # a column with the stride of a row
        values((5, 5), torch.float32)[::5, ::5],
    ],
    ids=["flat", "rows", "bytes", "column", "element"],
)
def test_strides_of_a_single_row_or_column_do_not_count(tensor: torch.Tensor) -> None:
    """A tensor is contiguous whatever its strides in dims of size 1, but not each of them can be viewed as words."""
    info = info_of(tensor)
    total: Partial = (0, 0)
    for c in range(0, tensor.shape[-1], 50_000):  # no boundary is that of a part
        block = tensor[..., c : c + 50_000].clone(memory_format=torch.contiguous_format)
        offsets = (*(0 for _ in tensor.shape[:-1]), c)
        total = add(total, partial_digest(info, Chunk(offsets, tuple(block.shape)), block))
    assert finish(info, total) == digest(tensor)
