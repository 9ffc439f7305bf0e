"""Pause Python's cyclic garbage collector, and ask it for the objects of a class."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

_Kind = TypeVar("_Kind")


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


def instances_of(kind: type[_Kind], *, frozen: bool = False) -> list[_Kind]:
    """Return all objects of a class in this process; some may be garbage that was not collected yet.

    An object refers to its class, so the collector finds them in one pass of its own: to ask each of 10^6 objects takes
    a second. `frozen`: also those that gc.freeze() has set aside, which the collector then has again.
    """
    if frozen:
        gc.unfreeze()
    kinds: list[type] = [kind]
    for own in kinds:
        kinds += type.__subclasses__(own)
    return [value for value in gc.get_referrers(*kinds) if issubclass(type(value), kind)]
