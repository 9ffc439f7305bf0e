"""Quantization-aware training and the quantized export."""

from titan_ckpt.converters.qat.converter import QATConfig, QATConverter

__all__ = ["QATConfig", "QATConverter"]
