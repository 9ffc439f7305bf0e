"""A model of what a file system may have kept when the power goes: what was synced, and any part of the rest.

Owns the model and the recording that drives it. Operations run for real and are recorded; the model replays them, and
at any point gives a tree that a machine may find after a power failure:

- bytes of a file are kept where it was synced after they were written; of later ones any, torn, or zeros instead;
- an entry of a folder is kept where that folder was synced after the change; of later changes any subset, but a file
  or folder is never in two places or in none (renames are atomic in a journalled file system);
- syncing a file says nothing about its name.

Source: the idea of dropping unsynced state is LevelDB's FaultInjectionTestEnv and CrashMonkey (OSDI 2018).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_ckpt.telemetry.events import TELEMETRY

Tree = dict[str, bytes | None]
"""Path below the root -> a file's bytes, None for a folder."""


@dataclass
class Recorder:
    """Runs each operation and notes it, with paths below `root` and files by a number of their own."""

    root: Path
    events: list[tuple[Any, ...]] = field(default_factory=list)
    _open: dict[int, int] = field(default_factory=dict)

    def __call__(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "pwrite_all":
            fd, data, offset = args
            event: tuple[Any, ...] = ("write", self._open[fd], offset, bytes(memoryview(data).cast("B")))
        elif name in ("fsync", "close", "truncate", "fallocate"):
            event = (name, self._open[args[0]], *args[1:])
        else:
            paths = [str(Path(path).relative_to(self.root)) for path in args if isinstance(path, str | Path)]
            event = (name, *paths)
        result = operation(*args)
        if name in ("open_exclusive", "open_or_create"):
            self._open[result] = len(self.events)
        self.events.append(event)
        return result

    def note(self, event: str, *details: Any) -> None:
        """Note something that is no operation, such as an acknowledgement."""
        self.events.append((event, *details))


@dataclass
class _Change:
    """A change of folder entries that is not durable: `node` leaves `source` and arrives at `target`."""

    node: int
    source: tuple[int, str] | None
    target: tuple[int, str] | None

    def touches(self, folder: int) -> bool:
        return folder in ((self.source or (None,))[0], (self.target or (None,))[0])

    def apply(self, folders: dict[int, dict[str, int]]) -> None:
        if self.source and folders[self.source[0]].get(self.source[1]) == self.node:
            del folders[self.source[0]][self.source[1]]
        if self.target:
            folders[self.target[0]][self.target[1]] = self.node


@dataclass
class _File:
    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, bytes) written, (size, None) for a changed size."""

    def write(self, offset: int, data: bytes) -> None:
        _put(self.now, offset, data)
        self.pending.append((offset, data))

    def resize(self, size: int) -> None:
        _resize(self.now, size)
        self.pending.append((size, None))

    def after_power_loss(self, choose: random.Random) -> bytes:
        if not self.pending:
            return self.durable
        kept = bytearray(self.durable)
        luck = choose.choice(("nothing", "all", "zeros", "some"))
        for offset, data in self.pending:
            if luck == "nothing" or (luck == "some" and choose.random() < 0.5):
                continue
            if data is None:
                _resize(kept, offset)
            elif luck == "zeros":
                _put(kept, offset, bytes(len(data)))
            elif luck == "some":
                _put(kept, offset, data[: choose.randrange(len(data) + 1)])
            else:
                _put(kept, offset, data)
        return bytes(kept)


class Disk:
    """The file system at one moment: what programs see, and what is durable."""

    def __init__(self, tree: Tree) -> None:
        """Begin with a tree that is durable; parents come before what is in them."""
        self._folders: dict[int, dict[str, int]] = {0: {}}
        self._durable: dict[int, dict[str, int]] = {0: {}}
        self._files: dict[int, _File] = {}
        self._by_event: dict[int, int] = {}
        self._changes: list[_Change] = []
        self._next = 1
        for path, data in sorted(tree.items()):
            folder, name = self._place(path)
            node = self._new(data is None)
            if data is not None:
                self._files[node] = _File(bytearray(data), data)
            self._folders[folder][name] = self._durable[folder][name] = node

    def do(self, number: int, event: tuple[Any, ...]) -> None:
        """Replay the recorded event of this number."""
        name, *args = event
        if name == "mkdir":
            self._add(args[0], self._new(folder=True))
        elif name in ("open_exclusive", "open_or_create"):
            folder, entry = self._place(args[0])
            node = self._folders[folder].get(entry)
            if node is None:
                node = self._new(folder=False)
                self._files[node] = _File()
                self._add(args[0], node)
            self._by_event[number] = node
        elif name == "write":
            self._files[self._by_event[args[0]]].write(args[1], args[2])
        elif name in ("truncate", "fallocate"):
            self._files[self._by_event[args[0]]].resize(args[1])
        elif name == "fsync":
            file = self._files[self._by_event[args[0]]]
            file.durable, file.pending = bytes(file.now), []
        elif name == "fsync_folder":
            self._sync_folder(self._folder(args[0]))
        elif name in ("unlink", "rmdir"):
            folder, entry = self._place(args[0])
            self._change(_Change(self._folders[folder][entry], (folder, entry), None))
        elif name == "rename_noreplace":
            source, target = self._place(args[0]), self._place(args[1])
            self._change(_Change(self._folders[source[0]][source[1]], source, target))
        else:
            assert name in ("close", "acknowledged"), f"the model does not know {name}"

    def after_power_loss(self, choose: random.Random) -> Tree:
        """Return one tree that may be found when the power comes back."""
        folders = {node: dict(entries) for node, entries in self._durable.items()}
        if choose.random() < 0.5:  # A journal: everything up to some moment.
            kept = self._changes[: choose.randrange(len(self._changes) + 1)]
        else:  # Any changes, of each file or folder the first ones.
            until = {node: choose.random() for node in {change.node for change in self._changes}}
            counts: dict[int, int] = {}
            for change in self._changes:
                counts[change.node] = counts.get(change.node, 0) + 1
            seen: dict[int, int] = {}
            kept = []
            for change in self._changes:
                seen[change.node] = seen.get(change.node, 0) + 1
                if seen[change.node] <= round(until[change.node] * counts[change.node]):
                    kept.append(change)
        for change in kept:
            change.apply(folders)
        tree: Tree = {}
        self._collect(0, "", folders, choose, tree)
        return tree

    def now(self) -> Tree:
        """Return what programs see."""
        tree: Tree = {}
        self._collect(0, "", self._folders, None, tree)
        return tree

    def _collect(
        self, node: int, path: str, folders: dict[int, dict[str, int]], choose: random.Random | None, tree: Tree
    ) -> None:
        for name, child in sorted(folders[node].items()):
            place = f"{path}/{name}" if path else name
            if child in self._files:
                file = self._files[child]
                tree[place] = bytes(file.now) if choose is None else file.after_power_loss(choose)
            else:
                tree[place] = None
                self._collect(child, place, folders, choose, tree)

    def _new(self, folder: bool) -> int:
        node = self._next
        self._next += 1
        if folder:
            self._folders[node], self._durable[node] = {}, {}
        return node

    def _add(self, path: str, node: int) -> None:
        self._change(_Change(node, None, self._place(path)))

    def _change(self, change: _Change) -> None:
        change.apply(self._folders)
        self._changes.append(change)

    def _sync_folder(self, folder: int) -> None:
        """Make this folder's changes durable, and with each the earlier ones of the same file or folder."""
        last = {change.node: index for index, change in enumerate(self._changes) if change.touches(folder)}
        rest = []
        for index, change in enumerate(self._changes):
            if index <= last.get(change.node, -1):
                change.apply(self._durable)
            else:
                rest.append(change)
        self._changes = rest

    def _place(self, path: str) -> tuple[int, str]:
        *parents, name = path.split("/")
        return self._folder("/".join(parents) or "."), name

    def _folder(self, path: str) -> int:
        node = 0
        for name in path.split("/"):
            node = node if name == "." else self._folders[node][name]
        return node


def read_tree(root: Path) -> Tree:
    """Read a folder from the disk, without the log of events, which nothing reads to resume a run."""
    paths = [path for path in sorted(root.rglob("*")) if path.name != TELEMETRY]
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths}


def write_tree(root: Path, tree: Tree) -> None:
    """Make a folder of a tree."""
    for path, data in sorted(tree.items()):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def _put(buffer: bytearray, offset: int, data: bytes) -> None:
    if len(buffer) < offset:
        buffer.extend(bytes(offset - len(buffer)))
    buffer[offset : offset + len(data)] = data


def _resize(buffer: bytearray, size: int) -> None:
    if len(buffer) < size:
        buffer.extend(bytes(size - len(buffer)))
    del buffer[size:]
