"""quant_method "fp8": float8 weights with a scale per block, per row or per tensor (DeepSeek, Qwen, Mistral).

Owns the names and shapes of weights and scales. FP4 experts packed two in a byte, as DeepSeek V4 has them, too.
Source: transformers, `integrations/finegrained_fp8.py` (Fp8Dequantize), `quantizers/quantizer_finegrained_fp8.py`
(names of scales). The scale is multiplied with, also where its name says inverse.
"""

from __future__ import annotations

from math import prod

import torch

from titan_ckpt.storage.quantised.folder import FLOAT8, Findings, QuantisedFolder, num_blocks, numbers, scales
from titan_ckpt.storage.quantised.tables import e2m1_pairs
from titan_ckpt.storage.quantised.values import Codes, Scaled
from titan_ckpt.tensors import Shape, TensorInfo

_FP4_GROUP = 32
_OF_ACTIVATIONS = ("activation_scale", "input_scale", ".qscale_act", ".k_scale", ".v_scale")
"""Ends of names of scales that belong to no weight: left out, as nothing is computed in float8 here."""


def find(folder: QuantisedFolder) -> Findings:
    """Pair each quantised weight with its scale."""
    found = Findings()
    block = folder.settings.get("weight_block_size")
    if block is not None and not _is_block(block):
        found.unsupported.append(f"weight_block_size {block!r} is not two positive integers")
        return found
    for key, info in folder.infos.items():
        if key.endswith(_OF_ACTIVATIONS):
            found.hidden.add(key)
        elif info.dtype in FLOAT8 or info.dtype == torch.int8:
            _add(found, folder, key, None if block is None else tuple(block))
    for key in folder.infos:
        if key.endswith("_scale_inv") and key not in found.hidden:
            found.faults[key] = "there is no float8 weight of this name"
    return found


def _add(found: Findings, folder: QuantisedFolder, key: str, block: tuple[int, int] | None) -> None:
    info = folder.infos[key]
    names = scale_names(key)
    present = [name for name in names if name in folder.infos]
    if len(present) != 1:
        found.faults[key] = f"{info} with {' and '.join(present) or 'no scale: no ' + ' or '.join(names)}"
        return
    scale_key, scale_info = present[0], folder.infos[present[0]]
    found.hidden.add(scale_key)
    packed = info.dtype == torch.int8
    shape = (*info.shape[:-1], info.shape[-1] * 2) if packed and info.shape else info.shape
    grid, length = _grid(shape, scale_info.shape, (1, _FP4_GROUP) if packed else block)
    scale = scales(scale_key, scale_info, grid)
    if not grid or scale is None:
        wanted = "a float or E8M0 dtype" if grid else length
        found.faults[key] = f"{info} with {scale_key} {scale_info}, expected {wanted}"
        return
    assert isinstance(length, tuple)
    if packed:
        values = Codes(key, TensorInfo(info.shape, torch.uint8), shape, e2m1_pairs())
        found.add(key, Scaled(values, scale, length))
    else:
        found.add(key, Scaled(numbers(key, info), scale, length))


def scale_names(key: str) -> list[str]:
    """Return what the scale of a weight may be called."""
    names = [f"{key}_scale_inv", f"{key}_scale"]
    if key.endswith(".weight"):
        stem = key.removesuffix("weight")
        names += [f"{stem}scale", f"{stem}qscale_weight"]
    return names


def _grid(shape: Shape, found: Shape, block: tuple[int, int] | None) -> tuple[Shape, Shape | str]:
    """Return the scale's shape with all dims of the weight, and the block; or nothing, and what was expected.

    A scale of no dims or one element is the whole tensor's; with fewer dims it counts from the first.
    """
    if not shape:
        return (), "a weight with dims"
    if found in ((), (1,)):
        return (1,) * len(shape), shape
    if block is not None and len(shape) >= 2:
        lengths = (*(1 for _ in shape[:-2]), *block)
        expected = num_blocks(shape, lengths)
        return (expected, lengths) if found == expected else ((), f"{list(expected)}")
    padded = (*found, *(1 for _ in shape[len(found) :]))
    if len(found) <= len(shape) and all(n in (1, size) for n, size in zip(padded, shape, strict=True)):
        assert prod(padded) == prod(found)
        return padded, tuple(size if n == 1 else 1 for n, size in zip(padded, shape, strict=True))
    return (), "one value per tensor or per row, as config.json has no weight_block_size"


def _is_block(block: object) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
