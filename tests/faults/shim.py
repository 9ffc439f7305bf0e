"""Numbers every change a process makes to a file system, and kills, fails or records it there.

The numbering is by the seam itself (`posix.MUTATING`): a new operation is in the matrix without being told.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_ckpt.disk import posix

Moment = Literal["before", "half", "after"]


@contextlib.contextmanager
def intercepted(around: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    """Route every mutating operation through `around(name, operation, args)`."""

    def route(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(name, functools.partial(operation, **kwargs), args)

        return call

    originals = {name: getattr(posix, name) for name in posix.MUTATING}
    for name, operation in originals.items():
        setattr(posix, name, route(name, operation))
    try:
        yield
    finally:
        for name, operation in originals.items():
            setattr(posix, name, operation)


@dataclass
class Counter:
    """Counts operations, from any thread, and remembers their names."""

    names: list[str] = field(default_factory=list)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.next(name)
        return operation(*args)

    def next(self, name: str) -> int:
        with self._guard:
            self.names.append(name)
            return len(self.names) - 1


@dataclass
class KillAt(Counter):
    """Ends the process by SIGKILL at one operation: before it, after it, or, for a write, when half is written."""

    ordinal: int = 0
    moment: Moment = "before"

    def __call__(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.next(name) != self.ordinal:
            return operation(*args)
        if self.moment == "half" and name == "pwrite_all":
            fd, data, offset = args
            operation(fd, memoryview(data).cast("B")[: max(1, memoryview(data).nbytes // 2)], offset)
        elif self.moment == "after":
            operation(*args)
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        return None


@dataclass
class StopAt(Counter):
    """Stops the process by SIGSTOP before one operation; it goes on when somebody sends SIGCONT."""

    ordinal: int = 0

    def __call__(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.next(name) == self.ordinal:
            os.kill(os.getpid(), signal.SIGSTOP)
        return operation(*args)


WRITES = frozenset({"mkdir", "open_exclusive", "open_or_create", "pwrite_all", "fallocate", "truncate"})
"""Operations that a full disk refuses; deleting and syncing still work."""


@dataclass
class FailAt(Counter):
    """Lets one operation fail with an errno, or all from there on; a write may have written half before."""

    ordinal: int = 0
    errno: int = 0
    lasting: bool = False
    only: frozenset[str] | None = None
    half: bool = False
    named: str | None = None
    """Count these operations alone."""
    hits: int = 0

    def __call__(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.named not in (None, name):
            return operation(*args)
        number = self.next(name)
        due = number >= self.ordinal if self.lasting else number == self.ordinal
        if not due or (self.only is not None and name not in self.only):
            return operation(*args)
        self.hits += 1
        if self.half and name == "pwrite_all":
            fd, data, offset = args
            operation(fd, memoryview(data).cast("B")[: memoryview(data).nbytes // 2], offset)
        if name == "close":
            operation(*args)  # The kernel releases the descriptor even where close reports an error.
        raise OSError(self.errno, os.strerror(self.errno))


def count_operations(act: Callable[[], object]) -> list[str]:
    """Run `act` and return the names of its operations, in order."""
    counter = Counter()
    with intercepted(counter):
        act()
    return counter.names
