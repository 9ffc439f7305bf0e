"""SaveHandle: a save, or the exports of a step, that runs in this thread or in one of its own.

Owns the thread and its error: `wait` raises it once, and what nobody waits for is logged when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from titan_ckpt.disk import cuda

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SaveHandle:
    """A save in flight. `wait` raises its error, once."""

    step: int
    _done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    """The error so far, until `wait` raises it."""
    _failed: bool = False

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def run(self, act: Callable[[], None]) -> None:
        """Call `act`, keep its error for `wait` and mark the save as ended; called once."""
        try:
            act()
        except BaseException as error:
            self.error, self._failed = error, True
            _unheard[id(self)] = self
        self._done.set()

    def start(self, act: Callable[[], None], name: str) -> None:
        """Do the same in a thread, whose device is this thread's; here, if there can be no more threads."""
        as_here = cuda.as_here()

        def run() -> None:
            as_here()
            act()

        try:
            threading.Thread(target=self.run, args=(run,), name=name).start()
        except RuntimeError:  # the other ranks save, and wait for this one
            self.run(act)

    def succeeded(self) -> bool:
        """Block until the save has ended and return whether it is committed; `wait` still raises its error."""
        self._done.wait()
        return not self._failed

    def wait(self) -> None:
        """Block until the save is committed. Raises: the save's error, the first time only."""
        self._done.wait()
        error, self.error = self.error, None
        _unheard.pop(id(self), None)
        if error is not None:
            raise error


_unheard: dict[int, SaveHandle] = {}
"""Failed saves that nobody has waited for yet."""


def _report_unheard() -> None:
    """Log unheard failures when the process ends without `close`; the threads of saves have ended by then."""
    for handle in _unheard.values():
        error = handle.error
        logger.critical("what was saved or exported of step %d is not there: %s", handle.step, error, exc_info=error)


atexit.register(_report_unheard)
os.register_at_fork(after_in_child=_unheard.clear)  # the process that saves says it
