"""quant_method "torchao": flattened tensor subclasses, `X._weight_qdata` and so on, described in the files' headers.

Owns the classes' on-disk forms, without torchao. It refuses what cannot be dequantized to the weight itself: layouts
for one device's kernel, and weights whose input is scaled before the product (act_pre_scale).
Source: torchao, `prototype/safetensors/safetensors_support.py` (names and metadata), `quantization/quant_primitives.py`
(dequantize_affine), `prototype/gptq/api.py` (int4), `prototype/mx_formats/` (MX, NVFP4 and swizzled scales).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from titan_ckpt.encoding import strict_json
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.quantized.folder import FLOAT8, FLOATS, Findings, QuantizedFolder, num_blocks, numbers
from titan_ckpt.formats.quantized.values import (
    E2M1_PAIRS,
    INT4_PAIRS,
    Codes,
    Joined,
    Numbers,
    Scaled,
    Transposed,
    Values,
)
from titan_ckpt.geometry.chunks import Shape, TensorInfo

_NAMES = "tensor_names"
_MAX_JSON_BYTES = 1 << 20
_MAX_NAMES_BYTES = 1 << 27
_PLAIN = "Tensor"
_TILE = (128, 4)
"""Rows and columns of a tile of swizzled scales."""


@dataclass(frozen=True, slots=True)
class _Flattened:
    """One tensor's parts, by their names inside the subclass, and its attributes."""

    prefix: str
    infos: Mapping[str, TensorInfo]
    attributes: Mapping[str, Any]

    def key(self, part: str) -> str:
        return self.prefix + part

    def numbers(self, part: str, shape: Shape | None = None) -> Values:
        """Return a part as numbers, in its own shape or another. Raises: ValueError if the shape does not fit."""
        info = self.infos[part]
        if shape is not None and prod(shape) != prod(info.shape):
            raise ValueError(f"{self.key(part)} is {info}, expected {list(shape)}")
        return numbers(self.key(part), info, shape)

    def block(self, dims: int) -> Shape:
        """Return the block size, one number for each dim. Raises: TypeError, ValueError."""
        block = strict_json.as_shape(self.attributes.get("block_size"))
        if len(block) != dims or 0 in block:
            raise ValueError(f"block_size is {list(block)}, expected {dims} positive integers")
        return block


def find(folder: QuantizedFolder) -> Findings:
    """Rebuild each tensor that the headers describe."""
    findings = Findings()
    descriptions = {name: text for metadata in folder.metadata for name, text in metadata.items()}
    if _NAMES not in descriptions:
        findings.faults[_NAMES] = "no file's header has it, so nothing describes the tensors"
        return findings
    for name in _names(folder):
        described = _description(folder, name, descriptions.get(name), findings)
        kind = described.get("_type")
        if kind == _PLAIN or not described:
            if described and name not in folder.infos:
                findings.faults[name] = "it is not there"
            continue
        try:
            _rebuild(findings, folder, name, described)
        except (TypeError, ValueError) as error:
            findings.faults[name] = f"{kind}: {error}"
        except KeyError as error:
            findings.faults[name] = f"{kind}: no {error.args[0]}"
    return findings


def _rebuild(findings: Findings, folder: QuantizedFolder, name: str, described: Mapping[str, Any]) -> None:
    """Add one tensor. Raises: TypeError, ValueError, KeyError with the missing attribute."""
    module, _, leaf = name.rpartition(".")
    prefix = f"{module}._{leaf}_"
    parts = [strict_json.as_str(part) for part in strict_json.as_list(described["_tensor_data_names"])]
    findings.hidden.update(prefix + part for part in parts)
    kind = str(described.get("_type"))
    if kind not in _MAKERS:
        findings.unsupported.append(f"{name} is a {kind}")
    elif missing := [prefix + part for part in parts if prefix + part not in folder.infos]:
        raise ValueError(f"no {', '.join(missing)}")
    elif "act_pre_scale" in parts:
        findings.unsupported.append(f"{name}: its input is scaled before the product (act_pre_scale)")
    else:
        infos = {part: folder.infos[prefix + part] for part in parts}
        findings.add(name, _MAKERS[kind](_Flattened(prefix, infos, described["_data"])))


def _names(folder: QuantizedFolder) -> list[str]:
    """Return the names of all tensors, each once. The files of a folder list their own tensors, or each lists all."""
    names: dict[str, None] = {}
    for metadata in folder.metadata:
        if text := metadata.get(_NAMES):
            listed = strict_json.parse(text.encode(), _MAX_NAMES_BYTES, f"{folder.path}: {_NAMES}")
            try:
                names.update(dict.fromkeys(strict_json.as_str(name) for name in strict_json.as_list(listed)))
            except TypeError as error:
                raise CorruptCheckpointError(f"{folder.path}: {_NAMES}: {error}", str(folder.path)) from error
    return list(names)


def _description(folder: QuantizedFolder, name: str, text: str | None, findings: Findings) -> dict[str, Any]:
    """Return the JSON of one tensor; empty, with a fault noted, if torchao would not write it."""
    described = None if text is None else strict_json.parse(text.encode(), _MAX_JSON_BYTES, f"{folder.path}: {name}")
    attributes = described.get("_data") if isinstance(described, dict) else None
    if not isinstance(described, dict) or (described.get("_type") != _PLAIN and not isinstance(attributes, dict)):
        findings.faults[name] = f"its header entry is {text!r:.80}"
        return {}
    return described


