"""Decides whether the objects that a run holds beside what its steps save, such as callbacks, continue exactly.

A class of a library is exact if it was proved so and is listed by the integration; a class that is not listed is
refused. A class of the user is exact if its objects hold nothing that changes, or give their state themselves: its code
sets no attribute in training, and data that it holds is watched, so that a save which finds it changed is refused.
Either can be allowed by name, with `checkpoint.allow`; then the log and every step say so.
"""

from __future__ import annotations

import dis
import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from inspect import unwrap
from io import IOBase
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from titan_ckpt.components.classes import class_name, is_of_library, is_own, is_own_kind, names_of, own_and_base
from titan_ckpt.process import codes_within, held_generators, is_random, used_by
from titan_ckpt.weights.names import OF_EVERY_MODULE, parts_of

if TYPE_CHECKING:
    from titan_ckpt.components.watched import Watch

logger = logging.getLogger(__name__)

MAX_DEPTH = 8
"""Objects within objects that are followed; what is deeper counts as something that changes."""

_CONSTANT = (str, bytes, int, float, complex, type(None), type, FunctionType, partial, torch.dtype, torch.device)
_CHANGING = frozenset(
    {
        "add", "add_", "append", "appendleft", "clear", "copy_", "discard", "extend", "fill_", "insert", "lerp_",
        "mul_", "pop", "popitem", "popleft", "remove", "setdefault", "update", "zero_",
    }
)  # fmt: skip
"""Methods of containers that change them."""
_CONTAINERS = (list, tuple, set, frozenset, deque, dict, SimpleNamespace)
_ARRAYS = (torch.Tensor, np.ndarray, bytearray)
_OF_CLASSES = (*_CONTAINERS, *_ARRAYS, str, int, float, type(None))
"""Types of data that a class may keep for its objects."""
_STORES = frozenset(dis.opmap[name] for name in ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_ATTR"))
_WITH_ORDER = (Dataset, DataLoader, Sampler)
"""Data has rules of its own: loader_position.py and data_order.py of the integrations."""
_BUILDS = ("__init__", "__new__", "__post_init__", "__set_name__", "__init_subclass__", "__setstate__")


def faults(
    held: Iterable[tuple[str, Any]],
    known: Mapping[str, str] | None,
    allow: Collection[str],
    *,
    live: Iterable[Any] = (),
    gives_state: Callable[[Any], bool] = lambda _: False,
    builds: Collection[str] = (),
    begins: Collection[str] = (),
    watch: Watch | None = None,
) -> Iterator[str]:
    """Yield one line for each object whose state a resumed run would lose, as far as that is known.

    `held`: (what it is, the object), such as ("callback", EarlyStopping()). `known`: full name of a library's class ->
    why it is not exact; "" if it was proved exact; without the table all are. `allow`: names that are let through.
    `live`: modules and other objects that the run saves, which an object may hold. `gives_state`: whether an object of
    the user's own class returns its state, which the integration saves and restores. `builds`, `begins`: methods that
    every start calls before and after its load. `watch`: notes what the objects hold now, when the methods of `begins`
    have been called.
    """
    held = list(held)
    saved = {id(part) for root in live for part in parts_of(root)} | {id(value) for _, value in held}
    for role, value in held:
        what, name = f"{role} {class_name(value)}", class_name(value)
        own_kinds, of_library = own_and_base(type(value))
        reason = None if known is None else _listed(type(value), known)
        if reason is None and own_kinds and not gives_state(value):
            own = Own(value, of_library, saved, builds, begins)
            if changing := next(own.changing(is_begun=watch is not None), None):
                reason = f"{changing}, and no step holds it: let the object return its state and take it back"
            elif watch is not None and name not in allow:
                watch.add(value, what, name, own.values, saved)
                if numbers := own.begun():
                    logger.warning("%s: every start sets %s anew, and no step holds it", what, ", ".join(numbers))
        if reason is not None:
            yield from fault_of(role, value, reason, allow)


def function_faults(
    functions: Iterable[tuple[str, Any]],
    allow: Collection[str],
    *,
    live: Iterable[Any] = (),
    others: Collection[Any] = (),
    watch: Watch | None = None,
) -> Iterator[str]:
    """Yield the same for functions, methods and callable objects; what libraries keep in those of theirs is theirs.

    `others`: objects that are looked at themselves, whose methods are none of these. Without `watch`, data that their
    code changes in place counts too.
    """
    saved = {id(part) for root in live for part in parts_of(root)}
    for role, given in functions:
        function = given.func if isinstance(given, partial) else given
        if isinstance(given, partial):
            name = class_name(function)
            arguments = [given.args, given.keywords]
            if watch is not None and name not in allow:
                watch.add(given, f"{role} {name}", name, partial(dict, {"its arguments": arguments}), saved)
            for generator in (g for g in held_generators(arguments) if id(g) not in saved):
                reason = f"it draws from a {type(generator).__qualname__} that it is given, and no step holds that"
                yield from fault_of(role, function, reason, allow)
        owner = getattr(function, "__self__", function)
        if owner is not None and not isinstance(owner, nn.Module) and not any(owner is other for other in others):
            yield from faults([(role, owner)], None, allow, live=live, watch=watch)
            for changed in _filled(owner) if watch is None else ():
                reason = f"its code changes {changed}, and no step holds it"
                yield from fault_of(role, owner, reason, allow)


def unless_allowed(what: str, name: str, reason: str, allow: Collection[str]) -> Iterator[str]:
    """Yield the line that refuses `what`, with the way to allow it by `name`; if it is allowed, log that instead."""
    if name in allow:
        logger.warning("%s: %s; checkpoint.allow lets it run", what, reason)
    else:
        yield f'{what}: {reason}, or allow that a resumed run loses it: checkpoint.allow = ["{name}"]'


def fault_of(role: str, value: Any, reason: str, allow: Collection[str]) -> Iterator[str]:
    """Yield the same for an object, which is allowed by the name of its class, or for a function."""
    yield from unless_allowed(f"{role} {class_name(value)}", class_name(value), reason, allow)


def _listed(kind: type, known: Mapping[str, str]) -> str | None:
    """Return why a class that a library has, or that extends some of it, is not exact, and the next step, or None."""
    bases = [base for base in kind.__mro__ if is_of_library(base)]
    for base in bases:
        listed = known.get(name := names_of(base)[0])
        if listed and not any(issubclass(other, base) for other in bases[: bases.index(base)]):
            return listed
        if listed is None and base is bases[0]:
            what = "it" if base is kind else f"its base {name}"
            return f"{what} was not proved to continue exactly after a resume: leave it out"
    return None


class Own:
    """An object of the user's own class, and what may change in it.

    `of_library`: the class of a library that it extends, or object; its own attributes do not count.
    """

    def __init__(
        self,
        value: Any,
        of_library: type,
        saved: Collection[int],
        builds: Collection[str] = (),
        begins: Collection[str] = (),
        *,
        is_within: bool = False,
    ) -> None:
        kinds = type(value).__mro__
        own = kinds[: kinds.index(of_library)]
        self._value, self._saved, self._builds, self._begins = value, saved, builds, begins
        self._kinds = [
            kind for kind in own if not kind.__module__.startswith("titan_ckpt.")
        ]  # what an integration has put before them
        inherited = _stored_within(tuple(kind for kind in kinds if kind not in self._kinds))
        self._inherited = inherited | {"self._opt_called"}  # torch's schedulers set it in an optimizer that steps
        self._is_within = is_within

    def _attributes(self) -> dict[str, Any]:
        """Return what the object has now: attributes of its own, and data in those of its classes."""
        return {
            name: item
            for owner in (*([] if self._is_within else reversed(self._kinds)), self._value)
            for name, item in (getattr(owner, "__dict__", None) or {}).items()
            if f"self.{name}" not in self._inherited and name not in OF_EVERY_MODULE
            if owner is self._value or (isinstance(item, _OF_CLASSES) and not name.startswith("__"))
            if not (isinstance(item, MethodType) and item.__self__ is self._value)  # Lightning puts `forward` back so
        }

    def _functions(self) -> list[FunctionType]:
        if isinstance(self._value, FunctionType):
            return [self._value]
        return [m for kind in self._kinds for m in vars(kind).values() if isinstance(m, FunctionType)]

    def changing(self, path: str = "", depth: int = 0, *, is_begun: bool = False) -> Iterator[str]:
        """Yield what changes: attributes that its code sets, and those whose values can change unseen.

        `is_begun`: whether attributes that `begins` sets have their values.
        """
        if isinstance(self._value, FunctionType):
            yield from _kept_by(self._value)
        where = f" of self{path}" if path else ""
        stored = stored_by_code_of(self._kinds, (*self._builds, *self._begins))
        yield from (f"its code{where} sets {name}" for name in stored)
        around = (pair for function in self._functions() for pair in used_by(function).items())
        drawn = ((name, value) for name, value in around if is_random(value) and id(value) not in self._saved)
        yield from (f"it draws from {name}, a {type(value).__qualname__}" for name, value in drawn)
        begun = self._begun() if is_begun else {}
        for name, item in self._attributes().items():
            yield from _changing_item(item, self._saved, f"{path}.{name}", depth + 1, begun.get(name))

    def begun(self) -> list[str]:
        """Return the attributes that methods of `begins` have set, such as "self.start"."""
        return [f"self.{name}" for name in self._begun() if name in self._attributes()]

    def values(self) -> dict[str, Any]:
        """Return the values that are to be watched, as they are now, by name."""
        found = {f"self.{name}": item for name, item in self._attributes().items()}
        around = [variables_of(function).items() for function in self._functions()]
        return found | {f"the variable {name}": item for items in around for name, item in items}

    def _begun(self) -> dict[str, str]:
        """Return the attributes that methods of `begins` set, and which does."""
        methods = [(hook, vars(kind)[hook]) for kind in self._kinds for hook in self._begins if hook in vars(kind)]
        return {name.removeprefix("self."): hook for hook, method in methods for name in _stored(method)}


def _changing_item(
    item: Any, saved: Collection[int], path: str, depth: int, begun_by: str | None = None
) -> Iterator[str]:
    """Yield what changes in a value. Data alone does not: it is watched. `begun_by`: the hook that sets it anew."""
    if isinstance(item, (*_CONSTANT, *_WITH_ORDER)) or id(item) in saved:
        return
    if isinstance(item, _CONTAINERS) and depth < MAX_DEPTH:
        named = vars(item) if isinstance(item, SimpleNamespace) else item
        for part in [*(named.values() if isinstance(named, dict) else named)]:
            yield from _changing_item(part, saved, path, depth + 1, begun_by)
    elif isinstance(item, _ARRAYS):
        if begun_by:
            yield f"every start sets self{path}, a {type(item).__qualname__}, anew in {begun_by}"
    elif _draws_or_trains(item):
        yield f"self{path} is a {type(item).__qualname__}, which can change"
    elif not is_own(item) or _is_installed(type(item)):
        return  # a tokenizer, a path: what libraries keep in it is theirs; a configuration of a third party is watched
    elif depth >= MAX_DEPTH:
        yield f"self{path} is nested too deeply to be looked at"
    else:
        yield from Own(item, object, {*saved, id(item)}, is_within=True).changing(path, depth)


def _draws_or_trains(item: Any) -> bool:
    """Return whether an object of a library is there to change, and is no data that can be compared."""
    if isinstance(item, IOBase) or type(item).__module__ == "torch.nn.modules.loss":
        return False
    is_changed_by_use = not {"queue.Queue", "torchmetrics.metric.Metric"}.isdisjoint(names_of(type(item)))
    return is_changed_by_use or is_random(item) or isinstance(item, (nn.Module, torch.optim.Optimizer, Iterator))


def _is_installed(kind: type | FunctionType) -> bool:
    """Return whether a class or function is of an installed package: not all that its code could set is set here."""
    return "-packages" in str(getattr(sys.modules.get(kind.__module__), "__file__", ""))


def stored_by_code_of(kinds: Iterable[type], builds: Collection[str] = ()) -> Iterator[str]:
    """Yield what the methods of classes set or delete after the object is built, such as "self.best".

    `builds`: further methods that build the object.
    """
    kinds = [*kinds]
    classes = {kind.__name__ for kind in kinds}
    for kind in kinds:
        for name, method in vars(kind).items():
            if name not in _BUILDS and name not in builds:
                yield from _stored(method, classes)


def variables_of(function: FunctionType) -> dict[str, Any]:
    """Return what a function uses beside its arguments: variables around it, defaults, and globals with data."""
    is_users = is_own(function) and not _is_installed(function)
    used = used_by(function, lambda value: is_users and isinstance(value, (*_CONTAINERS, *_ARRAYS)))
    return used | {
        name: function.__globals__.get(name) for owner, name in _stores(function.__code__) if owner == "global"
    }


def _kept_by(function: FunctionType) -> Iterator[str]:
    """Yield what a function keeps between calls: variables around it and attributes of its own, which its code sets."""
    for owner, name in _stores(function.__code__):
        if owner in ("global", "nonlocal"):
            yield f"its code sets {name}, which is outside of it"
        elif owner == function.__name__:
            yield f"its code sets {owner}.{name}"


def _filled(owner: Any) -> Iterator[str]:
    """Yield the data of a function or of an object of the user's own class that its code changes in place."""
    if isinstance(owner, FunctionType):
        around = {name for name, item in variables_of(owner).items() if isinstance(item, (*_CONTAINERS, *_ARRAYS))}
        yield from sorted(around & {*_filled_by(owner.__code__, "LOAD_DEREF", "LOAD_GLOBAL")})
        return
    kinds = [kind for kind in type(owner).__mro__ if is_own_kind(kind)]
    codes = [code for kind in kinds for method in vars(kind).values() for code in codes_of(method)]
    yield from sorted({f"self.{name}" for code in codes for name in _filled_by(code, "LOAD_ATTR")})


def _filled_by(code: CodeType, *loads: str) -> Iterator[str]:
    """Yield the names whose value, once it is loaded, the code changes by a method or by an item."""
    for instructions in ([*dis.get_instructions(each)] for each in codes_within(code)):
        for i, instruction in enumerate(instructions[:-1]):
            method, item = instructions[i + 1], instructions[i + 2 : i + 3]
            by_method = method.opname in ("LOAD_ATTR", "LOAD_METHOD") and method.argval in _CHANGING
            by_item = any(each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "COPY") for each in item)
            if instruction.opname in loads and (by_method or by_item):
                yield instruction.argval


