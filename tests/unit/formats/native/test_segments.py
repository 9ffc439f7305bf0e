"""Gathering live tensors into one run of bytes, and scattering windows of a file into tensors, against torch itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_cuda import on_device
from tests.world import bits
from titan_ckpt.disk.memory import Buffer
from titan_ckpt.formats.native import segments
from titan_ckpt.formats.native.segments import Places, Segments
from titan_ckpt.formats.native.transfers import Held, Transfer, scatter
from titan_ckpt.geometry.chunks import Chunk


def some_tensors() -> list[torch.Tensor]:
    """Return tensors of every shape of memory, wider elements first."""
    base = torch.randn(37, 21, generator=torch.Generator().manual_seed(1))
    return [
        torch.complex(base, base).conj(),
        base,
        base.t(),
        base[::2, 1::3],
        base.view(37, 7, 3).permute(2, 0, 1),
        torch.tensor(4.0),
        *base[:9, :6].view(9, 2, 3),
        *torch.complex(base, base).conj().imag[:6, :2],
        *torch.arange(5.0),
        base.expand(3, 37, 21),
        torch.empty(0),
        base.bfloat16().t(),
        torch.arange(11, dtype=torch.uint8),
        *[torch.full((3,), i, dtype=torch.uint8) for i in range(8)],
        base.t() > 0,
    ]


def laid_out(tensors: Sequence[torch.Tensor]) -> tuple[Segments, bytes]:
    places = Places.of([(tensor.dtype, tensor.shape) for tensor in tensors])
    return Segments(places, tensors), b"".join(bits(tensor.resolve_conj().resolve_neg()) for tensor in tensors)


@given(st.data())
def test_any_part_of_the_run_is_copied_out(data: st.DataObject) -> None:
    """From any element to any other, to any place in the target, nothing beside it."""
    run, expected = laid_out(some_tensors())
    start = data.draw(st.integers(0, len(expected) // 8)) * 8
    stop = data.draw(st.integers(start // 8, len(expected) // 8)) * 8
    at = data.draw(st.integers(0, 4)) * 16
    target = Buffer.allocate(len(expected) + 128)
    target.tensor.fill_(7)
    run.fill(start, stop, target, at)
    copied = bytes(target.view)
    assert copied[at : at + stop - start] == expected[start:stop]
    assert set(copied[:at] + copied[at + stop - start :]) <= {7}


def test_device_tensors_are_packed_and_copied_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small neighbours in packs, large ones alone, host memory at once, in pieces of any size: the run is the same."""
    tensors = some_tensors()
    expected = laid_out(tensors)[1]

    for packed, pack in ((1 << 18, 1 << 24), (2000, 4000), (1, 1)):
        monkeypatch.setattr(segments, "_PACKED_BYTES", packed)
        monkeypatch.setattr(segments, "_PACK_BYTES", pack)
        mixed = [t if i in (1, 5) else on_device(t) for i, t in enumerate(tensors)]
        for step in (len(expected), 4096, 48):
            target = Buffer.allocate(len(expected))
            for start in range(0, len(expected), step):
                laid_out(mixed)[0].enqueue(start, min(start + step, len(expected)), target, start)
            assert bytes(target.view) == expected


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
    transfer = Transfer("x", start, sizes, dtype, None if box.sizes == sizes else box, into)
    is_run = transfer.stop - transfer.first == box.numel * dtype.itemsize
    assert (transfer.rows is not None) == (into.is_contiguous() and kind == "plain" and not is_run)
    step = data.draw(st.one_of(st.integers(1, 5), st.integers(6, 400)))
    edges = [cut * dtype.itemsize for cut in (*range(0, len(section), step), len(section))]
    for window in pairwise(edges):
        if window[1] <= transfer.first or window[0] >= transfer.stop:
            continue
        begin = data.draw(st.sampled_from([0, window[0]]))  # memory may hold more than this window
        bounce = Buffer.allocate(window[1] - begin)
        bounce.tensor.copy_(section.view(torch.uint8)[begin : window[1]])
        scatter([transfer], window, Held.of(bounce, begin))
    values = section[start // dtype.itemsize :][:numel].view(sizes)
    expected = values[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
    assert torch.equal(into, expected.to(into.dtype))
    assert bool((beside[..., 1] == 101).all())


def test_columns_come_out_of_memory_that_holds_more_than_the_window() -> None:
    """A bucket's answer and a direct read hold many blocks, and each block is scattered when it is verified."""
    section = torch.arange(96, dtype=torch.uint8)
    into = torch.zeros(12, 3, dtype=torch.uint8)
    transfer = Transfer("x", 0, (12, 8), torch.uint8, Chunk((0, 2), (12, 3)), into)
    assert transfer.rows is not None
    memory = Buffer.allocate(96)
    memory.tensor.copy_(section)
    for window in pairwise([0, 28, 60, 96]):
        scatter([transfer], window, Held.of(memory, 0))
    assert torch.equal(into, section.view(12, 8)[:, 2:5])
