"""A call in a thread of its own, which an interrupt of the thread that waits for it does not lose.

Signal handlers, that of Ctrl-C among them, run between any two instructions of the main thread and may raise there. So
nothing here relies on the line after a call: one atomic operation decides who makes the call, its end is a plain flag,
and waiting changes nothing. threading.Event and Thread.join do not suffice: an interrupt can leave the lock of the one
taken, and makes the other say of a thread that runs that it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from titan_ckpt.disk import cuda
from titan_ckpt.errors import SaveError

_LOOK_SECONDS = 1.0
"""Longest time between two looks at the flag, if an interrupt has left the lock taken."""


class Latch:
    """A mark that one thread sets and others wait for."""

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Set the mark. One thread alone calls it."""
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self) -> None:
        """Block until the mark is set."""
        while not self.is_set:
            if self._lock.acquire(timeout=_LOOK_SECONDS):
                self._lock.release()


class BackgroundCall:
    """A call that is made once: by `start` in a thread, or by `run` in this one. Keeps its error."""

    def __init__(self, act: Callable[[], object], name: str, *, late: bool = True, daemon: bool = False) -> None:
        """`late`: if an interrupt kept the thread from starting, whoever waits makes the call; otherwise it fails."""
        self.error: BaseException | None = SaveError(f"{name}: an interrupt came before it had ended")
        """Why the call has not succeeded."""
        self._act, self._name, self._late, self._daemon = act, name, late, daemon
        self._as_here = cuda.as_here()
        self._makers: dict[str, int] = {}
        """The thread that makes the call, under one key."""
        self._is_started = False
        self._ended = Latch()

    @property
    def done(self) -> bool:
        return self._ended.is_set

    @property
    def is_running(self) -> bool:
        """Return whether a thread makes the call now. False after an interrupted start, which `wait` sees to."""
        return self._is_started and not self.done

    def start(self) -> None:
        """Make the call in a thread, whose device is this thread's; here, if there can be no more threads.

        Raises: RuntimeError for a call that cannot be made here.
        """
        try:
            threading.Thread(target=self.run, name=self._name, daemon=self._daemon).start()
        except RuntimeError as error:
            if not self._late or "new thread" not in str(error):  # the handler of a signal may raise one, too
                raise
            self.run()
        self._is_started = True

    def run(self, *, make: bool = True) -> None:
        """Make the call in this thread, unless another one does. `make`: False ends a call that nobody makes."""
        me = threading.get_ident()
        was_left = self._makers.get("is") == me
        if self._makers.setdefault("is", me) != me or self.done:
            return
        try:
            if make and not was_left:  # this thread was interrupted in it before, and the error stands
                self._as_here()
                self._act()
                self.error = None
        except BaseException as error:
            self.error = error
        self._act = lambda: None  # what it holds is not needed any more
        self._ended.set()

    def see_to_start(self) -> None:
        """Make the call here, or end it, if an interrupt kept its thread from starting."""
        if not self._is_started:
            self.run(make=self._late)

    def wait(self) -> None:
        """Block until the call has ended. It may be left by an interrupt and called again; `error` has the outcome."""
        self.see_to_start()
        self._ended.wait()
