"""The seam between content and bytes: what a format must offer to be read from and written to.

Owns no format. A third party's format implements `TensorReader`, and is proved by `titan_ckpt.testing.StorageTests`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from titan_ckpt.manifest import FileRecord as FileRecord  # of this seam too: what a writer reports
from titan_ckpt.storage.transfers import BlockReader
from titan_ckpt.tensors import Chunk, TensorInfo


class ReadRequest(NamedTuple):
    """Fill `into` with the values of `chunk` of the file tensor `key`.

    `into` may be any strided view of live memory; in row-major order its elements are those of the chunk.
    A dtype that differs from the file's is cast by the reader; who may cast is decided before, by the planner.
    """

    key: str
    chunk: Chunk
    into: torch.Tensor


class TensorReader(ABC):
    """An open checkpoint folder of one format. A context manager; close() is idempotent."""

    path: Path
    format: str

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor's global shape and dtype by its name in the file (dequantised where quantised)."""

    @abstractmethod
    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Fill every request's memory, in any order, verifying what is read where the format carries digests.

        Raises: CorruptCheckpointError naming the file; OSError. Values already written are then undefined.
        """

    def check(self, requests: Sequence[ReadRequest]) -> None:
        """Verify what `read` of the same requests will take, before anything is filled; what memory holds of it.

        A format without digests has nothing to hold against. Raises: as `read`.
        """
        return

    def plan(self, requests: Sequence[ReadRequest]) -> Sequence[BlockReader]:
        """Prepare a `read` of these requests; return what ranks of one host may verify for each other before it.

        A format that returns nothing is asked to `check` on every rank. Raises: as `read`.
        """
        return ()

    def metadata(self) -> dict[str, Any]:
        """Return what the format says beside the tensors (hf: config.json, peft: adapter_config.json)."""
        return {}

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
