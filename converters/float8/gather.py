"""A float8-aware parameter that any collective backend can gather.

Owns one tensor subclass. This module imports torchao, so it is imported only when Float8 needs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor


class ByteGatheredWeight(WeightWithDynamicFloat8CastTensor):  # type: ignore[misc]
    """torchao's weight for float8 all-gather, gathered as bytes because gloo has no float8 collectives."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        return tree_map_only(WeightWithDynamicFloat8CastTensor, _as_bytes_gathered, out)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return this rank's float8 values as bytes, and the scale and dtype that are needed to read them."""
        (data,), (scale,) = super().fsdp_pre_all_gather(mesh)
        return (data.view(torch.uint8),), (scale, data.dtype)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Float8TrainingTensor, tuple[torch.Tensor, ...]] | None:
        """Return the whole weight as a view of the gathered bytes, which FSDP2 frees when it reshards."""
        (gathered,), (scale, dtype) = all_gather_outputs, metadata
        made = super().fsdp_post_all_gather((gathered.view(dtype),), (scale,), param_dtype, out=out)
        return None if made is None else (made[0], (gathered,))


def use_byte_gather(model: nn.Module) -> None:
    """Turn every float8-aware parameter of the model into a ByteGatheredWeight, in place."""
    for parameter in model.parameters():
        if isinstance(parameter, WeightWithDynamicFloat8CastTensor):
            _as_bytes_gathered(parameter)


def _as_bytes_gathered(value: torch.Tensor) -> torch.Tensor:
    value.__class__ = ByteGatheredWeight
    return value
