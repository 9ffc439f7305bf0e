"""The values of stored bytes: constant tables [256, values per byte] in float32 on the CPU.

Owns the encodings of small floats and packed integers. Knows no tensors, and not how formats name the encodings.
Device and dtype are given everywhere: a builder of a model may import this module, under `torch.device("meta")`.
Source: OCP Microscaling Formats (MX) 1.0 (E2M1, E8M0); compressed-tensors, `pack_quantized/helpers.py` (offsets).
"""

from __future__ import annotations

import functools

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BYTES = torch.arange(256, device="cpu")


@functools.cache
def floats(dtype: torch.dtype) -> torch.Tensor:
    """Return the value of each byte as a float8 or int8 number."""
    return _BYTES.to(torch.uint8).view(dtype).float().view(256, 1)


def nibbles(values: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Return both values of each byte, given the values [16] of a nibble. The low nibble comes first by default."""
    low, high = values.float()[_BYTES & 15], values.float()[_BYTES >> 4]
    return torch.stack((high, low) if high_first else (low, high), dim=1).contiguous()


EXPONENTS = torch.ldexp(torch.ones_like(_BYTES, dtype=torch.float32), _BYTES - 127).view(256, 1)
"""2 ** (byte - 127): E8M0 scales that are stored as plain bytes. 255, which means NaN, gives 2 ** 128."""
E2M1_PAIRS = nibbles(torch.tensor(_E2M1, device="cpu"))
"""Two FP4 values per byte, the low nibble first."""
INT4_PAIRS = nibbles(torch.tensor([*range(8), *range(-8, 0)], device="cpu"))
"""Two two's complement integers per byte, the low nibble first."""


@functools.cache
def offset_integers(num_bits: int) -> torch.Tensor:
    """Return integers that are stored with half their range added: two per byte for 4 bits, one for 8."""
    if num_bits == 4:
        return nibbles(_BYTES[:16] - 8)
    return (_BYTES - 128).float().view(256, 1)
