"""Quantisation-aware training and the quantised export."""

from titan_ckpt.converters.qat.converter import QATConfig, QATConverter

__all__ = ["QATConfig", "QATConverter"]
