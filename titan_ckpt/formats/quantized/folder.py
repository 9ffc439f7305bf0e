"""The input and the output of a quantization method's module: a folder's headers, and its findings.

Owns the verdict: every fault of every tensor in one error. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from titan_ckpt.errors import CorruptCheckpointError, LoadMismatchError, listed
from titan_ckpt.formats.quantized.values import EXPONENTS, Codes, Numbers, Values, floats
from titan_ckpt.geometry.chunks import Shape, TensorInfo
from titan_ckpt.stores.store import Place

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
_UNREADABLE_ALONE = FLOAT8 | {torch.int8, torch.float8_e8m0fnu}


@dataclass(frozen=True, slots=True)
class QuantizedFolder:
    """Headers and settings of a folder. `read_whole` reads small tensors on which the shape of others depends."""

    path: Place
    method: str
    settings: Mapping[str, Any]
    """config.json's quantization_config."""
    infos: Mapping[str, TensorInfo]
    metadata: Sequence[Mapping[str, str]]
    """The `__metadata__` of each file."""
    read_whole: Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a method's module: name of each dequantized tensor -> expression, and all faults."""

    values: dict[str, Values] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    """Stored tensors that are not listed, because they mean nothing by themselves."""
    unsupported: list[str] = field(default_factory=list)
    """Variants that this version cannot dequantize, one line each."""
    faults: dict[str, str] = field(default_factory=dict)
    """Name of a stored tensor -> what is missing beside it, or contradicts it."""

    def add(self, key: str, values: Values) -> None:
        """List a tensor in place of the stored ones from which it is computed; an empty tensor is a fault."""
        if 0 in values.shape:
            self.faults[key] = f"it is empty, {list(values.shape)}"
            return
        self.values[key] = values
        self.hidden.update(leaf.key for leaf in values.leaves())

    def raise_faults(self, folder: QuantizedFolder) -> None:
        """Raise one error with all faults, if there are any.

        Raises: LoadMismatchError for variants that cannot be dequantized, and if no tensor is quantized;
        CorruptCheckpointError for faults and for tensors without a scale.
        """
        bare = {
            key: f"{info} without a scale"
            for key, info in folder.infos.items()
            if info.dtype in _UNREADABLE_ALONE and key not in self.hidden
        }
        where = f"{folder.path}: its weights are quantized (quantization_config.quant_method = {folder.method!r})"
        if self.unsupported:
            raise LoadMismatchError(
                f"{where}, in a way that this version does not dequantize: {listed(self.unsupported)}. "
                "Use a folder with plain float weights"
            )
        if faults := bare | self.faults:
            lines = [f"{key}: {cause}" for key, cause in faults.items()]
            raise CorruptCheckpointError(
                f"{where}, and {len(lines)} tensor(s) cannot be dequantized: {listed(lines)}. "
                "Is the download complete, and is config.json the one of these weights?",
                str(folder.path),
            )
        if not self.values:
            raise LoadMismatchError(
                f"{where}, and no tensor in its files is. If they are plain floats, remove quantization_config from "
                "config.json"
            )


def numbers(key: str, info: TensorInfo, shape: Shape | None = None) -> Values:
    """Return a stored tensor as numbers, in its own shape or in one with as many elements."""
    shape = info.shape if shape is None else shape
    if info.dtype in FLOAT8:
        return Codes(key, TensorInfo(shape, torch.uint8), shape, floats(info.dtype))
    return Numbers(key, TensorInfo(shape, info.dtype))


def scales(key: str, info: TensorInfo, shape: Shape) -> Values | None:
    """Return stored scales: floats, float8, or exponents as E8M0 or plain bytes; None for any other dtype."""
    if info.dtype == torch.uint8:
        return Codes(key, TensorInfo(shape, torch.uint8), shape, EXPONENTS)
    if info.dtype in FLOATS or info.dtype in FLOAT8 or info.dtype == torch.float8_e8m0fnu:
        return numbers(key, info, shape)
    return None


def num_blocks(shape: Shape, block: Shape) -> Shape:
    """Return the number of blocks along each dim, of which the last may be cut off."""
    return tuple(-(-size // max(length, 1)) for size, length in zip(shape, block, strict=True))
