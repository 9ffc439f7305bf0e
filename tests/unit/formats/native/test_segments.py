"""Gathering live tensors into one run of bytes, against the bytes torch itself would give."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_cuda import on_device
from tests.world import bits
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.formats.native import writer
from titan_ckpt.formats.native.writer import Segments, lay_end_to_end


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
    places = lay_end_to_end([(tensor.dtype, tensor.shape) for tensor in tensors])
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
        monkeypatch.setattr(writer, "_PACKED_BYTES", packed)
        monkeypatch.setattr(writer, "_PACK_BYTES", pack)
        mixed = [t if i in (1, 5) else on_device(t) for i, t in enumerate(tensors)]
        for step in (len(expected), 4096, 48):
            target = Buffer.allocate(len(expected))
            for start in range(0, len(expected), step):
                laid_out(mixed)[0].enqueue(start, min(start + step, len(expected)), target, start)
            assert bytes(target.view) == expected
