"""The files of one export while all ranks fill them. Knows no tensors.

Owns who creates a file, and its end. On a mounted file system a rank creates it at its final size and all write into
it; in a bucket one rank uploads it while it is written, in about that order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import accumulate

from titan_ckpt.disk.files import FileWriter, Writer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.safetensors.container import Layout
from titan_ckpt.stores.mounted import local_path, store_of
from titan_ckpt.stores.store import Place


def is_shared(place: Place) -> bool:
    """Return whether ranks write into one file of a folder. Else one rank uploads each, and it is there when synced."""
    return local_path(place) is not None


class OutputFiles:
    """The files of one export, in the order of its plan: rank n creates the files n, n + ranks, and so on."""

    def __init__(self, place: Place, layouts: Mapping[str, Layout], coordinator: Coordinator) -> None:
        """Create nothing yet."""
        self._place = place
        self._folder = local_path(place)
        self.is_shared = is_shared(place)
        self._layouts = layouts
        self.owners = {name: number % coordinator.world_size for number, name in enumerate(layouts)}
        self._own = {name: layout for name, layout in layouts.items() if self.owners[name] == coordinator.rank}
        self._files: dict[str, Writer] = {}
        self._opening = threading.Lock()
        beside = 1 if self.is_shared else coordinator.world_size
        sizes = [layout.num_bytes for layout in layouts.values()]
        starts = [0, *accumulate(max(sizes[first : first + beside]) for first in range(0, len(sizes), beside))]
        self.starts = {name: starts[number // beside] for number, name in enumerate(layouts)}
        """How many bytes lie before each file. As many files as there are ranks are uploaded side by side."""

    def begin(self) -> None:
        """Create this rank's files, with their headers. Raises: OSError, also for a full disk."""
        for name, layout in self._own.items():
            if self._folder is not None:
                FileWriter.reserve(self._folder / name, layout.num_bytes, layout.header)
            else:
                self.file(name).write(memoryview(layout.header), 0)

    def file(self, name: str) -> Writer:
        """Return a file that is there, or that this rank uploads. Threads may call it. Raises: OSError."""
        with self._opening:
            if name not in self._files:
                self._files[name] = (
                    FileWriter(self._folder / name, direct=True)
                    if self._folder is not None
                    else store_of(self._place).new_file(self._place / name, self._layouts[name].num_bytes)
                )
            return self._files[name]

    def flush(self) -> None:
        """Write what was put off. Raises: OSError."""
        for file in self._files.values():
            file.flush()

    def sync(self, before: Callable[[], None] = lambda: None) -> None:
        """Make what this rank has written durable, headers too; may be called again. `before`: called before each file.

        Raises: OSError; EOFError; what `before` raises.
        """
        for name in {**self._own, **self._files}:
            before()
            self.file(name).finish(self._layouts[name].num_bytes)

    def close(self) -> None:
        """Close the files; idempotent. Raises: OSError if a network file system reports a late error."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
