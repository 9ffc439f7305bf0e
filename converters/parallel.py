"""Tensor parallelism of converted modules: fake quantizers stay whole, each adapter is sharded as its weight is.

Owns one ParallelStyle that wraps PyTorch's styles for linear and embedding modules. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from titan_ckpt.converters.lora.copies import Follower, SomeCopied, TrainedCopy
from titan_ckpt.converters.lora.layers import LoRAEmbedding, LoRALinear
from titan_ckpt.errors import ConverterError

_ADDED = ("lora_a", "lora_b", "lora_magnitude")


def converted_plan(plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return a plan for `parallelize_module` that also works for modules which converters have changed."""
    return {name: ConvertedParallel(style) for name, style in plan.items()}


class ConvertedParallel(ParallelStyle):
    """Apply `style` to a linear or embedding module that has child modules; any other module gets `style` itself.

    If the weight is sharded by rows, B is sharded by rows and A is replicated; if it is sharded by columns, A is
    sharded and B is replicated. So the low-rank path needs at most one small reduction.
    """

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parts = dict(module.named_children())
        is_copied = isinstance(module, SomeCopied | TrainedCopy | Follower)  # the last one has no child modules
        if not isinstance(module, nn.Linear | nn.Embedding) or not (parts or is_copied):
            return self.style._apply(module, device_mesh)  # noqa: SLF001 - the method that every style has
        adapted = isinstance(module, LoRALinear | LoRAEmbedding)
        if adapted and not isinstance(self.style, ColwiseParallel | RowwiseParallel):
            raise ConverterError(f"an adapted {type(module).__name__} cannot be cut by {type(self.style).__name__}")
        if isinstance(module, LoRALinear) and module.adapter.rows:
            raise ConverterError("tensor parallelism would cut across the parts of a fused weight's adapter")
        if is_copied or (isinstance(module, LoRALinear) and module.adapter.bias):
            raise ConverterError(
                f"a {type(module).__name__} cannot be cut: tensor parallelism has no form for trained biases, rows of "
                "tables, trained and frozen copies of modules, and modules that follow a tied table; use FSDP2 alone, "
                "or leave them out"
            )
        for name in parts:  # a style shards everything below a module in the same way
            delattr(module, name)
        module = self.style._apply(module, device_mesh)  # noqa: SLF001
        for name, part in parts.items():
            if adapted and name in _ADDED:
                _distribute(part, device_mesh, _placement(name, cut_rows=isinstance(self.style, ColwiseParallel)))
            module.add_module(name, part)
        return module


def _placement(name: str, *, cut_rows: bool) -> Placement:
    """Return the placement of a factor: A (rank, in) has no out dim; B (out, rank) and magnitude (out,) no in dim."""
    if name == "lora_a":
        return Replicate() if cut_rows else Shard(1)
    return Shard(0) if cut_rows else Replicate()


def _distribute(part: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in [*part.named_parameters()]:
        local = distribute_tensor(parameter.detach(), mesh, [placement])
        part.register_parameter(name, nn.Parameter(local, requires_grad=parameter.requires_grad))