def _float8(flat: _Flattened) -> Values:
    """Return float8 numbers times a scale per block. The size of a block follows from the shapes."""
    codes, scale = flat.infos["qdata"], flat.infos["scale"]
    if codes.dtype not in FLOAT8 or scale.dtype not in FLOATS:
        raise ValueError(f"qdata is {codes} and scale {scale}, expected float8 and floats")
    grid = (1,) * len(codes.shape) if prod(scale.shape) == 1 else scale.shape
    if len(grid) != len(codes.shape) or any(m == 0 or n % m for n, m in zip(codes.shape, grid, strict=True)):
        raise ValueError(f"{flat.key('scale')} is {scale}, which does not divide {codes}")
    block = tuple(n // m for n, m in zip(codes.shape, grid, strict=True))
    return Scaled(flat.numbers("qdata"), flat.numbers("scale", grid), block)


def _affine(flat: _Flattened) -> Values:
    """Return (int8 - zero point) * scale per block."""
    codes = flat.infos["qdata"]
    if codes.dtype != torch.int8:
        raise ValueError(f"qdata is {codes}, expected int8")
    block = flat.block(len(codes.shape))
    grid = num_blocks(codes.shape, block)
    zero = flat.numbers("zero_point", grid) if "zero_point" in flat.infos else None
    return Scaled(flat.numbers("qdata"), flat.numbers("scale", grid), block, zero=zero)


def _int4(flat: _Flattened) -> Values:
    """Return int4 * scale + zero point per group; two values per byte, scales transposed [..., groups, rows]."""
    codes, shape = flat.infos["qdata"], strict_json.as_shape(flat.attributes["shape"])
    block = flat.block(len(shape))
    if codes.dtype.itemsize != 1 or codes.shape != (*shape[:-1], shape[-1] // 2) or shape[-1] % 2 or len(shape) < 2:
        raise ValueError(f"qdata is {codes}, expected bytes {[*shape[:-1], shape[-1] // 2]}")
    if any(length != 1 for length in block[:-1]) or shape[-1] % block[-1]:
        raise ValueError(f"block_size is {list(block)}, expected groups of each row")
    *lead, rows, groups = num_blocks(shape, block)
    stored = (*lead, groups, rows)
    swap = (*range(len(lead)), len(shape) - 1, len(shape) - 2)
    scale, zero = (Transposed(flat.numbers(part, stored), swap) for part in ("scale", "zero_point"))
    values = Codes(flat.key("qdata"), TensorInfo(codes.shape, torch.uint8), shape, INT4_PAIRS)
    return Scaled(values, scale, block, offset=zero)


def _mx(flat: _Flattened) -> Values:
    """Return float8 or FP4 numbers times an exponent per block of a row."""
    kind = flat.attributes["elem_dtype"]["_data"]
    if kind != "float4_e2m1fn_x2" and flat.infos["qdata"].dtype not in FLOAT8:
        raise ValueError(f"elements are {kind}")
    values = _fp4(flat) if kind == "float4_e2m1fn_x2" else flat.numbers("qdata")
    return Scaled(values, _block_scales(flat, values.shape), _row_block(flat, values.shape))


def _nvfp4(flat: _Flattened) -> Values:
    """Return FP4 numbers times a float8 scale per block of a row, and times the tensor's own scale if there is one."""
    values = _fp4(flat)
    scale = _block_scales(flat, values.shape)
    if "per_tensor_scale" in flat.infos:
        outer = flat.infos["per_tensor_scale"].shape
        grid = outer or (1,) * len(scale.shape)
        whole = tuple(n if m == 1 else 1 for n, m in zip(scale.shape, grid, strict=True))
        scale = Scaled(scale, flat.numbers("per_tensor_scale", grid), whole)
    return Scaled(values, scale, _row_block(flat, values.shape))


def _fp4(flat: _Flattened) -> Values:
    codes = flat.infos["qdata"]
    if codes.dtype != torch.uint8 or len(codes.shape) < 2:
        raise ValueError(f"qdata is {codes}, expected bytes of a matrix")
    return Codes(flat.key("qdata"), codes, (*codes.shape[:-1], codes.shape[-1] * 2), E2M1_PAIRS)


def _row_block(flat: _Flattened, shape: Shape) -> Shape:
    length = strict_json.as_int(flat.attributes["block_size"])
    if not shape or length <= 0 or shape[-1] % length:
        raise ValueError(f"block_size is {length}, which does not divide {list(shape)}")
    return (*(1 for _ in shape[:-1]), length)


def _block_scales(flat: _Flattened, shape: Shape) -> Values:
    """Return the scales as a matrix. Swizzled scales are stored in tiles, where rows that are 32 apart are adjacent."""
    key, info = flat.key("scale"), flat.infos["scale"]
    grid = num_blocks(shape, _row_block(flat, shape))
    if info.dtype != torch.float8_e8m0fnu and info.dtype not in FLOAT8:
        raise ValueError(f"{key} is {info}, expected float8 scales")
    if not flat.attributes.get("is_swizzled_scales"):
        return flat.numbers("scale", grid)
    tiles = num_blocks(grid, _TILE) if len(grid) == 2 else ()
    if prod((*tiles, *_TILE)) != prod(info.shape) or not tiles:
        raise ValueError(f"{key} is {info}, expected {list(tiles)} tiles of {list(_TILE)}")
    stored = (*tiles, _TILE[0] // 4, 4, _TILE[1])
    values = Numbers(key, TensorInfo(stored, info.dtype)) if info.dtype not in FLOAT8 else numbers(key, info, stored)
    return Joined(Transposed(values, (0, 3, 2, 1, 4)), (3, 2), grid)


_MAKERS: Mapping[str, Callable[[_Flattened], Values]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": _affine,
    "IntxUnpackedToInt8Tensor": _affine,
    "Int4Tensor": _int4,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
"""torchao class -> maker. Int4TilePackedTo4dTensor and Int4PlainInt32Tensor are laid out for one device's kernel."""
