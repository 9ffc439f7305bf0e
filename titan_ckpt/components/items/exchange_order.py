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
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_ckpt.components.items.item import STATES, FlatFolder, Item, Leaves, Stored
from titan_ckpt.components.known.exchanges import rounds_by_order, wrappers_of
from titan_ckpt.components.unsaved_state import class_name
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.types import StateDict


class ExchangeOrder(Item):
    """The buckets of models that DDP wraps: `value` and `restore` are collective over its ranks."""

    component = "states"
    is_required = False

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._wrapped: list[Any] = [*filter(rounds_by_order, wrappers_of(models, 3))]
        self._found: dict[int, list[str]] = {}

    @property
    def key(self) -> str:
        return f"{STATES}order of DDP's exchange"

    def __bool__(self) -> bool:
        """Return whether any of the models has an order to save."""
        return bool(self._wrapped)

    def check_wrapped(self) -> None:
        """Check after the first step that no model was wrapped later. Raises: StateEncodingError."""
        known = {id(ddp) for ddp in self._wrapped}
        if late := [ddp for ddp in wrappers_of(self._models, 3) if rounds_by_order(ddp) and id(ddp) not in known]:
            raise StateEncodingError(
                f"DistributedDataParallel was put around {class_name(late[0].module)} after the CheckpointManager was "
                "made, so no step would hold the order in which three or more ranks sum gradients: wrap the model first"
            )

    def value(self, tensors: StateDict) -> list[list[str]]:
        """Return the names of each model's parameters in their order; none for one that has no final order yet."""
        for i, ddp in enumerate(self._wrapped):
            if i not in self._found:
                ddp._has_rebuilt_buckets |= ddp.reducer._rebuild_buckets()  # noqa: SLF001 - as the next forward pass would
                if ddp._has_rebuilt_buckets:  # noqa: SLF001 - as above
                    self._found[i] = _order_of(ddp)
        return [self._found.get(i, []) for i in range(len(self._wrapped))]

    def restore(self, stored: Stored, tensors: StateDict) -> None:
        """Give each model its order, unless this process has computed a step, or trains other parameters."""
        for ddp, order in zip(self._wrapped, stored.values.get(self.key, ()), strict=False):
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

    def leaves(self) -> Leaves:
        """Yield nothing: torchtitan stores no order."""
        yield from ()

    def from_torchtitan(self, folder: FlatFolder) -> None:
        """Return None, for the same reason."""


class _WithoutMemory(TorchDispatchMode):
    """Makes new tensors on the meta device, also those that the code of torch in C++ makes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), "device": "meta"})


def _order_of(ddp: Any) -> list[str]:
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    # its zeros, which nothing reads, would be as large as all gradients
    with _WithoutMemory():  # type: ignore[no-untyped-call]
        buckets = ddp.reducer._get_zeros_like_grad_buckets()  # noqa: SLF001 - no other function names their parameters
    return [names[id(parameter)] for bucket in buckets for parameter in bucket.parameters()]
