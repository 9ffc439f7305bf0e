"""MemoryStore: a third place for bytes, in this process. It shows how little a store needs to bring.

FolderStore is the same for several processes.
"""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import threading
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, unquote

from titan_ckpt.stores.objects import MAX_SMALL_BYTES, ObjectFacts, ObjectStore, Version
from titan_ckpt.stores.store import OTHERS

_Object = tuple[bytes, Version, float]


class MemoryStore(ObjectStore):
    """Objects of this process, under ram://name/key."""

    _all: ClassVar[MutableMapping[str, _Object]] = {}
    """URL -> content, version and time of each object."""
    _lock: ClassVar[threading.RLock] = threading.RLock()
    _versions: ClassVar[Iterator[int]] = itertools.count()

    def create(self, key: str, data: bytes) -> Version:
        with self._lock:
            if self._all.get(self.url(key), (data,))[0] != data:
                raise FileExistsError(errno.EEXIST, "is there already", self.url(key))
            return self._put(key, data)

    def replace(self, key: str, data: bytes, version: Version) -> None:
        with self._lock:
            if self._all.get(self.url(key), (b"", None))[1] != version:
                raise FileExistsError(errno.EEXIST, "another writer's content is there", self.url(key))
            self._put(key, data)

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._put(key, data)

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        self.put(key, b"".join(map(bytes, parts)))

    def _put(self, key: str, data: bytes) -> Version:
        version = {"e_tag": str(next(self._versions))}
        self._all[self.url(key)] = data, version, time.time()
        return version

    def _get(self, key: str) -> _Object:
        if self.url(key) not in self._all:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url(key))
        return self._all[self.url(key)]

    def read(self, key: str, max_bytes: int = MAX_SMALL_BYTES) -> tuple[bytes, Version]:
        data, version, _ = self._get(key)
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", self.url(key))
        return data, version

    def read_head(self, key: str, num_bytes: int) -> tuple[bytes, int]:
        data, _, _ = self._get(key)
        return data[:num_bytes], len(data)

    def read_range(self, key: str, start: int, stop: int) -> memoryview:
        data, _, _ = self._get(key)
        if stop > len(data):
            raise EOFError(f"{self.url(key)} ends at byte {len(data)}")
        return memoryview(data)[start:stop]

    def list_objects(self, prefix: str) -> list[ObjectFacts]:
        root, below = self.url(""), f"{self.url(prefix)}/"
        with self._lock:
            found = [(url, *known) for url, known in self._all.items() if url.startswith(below)]
        return [ObjectFacts(url[len(root) + 1 :], len(data), v, seconds) for url, data, v, seconds in sorted(found)]

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._all.pop(self.url(key), None)


class _Files(MutableMapping[str, _Object]):
    """Objects as files of the folder that the environment names."""

    def _path(self, url: str) -> Path:
        return Path(os.environ["TESTED_OBJECTS"], quote(url, safe=""))

    def __getitem__(self, url: str) -> _Object:
        if not self._path(url).exists():
            raise KeyError(url)
        found: _Object = pickle.loads(self._path(url).read_bytes())
        return found

    def __setitem__(self, url: str, value: _Object) -> None:
        draft = self._path(f".{os.getpid()}")
        draft.write_bytes(pickle.dumps(value))
        draft.rename(self._path(url))

    def __delitem__(self, url: str) -> None:
        self._path(url).unlink()

    def __iter__(self) -> Iterator[str]:
        return (unquote(name) for name in os.listdir(os.environ["TESTED_OBJECTS"]) if not name.startswith("."))

    def __len__(self) -> int:
        return len([*self])


class FolderStore(MemoryStore):
    """Objects that processes share, under dir://name/key. One process at a time changes an object."""

    _all: ClassVar[MutableMapping[str, _Object]] = _Files()
    _versions: ClassVar[Iterator[int]] = iter(time.time_ns, 0)


OTHERS["ram"] = MemoryStore
OTHERS["dir"] = FolderStore
