"""Decides whether the hooks by which DDP exchanges gradients continue exactly after a resume."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from titan_ckpt.components.unsaved_state import class_name, unless_allowed
from titan_ckpt.rng import used_by

_EXACT = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_REASON = (
    "what it keeps between steps, such as the errors of a compression or weights that are each rank's own, is in no "
    "step: use one of torch's default_hooks, such as bf16_compress_hook, or leave it out"
)

_STATIC = (
    "three or more ranks round sums by the order of its first step in a process, which no step holds: leave it out"
)

_HOOKED = (
    "on three or more ranks of DDP a resume makes the order of its exchange by a pass of zeros, on which they would be "
    "called: call them from the loop, or use find_unused_parameters=True"
)


def exchange_faults(models: Iterable[nn.Module], allow: Collection[str]) -> Iterator[str]:
    """Yield one line for each hook of DDP, or of gradients that it sums, by which a resumed run may differ."""
    wrapped = [module for model in models for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for module in wrapped:
        if module.static_graph and module.process_group.size() > 2:
            yield from unless_allowed("DDP's static_graph", class_name(module), _STATIC, allow)
        hooked = [name for name, p in module.named_parameters() if p._post_accumulate_grad_hooks or p._backward_hooks]  # noqa: SLF001 - as above
        if hooked and module.process_group.size() > 2 and not module.find_unused_parameters:
            yield from unless_allowed(f"hooks on gradients of {hooked[0]}", class_name(module), _HOOKED, allow)
    for hook, state in (each for module in wrapped for each in module._comm_hooks):  # noqa: SLF001 - without a public name
        if not (_is_exact(hook) and (state is None or isinstance(state, ProcessGroup))):
            name = class_name(hook)
            yield from unless_allowed(f"DDP's communication hook {name}", name, _REASON, allow)


def wrappers_of(models: Collection[nn.Module]) -> list[DistributedDataParallel]:
    """Return the wrappers of DDP around models, for a library that keeps only what is inside of them."""
    inside = {id(model) for model in models}
    return [v for v in gc.get_objects() if issubclass(type(v), DistributedDataParallel) and id(v.module) in inside]


def _is_exact(hook: Any) -> bool:
    """Return whether a hook, and one that it wraps, are torch's own that keep nothing."""
    return getattr(hook, "__module__", None) == _EXACT and all(
        _is_exact(inner) for inner in used_by(hook).values() if callable(inner)
    )
