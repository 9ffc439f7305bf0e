"""Opening quantized Hugging Face weights as floats.

Owns the choice of the method by config.json. Each method is a module of this folder that turns names and shapes into
expressions (values.py); reading.py computes them in float32, for the requested regions only.

A dequantized tensor is listed as float32, whatever dtype config.json gives the model, because float32 is what scale
times code gives without another rounding. The planner decides whether it may be rounded to bfloat16, as for any file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from titan_ckpt.errors import LoadMismatchError, listed
from titan_ckpt.formats.quantized import bitsandbytes, compressed_tensors, fp8_block, mxfp4, torchao_flat
from titan_ckpt.formats.quantized.folder import Findings, QuantizedFolder
from titan_ckpt.formats.quantized.reading import DequantizedFiles
from titan_ckpt.formats.safetensors.container import SafetensorsHeader
from titan_ckpt.formats.safetensors.reader import SafetensorsFiles
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.chunks import Chunk, TensorInfo
from titan_ckpt.geometry.requests import FilePart
from titan_ckpt.stores.store import Place

METHODS: Mapping[str, Callable[[QuantizedFolder], Findings]] = {
    "bitsandbytes": bitsandbytes.find,
    "compressed-tensors": compressed_tensors.find,
    "fp8": fp8_block.find,
    "mxfp4": mxfp4.find,
    "torchao": torchao_flat.find,
}
"""By config.json's quantization_config.quant_method."""
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SCALES_OF = {
    "": ("_scale_inv", "_scale", ".absmax"),
    "weight": ("SCB",),
    "_blocks": ("_scales",),
    "_packed": ("_scale",),
    "qdata": ("scale",),
}
"""End of the name of codes -> ends of the names of their scales, over all methods."""


def open_quantized(
    path: Place, config: Mapping[str, Any], headers: Sequence[SafetensorsHeader]
) -> DequantizedFiles | None:
    """Return the folder's tensors as floats; None if config.json does not mention quantization.

    Raises: LoadMismatchError for an unknown method or variant, and for codes with scales without any method;
    CorruptCheckpointError for scales that are missing or do not fit. The errors name the tensors.
    """
    settings = quantization_of(config)
    infos = {key: entry.info for header in headers for key, entry in header.entries.items()}
    if settings is None:
        _refuse_codes(path, infos)
        return None
    method = _method(settings)
    if method not in METHODS:
        raise LoadMismatchError(
            f"{path}: its weights are quantized (quantization_config.quant_method = {method!r}), and this version "
            f"does not dequantize them; it knows {', '.join(METHODS)}. Use a folder with plain float weights"
        )
    metadata = [header.metadata for header in headers]
    folder = QuantizedFolder(path, method, settings, infos, metadata, lambda keys: _read_whole(headers, infos, keys))
    with gc_paused():
        findings = METHODS[method](folder)
        findings.raise_faults(folder)
        return DequantizedFiles(headers, findings.values, findings.hidden)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization_config of a config.json, or that of a nested part such as the text model."""
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for name in ("quantization_config", "compression_config"):
            if settings := part.get(name):
                return settings if isinstance(settings, dict) else {"quant_method": settings}
    return None


def _refuse_codes(path: Place, infos: Mapping[str, TensorInfo]) -> None:
    """Raise if codes have scales beside them: the config.json, which does not mention them, may be the wrong one."""
    codes = [
        f"{key} ({str(info.dtype).removeprefix('torch.')}, with {scale})"
        for key, info in infos.items()
        if info.dtype not in _PLAIN
        for suffix, scales in _SCALES_OF.items()
        for scale in (key.removesuffix(suffix) + name for name in scales)
        if key.endswith(suffix) and scale in infos
    ]
    if codes:
        raise LoadMismatchError(
            f"{path}: {len(codes)} tensor(s) are codes with scales beside them, and config.json has no "
            f"quantization_config that says how to read them: {listed(codes)}. "
            "Restore the folder's own config.json; without it the weights would be loaded unscaled"
        )


def _method(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"  # as transformers reads configs from before there was quant_method
    return str(method)


def _read_whole(
    headers: Sequence[SafetensorsHeader], infos: Mapping[str, TensorInfo], keys: Sequence[str]
) -> dict[str, torch.Tensor]:
    tensors = {key: torch.empty(infos[key].shape, dtype=infos[key].dtype) for key in keys}
    with contextlib.closing(SafetensorsFiles(headers)) as files:
        files.read([FilePart(key, Chunk.whole(infos[key].shape), tensor) for key, tensor in tensors.items()])
    return tensors
