"""Decides whether the objects that a run holds beside what its steps save, such as callbacks, continue exactly.

A class of a library is exact if it was proved so and is listed by the integration; a class that is not listed is
refused. A class of the user is exact if its objects hold nothing that changes, or give their state themselves. Either
can be allowed by name, with `checkpoint.allow`; then the log and every step say so.
"""

from __future__ import annotations

import dis
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from inspect import unwrap
from io import IOBase
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from titan_ckpt.rng import held_generators, is_random, used_by

logger = logging.getLogger(__name__)

LIBRARIES = frozenset(
    {
        "accelerate", "datasets", "evaluate", "lightning", "lightning_fabric", "peft", "pytorch_lightning", "torch",
        "torchao", "torchdata", "torchmetrics", "torchtitan", "transformers", "trl",
    }
)  # fmt: skip
"""Packages whose classes are listed one by one; a class of any other package is looked at as the user's own."""

MAX_DEPTH = 8
"""Objects within objects that are followed; what is deeper counts as something that changes."""

_CONSTANT = (str, bytes, int, float, complex, type(None), type, FunctionType, partial, torch.dtype, torch.device)
_BUILDS = ("__init__", "__new__", "__post_init__", "__set_name__", "__init_subclass__", "__setstate__")


def class_name(value: Any) -> str:
    """Return the full name of a function or of an object's class, such as "lightning.pytorch.callbacks.timer.Timer"."""
    named = value if isinstance(value, FunctionType) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def faults(
    held: Iterable[tuple[str, Any]],
    known: Mapping[str, str],
    allow: Collection[str],
    *,
    live: Iterable[nn.Module] = (),
    gives_state: Callable[[Any], bool] = lambda _: False,
) -> Iterator[str]:
    """Yield one line for each object whose state a resumed run would lose, as far as that is known.

    `held`: (what it is, the object), such as ("callback", EarlyStopping()). `known`: full name of a library's class ->
    why it is not exact; "" if it was proved exact. `allow`: names that are let through. `live`: modules that the run
    saves, which an object may hold. `gives_state`: whether an object of the user's own class returns its state, which
    the integration saves and restores.
    """
    held = list(held)
    saved = {id(module) for root in live for module in root.modules()} | {id(value) for _, value in held}
    for role, value in held:
        reason = _reason(value, known, saved, gives_state)
        if reason is not None:
            yield from unless_allowed(f"{role} {class_name(value)}", class_name(value), reason, allow)


def function_faults(
    functions: Iterable[tuple[str, Any]],
    allow: Collection[str],
    *,
    live: Iterable[nn.Module] = (),
    others: Collection[Any] = (),
) -> Iterator[str]:
    """Yield the same for functions, methods and callable objects; what libraries keep in those of theirs is theirs.

    `others`: objects that are looked at themselves, whose methods are none of these.
    """
    for role, given in functions:
        function = given.func if isinstance(given, partial) else given
        for generator in held_generators([given.args, given.keywords]) if isinstance(given, partial) else ():
            reason = f"it draws from a {type(generator).__qualname__} that it is given, and no step holds that"
            yield from unless_allowed(f"{role} {class_name(function)}", class_name(function), reason, allow)
        owner = getattr(function, "__self__", function)
        if owner is not None and not isinstance(owner, nn.Module) and not any(owner is other for other in others):
            of_libraries = {f"{kind.__module__}.{kind.__qualname__}": "" for kind in type(owner).__mro__}
            yield from faults([(role, owner)], of_libraries, allow, live=live)


def unless_allowed(what: str, name: str, reason: str, allow: Collection[str]) -> Iterator[str]:
    """Yield the line that refuses `what`, with the way to allow it by `name`; if it is allowed, log that instead."""
    if name in allow:
        logger.warning("%s: %s; checkpoint.allow lets it run", what, reason)
    else:
        yield f'{what}: {reason}, or allow that a resumed run loses it: checkpoint.allow = ["{name}"]'


def _reason(
    value: Any, known: Mapping[str, str], saved: Collection[int], gives_state: Callable[[Any], bool]
) -> str | None:
    """Return why an object is not exact and the next step, or None."""
    bases = [kind for kind in type(value).__mro__ if _package(kind) in LIBRARIES]
    of_library = bases[0] if bases else None
    for base in bases:
        listed = known.get(name := f"{base.__module__}.{base.__qualname__}")
        if listed and not any(issubclass(other, base) for other in bases[: bases.index(base)]):
            return listed
        if listed is None and base is of_library:
            what = "it" if base is type(value) else f"its base {name}"
            return f"{what} was not proved to continue exactly after a resume: leave it out"
    if of_library is type(value) or gives_state(value):
        return None
    if changing := next(_changing(value, of_library, saved, "", 0), None):
        return f"{changing}, and no step holds it: let the object return its state and take it back"
    return None


