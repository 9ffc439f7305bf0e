"""SaveHandle: a save, or the exports of a step, that runs in this thread or in one of its own.

Owns what is said of a failure that nobody waits for: it is logged when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable

from titan_ckpt.disk.workers import BackgroundCall

logger = logging.getLogger(__name__)


class SaveHandle(BackgroundCall):
    """A save in flight, or the exports of a step."""

    def __init__(self, step: int, act: Callable[[], object], name: str) -> None:
        super().__init__(act, f"titan_ckpt {name} {step}")
        self.step = step

    def run(self, *, make: bool = True) -> None:
        _unheard[id(self)] = self
        super().run(make=make)
        if self.done and self.error is None:
            self.hear()

    def succeeded(self) -> bool:
        """Block until the save has ended and return whether it is committed."""
        self.wait()
        return self.error is None

    def hear(self) -> None:
        """Note that somebody knows how it ended."""
        _unheard.pop(id(self), None)


_unheard: dict[int, SaveHandle] = {}
"""Saves that have failed, or may fail, and that nobody has waited for yet."""


def _report_unheard() -> None:
    """Log unheard failures when the process ends without `close`; the threads of saves have ended by then."""
    for handle in _unheard.values():
        error = handle.error
        logger.critical("what was saved or exported of step %d is not there: %s", handle.step, error, exc_info=error)


atexit.register(_report_unheard)
os.register_at_fork(after_in_child=_unheard.clear)  # the process that saves says it
