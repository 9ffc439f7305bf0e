"""Quantisation-aware training and the quantised export."""

from converters.qat.converter import QATConfig, QATConverter

__all__ = ["QATConfig", "QATConverter"]
