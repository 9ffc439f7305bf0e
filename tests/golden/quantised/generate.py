"""Writes the golden folders beside it with the libraries that own the formats; nobody runs it but to renew them.

Each folder is what its library stores; `expected.json` has the SHA-256 of each weight's float32 bytes as the library's
own dequantizer gives them. Run in an environment of its own, for the libraries are no dependencies of this package:
    python -m venv V && V/bin/pip install torch transformers accelerate bitsandbytes==0.50.2 compressed-tensors==0.20.0
    V/bin/python tests/golden/quantised/generate.py
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import bitsandbytes as bnb  # type: ignore[import-not-found]
import torch
from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found]
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8  # type: ignore[import-not-found]
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32  # type: ignore[import-not-found]
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme  # type: ignore[import-not-found]
from compressed_tensors.quantization.lifecycle.forward import dequantize  # type: ignore[import-not-found]
from compressed_tensors.quantization.utils import calculate_qparams  # type: ignore[import-not-found]
from safetensors.torch import save_file

HERE = Path(__file__).parent
Tensors = dict[str, torch.Tensor]
Options = dict[str, Any]
Case = tuple[dict[str, Any], Tensors, Tensors]
"""(quantization_config, what is stored, what it stands for)."""


def digest(value: torch.Tensor) -> str:
    assert value.dtype == torch.float32
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


def write(name: str, case: Case) -> None:
    settings, stored, expected = case
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}, indent=1) + "\n")
    digests = {key: {"shape": list(v.shape), "sha256": digest(v)} for key, v in expected.items()}
    (folder / "expected.json").write_text(json.dumps(digests, indent=1) + "\n")


def four_bit(shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Case:
    """Return a weight as bnb.nn.Params4bit saves it."""
    weight = torch.randn(shape, dtype=dtype)
    packed, state = bnb.functional.quantize_4bit(weight, **options)
    state.dtype, own = torch.float32, state.dtype
    expected = bnb.functional.dequantize_4bit(packed, state)
    state.dtype = own
    parts = {f"a.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": options["quant_type"]}
    return settings, {"a.weight": packed, "a.bias": torch.ones(3)} | parts, {"a.weight": expected.reshape(shape)}


def eight_bit() -> Case:
    """Return a weight as bnb.nn.Linear8bitLt saves it."""
    layer = bnb.nn.Linear8bitLt(40, 24, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(torch.randn(24, 40, dtype=torch.float16), requires_grad=False).to("cpu")
    stored = {f"a.{name}": value for name, value in layer.state_dict().items()}
    expected = bnb.functional.int8_vectorwise_dequant(stored["a.weight"], stored["a.SCB"])
    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, stored, {"a.weight": expected}


def qparams(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of each block, from its minimum and maximum."""
    rows, columns = weight.shape
    match args.strategy:
        case "tensor":
            blocks = weight.reshape(1, 1, -1)
        case "channel":
            blocks = weight.reshape(rows, 1, -1)
        case "block":
            high, wide = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
            blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2).flatten(2)
        case _:
            blocks = weight.reshape(rows, -1, args.group_size)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    return (scale.reshape(1), zero.reshape(1)) if args.strategy == "tensor" else (scale, zero)


