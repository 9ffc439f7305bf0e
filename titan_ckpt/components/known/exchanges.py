"""Decides whether the hooks by which DDP exchanges gradients continue exactly after a resume."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup, get_world_size, is_initialized
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from titan_ckpt.components.unsaved_state import class_name, unless_allowed
from titan_ckpt.gc_paused import instances_of
from titan_ckpt.rng import used_by
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


def exchange_faults(wrapped: Collection[DistributedDataParallel], allow: Collection[str]) -> Iterator[str]:
    """Yield one line for each hook of DDP, or of gradients that it sums, by which a resumed run may differ."""
    around = Counter(module.module for module in wrapped if module.process_group.size() > 2)
    for what in (class_name(inner) for inner, count in around.items() if count > 1):
        yield from unless_allowed(f"several wrappers of DDP around {what}", what, _TWICE, allow)
    for module in wrapped:
        if module.static_graph and module.process_group.size() > 2:
            yield from unless_allowed("DDP's static_graph", class_name(module), _STATIC, allow)
        is_ordered = module.process_group.size() > 2 and not module.find_unused_parameters
        if is_ordered and (sparse := _sparse(module)):
            yield from unless_allowed(f"sparse gradients of {sparse[0]}", class_name(module), _SPARSE, allow)
        if is_ordered and (hooked := _hooked(module)):
            yield from unless_allowed(f"hooks on gradients of {hooked[0]}", class_name(module), _HOOKED, allow)
    for hook, state in (each for module in wrapped for each in module._comm_hooks):  # noqa: SLF001 - without a public name
        if not (_is_exact(hook) and (state is None or isinstance(state, ProcessGroup))):
            name = class_name(hook)
            yield from unless_allowed(f"DDP's communication hook {name}", name, _REASON, allow)


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
    if gc.get_freeze_count() and places.keys() - {id(p) for ddp in wrappers for p in ddp.parameters()}:
        wrappers = instances_of(DistributedDataParallel, frozen=True)
    first = [min((places[id(p)] for p in ddp.parameters() if id(p) in places), default=None) for ddp in wrappers]
    return [(place, ddp) for place, ddp in zip(first, wrappers, strict=True) if place is not None]


def rounds_by_order(ddp: DistributedDataParallel) -> bool:
    """Return whether sums round by an order that DDP finds in its first backward pass, and a pass of zeros gives back.

    Two ranks round alike in any order; DDP that looks for unused parameters keeps its first one.
    """
    is_ordered = not (ddp.find_unused_parameters or ddp.static_graph or _hooked(ddp) or _sparse(ddp))
    return ddp.process_group.size() > 2 and is_ordered


def _hooked(ddp: DistributedDataParallel) -> list[str]:
    """Return the parameters whose gradients have hooks beside DDP's."""
    named = ddp.named_parameters()
    return [name for name, p in named if p._post_accumulate_grad_hooks or p._backward_hooks]  # noqa: SLF001 - without a public name


def _sparse(ddp: DistributedDataParallel) -> list[str]:
    """Return the modules whose gradients are sparse."""
    tables = ((n, m) for n, m in ddp.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return [name for name, table in tables if table.sparse]  # as DDP asks


def _is_exact(hook: Any) -> bool:
    """Return whether a hook, and one that it wraps, are torch's own that keep nothing."""
    return getattr(hook, "__module__", None) == _EXACT and all(
        _is_exact(inner) for inner in used_by(hook).values() if callable(inner)
    )
