"""Classes by their names: whose they are, what they extend, and tables of those that continue exactly.

Libraries are optional, so their classes are known by name, and none is imported for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

LIBRARIES = frozenset(
    {
        "accelerate", "datasets", "evaluate", "lightning", "lightning_fabric", "peft", "pytorch_lightning", "torch",
        "torchao", "torchdata", "torchmetrics", "torchtitan", "transformers", "trl",
    }
)  # fmt: skip
"""Packages whose classes are listed one by one; a class of any other package is looked at as the user's own."""


def class_name(value: Any) -> str:
    """Return the full name of a function or of an object's class, such as "lightning.pytorch.callbacks.timer.Timer"."""
    named = value if isinstance(value, FunctionType) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def names_of(kind: type) -> list[str]:
    """Return the full names of a class and of those that it extends."""
    return [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]


def package_of(kind: type | FunctionType) -> str:
    return kind.__module__.partition(".")[0]


def is_of_library(kind: type | FunctionType) -> bool:
    """Return whether a class or function is of a package whose classes are listed one by one."""
    return package_of(kind) in LIBRARIES


def exact(modules: Mapping[str, str]) -> dict[str, str]:
    """Return the table of classes that continue exactly: full name -> "". `modules`: the names of each module's."""
    return {f"{module}.{name}": "" for module, names in modules.items() for name in names.split()}


def is_own(value: Any) -> bool:
    """Return whether an object's class, or a function, is no listed library's, none of Python's and not ours."""
    return is_own_kind(value if isinstance(value, FunctionType) else type(value))


def is_own_kind(kind: type | FunctionType) -> bool:
    """Return the same of a class itself."""
    package = package_of(kind)
    return package not in LIBRARIES and package not in sys.stdlib_module_names and package != "titan_ckpt"


@cache
def own_kinds(kinds: tuple[type, ...]) -> tuple[type, ...]:
    """Return the user's own classes among these."""
    return tuple(filter(is_own_kind, kinds))


def own_and_base(kind: type) -> tuple[tuple[type, ...], type]:
    """Return the user's own classes that a class begins with, and the first one of a library, or object, below them."""
    kinds = kind.__mro__
    i = next((i for i, base in enumerate(kinds) if is_of_library(base)), len(kinds) - 1)
    return kinds[:i], kinds[i]


def defines(value: Any, methods: Sequence[str]) -> bool:
    """Return whether the user's own classes, and not those of a library, define these methods of an object."""
    homes = [next((kind for kind in type(value).__mro__ if name in vars(kind)), None) for name in methods]
    return all(home is not None and not is_of_library(home) for home in homes)


def gives_state(value: Any) -> bool:
    """Return whether an object of the user's own class gives its state and takes it back."""
    return defines(value, ("state_dict", "load_state_dict"))
