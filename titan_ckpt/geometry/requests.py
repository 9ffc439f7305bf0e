"""The seam between content and bytes: the interface of a format's reader.

Owns no format; formats/open.py knows all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo

Fill = Callable[[], tuple[int, int] | None]
"""Fills the memory of requests that are planned already. Returns the bytes that this rank has read, and those that came
from other ranks; None if it does not say."""


class TensorReader(ABC):
    """An open checkpoint folder of one format. A context manager; close() is idempotent."""

    path: Any
    """A `stores.store.Place`."""
    format: str
    _tensors: Mapping[str, TensorInfo]
    """The tensors of a format that knows them when it is opened; others have a `tensors` of their own."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor's global shape and dtype by its name in the file (dequantized where quantized)."""
        return self._tensors

    @abstractmethod
    def plan(self, requests: Sequence[Block]) -> Fill:
        """Check all that can be checked without reading a tensor; return the function that fills every request.

        The function fills in any order, and verifies the bytes if the format has digests.
        Raises: CorruptCheckpointError naming the file; OSError; the function too, and the memory is undefined then.
        """

    def read(self, requests: Sequence[Block]) -> None:
        """Fill every request's memory. Raises: as `plan`, and as the function that it returns."""
        self.plan(requests)()

    def whole(self, key: str) -> torch.Tensor:
        """Return all values of a tensor. Raises: as `read`."""
        info = self.tensors[key]
        value = torch.empty(info.shape, dtype=info.dtype)
        self.read([Block(Chunk.whole(info.shape), value, key)])
        return value

    def metadata(self) -> dict[str, Any]:
        """Return the format's metadata beside the tensors (hf: config.json, peft: adapter_config.json)."""
        return {}

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
