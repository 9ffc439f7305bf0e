"""Tools to test your own parts against this package: tests in real processes, and the converter laws as tests."""

from __future__ import annotations

from titan_ckpt.testing.converters import ConverterTests
from titan_ckpt.testing.ranks import RankError, distributed

__all__ = ["ConverterTests", "RankError", "distributed"]
