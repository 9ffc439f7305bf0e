"""What a third party needs to test its own parts against this package: real processes, and the laws as test classes."""

from __future__ import annotations

from titan_ckpt.testing.converters import ConverterTests
from titan_ckpt.testing.ranks import RankError, distributed

__all__ = ["ConverterTests", "RankError", "distributed"]
