"""Watches what the user's own modules keep beside the model's state: attributes, and buffers that are not persistent.

Owns which of them count. Modules of libraries are not looked at: their models were proved. Each step makes its outputs
anew: a value that no module's code reads before it has set it, and a tensor with a graph, unless the code that sets it
reads the last one before. A cached_property counts as unchanged if its function returns the same again.
"""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from types import CodeType
from typing import Any

import torch
from torch import nn

from titan_ckpt.components.classes import is_of_library, is_own, is_own_kind, own_kinds, package_of
from titan_ckpt.components.unsaved_state import Own, codes_of
from titan_ckpt.components.watched import Watch, trace
from titan_ckpt.process import codes_within, generators_kept
from titan_ckpt.weights.names import hidden_buffers, named_modules, parts_of

_JUDGED = frozenset({"lightning", "pytorch_lightning", "torchmetrics"})
"""Packages whose modules have hooks for their state: the integration with Lightning judges them."""
_HOW = (
    "fill it in __init__ if it is a cache, such as a mask; register it as a persistent buffer there, or return it by "
    "get_extra_state() and take it back by set_extra_state(), if steps change it"
)


def watch_modules(parts: Sequence[nn.Module], allow: Collection[str], watch: Watch, live: Iterable[Any]) -> None:
    """Watch the modules of a model from now on. `live`: other objects whose state steps hold."""
    modules = [found for part in parts for found in _modules(part)]
    unsaved = {id(value) for _, module in modules for value in hidden_buffers(module).values()}
    saved = frozenset(id(value) for root in (*parts, *live) for value in parts_of(root)) - unsaved
    read, carried = _uses_of({kind for _, module in modules for kind in _kinds(module)})
    for path, module in modules:
        if not (kinds := _kinds(module)):
            continue
        name = f"{kinds[0].__module__}.{kinds[0].__qualname__}"
        hooks = [getattr(hook, "__func__", hook) for hook in module._state_dict_hooks.values()]  # noqa: SLF001 - as below
        gives_state = _gives(module, "get_extra_state", "_save_to_state_dict") or any(map(is_own, hooks))
        if name not in allow and not gives_state:
            values = partial(_values, module, saved, read)
            comes_back = partial(_comes_back, module, saved, carried, set[str]())
            watch.add(module, f"module {path or 'of the model'}, {name}", name, values, saved, comes_back, _HOW)


def _modules(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose state is that of their buffers and parameters."""
    whole: set[int] = set()
    for prefix, module in named_modules(part, whole):
        if _gives(module, "state_dict"):
            whole.add(id(module))
        else:
            yield prefix[:-1], module


def _kinds(module: nn.Module) -> tuple[type, ...]:
    """Return the user's own classes of a module; none if its integration judges it."""
    own = own_kinds(kinds := type(module).__mro__)
    return () if own and _is_judged(kinds) else own


@cache
def _is_judged(kinds: tuple[type, ...]) -> bool:
    return any(package_of(kind) in _JUDGED for kind in kinds)


def _gives(module: nn.Module, *methods: str) -> bool:
    return any(method in vars(kind) for kind in _kinds(module) for method in methods)


def _values(module: nn.Module, saved: Collection[int], read: Collection[str]) -> dict[str, Any]:
    kinds = [*type(module).__mro__]
    first = kinds.index(_kinds(module)[0])
    of_library = next(kind for kind in kinds[first:] if is_of_library(kind))
    values = {f"self.{name}": value for name, value in hidden_buffers(module).items()}
    for name, value in Own(module, of_library, saved).values().items():
        is_output = name.startswith("self.") and name.removeprefix("self.") not in read
        is_function = callable(value) and not (isinstance(value, nn.Module) or is_own_kind(type(value)))
        if not (is_output or is_function):
            values[name] = value
    return values


def _comes_back(
    module: nn.Module, saved: Collection[int], carried: Collection[str], outputs: set[str], name: str
) -> bool:
    """Return whether the steps make a value of a module anew. `outputs`: those that have had a graph; more are added.

    An evaluation without gradients, between a step and its save, leaves outputs without a graph.
    """
    name = name.removeprefix("self.")
    value = vars(module).get(name)
    if isinstance(value, torch.Tensor) and value.grad_fn is not None and name not in carried:
        outputs.add(name)
    found = next((vars(kind)[name] for kind in type(module).__mro__ if name in vars(kind)), None)
    if name in vars(module) and isinstance(found, cached_property):
        with generators_kept(), suppress(Exception):  # of the user's code
            return bool(trace(value, saved) == trace(found.func(module), saved))
    return name in outputs


def _uses_of(kinds: Iterable[type]) -> tuple[set[str], set[str]]:
    """Return the attributes that code of classes loads before it has set them, or may load by their names.

    Also those that it loads, and sets after that. A method that only returns an attribute, such as for a plot, reads it
    where its own name is read.
    """
    read, carried = set[str](), set[str]()
    getters: list[tuple[str, str]] = []
    for name, codes in ((name, codes_of(method)) for kind in kinds for name, method in vars(kind).items()):
        if returned := [attribute for code in codes if (attribute := _returned_by(name, code))]:
            getters += [(name, attribute) for attribute in returned]
            continue
        for used, is_carried in (use for code in codes_within(*codes) for use in _used_by(code)):
            (carried if is_carried else read).add(used)
    for _ in getters:  # one may call another
        read |= {attribute for name, attribute in getters if name in read}
    return read, carried


def _returned_by(name: str, code: CodeType) -> str | None:
    """Return the attribute that a method returns and does nothing else, or None. Torch and Python call some by name."""
    if name == "forward" or name.startswith("__") or code.co_argcount != 1:
        return None
    load, *rest = [i for i in dis.get_instructions(code) if i.opname not in ("RESUME", "NOP")]
    is_getter = load.argval == code.co_varnames[0] and [i.opname for i in rest] == ["LOAD_ATTR", "RETURN_VALUE"]
    return rest[0].argval if is_getter else None


def _used_by(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yield the names of attributes that code loads before it has set them, and of those whether it sets them then.

    Code before the first branch runs in every call, so an attribute that it sets is set.
    """
    before: Any = None
    loaded, first = set[str](), set[str]()
    is_straight = not code.co_exceptiontable
    for i in dis.get_instructions(code):
        is_of_self = before is not None and bool(code.co_varnames) and before.argval == code.co_varnames[0]
        is_straight = is_straight and not ("JUMP" in i.opname or i.opname in ("FOR_ITER", "SEND", "RETURN_GENERATOR"))
        if i.opname in ("LOAD_ATTR", "LOAD_METHOD") and not (is_of_self and i.argval in first):
            loaded.add(i.argval)
            yield i.argval, False
        elif i.opname == "STORE_ATTR" and i.argval in loaded:
            yield i.argval, True
        elif i.opname == "STORE_ATTR" and is_of_self and is_straight:
            first.add(i.argval)
        before = i
    constants = (text for value in code.co_consts for text in (value if isinstance(value, tuple) else [value]))
    yield from ((text, False) for text in constants if isinstance(text, str))
