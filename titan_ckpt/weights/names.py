"""Names of a model's tensors: the walk over its modules, and names without the segments that wrappers add.

Owns which modules have code of their own that saves or loads their state; own_state.py asks that code.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

EXTRA_STATE = "_extra_state"
"""Last segment of the name of a module's extra state. Source: torch.nn.modules.module."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that every module has: their content is the model's state."""
WRAPPER_SEGMENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})

LOADING = ("load_state_dict", "_load_from_state_dict", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
SAVING = ("state_dict", "_save_to_state_dict", "_state_dict_hooks")
_HARMLESS = (
    "torch.nn.modules.",
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
)
"""Modules of torch whose hooks and methods make no values and give no names that `clean_fqn` would not give."""


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


def read_state(part: nn.Module) -> Iterator[tuple[str, torch.Tensor | nn.Module]]:
    """Yield (fqn, live tensor), aliases included, and (prefix, module) of each subtree that makes its own state.

    The order is that of `part.state_dict()`, which would hold the same values. Collective if a hook is.
    """
    whole: set[int] = set()
    for prefix, module in named_modules(part, whole):
        if has_code(module):
            whole.add(id(module))
            yield prefix, module
            continue
        for hook in module._state_dict_pre_hooks.values():  # noqa: SLF001 - as nn.Module.state_dict does
            hook(module, prefix, False)
        for fqn, value in own_tensors(prefix, module):
            yield fqn, value if is_lazy(value) else value.detach()


def own_tensors(prefix: str, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return (fqn, tensor) of a module's own parameters and persistent buffers, without its children's."""
    own: list[tuple[str, torch.Tensor]]
    own = [(prefix + n, v) for n, v in module._parameters.items() if v is not None]  # noqa: SLF001
    if not module._buffers:  # noqa: SLF001 - the usual case, and a hot path
        return own
    hidden = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public name for what persists
    kept = ((prefix + n, v) for n, v in module._buffers.items() if v is not None and n not in hidden)  # noqa: SLF001
    return [*own, *kept]


def has_code(module: nn.Module, names: tuple[str, ...] = SAVING + LOADING) -> bool:
    """Return whether a module has code of its own that saves or loads it, which `nn.Module` would do otherwise.

    `names`: methods that it may override, and the dicts of its hooks.
    """
    own = module.__dict__
    kind: Any = type(module)  # mypy takes a class of modules for one that cannot be hashed
    codes = [own[name] for name in names if own.get(name)]
    return overrides(kind, names) or any(callable(c) or any(map(_is_foreign, c.values())) for c in codes)


@functools.lru_cache(maxsize=4096)  # a hot path, and modules by the ten thousand have few classes
def overrides(kind: type, names: tuple[str, ...]) -> bool:
    """Return whether a class of modules has methods of its own of these names."""
    return any(_is_foreign(getattr(kind, name)) for name in names if hasattr(nn.Module, name))


def _is_foreign(code: Any) -> bool:
    return not str(getattr(code, "__module__", "")).startswith(_HARMLESS)


def extra_state_modules(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (fqn of its extra state, module) once for each module that overrides `get_extra_state`."""
    met: set[nn.Module] = set()
    for prefix, module in named_modules(part):
        if type(module).get_extra_state is not nn.Module.get_extra_state and module not in met:
            met.add(module)
            yield prefix + EXTRA_STATE, module
