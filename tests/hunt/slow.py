"""A disk and a copy that stand still until the training thread waits for them, and interrupts of that thread.

So the order of what happens does not depend on how fast a machine is. Installed once in a process of the hunt.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import titan_ckpt
from tests.faults import shim
from titan_ckpt.formats.native import arena
from titan_ckpt.formats.native.writer import Segments
from titan_ckpt.formats.native.writer_process import WriterProcess

PIECE_BYTES = 32 << 10
_PACKAGE = str(Path(titan_ckpt.__file__).parent)
_SAVING = tuple(f"{_PACKAGE}/{name}" for name in ("manager.py", "saving/", "exporting/", "components/run_state.py"))
_WAITS = ("threading.py", "subprocess.py", "selectors.py", "disk/workers.py", "distributed/coordinator.py")
_START = threading.Thread.start.__code__
_PATIENCE_SECONDS = 3.0
"""A hold ends after this time in any case."""


class Slow:
    """The holds of one process. `thread` is the one that trains."""

    def __init__(self) -> None:
        self.thread = threading.main_thread()
        self._flows = False
        self.sends_interrupt = False
        """The thread gets SIGINT when it waits; taken off when it is sent."""
        self._holds: set[str] = set()
        self._pieces = 0
        self._guard = threading.Lock()
        self._is_held = threading.Event()
        self._disk = ExitStack()

    def install(self) -> None:
        """Route every change of the disk and every piece of a copy through this object, and make pieces small."""
        mock.patch.object(arena, "IO_BYTES", PIECE_BYTES).start()
        self._disk.enter_context(shim.intercepted(self._on_disk))
        self._before(Segments, "fill", self._on_piece)
        self._before(WriterProcess, "write", lambda: self._reach("write"))

    def _before(self, kind: type, name: str, act: Callable[[], None]) -> None:
        real = getattr(kind, name)

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            act()
            return real(*args, **kwargs)

        setattr(kind, name, call)

    def hold(self, point: str) -> None:
        """Let the save that begins now stand still at a point. One before it that is held stays so."""
        self._holds |= {point} - {""}
        self._pieces, self._flows = 0, False

    def flow(self) -> None:
        """Hold nothing any more, until a save is to be held."""
        self._holds.clear()
        self._flows = True

    def _on_disk(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        of_export = threading.current_thread().name.startswith("titan_ckpt export")
        points = {"mkdir": "begin", "open_exclusive": "write", "rename_noreplace": "commit"}
        if of_export and name == "mkdir":
            self._reach("export")
        elif name in points and ".staging" in str(args[0]):
            self._reach(points[name])
        return operation(*args)

    def _on_piece(self) -> None:
        with self._guard:
            self._pieces += 1
            is_late = self._pieces >= 3
        self._reach("copy")
        if is_late:
            self._reach("piece")

    def _reach(self, point: str) -> None:
        """Stand still here, if this is the point, until the thread waits for something."""
        if threading.current_thread() is self.thread or point not in self._holds:
            return
        self._is_held.set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        seen: tuple[int, int] | None = None
        times = 0
        while point in self._holds and not self._flows and time.monotonic() < deadline:
            frame = self._frame()
            now = None if frame is None else (id(frame), frame.f_lasti)
            times = times + 1 if now == seen and frame is not None and _waits(frame) else 0
            seen = now
            if times >= 3:
                if not self.sends_interrupt:
                    break
                self.sends_interrupt, times = False, 0
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.005)
            time.sleep(0.001)
        self._holds.discard(point)
        self._is_held.clear()

    def _frame(self) -> FrameType | None:
        """Return where the training thread is.

        CPython 3.11 holds a lock of all threads meanwhile: a collection that gave the GIL away would end in a deadlock.
        """
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(self.thread.ident or 0)
        finally:
            if is_enabled:
                gc.enable()

    def stand_still(self) -> None:
        """Wait until what runs in the background is held or has ended, so that every run of a program is the same."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._is_held.is_set() and time.monotonic() < deadline and background_threads():
            time.sleep(0.001)


def background_threads() -> list[threading.Thread]:
    """Return the threads of the manager that still run."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("titan_ckpt")]


def _waits(frame: FrameType) -> bool:
    """Return whether a frame waits for a save; the wait of Thread.start() is one for a thread that runs already."""
    if not frame.f_code.co_filename.endswith(_WAITS):
        return False
    callers = [frame, frame.f_back, frame.f_back and frame.f_back.f_back]  # Condition.wait, Event.wait, Thread.start
    return not any(caller is not None and caller.f_code is _START for caller in callers)


@contextmanager
def interrupted(slow: Slow, interrupt: str) -> Iterator[None]:
    """Raise KeyboardInterrupt in this thread at the drawn moment, if the block comes to it.

    `saving@N`: before the N-th opcode in the frames of the manager and of saving; `all@N`: of the whole package.
    `wait`: by SIGINT, when the thread waits for something that is held.
    """
    where, _, at = interrupt.partition("@")
    if where == "wait":
        slow.sends_interrupt = True
        try:
            yield
        finally:
            slow.sends_interrupt = False
        return
    left = int(at)
    within: str | tuple[str, ...] = _SAVING if where == "saving" else _PACKAGE

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if event == "call":
            if not frame.f_code.co_filename.startswith(within):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt(f"at {frame.f_code.co_qualname}:{frame.f_lineno}")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
