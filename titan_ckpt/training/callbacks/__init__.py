"""Callbacks around the steps of a run, one module per family. base.py owns the events and their order."""

from __future__ import annotations

from titan_ckpt.training.callbacks.base import Callback, Callbacks, LogValue, StepMetrics

__all__ = ["Callback", "Callbacks", "LogValue", "StepMetrics"]
