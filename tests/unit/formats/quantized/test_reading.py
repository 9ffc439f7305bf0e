"""Quantized weights through the ordinary reader: bytes read, memory taken, casts, shards, memory of any shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.forked import memory_of
from tests.world import fill, read_all
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo
from titan_ckpt.geometry.keymap import KeyMap, KeyRule, PermuteRotary, Transpose
from titan_ckpt.testing import distributed
from titan_ckpt.types import StateDict
from titan_ckpt.weights.transforms import StateDictTransforms

BLOCK = (16, 16)
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}}


def fp8_folder(folder: Path, rows: int, columns: int, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """Write one quantized weight `a.weight` and a bias; return what it stands for."""
    codes = torch.randint(0, 120, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1]))
    save_file(
        {"a.weight": codes, "a.weight_scale_inv": scale, "a.bias": torch.ones(rows, dtype=torch.bfloat16)},
        folder / "model.safetensors",
    )
    settings = {"quant_method": "fp8", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return codes.float() * spread


def test_scales_are_not_listed_and_weights_are_float32(tmp_path: Path) -> None:
    """The tensors of the model are listed; plain ones keep their dtype; config.json stays as it is."""
    fp8_folder(tmp_path, 40, 24)
    with open_reader(tmp_path) as reader:
        assert dict(reader.tensors) == {
            "a.bias": TensorInfo((40,), torch.bfloat16),
            "a.weight": TensorInfo((40, 24), torch.float32),
        }
        assert reader.metadata() == FP8


def test_only_the_bytes_of_the_region_are_read(tmp_path: Path) -> None:
    """A hundredth of the rows costs a hundredth of the bytes, and the scales that cover them."""
    expected = fp8_folder(tmp_path, 8192, 512, (64, 64))
    into = torch.empty(80, 512)
    with open_reader(tmp_path) as reader:
        reader.read([Block(Chunk((0,), (1,)), torch.empty(1, dtype=torch.bfloat16), "a.bias")])
        before = bytes_read()
        reader.read([Block(Chunk((3000, 0), (80, 512)), into, "a.weight")])
        taken = bytes_read() - before
    assert torch.equal(into, expected[3000:3080])
    assert 80 * 512 + 3 * 8 * 4 <= taken <= 80 * 512 + 8192


def bytes_read() -> int:
    """Return what this process has read, as the kernel counts it."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_memory_stays_bounded_whatever_the_tensors_size(tmp_path: Path) -> None:
    """A weight of 160 MiB in float32 is dequantized into bfloat16 without a copy of it in either form."""
    expected = fp8_folder(tmp_path, 5120, 8192, (128, 128))[1234].bfloat16()
    into = torch.zeros(5120, 8192, dtype=torch.bfloat16)
    with open_reader(tmp_path) as reader:

        def act() -> bool:
            reader.read([Block(Chunk.whole(into.shape), into, "a.weight")])
            return torch.equal(into[1234], expected)

        extra, is_right = memory_of(act, before=into.zero_)
    assert is_right and extra < 96 << 20


def test_a_planned_cast_is_one_rounding(tmp_path: Path) -> None:
    """A bfloat16 model is told to ask for the cast, and then has the float32 values rounded once."""
    expected = fp8_folder(tmp_path, 40, 24)
    wanted: StateDict = {"a.weight": torch.zeros(40, 24, dtype=torch.bfloat16)}
    with open_reader(tmp_path) as reader:
        refused = StateDictTransforms().from_file(wanted, reader.tensors, None, cast=False)
        assert "cast = true" in refused.report.mismatched[0].found
        plan = StateDictTransforms().from_file(wanted, reader.tensors, None, cast=True)
        assert plan.report.cast == {"a.weight": "float32 -> bfloat16"}
        reader.read(plan.requests)
    assert torch.equal(wanted["a.weight"], expected.bfloat16())


@pytest.mark.parametrize("rows", [32, 30])
def test_values_land_in_memory_that_a_table_rearranged(tmp_path: Path, rows: int) -> None:
    """Rotary rows go into views whose shape is not the region's, transposed columns into other strides."""
    expected = fp8_folder(tmp_path, 32, 24)
    rotary: StateDict = {"q": torch.zeros(32, 24)}
    turned: StateDict = {"t": torch.zeros(24, 32)}
    fill(rotary, tmp_path, KeyMap((KeyRule.of("q", "a.weight", PermuteRotary(2)),)))
    fill(turned, tmp_path, KeyMap((KeyRule.of("t", "a.weight", Transpose()),)))
    flat = torch.zeros(rows * 24)
    with open_reader(tmp_path) as reader:
        reader.read([Block(Chunk((1, 0), (rows - 1, 24)), flat[24:], "a.weight")])
    assert torch.equal(rotary["q"], expected.view(2, 2, 8, 24).transpose(1, 2).reshape(32, 24))
    assert torch.equal(turned["t"], expected.t())
    assert torch.equal(flat.view(rows, 24)[1:], expected[1:rows])


def test_closing_twice_and_reading_nothing_is_harmless(tmp_path: Path) -> None:
    """An empty region reads nothing, and close is idempotent."""
    fp8_folder(tmp_path, 40, 24)
    reader = open_reader(tmp_path)
    reader.read([])
    reader.read([Block(Chunk((3, 0), (0, 24)), torch.zeros(0, 24), "a.weight")])
    reader.close()
    reader.close()


@distributed(nproc=2)
def test_shards_of_any_dim_load_straight_into_parameters(tmp_path: Path) -> None:
    """Each rank reads its rows or columns of fp8 blocks and of mxfp4 experts, on boundaries that are no block's."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    folder = tmp_path / f"rank{mesh.get_rank()}"
    folder.mkdir()
    expected = {"a.weight": fp8_folder(folder, 45, 51)}
    blocks = torch.randint(0, 256, (3, 10, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 10, 3), dtype=torch.uint8)
    experts = tmp_path / f"experts{mesh.get_rank()}"
    experts.mkdir()
    save_file({"e.w_blocks": blocks, "e.w_scales": scales}, experts / "model.safetensors")
    (experts / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    expected["e.w"] = read_all(experts)["e.w"]
    for key, source in (("a.weight", folder), ("e.w", experts)):
        placements: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(expected[key].dim()))]
        for placement in placements:
            value = distribute_tensor(torch.full(expected[key].shape, float("nan")), mesh, [placement])
            assert fill({key: value}, source).loaded == (key,)
            assert isinstance(value, DTensor)
            assert torch.equal(value.full_tensor(), expected[key]), (key, placement)
