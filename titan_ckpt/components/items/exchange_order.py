"""ExchangeOrder: the places of gradients in DDP's exchange, which three or more ranks round sums by.

DDP puts gradients into buckets in the order of parameters, and after the first backward pass of a process once more, in
the order in which they came. So a resumed process would compute its first step with other buckets than the whole run.
Here they are saved, and made before that step by a pass of zeros. Hooks by which DDP exchanges gradients, and what
keeps its order from being given back, are refused.
Source: torch 2.13, nn/parallel/distributed.py `_pre_forward` and csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, get_world_size, is_initialized
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from titan_ckpt.components.classes import class_name
from titan_ckpt.components.gradients import still_used
from titan_ckpt.components.items.item import STATES, OwnItem, Stored
from titan_ckpt.components.unsaved_state import fault_of, unless_allowed
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.process import has_frozen, instances_of, used_by
from titan_ckpt.types import StateDict
from titan_ckpt.weights.names import named_modules

_EXACT = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_REASON = (
    "what it keeps between steps, such as the errors of a compression or weights that are each rank's own, is in no "
    "step: use one of torch's default_hooks, such as bf16_compress_hook, or leave it out"
)

_STATIC = (
    "three or more ranks round sums by the order of its first step in a process, which no step holds: leave it out"
)

_SPARSE = (
    "on three or more ranks of DDP nobody can read the order of its exchange, which a resume needs: use "
    "sparse=False, or find_unused_parameters=True"
)

_TWICE = (
    "each wrapper finds an order of its own, and three or more ranks round sums by that: delete the one that is not "
    "called, with all that holds it, before the CheckpointManager is made"
)

_HOOKED = (
    "on three or more ranks of DDP a resume makes the order of its exchange by a pass of zeros, on which they would be "
    "called: call them from the loop, or use find_unused_parameters=True"
)
_UNKNOWN = (
    "the step does not hold the order in which DDP sums gradients here: an earlier version has saved it, or a run with "
    "other ranks or other trained parameters. On three or more ranks sums may round otherwise than in the run that was "
    "not stopped"
)


class ExchangeOrder(OwnItem):
    """The buckets of models that DDP wraps: `value` and `restore` are collective over its ranks."""

    component = "states"
    key = f"{STATES}order of DDP's exchange"
    is_collective = True

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._wrapped: list[Any] = [*filter(rounds_by_order, wrappers_of(models, 3))]
        self._found: dict[int, list[str]] = {}

    def __bool__(self) -> bool:
        """Return whether any of the models has an order to save."""
        return bool(self._wrapped)

    def faults(self, allow: Collection[str]) -> list[str]:
        """Return why a resumed run may differ by its hooks, of which some may be new since the manager was made."""
        return [*exchange_faults(wrappers_of(self._models), allow)]

    def check_wrapped(self, allow: Collection[str]) -> None:
        """Check after the first step that no model was wrapped later, and got no hook. Raises: StateEncodingError."""
        wrapped, known = wrappers_of(self._models), {id(ddp) for ddp in self._wrapped}
        if faults := [*exchange_faults(wrapped, allow)]:
            raise StateEncodingError("new since the CheckpointManager was made: " + "\n".join(faults))
        if late := [ddp for ddp in wrapped if rounds_by_order(ddp) and id(ddp) not in known]:
            raise StateEncodingError(
                f"DistributedDataParallel was put around {class_name(late[0].module)} after the CheckpointManager was "
                "made, so no step would hold the order in which three or more ranks sum gradients: wrap the model first"
            )

    def settle(self) -> None:
        """Let DDP make its final buckets, as its next forward pass would. Collective over its ranks."""
        for i, ddp in enumerate(self._wrapped):
            if i not in self._found:
                with still_used(ddp):  # gradients may be views of the buckets
                    ddp._has_rebuilt_buckets |= ddp.reducer._rebuild_buckets()  # noqa: SLF001 - as the next forward pass would
                if ddp._has_rebuilt_buckets:  # noqa: SLF001 - as above
                    self._found[i] = _order_of(ddp)

    def value(self, tensors: StateDict) -> list[list[str]]:
        """Return the names of each model's parameters in their order; none for one that has no final order yet."""
        self.settle()
        return [self._found.get(i, []) for i in range(len(self._wrapped))]

    def warnings(self, stored: Stored) -> list[str]:
        """Return one line if a model gets no order, and will sum its next gradients by one that it finds anew."""
        if all(order is not None for _, order in self._orders(stored)):
            return []
        return [_UNKNOWN]

    def restore(self, stored: Stored, tensors: StateDict) -> None:
        """Give each model its order by a pass of zeros, unless it has that already."""
        for ddp, order in self._orders(stored):
            if order and not (ddp._has_rebuilt_buckets and order == _order_of(ddp)):  # noqa: SLF001 - as above
                _give(ddp, order)
        self._found = {}

    def _orders(self, stored: Stored) -> Iterator[tuple[Any, list[str] | None]]:
        """Yield each model with its order: none if its first backward pass is to find it, None if that is unknown."""
        orders = stored.values.get(self.key, [])
        for ddp, order in zip_longest(self._wrapped, orders[: len(self._wrapped)]):
            fits = order is not None and rounds_by_order(ddp) and sorted(order) == sorted(_order_of(ddp))
            is_first = order == [] and not ddp._has_rebuilt_buckets  # noqa: SLF001 - as above
            yield ddp, order if fits or is_first else None


