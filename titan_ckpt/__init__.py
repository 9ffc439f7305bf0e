"""Checkpoints for PyTorch training: atomic, verified, and readable by the rest of the world.

The public names are imported on first use (PEP 562), so that `import titan_ckpt` and the command line's help do not
wait for torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from titan_ckpt.errors import printable

if TYPE_CHECKING:
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
    from titan_ckpt.geometry.keymap import KeyMap, KeyRule
    from titan_ckpt.guard.run_guard import RunGuard, StopRun
    from titan_ckpt.integrations.loader_position import PositionedLoader
    from titan_ckpt.loading.restore import LoadResult
    from titan_ckpt.manager import CheckpointManager
    from titan_ckpt.stores.store import StoreConfig
    from titan_ckpt.weights.transforms import StateDictTransforms
    from titan_ckpt.weights.wrapper import ModelWrapper

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
    "PositionedLoader",
    "ResumeConfig",
    "RunGuard",
    "SaveConfig",
    "StateDictTransforms",
    "StopConfig",
    "StopRun",
    "StoreConfig",
]

_MODULES = {
    "config": "CheckpointConfig ExportConfig InitialLoadConfig KeepConfig ResumeConfig SaveConfig StopConfig",
    "stores.store": "StoreConfig",
    "errors": "CheckpointError",
    "geometry.keymap": "KeyMap KeyRule",
    "guard.run_guard": "RunGuard StopRun",
    "integrations.loader_position": "PositionedLoader",
    "loading.restore": "LoadResult",
    "manager": "CheckpointManager",
    "weights.transforms": "StateDictTransforms",
    "weights.wrapper": "ModelWrapper",
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}

_make_record = logging.getLogRecordFactory()


def _printable_record(*args: Any, **options: Any) -> logging.LogRecord:
    """Return a record for the log; a name in a foreign file must not move a terminal's cursor or forge a line."""
    record = _make_record(*args, **options)
    if (record.name or "").startswith(f"{__name__}."):  # logging.makeLogRecord makes one without a name
        record.msg, record.args = printable(record.getMessage()), ()
    return record


logging.setLogRecordFactory(_printable_record)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
