"""Float8 weights in blocks with a scale each, as DeepSeek's and Qwen's folders hold them.

Owns the rounding and the form on disk; needs no torchao.
Source: transformers, `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from converters.quantised_folder import plain_modules
from titan_ckpt.quantising import QuantisedTensor
from titan_ckpt.tensors import TensorInfo

BLOCK = 128
"""Rows and columns that share a scale."""
_CODES = torch.float8_e4m3fn
_LARGEST = torch.finfo(_CODES).max


class BlockQuantiser:
    """Satisfies titan_ckpt.quantising.WeightQuantiser."""

    def __init__(self, weights: Collection[str]) -> None:
        """`weights`: fqns of matrices that were multiplied in float8."""
        self._weights = frozenset(weights)

    def claims(self, fqn: str) -> bool:
        """Say whether the weight was multiplied in float8 in training."""
        return fqn in self._weights

    def quantise(self, key: str, info: TensorInfo) -> QuantisedTensor | None:
        """Return codes and scales; None where blocks do not tile the matrix.

        transformers works the size of a block out by dividing: a last block that is cut short would shift all others.
        """
        if any(size > BLOCK and size % BLOCK for size in info.shape):
            return None
        grid = tuple(-(-size // BLOCK) for size in info.shape)
        scale = f"{key}_scale_inv"
        parts = {key: TensorInfo(info.shape, _CODES), scale: TensorInfo(grid, torch.float32)}
        return QuantisedTensor(
            parts,
            min(BLOCK, info.shape[0]),
            lambda values: dict(zip(parts, encode(values), strict=True)),
            lambda found: decode(found[key], found[scale]),
        )

    def header(self, infos: Mapping[str, TensorInfo], quantised: Mapping[str, str]) -> dict[str, str]:
        """Return nothing: names and shapes say all."""
        return {}

    def config(self, infos: Mapping[str, TensorInfo], quantised: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields that transformers and vLLM read."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": plain_modules(infos, quantised),
        }


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 codes and the float32 number that each block of them is to be multiplied with.

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
    """Return the values, in float32."""
    rows, columns = codes.shape
    each = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * each
