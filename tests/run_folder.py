"""RunFolder: where the run of a test keeps its checkpoints, in a folder of this machine or in a bucket.

A test that takes the fixture `run_folder` is about behaviour; tests/stores/test_manager_suite.py runs it on buckets.
Needs no client of a bucket until one is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.faults.shim import WRITES, intercepted
from titan_ckpt.config import StoreConfig
from titan_ckpt.directory.bucket_commits import Commit, Commits
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.bucket import Bucket
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import open_location


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The base folder of a run, and the URL of its checkpoints if they are in a bucket. Can be sent to ranks."""

    base: Path
    url: str = ""
    store: StoreConfig | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of CheckpointConfig that say where checkpoints are."""
        return {"folder": f"{self.url}/checkpoints", "store": self.store} if self.url else {}

    @property
    def checkpoints(self) -> str:
        """Return the place of the steps, as errors name it."""
        return f"{self.url or self.base}/checkpoints"

    @property
    def attempts(self) -> str:
        """Return what the names of the files of a save have that is not finished."""
        return "/data/" if self.url else "/.staging/"

    def __truediv__(self, name: str) -> RunFolder:
        return RunFolder(self.base / name, self.url and f"{self.url}/{name}", self.store)

    def steps(self) -> list[int]:
        """Return the committed steps, as the files or objects alone show them."""
        if not self.url:
            names = [p.name.removeprefix("step-") for p in Path(self.checkpoints).glob("step-*")]
            return sorted(int(name) for name in names if name.isdigit())
        return [commit.step for commit in self._commits()]

    def unfinished(self) -> list[str]:
        """Return the files of saves and deletions that are not finished."""
        if not self.url:
            folders = [Path(self.checkpoints, name) for name in (".staging", ".trash")]
            return [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()]
        objects = self._bucket.bucket.list_objects((self._bucket / "data").key)
        whole = {commit.attempt for commit in self._commits()}
        return [facts.key for facts in objects if facts.key.split("/")[-2] not in whole]

    def everything(self) -> list[str]:
        """Return the names of all that is there, with what changes when it is written again."""
        if not self.url:
            return sorted(f"{p.relative_to(self.base)} {p.stat().st_mtime_ns}" for p in self.base.rglob("*"))
        return [f"{f.key} {f.version}" for f in self._bucket.bucket.list_objects(self._bucket.key)]

    def read(self, step: int, name: str) -> bytes:
        """Return a file of a committed step."""
        return self._file(step, name).read() if self.url else Path(self.checkpoints, f"step-{step}", name).read_bytes()

    def write(self, step: int, name: str, content: bytes) -> None:
        """Put other content in the place of a file of a committed step."""
        if not self.url:
            Path(self.checkpoints, f"step-{step}", name).write_bytes(content)
            return
        file = self._file(step, name)
        file.bucket.upload(file.key, iter([memoryview(content)]), 5 << 20)

    def damage(self, step: int, name: str = "rank-00000.safetensors") -> None:
        """Flip a bit near the end of a file."""
        content = bytearray(self.read(step, name))
        content[-3] ^= 1
        self.write(step, name, bytes(content))

    @property
    def _bucket(self) -> BucketPath:
        place = open_location(self.checkpoints, settings=self.store)
        assert isinstance(place, BucketPath)
        return place

    def _commits(self) -> list[Commit]:
        return [commit for commit in Commits(self._bucket).list_commits().commits if commit.is_current]

    def _file(self, step: int, name: str) -> BucketPath:
        (commit,) = [commit for commit in self._commits() if commit.step == step]
        return commit.path if name == "MANIFEST.json" else Commits(self._bucket).files(step, commit.attempt) / name


@dataclass
class Disk:
    """A disk or a bucket that refuses every write while `error` is set; what is there can be renamed and deleted."""

    error: int = 0
    only: str = ""
    """Refuse only paths with this part."""
    names: frozenset[str] = WRITES

    def __call__(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.error and name in self.names and self.only in str(args[0]):
            raise OSError(self.error, os.strerror(self.error))
        return operation(*args)

    @contextlib.contextmanager
    def inserted(self) -> Iterator[None]:
        """Let every write of this process come here. A bucket's error is the one of a server that stays too busy."""

        def refusing(write: Callable[..., object]) -> Callable[..., object]:
            @functools.wraps(write)
            def call(bucket: Bucket, key: str, *args: Any) -> object:
                if self.error and self.only in bucket.url(key):
                    raise StoreError(errno.EIO, f"{bucket.url(key)}: {os.strerror(self.error)}", is_final=False)
                return write(bucket, key, *args)

            return call

        with contextlib.ExitStack() as stack:
            stack.enter_context(intercepted(self))
            for name in ("create", "replace", "upload"):
                stack.enter_context(patch.object(Bucket, name, refusing(getattr(Bucket, name))))
            yield
