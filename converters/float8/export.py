"""Float8 weights with one scale per block, in the form of DeepSeek's and Qwen's folders.

Owns the rounding and the form on disk. Needs no torchao.
Source: transformers, `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from titan_ckpt.converters.quantized import plain_modules
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.weights.quantize import QuantizedTensor

BLOCK = 128
"""Rows and columns that share a scale."""
_CODES = torch.float8_e4m3fn
_LARGEST = torch.finfo(_CODES).max


class BlockQuantizer:
    """Satisfies titan_ckpt.weights.quantize.WeightQuantizer."""

    def __init__(self, weights: Collection[str]) -> None:
        """`weights`: fqns of the matrices that training multiplied in float8."""
        self._weights = frozenset(weights)

    def claims(self, fqn: str) -> bool:
        """Return whether training multiplied the weight in float8."""
        return fqn in self._weights

    def quantize(self, key: str, info: TensorInfo) -> QuantizedTensor | None:
        """Return the parts with codes and scales; None if blocks do not tile the matrix.

        transformers derives the block size by division, so a shorter last block would shift all other blocks.
        """
        if any(size > BLOCK and size % BLOCK for size in info.shape):
            return None
        grid = tuple(-(-size // BLOCK) for size in info.shape)
        scale = f"{key}_scale_inv"
        parts = {key: TensorInfo(info.shape, _CODES), scale: TensorInfo(grid, torch.float32)}
        return QuantizedTensor(
            parts,
            min(BLOCK, info.shape[0]),
            lambda values: dict(zip(parts, encode(values), strict=True)),
            lambda stored: decode(stored[key], stored[scale]),
        )

    def header(self, infos: Mapping[str, TensorInfo], quantized: Mapping[str, str]) -> dict[str, str]:
        """Return no metadata: names and shapes are enough to read the files."""
        return {}

    def config(self, infos: Mapping[str, TensorInfo], quantized: Mapping[str, str]) -> dict[str, Any]:
        """Return the quantization_config that transformers and vLLM read."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": plain_modules(infos, quantized),
        }


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 codes, and the float32 factor by which each block of codes must be multiplied.

    Shape: (rows, columns) in; (rows, columns) and (ceil(rows / 128), ceil(columns / 128)) out.
    """
    rows, columns = values.shape
    padded = F.pad(values.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    codes = (blocks / scale[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(_CODES)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values of `codes` with their block scales applied, in float32."""
    rows, columns = codes.shape
    each = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * each
