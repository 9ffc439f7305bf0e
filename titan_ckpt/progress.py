"""A progress bar on the console during a long load or export: on rank 0 only, and never in files or pipes.

Owns when a bar is shown. The code that moves bytes only calls the function that `shown` yields and knows no console.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Count = Callable[[int], None]
"""Counts so many more bytes as done. Any thread may call it."""
CONSOLE = Console(stderr=True)
"""Console of the whole package, so that this bar and a training's bar are drawn together."""
DELAY_SECONDS = 1.5
"""No bar is shown before this time."""


class _Bar:
    """A bar that any thread advances; it is drawn from the first `advance` after the delay on."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title, self._total = title, total_bytes
        self._done = 0
        self._due = time.monotonic() + DELAY_SECONDS
        self._lock = threading.Lock()
        self._progress: Progress | None = None

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._progress is None and time.monotonic() >= self._due:
                columns = (BarColumn(None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
                self._progress = Progress(TextColumn("{task.description}"), *columns, console=CONSOLE, transient=True)
                self._progress.add_task(self._title, total=max(self._total, self._done))
                self._progress.start()
            if self._progress is not None:
                self._progress.update(self._progress.task_ids[0], completed=self._done)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


_is_shown = False


def uncounted(_num_bytes: int) -> None:
    """Count nothing."""


@contextmanager
def shown(title: str, total_bytes: int) -> Iterator[Count]:
    """Show how much of `total_bytes` is done while the block runs, if it takes long and the console is a terminal.

    Yields the function that counts. Only in the main thread, so that background work shows no bar. While a bar is
    shown, another one is not: what it would count, such as reads for the sake of a write, is a part of the first.
    """
    global _is_shown
    first_rank = not dist.is_initialized() or dist.get_rank() == 0
    in_main_thread = threading.current_thread() is threading.main_thread()
    if _is_shown or not (first_rank and in_main_thread and CONSOLE.is_terminal):
        yield uncounted
        return
    _is_shown, bar = True, _Bar(title, total_bytes)
    try:
        yield bar.advance
    finally:
        _is_shown = False
        bar.close()
