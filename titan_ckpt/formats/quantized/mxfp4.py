"""quant_method "mxfp4": experts as blocks of FP4 values with an exponent each (gpt-oss).

Owns the names and the layout: `X_blocks` [E, R, G, B] bytes and `X_scales` [E, R, G] are X [E, G * B * 2, R].
Source: transformers, `integrations/mxfp4.py` (convert_moe_packed_tensors, which transposes).
"""

from __future__ import annotations

import torch

from titan_ckpt.formats.quantized.folder import Findings, QuantizedFolder
from titan_ckpt.formats.quantized.values import E2M1_PAIRS, EXPONENTS, Codes, Scaled, Transposed
from titan_ckpt.geometry.chunks import TensorInfo

_BLOCKS, _SCALES = "_blocks", "_scales"


def find(folder: QuantizedFolder) -> Findings:
    """Pair blocks with scales."""
    findings = Findings()
    infos = folder.infos
    for key in infos:
        if key.endswith(_SCALES) and key.removesuffix(_SCALES) + _BLOCKS not in infos:
            findings.faults[key] = f"there is no {key.removesuffix(_SCALES)}{_BLOCKS}"
        if not key.endswith(_BLOCKS):
            continue
        name = key.removesuffix(_BLOCKS)
        scales_key = name + _SCALES
        blocks, scales = infos[key], infos.get(scales_key)
        if scales is None:
            findings.faults[key] = f"there is no {scales_key}"
        elif blocks.dtype != torch.uint8 or len(blocks.shape) != 4:
            findings.faults[key] = f"{blocks}, expected uint8 [experts, rows, groups, bytes of a group]"
        elif scales != TensorInfo(blocks.shape[:-1], torch.uint8):
            findings.faults[scales_key] = f"{scales}, expected {TensorInfo(blocks.shape[:-1], torch.uint8)}"
        else:
            num, rows, groups, size = blocks.shape
            stored = TensorInfo((num, rows, groups * size), torch.uint8)
            codes = Codes(key, stored, (num, rows, groups * size * 2), E2M1_PAIRS)
            scale = Codes(scales_key, scales, scales.shape, EXPONENTS)
            findings.add(name, Transposed(Scaled(codes, scale, (1, 1, 2 * size)), (0, 2, 1)))
    return findings