def _give(ddp: Any, order: Sequence[str]) -> None:
    """Let a wrapper make its buckets as after a backward pass in which gradients came in this order. Collective."""
    named = dict(ddp.module.named_parameters())
    before = {name: named[name].grad for name in order}
    for name in order:
        named[name].grad = None
    ddp.reducer._reset_state()  # noqa: SLF001 - as above
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    for name in order:
        torch.autograd.backward([named[name]], [torch.zeros_like(named[name])])
    ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()  # noqa: SLF001 - as above
    for name, grad in before.items():
        named[name].grad = grad


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


def exchange_faults(wrapped: Collection[DistributedDataParallel], allow: Collection[str]) -> Iterator[str]:
    """Yield one line for each hook of DDP, or of gradients that it sums, by which a resumed run may differ."""
    around = Counter(module.module for module in wrapped if module.process_group.size() > 2)
    for inner in (inner for inner, count in around.items() if count > 1):
        yield from fault_of("several wrappers of DDP around", inner, _TWICE, allow)
    for module in wrapped:
        for what, reason in _lost_order(module):
            yield from unless_allowed(what, class_name(module), reason, allow)
    for hook, state in (each for module in wrapped for each in module._comm_hooks):  # noqa: SLF001 - without a public name
        if not (_is_exact(hook) and (state is None or isinstance(state, ProcessGroup))):
            yield from fault_of("DDP's communication hook", hook, _REASON, allow)


def wrappers_of(models: Collection[nn.Module], min_ranks: int = 1) -> list[DistributedDataParallel]:
    """Return the wrappers of DDP around parameters of models, in the order of these: a model may not know its own.

    `min_ranks`: with fewer, nobody asks, because all objects of the process are looked at.
    """
    if not is_initialized() or get_world_size() < min_ranks:
        return []
    found = _around(models)
    if len({place for place, _ in found}) < len(found):
        del found
        gc.collect()  # the wrapper of a cell that ran before may wait for that, on some ranks alone
        found = _around(models)
    return [ddp for _, ddp in sorted(found, key=lambda pair: pair[0])]


def _around(models: Collection[nn.Module]) -> list[tuple[int, DistributedDataParallel]]:
    modules = (module for model in models for _, module in named_modules(model))
    parameters = enumerate(p for module in modules for p in module._parameters.values())  # noqa: SLF001 - a hot path
    places = {id(p): n for n, p in parameters if p is not None and not isinstance(p, DTensor)}  # DDP takes no DTensor
    wrappers = instances_of(DistributedDataParallel) if places else []
    others = places.keys() - {id(p) for ddp in wrappers for p in ddp.parameters()}
    if others and has_frozen():  # last: it may count every frozen object
        wrappers = instances_of(DistributedDataParallel, frozen=True)
    first = [min((places[id(p)] for p in ddp.parameters() if id(p) in places), default=None) for ddp in wrappers]
    return [(place, ddp) for place, ddp in zip(first, wrappers, strict=True) if place is not None]


def rounds_by_order(ddp: DistributedDataParallel) -> bool:
    """Return whether sums round by an order that DDP finds in its first backward pass, and a pass of zeros gives back.

    Two ranks round alike in any order; DDP that looks for unused parameters keeps its first one.
    """
    return ddp.process_group.size() > 2 and not ddp.find_unused_parameters and not any(_lost_order(ddp))


def _lost_order(ddp: DistributedDataParallel) -> Iterator[tuple[str, str]]:
    """Yield (what it is, the reason) of all by which the order of a wrapper's sums cannot be given back."""
    if ddp.process_group.size() <= 2:
        return
    if ddp.static_graph:
        yield "DDP's static_graph", _STATIC
    if not ddp.find_unused_parameters:
        tables = ((n, m) for n, m in ddp.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        if sparse := next((name for name, table in tables if table.sparse), None):  # as DDP asks
            yield f"sparse gradients of {sparse}", _SPARSE
        parameters = ddp.named_parameters()
        if hooked := next((n for n, p in parameters if p._post_accumulate_grad_hooks or p._backward_hooks), None):  # noqa: SLF001
            yield f"hooks on gradients of {hooked}", _HOOKED


def _is_exact(hook: Any) -> bool:
    """Return whether a hook, and one that it wraps, are torch's own that keep nothing."""
    return getattr(hook, "__module__", None) == _EXACT and all(
        _is_exact(inner) for inner in used_by(hook).values() if callable(inner)
    )
