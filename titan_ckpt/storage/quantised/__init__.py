"""Quantised Hugging Face weights, read as the floats they stand for.

Owns the choice of the method by config.json. Each method is a module here that turns names and shapes into
expressions (values.py); reading.py computes them, in float32 and for the requested regions alone.

A dequantised tensor is listed as float32, whatever config.json says of the model's dtype: that is what scale and code
give without another rounding. Who may round to bfloat16 is the planner's business, as with any other file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.storage.base import ReadRequest
from titan_ckpt.storage.engine import collector_held
from titan_ckpt.storage.quantised import bitsandbytes, compressed_tensors, fp8_block, mxfp4, torchao_flat
from titan_ckpt.storage.quantised.folder import Findings, QuantisedFolder
from titan_ckpt.storage.quantised.reading import DequantisedFiles
from titan_ckpt.storage.safetensors_file import SafetensorsHeader
from titan_ckpt.storage.safetensors_reader import SafetensorsFiles
from titan_ckpt.tensors import Chunk

METHODS: Mapping[str, Callable[[QuantisedFolder], Findings]] = {
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
"""End of the name of codes -> what is there instead in their scales' name, over all methods."""
_LISTED = 8


def open_quantised(
    path: Path, config: Mapping[str, Any], headers: Sequence[SafetensorsHeader]
) -> DequantisedFiles | None:
    """Return the folder's tensors as floats; None where config.json says nothing of quantisation.

    Raises: LoadMismatchError for a method, or a variant of one, that is not known here, and for codes with scales that
    no method explains; CorruptCheckpointError for scales that are missing or do not fit. All name the tensors.
    """
    settings = quantisation_of(config)
    if settings is None:
        _refuse_codes(path, {key: entry.info.dtype for header in headers for key, entry in header.entries.items()})
        return None
    method = _method(settings)
    if method not in METHODS:
        raise LoadMismatchError(
            f"{path}: its weights are quantised (quantization_config.quant_method = {method!r}), and this version "
            f"does not dequantise them; it knows {', '.join(METHODS)}. Use a folder with plain float weights"
        )
    infos = {key: entry.info for header in headers for key, entry in header.entries.items()}
    metadata = [header.metadata for header in headers]
    folder = QuantisedFolder(path, method, settings, infos, metadata, lambda keys: _read_whole(headers, keys))
    with collector_held():
        found = METHODS[method](folder)
        found.raise_faults(folder)
        return DequantisedFiles(headers, found.values, found.hidden)


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization_config of a config.json, also where it is that of a model's text part."""
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for name in ("quantization_config", "compression_config"):
            if settings := part.get(name):
                return settings if isinstance(settings, dict) else {"quant_method": settings}
    return None


def _refuse_codes(path: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise where codes lie beside their scales, for config.json, which says nothing, may be lost or another's."""
    found = [
        f"{key} ({str(dtype).removeprefix('torch.')}, with {scale})"
        for key, dtype in dtypes.items()
        if dtype not in _PLAIN
        for suffix, scales in _SCALES_OF.items()
        for scale in (key.removesuffix(suffix) + name for name in scales)
        if key.endswith(suffix) and scale in dtypes
    ]
    if found:
        more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        raise LoadMismatchError(
            f"{path}: {len(found)} tensor(s) are codes with scales beside them, and config.json has no "
            f"quantization_config that says how to read them: {'; '.join(found[:_LISTED])}{more}. "
            "Restore the folder's own config.json; without it the weights would be loaded unscaled"
        )


def _method(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"  # as transformers reads configs from before there was quant_method
    return str(method)


def _read_whole(headers: Sequence[SafetensorsHeader], keys: Sequence[str]) -> dict[str, torch.Tensor]:
    infos = {key: entry.info for header in headers for key, entry in header.entries.items()}
    tensors = {key: torch.empty(infos[key].shape, dtype=infos[key].dtype) for key in keys}
    files = SafetensorsFiles(headers)
    try:
        files.read([ReadRequest(key, Chunk.whole(infos[key].shape), tensor) for key, tensor in tensors.items()])
    finally:
        files.close()
    return tensors
