"""Pause Python's cyclic garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic collector, which would walk the 10^6 new objects of a large plan again and again.

    Only in the main thread: the collector is the process's, and training goes on beside saves and exports in other
    threads, which take minutes.
    """
    enabled = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if enabled:
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