@cache
def _stored_within(kinds: tuple[type, ...]) -> frozenset[str]:
    return frozenset(name for kind in kinds for method in vars(kind).values() for name in _stored(method))


def _stored(method: Any, classes: Collection[str] = ()) -> Iterator[str]:
    """Yield what the code of a function, method or property sets or deletes: attributes of its object, and globals.

    `classes`: names of the object's classes, whose attributes count too.
    """
    codes = codes_of(method)
    owners = {code.co_varnames[0] for code in codes} | {"__class__", *classes}
    for owner, name in (store for code in codes_within(*codes) for store in _stores(code)):
        if owner == "global":
            yield f"the global {name}"
        elif owner in owners:
            yield f"self.{name}"


def codes_of(method: Any) -> list[CodeType]:
    """Return the code of a function, method or property of a class."""
    members: tuple[Any, ...] = (method,)
    if isinstance(method, property):
        members = (method.fget, method.fset, method.fdel)
    # torch wraps the step() of each class of an optimizer
    codes = (getattr(unwrap(getattr(member, "__func__", member)), "__code__", None) for member in members)
    return [code for code in codes if isinstance(code, CodeType) and code.co_varnames]


@cache
def _stores(code: CodeType) -> list[tuple[Any, str]]:
    """Return (owner, name) of all that code sets or deletes outside of its own variables.

    The owner is the name of the object of an attribute; "global" or "nonlocal" of a variable. The load of the object
    precedes a store, or the COPY of `self.n += 1`.
    """
    found: list[tuple[Any, str]] = []
    before: Any = None
    copied: list[Any] = []
    # most code stores nothing, and each instruction takes microseconds
    for instruction in [] if _STORES.isdisjoint(code.co_code[::2]) else dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "STORE_GLOBAL":
            found.append(("global", name))
        if instruction.opname == "STORE_DEREF" and name in code.co_freevars:
            found.append(("nonlocal", name))
        if instruction.opname == "COPY":
            copied.append(before)
        if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
            loaded = getattr(copied.pop() if copied and before.opname == "SWAP" else before, "argval", None)
            found.append((loaded[-1] if isinstance(loaded, tuple) else loaded, name))
        before = instruction
    return found
