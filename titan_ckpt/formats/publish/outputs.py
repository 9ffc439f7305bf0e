"""Outputs: the files of one export while all ranks fill them. Knows no tensors.

Owns who creates a file. On a mounted file system a rank creates it at its final size and all write into it; where a
file has one writer, `upload` brings it the bytes of the others.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from titan_ckpt.disk import posix
from titan_ckpt.disk.file_writer import FileWriter
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.safetensors.container import Layout

if TYPE_CHECKING:
    from titan_ckpt.formats.publish.upload import UploadedFile


class Outputs(ABC):
    """The files of one export, in the order of its plan."""

    is_sequential: ClassVar[bool]
    """Whether each is written from its beginning, in steps that all ranks keep, and can be read when it is finished."""

    def connect(self) -> None:  # noqa: B027
        """Connect the ranks that bring each other bytes. Collective. Raises: ExportError; PeerError."""

    @abstractmethod
    def begin(self) -> None:
        """Create this rank's files, with their headers. Raises: OSError."""

    @abstractmethod
    def file(self, name: str) -> FileWriter | UploadedFile:
        """Return a file that any rank has created. Threads may call it. Raises: OSError."""

    def position(self, name: str, offset: int) -> int:
        """Return a number by which all bytes are ordered."""
        return offset

    def is_ahead(self, position: int) -> bool:
        """Note how far this rank is; return whether it should wait (`wait_for_others`) before it writes there."""
        return False

    def wait_for_others(self) -> None:  # noqa: B027
        """Wait until this rank is not too far ahead of the slowest one. Raises: OSError; ExportError."""

    def end(self) -> None:  # noqa: B027
        """Note that this rank writes nothing more, so that no other one waits for it."""

    def flush(self) -> None:  # noqa: B027
        """Write what was put off. Raises: OSError."""

    @abstractmethod
    def sync(self) -> None:
        """Make what this rank has written durable; may be called again. Raises: OSError; ExportError."""

    @abstractmethod
    def close(self) -> None:
        """End what is under way; idempotent. Raises: OSError if a network file system reports a late error."""


class SharedFiles(Outputs):
    """Files that the ranks create, each some of them, and into which all write their own bytes."""

    is_sequential = False

    def __init__(self, folder: Path, layouts: Mapping[str, Layout], coordinator: Coordinator) -> None:
        """Create nothing yet."""
        self._folder = folder
        self._own = {name: layouts[name] for name in [*layouts][coordinator.rank :: coordinator.world_size]}
        self._files: dict[str, FileWriter] = {}
        self._opening = threading.Lock()

    def begin(self) -> None:
        """Create files of their final size, all space reserved. Raises: OSError, also for a full disk."""
        for name, layout in self._own.items():
            fd = posix.open_exclusive(self._folder / name)
            try:
                posix.fallocate(fd, layout.num_bytes)
                posix.truncate(fd, layout.num_bytes)
                posix.pwrite_all(fd, layout.header, 0)
            finally:
                posix.close(fd)

    def file(self, name: str) -> FileWriter:
        with self._opening:
            if name not in self._files:
                self._files[name] = FileWriter(self._folder / name, direct=True)
            return self._files[name]

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def sync(self) -> None:
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        with ExitStack() as stack:
            while self._files:
                stack.callback(self._files.popitem()[1].close)
