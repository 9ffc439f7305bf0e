"""Callbacks, strategies and precisions of Lightning and Fabric: resumed exactly, or refused by name.

The exact callbacks are killed and resumed in tests/integrations/test_lightning_cases.py.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

from tests.integrations.lightning_cases import CALLBACKS
from tests.zoo.worlds import Row
from titan_ckpt.integrations.lightning.known import KNOWN

FLOORS = {"": 34, "Precision": 8, "Strategy": 6}
_PACKAGES = ("lightning.pytorch", "lightning.fabric")
_OF_FABRIC = {"plugins.precision": "plugins.precision.Precision", "strategies": "strategies.Strategy"}
_OF_TRAINER = dict.fromkeys(("callbacks", "cli", "serve"), "callbacks.Callback") | _OF_FABRIC
_ABSTRACT = ("strategies.strategy.Strategy", "strategies.parallel.ParallelStrategy")


def rows() -> list[Row]:
    """Return the row of every class that the installed packages offer."""
    names = [name for package in _PACKAGES for name in sorted({*offered(package)})]
    reasons = {name: KNOWN.get(name, "it was not proved to continue exactly") for name in names}
    return [(name, "refused" if why else "exact", why) for name, why in reasons.items()]


def offered(package: str) -> Iterator[str]:
    """Yield the full names of the public callbacks, strategies and precisions of a package."""
    for part, base in (_OF_FABRIC if "fabric" in package else _OF_TRAINER).items():
        home, _, name = f"{package}.{base}".rpartition(".")
        kind = getattr(importlib.import_module(home), name)
        root = importlib.import_module(f"{package}.{part}")
        under = pkgutil.walk_packages(getattr(root, "__path__", []), f"{root.__name__}.")
        for module in (root, *(importlib.import_module(found.name) for found in under)):
            for value in vars(module).values():
                if inspect.isclass(value) and issubclass(value, kind) and not value.__name__.startswith("_"):
                    where = f"{value.__module__}.{value.__qualname__}"
                    if where.startswith(f"{package}.") and "._" not in where and not where.endswith(_ABSTRACT):
                        yield where


@pytest.mark.parametrize("package", [*_PACKAGES, "pytorch_lightning", "lightning_fabric"])
def test_every_class_of_the_installed_lightning_is_listed(package: str) -> None:
    """A callback, strategy or precision of a newer version is refused until it is listed; none is listed in vain."""
    assert {*offered(package)} == {name for name in KNOWN if name.startswith(f"{package}.")}


def test_every_callback_that_is_listed_as_exact_is_killed_and_resumed() -> None:
    """The cases have one of each class."""
    exact = [name for name, verdict, _ in rows() if verdict == "exact" and name.startswith("lightning.pytorch.c")]
    assert {name.rpartition(".")[2] for name in exact} - {"Callback"} == CALLBACKS.keys()