def compressed(fmt: str, shape: tuple[int, int], dtype: torch.dtype, **weights: Any) -> Case:
    """Return a weight as the library's compressor of this format stores it."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    args, weight = scheme.weights, torch.randn(shape, dtype=dtype)
    scale, zero = qparams(weight, args)
    state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = torch.tensor([448 * 6 / weight.abs().max().item()])
        state["weight_scale"] = (scale.float() * state["weight_global_scale"]).to(torch.float8_e4m3fn).to(dtype)
    if fmt.startswith("mx"):
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(state["weight_scale"].float())))
    compressor = BaseCompressor.get_value_from_registry(fmt)
    stored = {f"a.{k}": v for k, v in compressor.compress(state, scheme).items()}
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=fmt, quantization_status="compressed", ignore=["lm_head"]
    )
    settings = json.loads(json.dumps(config.to_dict(), default=str))
    return settings, stored | {"a.bias": torch.ones(3)}, {"a.weight": decompressed(fmt, stored, scheme)}


def decompressed(fmt: str, stored: Tensors, scheme: Any) -> torch.Tensor:
    """Return the weight by the library's own arithmetic, which takes its precision from the scale."""
    args, scale, zero = scheme.weights, stored["a.weight_scale"], stored.get("a.weight_zero_point")
    if fmt == "pack-quantized":
        shape = stored["a.weight_shape"]
        codes = unpack_from_int32(stored["a.weight_packed"], args.num_bits, torch.Size(shape.tolist()))
        if zero is not None and args.strategy in ("group", "channel"):
            zero = unpack_from_int32(zero, args.num_bits, (int(shape[0]), scale.shape[-1]), packed_dim=0)
    elif "fp4" in fmt:
        rows, columns = stored["a.weight_packed"].shape
        codes = unpack_fp4_from_uint8(stored["a.weight_packed"], rows, columns * 2, torch.float32)
    else:
        codes = stored["a.weight"]
    if scale.dtype == torch.uint8:
        scale = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")._decompress_scale(scale, torch.float32)
    value: torch.Tensor = dequantize(
        x_q=codes, scale=scale.float(), zero_point=zero, args=args, global_scale=stored.get("a.weight_global_scale")
    )
    return value


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield a folder's name and how its content is made."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    nested = {"quant_type": "nf4", "blocksize": 64, "compress_statistics": True}
    plain = nested | {"compress_statistics": False}
    yield "bnb-nf4", partial(four_bit, (24, 128), bf16, **plain)
    yield "bnb-nf4-nested", partial(four_bit, (130, 128), bf16, **nested)
    yield "bnb-nf4-nested-ragged", partial(four_bit, (9, 24), f16, **nested)
    yield "bnb-nf4-odd", partial(four_bit, (7, 9), f32, **plain)
    yield "bnb-nf4-bf16-storage", partial(four_bit, (8, 64), bf16, quant_storage=bf16, **plain)
    yield "bnb-fp4", partial(four_bit, (6, 128), f32, quant_type="fp4", blocksize=128)
    yield "bnb-int8", eight_bit
    float8: Options = {"num_bits": 8, "type": "float"}
    wholes: list[Options] = [{"strategy": "tensor"}, {"strategy": "channel"}]
    blocks: list[Options] = [
        {"strategy": "group", "group_size": 16},
        {"strategy": "block", "block_structure": [16, 32]},
    ]
    for options in (*wholes, *blocks):
        name = f"ct-float-{options['strategy']}"
        yield name, partial(compressed, "float-quantized", (40, 64), bf16, **float8, **options)
    int8: Options = {"num_bits": 8, "type": "int", "strategy": "channel"}
    yield "ct-int-channel", partial(compressed, "int-quantized", (24, 40), f32, **int8)
    yield "ct-int-channel-asymmetric", partial(compressed, "int-quantized", (24, 40), bf16, symmetric=False, **int8)
    for bits, kind in product((4, 8), ("symmetric", "asymmetric")):
        packed: Options = {"num_bits": bits, "type": "int", "symmetric": kind == "symmetric"}
        group, channel = {"strategy": "group", "group_size": 32}, {"strategy": "channel"}
        yield f"ct-pack{bits}-group-{kind}", partial(compressed, "pack-quantized", (19, 64), bf16, **packed, **group)
        yield f"ct-pack{bits}-channel-{kind}", partial(compressed, "pack-quantized", (10, 37), f32, **packed, **channel)
    fp4: Options = {"num_bits": 4, "type": "float"}
    sixteens, thirties = {"strategy": "tensor_group", "group_size": 16}, {"strategy": "group", "group_size": 32}
    yield "ct-nvfp4", partial(compressed, "nvfp4-pack-quantized", (8, 64), bf16, **fp4, **sixteens)
    yield "ct-mxfp4", partial(compressed, "mxfp4-pack-quantized", (8, 64), bf16, **fp4, **thirties)
    scale: Options = {"scale_dtype": "torch.uint8"}
    yield "ct-mxfp8", partial(compressed, "mxfp8-quantized", (8, 64), bf16, **float8, **thirties, **scale)


if __name__ == "__main__":
    for number, (name, make) in enumerate(cases()):
        torch.manual_seed(number)
        write(name, make())
