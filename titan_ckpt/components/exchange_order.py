"""ExchangeOrder: the places of gradients in DDP's exchange, which three or more ranks round sums by.

DDP puts gradients into buckets in the order of parameters, and after the first backward pass of a process once more, in
the order in which they came. So a resumed process would compute its first step with other buckets than the whole run.
Here they are saved, and made before that step by a pass of zeros.
Source: torch 2.13, nn/parallel/distributed.py `_pre_forward` and csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class ExchangeOrder:
    """The buckets of models that DDP wraps. Every method is collective over its ranks."""

    def __init__(self, wrapped: Sequence[DistributedDataParallel]) -> None:
        """Watch them. Two ranks round alike in any order; DDP that looks for unused parameters keeps its first one."""
        self._wrapped: list[Any] = [
            ddp
            for ddp in wrapped
            if ddp.process_group.size() > 2 and not (ddp.find_unused_parameters or ddp.static_graph)
        ]
        self._found: dict[int, list[str]] = {}

    def state_dict(self) -> list[list[str]]:
        """Return the names of each model's parameters in their order; none for one that has no final order yet."""
        for i, ddp in enumerate(self._wrapped):
            if i not in self._found:
                ddp._has_rebuilt_buckets |= ddp.reducer._rebuild_buckets()  # noqa: SLF001 - as the next forward pass would
                if ddp._has_rebuilt_buckets:  # noqa: SLF001 - as above
                    self._found[i] = _order_of(ddp)
        return [self._found.get(i, []) for i in range(len(self._wrapped))]

    def load_state_dict(self, orders: Sequence[Sequence[str]]) -> None:
        """Give each model its order, unless this process has computed a step, or trains other parameters."""
        for ddp, order in zip(self._wrapped, orders, strict=False):
            named = dict(ddp.module.named_parameters())
            if ddp._has_rebuilt_buckets or sorted(order) != sorted(_order_of(ddp)):  # noqa: SLF001 - as above
                continue
            before = {name: named[name].grad for name in order}
            for name in order:
                named[name].grad = None
            ddp.reducer.prepare_for_forward()
            ddp.reducer.prepare_for_backward([])
            for name in order:
                torch.autograd.backward([named[name]], [torch.zeros_like(named[name])])
            ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()  # noqa: SLF001 - as above
            for name, grad in before.items():
                named[name].grad = grad


def _order_of(ddp: Any) -> list[str]:
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()  # noqa: SLF001 - no other function names their parameters
    return [names[id(parameter)] for bucket in buckets for parameter in bucket.parameters()]
