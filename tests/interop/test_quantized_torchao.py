"""Weights that torchao flattened into a folder are, bit for bit, what torchao dequantizes them to in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int4Tensor,
    Int8DynamicActivationIntxWeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    IntxUnpackedToInt8Tensor,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)
from torchao.quantization.quantize_.common import KernelPreference
from transformers import AutoModelForCausalLM, TorchAoConfig

from tests.interop.folders import a_box, assert_reads, read
from tests.world import write_llama
from titan_ckpt.errors import CorruptCheckpointError, LoadMismatchError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Chunk

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]


def write(folder: Path, tensors: dict[str, Any]) -> Path:
    """Save tensor subclasses the way transformers does."""
    stored, metadata = flatten_tensor_state_dict(tensors)
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    return folder


def in_float32(weight: Any) -> torch.Tensor:
    """Return what torchao computes, with its arithmetic in float32."""
    if isinstance(weight, IntxUnpackedToInt8Tensor):
        weight = weight.to(torch.float32)
        value: torch.Tensor = weight.dequantize()
    else:
        value = weight.dequantize(torch.float32)
    return value


def by_config(config: Any, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    linear = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    quantize_(linear, config)
    return linear.weight.detach()


def nvfp4(shape: tuple[int, ...], *, outer: bool, swizzled: bool) -> Any:
    value = torch.randn(shape)
    scale = per_tensor_amax_to_scale(value.abs().amax()) if outer else None
    return NVFP4Tensor.to_nvfp4(value, per_tensor_scale=scale, is_swizzled_scales=swizzled)


BF16, F32 = torch.bfloat16, torch.float32
EMULATED = KernelPreference.EMULATED
MAKERS: dict[str, Callable[[], Any]] = {
    "int8 per row": lambda: by_config(Int8WeightOnlyConfig(), (24, 40), BF16),
    "int8 per tensor": lambda: Int8Tensor.from_hp(torch.randn(24, 40), PerTensor()),
    "int8 grouped": lambda: by_config(Int8WeightOnlyConfig(granularity=PerGroup(32)), (24, 64), BF16),
    "int8 stacked": lambda: Int8Tensor.from_hp(torch.randn(3, 8, 16), PerRow()),
    "int4 grouped": lambda: by_config(IntxWeightOnlyConfig(INT4, PerGroup(32)), (24, 64), BF16),
    "int4 half": lambda: by_config(IntxWeightOnlyConfig(INT4, PerGroup(16)), (24, 64), torch.float16),
    "intx int8": lambda: by_config(IntxWeightOnlyConfig(torch.int8, PerAxis(0)), (24, 40), F32),
    "8da4w": lambda: by_config(Int8DynamicActivationIntxWeightConfig(INT4, PerGroup(32)), (24, 64), BF16),
    "float8 per row": lambda: by_config(Float8WeightOnlyConfig(), (24, 40), BF16),
    "float8 per tensor": lambda: Float8Tensor.from_hp(torch.randn(24, 40), granularity=PerTensor()),
    "float8 stacked": lambda: Float8Tensor.from_hp(torch.randn(3, 8, 16), granularity=PerRow()),
    "mxfp8 swizzled": lambda: by_config(
        MXDynamicActivationMXWeightConfig(kernel_preference=EMULATED), (160, 288), BF16
    ),
    "mxfp8": lambda: MXTensor.to_mx(torch.randn(6, 64), torch.float8_e4m3fn, 32),
    "mxfp4": lambda: MXTensor.to_mx(torch.randn(6, 64), torch.float4_e2m1fn_x2, 32),
    "nvfp4": lambda: nvfp4((16, 64), outer=False, swizzled=False),
    "nvfp4 swizzled": lambda: nvfp4((160, 96), outer=True, swizzled=True),
}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=10)
@given(data=st.data())
def test_any_region_of_a_torchao_weight_is_exact(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """Each class that torchao can flatten, whole and in regions, beside a tensor that is not quantized."""
    weight = MAKERS[name]()
    folder = write(tmp_path, {"a.weight": weight, "a.bias": torch.ones(4, dtype=BF16)})
    expected = in_float32(weight)
    with open_reader(folder) as reader:
        assert {key: str(info) for key, info in reader.tensors.items()} == {
            "a.bias": "bfloat16[4]",
            "a.weight": f"float32{list(weight.shape)}",
        }
    assert_reads(folder, "a.weight", expected, a_box(data, expected.shape))


# importing torchao.prototype.gptq prepares torch.compile, which uses what torch itself has deprecated
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("lead", [(), (2,)])
def test_int4_is_what_torchao_reconstructs(tmp_path: Path, lead: tuple[int, ...]) -> None:
    """Int4Tensor, whose quantizer needs a GPU library: its codes as that library packs them, against torchao's inverse.

    torchao's inverse adds twice; in double precision that loses nothing, and what is left is one rounding.
    Source of the packing: MSLK, quantize/shuffle.py (pack_int4, int4_row_quantize_zp).
    """
    from torchao.prototype.gptq import api as gptq

    codes = torch.randint(-8, 8, (*lead, 10, 64), dtype=torch.int8)
    packed = (codes[..., ::2] & 0xF) | (codes[..., 1::2] << 4)
    scale, zero = (torch.randn(*lead, 2, 10).to(BF16) for _ in range(2))
    weight = Int4Tensor(packed, scale, zero, [*(1 for _ in lead), 1, 32], codes.shape)
    folder = write(tmp_path, {"a.weight": weight})

    def inverse(c: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = gptq._int4_row_dequantize_zp(c, s.double(), z.double(), 32)
        return value.float()

    if lead:
        expected = torch.stack([inverse(*parts) for parts in zip(codes, scale, zero, strict=True)])
    else:
        expected = inverse(codes, scale, zero)
    assert_reads(folder, "a.weight", expected, Chunk((*(1 for _ in lead), 3, 21), (*(1 for _ in lead), 4, 30)))


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_a_model_saved_by_transformers_is_what_it_loads(tmp_path: Path) -> None:
    """A Llama quantized with torchao and saved by transformers in several files, against transformers' own load."""
    write_llama(tmp_path / "float")
    quantized = TorchAoConfig(IntxWeightOnlyConfig(INT4, PerGroup(32)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=quantized, dtype=F32)
    model.save_pretrained(tmp_path / "int4", max_shard_size="100KB")
    assert len(list((tmp_path / "int4").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "int4", dtype=F32)
    with open_reader(tmp_path / "int4") as reader:
        state = loaded.state_dict()
        assert set(reader.tensors) == set(state)
        kinds = {type(value).__name__ for value in state.values()}
        assert kinds == {"IntxUnpackedToInt8Tensor", "Tensor"}
        for key, value in state.items():
            expected = in_float32(value) if type(value) is not torch.Tensor else value
            assert torch.equal(read(reader, key), expected), key


def test_what_cannot_be_undone_is_refused(tmp_path: Path) -> None:
    """A weight whose input is scaled first, and a class laid out for a kernel, are refused by name and class."""
    weight = MAKERS["int8 per row"]()
    weight.act_pre_scale = torch.ones(40)
    with pytest.raises(LoadMismatchError, match=r"torchao.*a\.weight.*act_pre_scale"):
        open_reader(write(tmp_path / "scaled", {"a.weight": weight}))
    folder = write(tmp_path / "tiled", {"a.weight": MAKERS["int8 per row"]()})
    data = (folder / "model.safetensors").read_bytes()
    # a class name of the same length, so that the header keeps its size
    (folder / "model.safetensors").write_bytes(data.replace(b"Int8Tensor", b"Int9Tensor"))
    with pytest.raises(LoadMismatchError, match=r"a\.weight is a Int9Tensor"):
        open_reader(folder)


@pytest.mark.parametrize("broken", ["no metadata", "no scale", "no zero point", "wrong scale", "not JSON", "no block"])
def test_a_broken_flattened_tensor_is_named(tmp_path: Path, broken: str) -> None:
    """A part that is missing or of another shape, and metadata that is not there or wrong, give one error."""
    stored, metadata = flatten_tensor_state_dict({"a.weight": MAKERS["int4 grouped"]()})
    match broken:
        case "no metadata":
            metadata = {"format": "pt"}
        case "no scale":
            del stored["a._weight_scale"]
        case "no zero point":
            del stored["a._weight_zero_point"]
        case "wrong scale":
            stored["a._weight_scale"] = torch.ones(24, 3, dtype=BF16)
        case "not JSON":
            metadata["a.weight"] = "{"
        case "no block":
            metadata["a.weight"] = metadata["a.weight"].replace("block_size", "block_sise")
    save_file(stored, tmp_path / "model.safetensors", metadata)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    with pytest.raises(CorruptCheckpointError, match="tensor_names" if broken == "no metadata" else r"a\.(_)?weight"):
        open_reader(tmp_path)
