"""Callbacks of a user's own, by the names that a TOML file gives them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from titan_ckpt.errors import ConfigError
from titan_ckpt.training.callbacks.base import Callback


def import_callbacks(names: Sequence[str]) -> list[Callback]:
    """Import and make each "package.module:Class". Raises: ConfigError listing those that are no callback."""
    made: list[Callback] = []
    problems: list[str] = []
    for i, name in enumerate(names):
        try:
            made.append(_make(name))
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            problems.append(f"callbacks.{i}: {name!r} is no callback: {error}")
    if problems:
        raise ConfigError(problems)
    return made


def _make(name: str) -> Callback:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError('expected "package.module:Class", importable from where train.py is, or from PYTHONPATH')
    made: object = getattr(importlib.import_module(module), attribute)()
    if not isinstance(made, Callback):
        raise TypeError(
            f"it makes a {type(made).__name__}, expected a subclass of titan_ckpt.training.callbacks.Callback"
        )
    return made
