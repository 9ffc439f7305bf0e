"""Tools to test your own parts against this package: tests in real processes, and laws of converters and stores."""

from __future__ import annotations

from titan_ckpt.testing.converters import ConverterTests
from titan_ckpt.testing.ranks import RankError, distributed
from titan_ckpt.testing.stores import StoreTests

__all__ = ["ConverterTests", "RankError", "StoreTests", "distributed"]
