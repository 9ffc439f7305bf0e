"""Scattering windows of a file into tensors, against the same boxes taken by torch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_ckpt.disk.files import FileReader
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.formats.reading import slices
from titan_ckpt.formats.reading.slices import Slice, scatter
from titan_ckpt.geometry.chunks import Chunk


@pytest.mark.parametrize("kind", ["plain", "strided", "cast"])
@given(st.data())
def test_any_box_comes_out_of_any_windows(kind: str, data: st.DataObject) -> None:
    """A box of an array of 0 to 4 dims fills plain, strided and cast memory, and nothing beside it is written."""
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
    num_dims, num_cut = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 2))
    sizes = tuple(data.draw(st.integers(1, 7)) for _ in range(num_dims))
    offsets = tuple(data.draw(st.integers(0, n - 1)) if dim < num_cut else 0 for dim, n in enumerate(sizes))
    counts = tuple(
        data.draw(st.integers(1, n - o)) if dim < num_cut else n
        for dim, (n, o) in enumerate(zip(sizes, offsets, strict=True))
    )
    box = Chunk(offsets, counts)
    start = data.draw(st.integers(0, 3)) * dtype.itemsize
    numel = int(torch.Size(sizes).numel())
    section = torch.randint(0, 100, (start // dtype.itemsize + numel + 5,)).to(dtype)
    beside = torch.full((*box.sizes, 2), 101, dtype=torch.float64 if kind == "cast" else dtype)
    into = beside[..., 0] if kind != "plain" else beside[..., 0].contiguous()
    part = Slice("x", start, sizes, dtype, None if box.sizes == sizes else box, into)
    assert part.is_run == (part.stop - part.first == box.numel * dtype.itemsize)
    assert bool(part.address) == (into.is_contiguous() and into.dtype is dtype)
    step = data.draw(st.one_of(st.integers(1, 5), st.integers(6, 400)))
    edges = [cut * dtype.itemsize for cut in (*range(0, len(section), step), len(section))]
    for window in pairwise(edges):
        if window[1] <= part.first or window[0] >= part.stop:
            continue
        begin = data.draw(st.sampled_from([0, window[0]]))  # memory may hold more than this window
        bounce = Buffer.allocate(window[1] - begin)
        bounce.tensor.copy_(section.view(torch.uint8)[begin : window[1]])
        scatter([part], window, (bounce, begin))
    values = section[start // dtype.itemsize :][:numel].view(sizes)
    expected = values[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
    assert torch.equal(into, expected.to(into.dtype))
    assert bool((beside[..., 1] == 101).all())


def test_columns_come_out_of_memory_that_holds_more_than_the_window() -> None:
    """A bucket's answer and a direct read hold many blocks, and each block is scattered when it is verified."""
    section = torch.arange(96, dtype=torch.uint8)
    into = torch.zeros(12, 3, dtype=torch.uint8)
    part = Slice("x", 0, (12, 8), torch.uint8, Chunk((0, 2), (12, 3)), into)
    assert part.address and not part.is_run
    memory = Buffer.allocate(96)
    memory.tensor.copy_(section)
    for window in pairwise([0, 28, 60, 96]):
        scatter([part], window, (memory, 0))
    assert torch.equal(into, section.view(12, 8)[:, 2:5])


def test_elements_at_odd_offsets_of_a_mapping_are_aligned_before_torch_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping is seen from its first wanted byte on, which no dtype is aligned to."""
    value, seen, copy = torch.randn(100, 50), list[int](), slices._copy

    def watched(into: torch.Tensor, values: torch.Tensor) -> None:
        seen.append(values.data_ptr() % values.dtype.itemsize)
        copy(into, values)

    monkeypatch.setattr(slices, "_copy", watched)
    (tmp_path / "a.bin").write_bytes(bytes(3) + value.numpy().tobytes())
    file, into = FileReader(tmp_path / "a.bin"), torch.zeros(100, 50, dtype=torch.float64)
    stop = 3 + value.nbytes
    scatter(
        [Slice("x", 3, (100, 50), torch.float32, None, into)], (3, stop), (Buffer.over(file.view(3, value.nbytes)), 3)
    )
    file.close()
    assert torch.equal(into, value.double()) and seen == [0]