def _changing(value: Any, of_library: type | None, saved: Collection[int], path: str, depth: int) -> Iterator[str]:
    """Yield what may change in an object of the user's own class: an attribute that its code sets, or that can change.

    `of_library`: the listed class that it extends, whose own attributes do not count.
    """
    if isinstance(value, FunctionType):
        yield from _kept_by(value)
    kinds = type(value).__mro__
    own = kinds if of_library is None else kinds[: kinds.index(of_library)]
    own = tuple(kind for kind in own if _package(kind) != "titan_ckpt")
    where = f" of self{path}" if path else ""
    yield from (f"its code{where} sets {name}" for name in stored_by_code_of(own))
    yield from (f"{name} is a {kind}, which can change" for name, kind in _shared_by_objects(own))
    methods = (method for kind in own for method in vars(kind).values() if isinstance(method, FunctionType))
    yield from (fault for method in methods for fault in _drawn_by(method))
    inherited = {name for kind in kinds[len(own) :] for method in vars(kind).values() for name in _stored(method)}
    for name, item in getattr(value, "__dict__", {}).items():
        if f"self.{name}" not in inherited:
            yield from _changing_item(item, saved, f"{path}.{name}", depth + 1)


def _changing_item(item: Any, saved: Collection[int], path: str, depth: int) -> Iterator[str]:
    if isinstance(item, _CONSTANT) or id(item) in saved:
        return
    if isinstance(item, (tuple, frozenset)) and depth < MAX_DEPTH:
        for part in item:
            yield from _changing_item(part, saved, path, depth + 1)
    elif _holds_data(item):
        yield f"self{path} is a {type(item).__qualname__}, which can change"
    elif _package(type(item)) in LIBRARIES | sys.stdlib_module_names | {"titan_ckpt"}:
        return  # a tokenizer, a dataset, a path, a logger: what libraries keep in it is theirs
    elif depth >= MAX_DEPTH:
        yield f"self{path} is nested too deeply to be looked at"
    else:
        yield from _changing(item, None, saved, path, depth)


def _holds_data(item: Any) -> bool:
    """Return whether an object of a library is there to hold values that change."""
    if isinstance(item, IOBase) or type(item).__module__ == "torch.nn.modules.loss":
        return False
    kinds = (list, dict, set, bytearray, torch.Tensor, torch.Generator, nn.Module, torch.optim.Optimizer, Iterator)
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(item).__mro__}
    foreign = {
        "numpy.ndarray",
        "types.SimpleNamespace",
        "queue.Queue",
        "collections.deque",
        "torchmetrics.metric.Metric",
    }
    return isinstance(item, kinds) or is_random(item) or not names.isdisjoint(foreign)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


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


def _shared_by_objects(kinds: Collection[type]) -> Iterator[tuple[str, str]]:
    """Yield the attributes of classes that hold data, as far as the code of the classes uses them."""
    methods = [method for kind in kinds for method in vars(kind).values()]
    used = {name for method in methods for code in _codes(method) for name in code.co_names}
    for kind in kinds:
        for name in sorted(used & vars(kind).keys()):
            if _holds_data(vars(kind)[name]):
                yield f"{kind.__name__}.{name}", type(vars(kind)[name]).__qualname__


def _kept_by(function: FunctionType) -> Iterator[str]:
    """Yield what a function keeps between calls: variables around it and attributes of its own, which its code sets."""
    code = function.__code__
    before: Any = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "STORE_GLOBAL" or (instruction.opname == "STORE_DEREF" and name in code.co_freevars):
            yield f"its code sets {name}, which is outside of it"
        if instruction.opname == "STORE_ATTR" and before.argval == function.__name__:
            yield f"its code sets {before.argval}.{name}"
        before = instruction
    yield from _drawn_by(function)


def _drawn_by(function: FunctionType) -> Iterator[str]:
    """Yield the generators around a function, which it draws from."""
    for name, value in used_by(function).items():
        if is_random(value):
            yield f"it draws from {name}, a {type(value).__qualname__}"


def _stored(method: Any, classes: Collection[str] = ()) -> Iterator[str]:
    """Yield what the code of a function, method or property sets or deletes: attributes of its object, and globals.

    `classes`: names of the object's classes, whose attributes count too.
    """
    pending = _codes(method)
    owners = {code.co_varnames[0] for code in pending} | {"__class__", *classes}
    for code in pending:
        pending += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        yield from _stored_by(code, owners)


def _codes(method: Any) -> list[CodeType]:
    """Return the code of a function, method or property of a class."""
    members: tuple[Any, ...] = (method,)
    if isinstance(method, property):
        members = (method.fget, method.fset, method.fdel)
    # torch wraps the step() of each class of an optimizer
    codes = (getattr(unwrap(getattr(member, "__func__", member)), "__code__", None) for member in members)
    return [code for code in codes if isinstance(code, CodeType) and code.co_varnames]


def _stored_by(code: CodeType, owners: Collection[str]) -> Iterator[str]:
    """Yield the same of one code object. The load of the object precedes a store, or the COPY of `self.n += 1`."""
    before: Any = None
    copied: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_GLOBAL":
            yield f"the global {instruction.argval}"
        if instruction.opname == "COPY":
            copied.append(before)
        if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
            load = copied.pop() if copied and before.opname == "SWAP" else before
            loaded = load.argval if load is not None else None
            if loaded in owners or (isinstance(loaded, tuple) and loaded[-1] in owners):
                yield f"self.{instruction.argval}"
        before = instruction
