"""Boxes of row-major arrays and chunks of tensors, against numpy's own indexing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.geometry.boxes import boxes_of_range, element_span, overlap, spans
from titan_ckpt.geometry.chunks import Chunk, blocks_of

SIZES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Chunk]:
    sizes = draw(SIZES)
    offsets = tuple(draw(st.integers(0, n - 1)) for n in sizes)
    return sizes, Chunk(offsets, tuple(draw(st.integers(1, n - o)) for n, o in zip(sizes, offsets, strict=True)))


def elements(sizes: tuple[int, ...], box: Chunk) -> set[int]:
    numbers = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    return set(numbers[box.within(Chunk.whole(sizes))].ravel().tolist())


@given(boxes())
def test_the_span_reaches_from_the_first_to_the_last_element(case: tuple[tuple[int, ...], Chunk]) -> None:
    """element_span is the hull of the box in memory."""
    inside = elements(*case)
    assert element_span(*case) == (min(inside), max(inside) + 1)


@given(boxes(), st.integers(0, 40))
def test_spans_cover_the_box_and_leave_out_long_gaps(case: tuple[tuple[int, ...], Chunk], max_gap: int) -> None:
    """All elements of the box, in order, and no run with a gap longer than allowed inside."""
    inside = sorted(elements(*case))
    found = list(spans(*case, max_gap))
    covered = [i for first, stop in found for i in range(first, stop)]
    assert covered == sorted(set(covered)), "runs are in order and apart"
    assert set(inside) <= set(covered)
    gaps = [b - a - 1 for a, b in itertools.pairwise(inside)]
    assert len(found) - 1 == sum(gap > max_gap for gap in gaps)


@given(SIZES, st.data())
def test_a_range_of_elements_is_a_list_of_boxes(sizes: tuple[int, ...], data: st.DataObject) -> None:
    """boxes_of_range gives the range's elements, once each and in order."""
    total = int(np.prod(sizes, dtype=int))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = np.arange(total).reshape(sizes)
    found = [numbers[box.within(Chunk.whole(sizes))].ravel().tolist() for box in boxes_of_range(sizes, start, stop)]
    assert [i for part in found for i in part] == list(range(start, stop))


@given(
    st.integers(1, 3).flatmap(
        lambda dims: st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 3))] * dims))
    )
)
def test_an_overlap_is_found_if_there_is_one(cases: list[tuple[tuple[int, int], ...]]) -> None:
    """Against a comparison of all pairs, empty and equal chunks included."""
    chunks = [Chunk(*zip(*case, strict=True)) for case in cases]
    pair = overlap(chunks)
    assert (pair is not None) == any(a.intersect(b) is not None for a, b in itertools.combinations(chunks, 2))
    assert pair is None or pair[0].intersect(pair[1]) is not None


def test_chunks_of_a_mesh_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 ranks in a mesh of 64 x 64 cut a tensor into as many chunks. A whole read looks at all of them.

    Nor are chunks that reach past each other along the dim that is cut most.
    """
    chunks = [Chunk((2 * row, 3 * column), (2, 3)) for row in range(64) for column in range(64)]
    real = Chunk.intersect
    compared: list[Chunk] = []

    def counted(self: Chunk, other: Chunk) -> Chunk | None:
        compared.append(self)
        return real(self, other)

    monkeypatch.setattr(Chunk, "intersect", counted)
    stairs = [Chunk((i, i), (600 - i, 1)) for i in range(600)]
    halves = [Chunk((0, i), (600, 1)) for i in range(300)] + [Chunk((i, 300), (1, 1)) for i in range(600)]
    for apart in (chunks, stairs, halves):
        assert overlap(apart) is None
        assert len(compared) < len(apart)
    assert overlap([*chunks, Chunk((1, 1), (2, 3))]) is not None


def test_a_process_that_becomes_another_rank_holds_other_rows() -> None:
    """Meshes of the same ranks are equal, so nothing may be remembered by mesh alone: ranks fork, or join anew."""
    for rank in (0, 1):
        dist.init_process_group("fake", rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            value = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
            assert [block.chunk for block in blocks_of(value)] == [Chunk((2 * rank, 0), (2, 3))]
        finally:
            dist.destroy_process_group()
