"""quant_method "fp8": float8 weights with a scale per block, per row or per tensor (DeepSeek, Qwen, Mistral).

Owns the names and shapes of weights and scales, also of FP4 experts packed two in a byte (DeepSeek V4).
Source: transformers, `integrations/finegrained_fp8.py` (Fp8Dequantize), `quantizers/quantizer_finegrained_fp8.py`
(names of scales). Weights are multiplied with the scale, even if its name says inverse.
"""

from __future__ import annotations

from math import prod

import torch

from titan_ckpt.formats.quantized.folder import FLOAT8, Findings, QuantizedFolder, num_blocks, numbers, scales
from titan_ckpt.formats.quantized.values import E2M1_PAIRS, Codes, Scaled
from titan_ckpt.geometry.chunks import Shape, TensorInfo

_FP4_GROUP = 32
_OF_ACTIVATIONS = ("activation_scale", "input_scale", ".qscale_act", ".k_scale", ".v_scale")
"""Ends of names of scales of activations. They are left out, because a load computes nothing in float8."""


def find(folder: QuantizedFolder) -> Findings:
    """Pair each quantized weight with its scale."""
    findings = Findings()
    block = folder.settings.get("weight_block_size")
    if block is not None and not _is_block(block):
        findings.unsupported.append(f"weight_block_size {block!r} is not two positive integers")
        return findings
    for key, info in folder.infos.items():
        if key.endswith(_OF_ACTIVATIONS):
            findings.hidden.add(key)
        elif info.dtype in FLOAT8 or info.dtype == torch.int8:
            _add(findings, folder, key, None if block is None else tuple(block))
    for key in folder.infos:
        if key.endswith("_scale_inv") and key not in findings.hidden:
            findings.faults[key] = "there is no float8 weight of this name"
    return findings


def _add(findings: Findings, folder: QuantizedFolder, key: str, block: tuple[int, int] | None) -> None:
    info = folder.infos[key]
    names = scale_names(key)
    present = [name for name in names if name in folder.infos]
    if len(present) != 1:
        findings.faults[key] = f"{info} with {' and '.join(present) or 'no scale: no ' + ' or '.join(names)}"
        return
    scale_key, scale_info = present[0], folder.infos[present[0]]
    findings.hidden.add(scale_key)
    packed = info.dtype == torch.int8
    shape = (*info.shape[:-1], info.shape[-1] * 2) if packed and info.shape else info.shape
    grid, length = _grid(shape, scale_info.shape, (1, _FP4_GROUP) if packed else block)
    scale = scales(scale_key, scale_info, grid)
    if not grid or scale is None:
        wanted = "a float or E8M0 dtype" if grid else length
        findings.faults[key] = f"{info} with {scale_key} {scale_info}, expected {wanted}"
        return
    assert isinstance(length, tuple)
    if packed:
        values = Codes(key, TensorInfo(info.shape, torch.uint8), shape, E2M1_PAIRS)
        findings.add(key, Scaled(values, scale, length))
    else:
        findings.add(key, Scaled(numbers(key, info), scale, length))


def scale_names(key: str) -> list[str]:
    """Return the names that the scale of a weight may have."""
    names = [f"{key}_scale_inv", f"{key}_scale"]
    if key.endswith(".weight"):
        stem = key.removesuffix("weight")
        names += [f"{stem}scale", f"{stem}qscale_weight"]
    return names


def _grid(shape: Shape, given: Shape, block: tuple[int, int] | None) -> tuple[Shape, Shape | str]:
    """Return the scale's shape with as many dims as the weight, and the block; or (), and what was expected.

    A scale without dims or of one element belongs to the whole tensor. A scale with fewer dims than the weight covers
    the first dims.
    """
    if not shape:
        return (), "a weight with dims"
    if given in ((), (1,)):
        return (1,) * len(shape), shape
    if block is not None and len(shape) >= 2:
        lengths = (*(1 for _ in shape[:-2]), *block)
        expected = num_blocks(shape, lengths)
        return (expected, lengths) if given == expected else ((), f"{list(expected)}")
    padded = (*given, *(1 for _ in shape[len(given) :]))
    if len(given) <= len(shape) and all(n in (1, size) for n, size in zip(padded, shape, strict=True)):
        assert prod(padded) == prod(given)
        return padded, tuple(size if n == 1 else 1 for n, size in zip(padded, shape, strict=True))
    return (), "one value per tensor or per row, as config.json has no weight_block_size"


def _is_block(block: object) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
