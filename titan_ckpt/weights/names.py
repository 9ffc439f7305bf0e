"""Names of a model's tensors: the walk over its modules, and names without the segments that wrappers add."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

EXTRA_STATE = "_extra_state"
"""Last segment of the name of a module's extra state. Source: torch.nn.modules.module."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that every module has: their content is the model's state."""
WRAPPER_SEGMENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


def clean_fqn(name: str) -> str:
    """Drop the segments that activation checkpointing, torch.compile and FSDP put into parameter names."""
    if "_wrapped_module" not in name and "_orig_mod" not in name:  # the usual case, and a hot path
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def prefix_in(name: str, names: Collection[str]) -> str | None:
    """Return the name or the longest dotted prefix of it that is among others; None without one."""
    while name not in names:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def class_named(home: str, name: str, value: object) -> Any:
    """Return the class of an object, or a base of it, that has this name in this module; None without one.

    So an object of a library is known without an import of it.
    """
    return next((kind for kind in type(value).__mro__ if (kind.__module__, kind.__name__) == (home, name)), None)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is torch.compile's wrapper; a module of the user's own may be called as what is in it."""
    return class_named("torch._dynamo.eval_frame", "OptimizedModule", module) is not None


def named_modules(part: nn.Module, leaves: Collection[int] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield (clean prefix of its tensors' names, module) in `nn.Module.named_modules`' order, aliases included.

    `leaves`: ids of modules whose children are left out; the caller may add the one that it has just got.
    """
    todo = [("", part)]
    while todo:
        prefix, module = todo.pop()
        yield prefix, module
        if module._modules and id(module) not in leaves:  # noqa: SLF001 - most have none, and this is a hot path
            children = reversed(module._modules.items())  # noqa: SLF001 - named_children leaves aliases out
            own = WRAPPER_SEGMENTS
            todo += [(prefix if n in own else f"{prefix}{n}.", child) for n, child in children if child is not None]


def hidden_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's own buffers that no state dict holds."""
    hidden = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public name for what persists
    return {name: value for name, value in module.named_buffers(recurse=False) if name in hidden} if hidden else {}
