"""Checkpoints for PyTorch training: atomic, verified, and readable by the rest of the world."""

from __future__ import annotations

from titan_ckpt.config import (
    CheckpointConfig,
    ExportConfig,
    InitialLoadConfig,
    KeepConfig,
    ResumeConfig,
    SaveConfig,
    StopConfig,
)
from titan_ckpt.errors import CheckpointError
from titan_ckpt.keymap import KeyMap, KeyRule
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.model_wrapper import ModelWrapper
from titan_ckpt.restoring import LoadResult
from titan_ckpt.run_guard import RunGuard, StopRun
from titan_ckpt.transforms import StateDictTransforms

__version__ = "0.1.0"

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointManager",
    "ExportConfig",
    "InitialLoadConfig",
    "KeepConfig",
    "KeyMap",
    "KeyRule",
    "LoadResult",
    "ModelWrapper",
    "ResumeConfig",
    "RunGuard",
    "SaveConfig",
    "StateDictTransforms",
    "StopConfig",
    "StopRun",
]
