"""Watches what the user's own modules keep beside the model's state: attributes, and buffers that are not persistent.

Owns which of them count. Modules of libraries are not looked at: their models were proved. A value that no module's
code reads is an output of the step, and so is a tensor with a graph: each step makes them anew.
"""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch import nn

from titan_ckpt.components.unsaved_state import LIBRARIES, Own, codes_of, is_own_kind, package_of, parts_of
from titan_ckpt.components.watched import Watch

_JUDGED = frozenset({"lightning", "pytorch_lightning", "torchmetrics"})
"""Packages whose modules have hooks for their state: the integration with Lightning judges them."""
_HOW = "register it as a persistent buffer, or return it by get_extra_state() and take it back by set_extra_state()"


def watch_modules(parts: Sequence[nn.Module], allow: Collection[str], watch: Watch, live: Iterable[Any]) -> None:
    """Watch the modules of a model from now on. `live`: other objects whose state steps hold."""
    modules = [found for part in parts for found in _modules(part, "")]
    unsaved = {id(value) for _, module in modules for value in _hidden(module).values()}
    saved = frozenset(id(value) for root in (*parts, *live) for value in parts_of(root)) - unsaved
    read = frozenset(name for _, module in modules for kind in _kinds(module) for name in _read_by(kind))
    for path, module in modules:
        kinds = _kinds(module)
        name = f"{kinds[0].__module__}.{kinds[0].__qualname__}" if kinds else ""
        if kinds and name not in allow and not _gives(module, "get_extra_state", "_save_to_state_dict"):
            values = partial(_values, module, saved, read)
            watch.add(module, f"module {path or 'of the model'}, {name}", name, values, saved, how=_HOW)


def _modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose state is that of their buffers and parameters."""
    if not _gives(module, "state_dict"):
        yield path, module
        for name, child in module.named_children():
            yield from _modules(child, f"{path}.{name}".lstrip("."))


def _kinds(module: nn.Module) -> list[type]:
    """Return the user's own classes of a module; none if its integration judges it."""
    kinds = type(module).__mro__
    is_judged = any(package_of(kind) in _JUDGED for kind in kinds)
    return [] if is_judged else [kind for kind in kinds if is_own_kind(kind)]


def _gives(module: nn.Module, *methods: str) -> bool:
    return any(method in vars(kind) for kind in _kinds(module) for method in methods)


def _hidden(module: nn.Module) -> dict[str, Any]:
    """Return the buffers that no state dict holds."""
    hidden = module._non_persistent_buffers_set  # noqa: SLF001 - it has no public name
    return {name: value for name, value in module.named_buffers(recurse=False) if name in hidden}


def _values(module: nn.Module, saved: Collection[int], read: Collection[str]) -> dict[str, Any]:
    kinds = [*type(module).__mro__]
    first = kinds.index(_kinds(module)[0])
    of_library = next(kind for kind in kinds[first:] if package_of(kind) in LIBRARIES)
    values = {f"self.{name}": value for name, value in _hidden(module).items()}
    for name, value in Own(module, of_library, saved).values().items():
        is_output = name.startswith("self.") and name.removeprefix("self.") not in read
        if not (is_output or callable(value)):
            values[name] = None if isinstance(value, torch.Tensor) and value.grad_fn is not None else value
    return values


@cache
def _read_by(kind: type) -> frozenset[str]:
    return frozenset(name for method in vars(kind).values() for code in codes_of(method) for name in _loaded_by(code))


def _loaded_by(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes that code loads, or may load by their names."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    for value in code.co_consts:
        if isinstance(value, str):
            yield value
        elif isinstance(value, CodeType):
            yield from _loaded_by(value)
