"""Which copy stands for which live tensor, while an export is made in the background.

Owns the search by memory: converters wrap and unwrap tensors, and what they return aliases the live one. Copies no
model: the copies are those that a save has staged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from titan_ckpt.tensors import LazyTensor, TensorInfo, info_of

_Memory = tuple[int, torch.Size, tuple[int, ...], TensorInfo]


class StagedTensors:
    """A `Stage` (tensors.py): live tensor -> staged copy, or itself where it does not change, or a copy of its own."""

    def __init__(
        self, live: Mapping[str, torch.Tensor], staged: Mapping[str, LazyTensor], constant: Mapping[str, torch.Tensor]
    ) -> None:
        """`live`: the tensors that `staged` holds, by the same names. `constant`: others, which no training changes."""
        self._staged = {_memory(value): staged[fqn] for fqn, value in live.items()}
        self._constant = {_memory(value) for value in constant.values()}

    def __call__(self, value: torch.Tensor) -> torch.Tensor | LazyTensor:
        """Return what has the tensor's values of now; of a tensor unknown here a clone."""
        if not _local(value).numel():
            return LazyTensor(info_of(value), lambda: (), like=())
        memory = _memory(value)
        if (found := self._staged.get(memory)) is not None:
            return found
        return value if memory in self._constant else value.detach().clone()


def _memory(value: torch.Tensor) -> _Memory:
    local = _local(value)
    return local.data_ptr(), local.shape, tuple(local.stride()), info_of(value)


def _local(value: torch.Tensor) -> torch.Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001 - to_local() may copy
