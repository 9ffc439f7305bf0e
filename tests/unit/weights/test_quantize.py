"""Quantized groups: shares of any cut tile the parts, and what a table or a tensor does not allow is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from titan_ckpt.converters.float8.converter import BlockQuantizer, decode, encode
from titan_ckpt.errors import ExportError
from titan_ckpt.geometry.chunks import Chunk
from titan_ckpt.geometry.keymap import Concat, KeyMap, KeyRule, PermuteRotary, Split, TensorOp, Unstack
from titan_ckpt.weights.quantize import QuantizedGroup, quantized
from titan_ckpt.weights.transforms import StateDictTransforms

QUANTIZER = BlockQuantizer(["w"])


def group_of(value: torch.Tensor, op: TensorOp) -> QuantizedGroup:
    table = KeyMap((KeyRule.of("w", [f"k{i}.weight" for i in range(op.num_file)], op),))
    (group,) = quantized(StateDictTransforms(table).to_file({"w": value}, None, None), QUANTIZER)
    assert isinstance(group, QuantizedGroup)
    return group


def cut(value: torch.Tensor, op: TensorOp, shares: list[Chunk] | None) -> dict[str, list[tuple[Chunk, torch.Tensor]]]:
    """Return what a rank with these shares writes of each part."""
    group = group_of(value, op)
    found: dict[str, list[tuple[Chunk, torch.Tensor]]] = {name: [] for name in group.infos}
    for index, block in group.blocks():
        for piece in group.cut_shares(index, block, shares):
            found[piece.key].append((piece.chunk, piece.data))
    return found


@pytest.mark.parametrize("op", [PermuteRotary(2), Split((256, 128)), Unstack(3)], ids=["permute", "split", "experts"])
@pytest.mark.parametrize("dim", [0, 1])
def test_shares_of_any_cut_tile_every_part(op: TensorOp, dim: int) -> None:
    """However a tensor's writers share it, each block of codes is written once, whole, with its own scale."""
    shape = (3, 256, 128) if isinstance(op, Unstack) else (384, 100)
    value = torch.randn(shape)
    whole = cut(value, op, None)
    for ends in ([0, 1, shape[dim]], [0, shape[dim] // 3 + 1, shape[dim] - 1, shape[dim]]):
        written = {name: torch.zeros(info.shape) for name, info in group_of(value, op).infos.items()}
        for first, last in itertools.pairwise(ends):
            offsets, sizes = [0] * value.dim(), list(value.shape)
            offsets[dim], sizes[dim] = first, last - first
            for name, pieces in cut(value, op, [Chunk(tuple(offsets), tuple(sizes))]).items():
                for chunk, data in pieces:
                    written[name][chunk.within(Chunk.whole(written[name].shape))] += 1
                    there = torch.zeros(written[name].shape)
                    for region, values in whole[name]:
                        there[region.within(Chunk.whole(there.shape))] = values.float()
                    assert torch.equal(there[chunk.within(Chunk.whole(there.shape))], data.float())
        assert all(bool((counts == 1).all()) for counts in written.values())


def test_codes_are_within_half_a_step() -> None:
    """Blocks of zeros, of the largest numbers and of mixed ones come back within float8's rounding."""
    value = torch.randn(200, 130) * torch.logspace(-6, 6, 130)
    value[:128, :128] = 0
    value[128:, 128:] = torch.finfo(torch.float32).max
    codes, scale = encode(value)
    assert (codes.shape, scale.shape) == ((200, 130), (2, 2))
    back = decode(codes, scale)
    each = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    assert bool(
        ((back.double() - value.double()).abs() <= torch.maximum(value.abs() / 16, each * 2**-10) * 1.001).all()
    )
    assert torch.equal(back[:128, :128], value[:128, :128])


def test_several_tensors_in_one_cannot_be_quantized() -> None:
    """A scale would span two weights, of which one may not be there: refused before anything is written."""
    table = KeyMap((KeyRule.of(["w", "v"], "k.weight", Concat((4, 4))),))
    groups = StateDictTransforms(table).to_file({"w": torch.ones(4, 8), "v": torch.ones(4, 8)}, None, None)
    with pytest.raises(ExportError, match="w, v are stored as one tensor"):
        quantized(groups, QUANTIZER)
