"""quant_method "compressed-tensors": one scheme per group of modules, one format per scheme (vLLM, llm-compressor).

Owns the names of a weight's companions, and the packing. The scheme of a tensor follows from its shapes and dtypes:
exactly one of the layouts that config.json lists must fit.
Source: compressed-tensors, `compressors/` (pack_quantized, naive_quantized, nvfp4, mxfp4, mxfp8) and
`quantization/lifecycle/forward_helpers.py` (_dequantize).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from titan_ckpt.formats.quantized.folder import FLOAT8, Findings, QuantizedFolder, num_blocks, numbers, scales
from titan_ckpt.formats.quantized.values import (
    E2M1_PAIRS,
    Codes,
    Joined,
    Numbers,
    Quotient,
    Scaled,
    Transposed,
    Values,
    offset_integers,
)
from titan_ckpt.geometry.chunks import Shape, TensorInfo

_FORMATS = frozenset(
    {
        "float-quantized",
        "int-quantized",
        "naive-quantized",
        "pack-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    }
)
_PACKED_BITS = (4, 8)
"""Widths that fill whole bytes. Versions of the library pack other widths differently."""
_OF_WEIGHTS = ("weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale")
_OF_ACTIVATIONS = tuple(
    f".{part}_{what}" for part in ("input", "output", "q", "k", "v") for what in ("scale", "zero_point", "global_scale")
)
_NOT_DEQUANTIZED = {
    ".weight_g_idx": "its columns are grouped in order of activation",
    ".bitmask": "it is sparse",
    ".compressed": "it is sparse",
}


@dataclass(frozen=True, slots=True)
class _Scheme:
    """One scheme of config.json."""

    num_bits: int
    is_float: bool
    strategy: str
    group_size: int
    block: Shape
    symmetric: bool

    def layout(self, shape: Shape) -> tuple[Shape, Shape] | None:
        """Return the shape of the scales and of one block for a weight of this shape; None if the scheme cannot fit."""
        lead, last = shape[:-1], shape[-1]
        match self.strategy:
            case "tensor":
                return (1,), shape
            case "channel":
                return (*lead, 1), (*(1 for _ in lead), last)
            case "group" | "tensor_group" if self.group_size > 0 and last % self.group_size == 0:
                return (*lead, last // self.group_size), (*(1 for _ in lead), self.group_size)
            case "block" if len(self.block) == len(shape) == 2:
                return num_blocks(shape, self.block), self.block
        return None


def find(folder: QuantizedFolder) -> Findings:
    """Pair each quantized weight with its scales and the scheme that fits them."""
    findings = Findings()
    nested = folder.settings.get("quantization_config")  # as transformers unwraps it
    settings = nested if isinstance(nested, dict) else folder.settings
    _check_settings(findings, {"sparsity_config": folder.settings.get("sparsity_config"), **settings})
    schemes = list(_schemes(settings))
    if not schemes and not findings.unsupported:
        findings.unsupported.append("config_groups describe no weights")
    if findings.unsupported:
        return findings
    infos = folder.infos
    shapes = folder.read_whole([key for key in infos if key.endswith(".weight_shape") and infos[key].nbytes <= 512])
    for key, info in infos.items():
        stem, _, leaf = key.rpartition(".")
        if key.endswith(_OF_ACTIVATIONS):
            findings.hidden.add(key)
        elif reason := _NOT_DEQUANTIZED.get(f".{leaf}"):
            findings.unsupported.append(f"{key}: {reason}")
        elif leaf == "weight_packed" or (leaf == "weight" and f"{stem}.weight_scale" in infos):
            module = _Module(infos, stem, shapes.get(f"{stem}.weight_shape"), schemes)
            try:
                findings.add(f"{stem}.weight", module.values(leaf, info))
            except ValueError as error:
                findings.faults[key] = f"{info}: {error}"
            findings.hidden.update({key, *(f"{stem}.{part}" for part in _OF_WEIGHTS)} - {f"{stem}.weight"})
    for key in infos:
        if key.rpartition(".")[2] in _OF_WEIGHTS and key not in findings.hidden:
            findings.faults[key] = "there is no quantized weight of this name"
    return findings


@dataclass(frozen=True, slots=True)
class _Module:
    """The weight of one module, and its companions."""

    infos: Mapping[str, TensorInfo]
    stem: str
    weight_shape: torch.Tensor | None
    schemes: list[_Scheme]

    def values(self, leaf: str, info: TensorInfo) -> Values:
        """Return the dequantized weight. Raises: ValueError saying what is wrong."""
        if len(info.shape) < 2:
            raise ValueError("expected a matrix")
        if leaf == "weight":
            is_float = info.dtype in FLOAT8
            if not is_float and info.dtype != torch.int8:
                raise ValueError("has a scale and is not quantized")
            schemes = [s for s in self.schemes if s.is_float == is_float and (s.num_bits == 8 or not is_float)]
            return self._scaled(numbers(f"{self.stem}.weight", info), schemes)
        if info.dtype == torch.int32:
            return self._packed_integers(info)
        if info.dtype == torch.uint8:
            shape = (*info.shape[:-1], info.shape[-1] * 2)
            codes = Codes(f"{self.stem}.weight_packed", info, shape, E2M1_PAIRS)
            return self._scaled(codes, [s for s in self.schemes if s.is_float and s.num_bits == 4])
        raise ValueError("expected int32 or uint8")

    def _packed_integers(self, info: TensorInfo) -> Values:
        shape = self._shape(info)
        fitting = [s for s in self.schemes if not s.is_float and -(-shape[-1] * s.num_bits // 32) == info.shape[-1]]
        bits = {scheme.num_bits for scheme in fitting}
        if len(bits) != 1:
            widths = ", ".join(str(n) for n in sorted({s.num_bits for s in self.schemes if not s.is_float})) or "none"
            raise ValueError(f"{list(shape)} packed to {info.shape[-1]} words per row does not fit {widths} bits")
        (num_bits,) = bits
        if num_bits not in _PACKED_BITS:
            raise ValueError(f"{num_bits} bits are not dequantized by this version, 4 and 8 are")
        stored = TensorInfo((*info.shape[:-1], info.shape[-1] * 4), torch.uint8)
        codes = Codes(f"{self.stem}.weight_packed", stored, shape, offset_integers(num_bits))
        return self._scaled(codes, fitting)

    def _shape(self, info: TensorInfo) -> Shape:
        value = self.weight_shape
        if value is None or value.dtype not in (torch.int64, torch.int32) or value.dim() != 1:
            raise ValueError(f"no {self.stem}.weight_shape")
        shape = tuple(int(n) for n in value)
        if len(shape) < 2 or shape[:-1] != info.shape[:-1] or shape[-1] < 1:
            raise ValueError(f"weight_shape is {list(shape)}")
        return shape

    def _scaled(self, codes: Values, schemes: list[_Scheme]) -> Values:
        """Return the codes times their scales, whose layout must be the only one that fits."""
        key = f"{self.stem}.weight_scale"
        info = self.infos.get(key)
        if info is None:
            raise ValueError(f"no {key}")
        layouts = [(layout, scheme) for scheme in schemes if (layout := scheme.layout(codes.shape))]
        grid_shape = info.shape or (1,)
        fitting = {block: scheme for (shape, block), scheme in layouts if shape == grid_shape}
        if len(fitting) != 1:
            expected = " or ".join(dict.fromkeys(str(list(shape)) for (shape, _), _ in layouts)) or "no such weights"
            raise ValueError(f"{key} is {info}, and by config.json it is {expected}")
        ((block, scheme),) = fitting.items()
        grid = num_blocks(codes.shape, block)
        scale = scales(key, info, grid)
        if scale is None:
            raise ValueError(f"{key} is {info}, expected floats or exponents")
        symmetric = any(other.symmetric for (_, its_block), other in layouts if its_block == block)
        zero = self._zero(codes, grid, scheme, symmetric)
        return Scaled(codes, self._over_global(scale, scheme), block, zero=zero)

    def _zero(self, codes: Values, grid: Shape, scheme: _Scheme, symmetric: bool) -> Values | None:
        """Return the zero points. They are packed along rows if the weight is packed along columns."""
        key = f"{self.stem}.weight_zero_point"
        info = self.infos.get(key)
        if info is None:
            if not symmetric:
                raise ValueError(f"no {key}, and by config.json the weight is not symmetric")
            return None
        if info.dtype != torch.int32:
            if prod(info.shape) != prod(grid):
                raise ValueError(f"{key} is {info}, expected {list(grid)}")
            return numbers(key, info, grid)
        per_word = 32 // scheme.num_bits
        words = -(-grid[-2] // per_word) if len(grid) >= 2 else 0
        if scheme.num_bits not in _PACKED_BITS or info.shape != (*grid[:-2], words, grid[-1]):
            raise ValueError(f"{key} is {info}, expected {[*grid[:-2], words, grid[-1]]}")
        lead = len(grid) - 2
        stored = TensorInfo((*info.shape, 4), torch.uint8)
        table = offset_integers(scheme.num_bits)
        words_apart = Codes(key, stored, (*info.shape, per_word), table)
        rows = Transposed(words_apart, (*range(lead), lead, lead + 2, lead + 1))
        return Joined(rows, (*(1 for _ in range(lead)), 2, 1), grid)

    def _over_global(self, scale: Values, scheme: _Scheme) -> Values:
        key = f"{self.stem}.weight_global_scale"
        info = self.infos.get(key)
        if info is None:
            if scheme.strategy == "tensor_group":
                raise ValueError(f"no {key}")
            return scale
        if prod(info.shape) != 1 or info.dtype != torch.float32:
            raise ValueError(f"{key} is {info}, expected one float32")
        return Quotient(scale, Numbers(key, TensorInfo((1,) * len(scale.shape), info.dtype)))


def _check_settings(findings: Findings, settings: Mapping[str, Any]) -> None:
    """Note every setting by which the stored values are not just scaled weights."""
    groups = settings.get("config_groups")
    described = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    formats = [settings.get("format"), *(group["format"] for group in described if group.get("format") is not None)]
    unknown = {str(name) for name in formats if not isinstance(name, str) or name not in _FORMATS}
    findings.unsupported.extend(f"format {name!r}" for name in sorted(unknown))
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        findings.unsupported.append(f"sparsity_config.format {sparsity.get('format')!r}")
    transforms = settings.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        findings.unsupported.append("transform_config: its weights are rotated, which the model has to undo")


def _schemes(settings: Mapping[str, Any]) -> Iterator[_Scheme]:
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield _scheme(weights)


def _scheme(weights: Mapping[str, Any]) -> _Scheme:
    bits, group, block = weights.get("num_bits", 8), weights.get("group_size"), weights.get("block_structure")
    if isinstance(block, str):
        block = [int(n) if n.isdigit() else 0 for n in block.split("x")]
    block = block if isinstance(block, list) and all(type(n) is int and n > 0 for n in block) else []
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    return _Scheme(
        num_bits=bits if type(bits) is int and bits > 0 else 0,
        is_float=weights.get("type") == "float",
        strategy=str(strategy),
        group_size=group if type(group) is int else 0,
        block=tuple(block),
        symmetric=bool(weights.get("symmetric", True)),
    )
