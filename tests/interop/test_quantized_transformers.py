"""fp8 and mxfp4 folders are, bit for bit, what transformers dequantizes them to when it loads the model itself."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.interop.folders import a_box, assert_reads, gap, load, read
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Chunk
from titan_ckpt.models.llama3 import FLAVORS, Llama3

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers says that there is no GPU, and that it dequantizes: which is what is wanted."""
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)


def write(folder: Path, tensors: Tensors, settings: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps((config or {}) | {"quantization_config": settings}))
    return folder


def some_float8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(shape).mul(40).to(dtype)


def transformers_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    make: Any = Fp8Dequantize
    value: torch.Tensor = make(None)._dequantize_one(codes, scale, torch.float32)
    return value


def check_model(folder: Path) -> None:
    """Compare every tensor of the folder with what transformers makes of it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with open_reader(folder) as reader:
        assert set(reader.tensors) == set(model.state_dict())
        for key, value in model.state_dict().items():
            assert torch.equal(read(reader, key), value), key


def an_fp8_llama(folder: Path, config: dict[str, Any]) -> Path:
    """Quantize a Llama's linears in blocks of 16 x 16 with transformers; embeddings and norms stay as they are."""
    make: Any = Fp8Quantize
    quantizer = make(SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=(16, 16))))
    tensors: Tensors = {}
    for key, value in LlamaForCausalLM(LlamaConfig.from_dict(config)).state_dict().items():
        tensors |= quantizer.convert({key: value}) if key.endswith("proj.weight") else {key: value}
    assert sum(key.endswith("_scale_inv") for key in tensors) == 14
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    return write(folder, tensors, settings, config | {"architectures": ["LlamaForCausalLM"]})


LLAMA = replace(FLAVORS["debug-0.5m"], vocab_size=96, num_layers=2, max_seq_len=64, tie_embeddings=False)


def test_an_fp8_model_is_what_transformers_loads(tmp_path: Path) -> None:
    """Every tensor of a Llama that transformers quantized has the bits that transformers loads."""
    check_model(an_fp8_llama(tmp_path, LLAMA.to_hf()))


def test_a_native_model_computes_what_transformers_does_from_the_same_fp8_folder(tmp_path: Path) -> None:
    """Names, rotary rows and scales together: the logits are those of the model that transformers dequantized."""
    folder = an_fp8_llama(tmp_path, LLAMA.to_hf())
    model = Llama3(LLAMA)
    model.init_weights()
    load(model, folder)
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert gap(model, twin, torch.arange(40).view(2, 20) * 3 % 96) <= 1e-5


def test_a_gpt_oss_model_is_what_transformers_loads(tmp_path: Path) -> None:
    """Experts in mxfp4, with any bytes for blocks: transformers' layout has rows and columns exchanged."""
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        num_local_experts=3,
        num_experts_per_tok=2,
        head_dim=16,
    )
    tensors: Tensors = {}
    for key, value in GptOssForCausalLM(config).state_dict().items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = value.shape
            tensors[f"{key}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{key}_scales"] = torch.randint(100, 140, (experts, rows, columns // 32), dtype=torch.uint8)
        else:
            tensors[key] = value
    config.architectures = ["GptOssForCausalLM"]
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    check_model(write(tmp_path, tensors, settings, config.to_dict()))


@settings(max_examples=40)
@given(data=st.data())
def test_any_region_of_fp8_blocks_is_exact(tmp_path: Path, data: st.DataObject) -> None:
    """Blocks of any size, any float8, scales of any dtype, two or three dims: transformers' bits."""
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    block = [data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))]
    lead = tuple(data.draw(st.lists(st.integers(1, 3), max_size=1)))
    shape = (*lead, rows * block[0], columns * block[1])
    codes = some_float8(*shape, dtype=data.draw(st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])))
    kind = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8]))
    if kind == torch.uint8:
        scale = torch.randint(100, 150, (*lead, rows, columns), dtype=torch.uint8)
    else:
        scale = torch.rand(*lead, rows, columns).add(0.1).to(kind)
    settings = {"quant_method": "fp8", "weight_block_size": block}
    folder = write(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scale}, settings)
    assert_reads(folder, "a.weight", transformers_fp8(codes, scale), a_box(data, shape))


@pytest.mark.parametrize("name", ["a.weight_scale_inv", "a.weight_scale", "a.scale", "a.qscale_weight"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_for_the_whole_tensor_has_many_names_and_shapes(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    """Without a block size one scale holds for all of a weight; scales of activations are no weights."""
    codes, scale = some_float8(6, 10), torch.tensor(0.37).reshape(shape)
    tensors = {"a.weight": codes, name: scale, "a.activation_scale": torch.tensor(2.0), "a.bias": torch.ones(6)}
    folder = write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": None})
    with open_reader(folder) as reader:
        assert sorted(reader.tensors) == ["a.bias", "a.weight"]
        assert torch.equal(read(reader, "a.weight"), transformers_fp8(codes, scale))


def test_the_last_block_may_be_cut_off(tmp_path: Path) -> None:
    """A weight whose sides do not divide by the block (DeepSeek's are like that) has scales for its ragged edges."""
    codes, scale = some_float8(300, 200), torch.rand(3, 2)
    padded = torch.zeros(384, 256, dtype=torch.float8_e4m3fn)
    padded[:300, :200] = codes
    expected = transformers_fp8(padded, scale)[:300, :200]
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scale}, settings)
    boxes = Chunk((250, 0), (50, 200)), Chunk((0, 120), (300, 80)), Chunk((100, 100), (100, 50))
    assert_reads(folder, "a.weight", expected, *boxes)


def test_fp4_experts_in_an_fp8_folder_are_unpacked(tmp_path: Path) -> None:
    """DeepSeek V4 stores experts as two FP4 values per int8 with an exponent for 32 of them, beside fp8 linears."""
    packed = torch.randint(-128, 128, (8, 48), dtype=torch.int8)
    scale = torch.randint(100, 150, (8, 3)).to(torch.uint8).view(torch.float8_e8m0fnu)
    tensors = {
        "experts.0.w1.weight": packed,
        "experts.0.w1.scale": scale,
        "a.weight": some_float8(128, 256),
        "a.scale": torch.rand(1, 2).to(torch.float8_e8m0fnu),
    }
    folder = write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    for stem in ("experts.0.w1", "a"):
        expected = transformers_fp8(tensors[f"{stem}.weight"], tensors[f"{stem}.scale"])
        assert_reads(folder, f"{stem}.weight", expected)


@settings(max_examples=40)
@given(data=st.data())
def test_any_region_of_mxfp4_blocks_is_exact(tmp_path: Path, data: st.DataObject) -> None:
    """Any region of the transposed tensor, with blocks of any length and every exponent."""
    experts, rows, groups, size = (data.draw(st.integers(1, n)) for n in (3, 5, 4, 16))
    blocks = torch.randint(0, 256, (experts, rows, groups, size), dtype=torch.uint8)
    scales = torch.randint(0, 255, (experts, rows, groups), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    folder = write(tmp_path, {"e.up_blocks": blocks, "e.up_scales": scales}, {"quant_method": "mxfp4"})
    assert_reads(folder, "e.up", expected, a_box(data, expected.shape))
