"""Python objects that settings name as "package.module:Name", and the reader of tables that a package names.

Owns the syntax of such a name, its import, and the call of what it names.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Annotated, Any, Protocol, TypeVar

from titan_ckpt.encoding.toml import Check
from titan_ckpt.errors import ConfigError

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

ImportName = Annotated[str, Check('a name such as "package.module:Name"', _NAME.fullmatch)]
"""The type of a setting that names one's own code."""


def is_import_name(text: object) -> bool:
    """Return whether a setting names code, and no built-in choice."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def find_names_here() -> None:
    """Let names lead to modules in the current folder, too; they come last, so that no file here hides a package."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def import_named(name: str, setting: str) -> Any:
    """Import the module and return the attribute.

    Raises: ConfigError that says what is not there, and where to put it. An error inside the module's own code is
        raised as it is, because its traceback is what helps.
    """
    module_name, _, attribute = name.partition(":")
    if not is_import_name(name):
        raise ConfigError([f'{setting}: {name!r}: expected "package.module:Name"'])
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        where = "the folder that the run is started in, PYTHONPATH, or an installed package"
        raise ConfigError([f"{setting}: {name!r}: there is no module {error.name!r} in {where}"]) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError([f"{setting}: {name!r}: module {module_name!r} has no attribute {attribute!r}"])
        found = getattr(found, part)
    return found


def make_named(
    kind: type[T],
    setting: str,
    name: str,
    *arguments: object,
    settings: Mapping[str, Any] | None = None,
    offered: Mapping[str, Any] = MappingProxyType({}),
) -> T:
    """Call what `setting` names with `arguments`, all `settings`, and those of `offered` that it has parameters for.

    `settings`: those of the table in which the setting is; None if it has none.
    Raises: ConfigError for settings that it has no parameters for, or that it needs and are not given, and for what
        makes no `kind`.
    """
    where = setting if settings is None else f"{setting.rpartition('.')[0]}.settings"
    target = import_named(name, where)
    if not callable(target):
        raise ConfigError([f"{where}: {name!r} is a {type(target).__name__}, expected a class or a function"])
    signature = inspect.signature(target)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given = {key: value for key, value in offered.items() if takes_all or key in signature.parameters}
    given |= settings or {}
    try:
        signature.bind(*arguments, **given)
    except TypeError as error:
        raise ConfigError([f"{where}: {name!r}: {error}; its parameters: {signature}"]) from None
    made = target(*arguments, **given)
    if not isinstance(made, kind):
        expected = f"expected a subclass of {kind.__module__}.{kind.__qualname__}"
        raise ConfigError([f"{setting}: {name!r} makes a {type(made).__name__}, {expected}"])
    return made


TABLES = "titan_ckpt.tables"
"""Entry-point group: the name of a top-level array of tables -> an object with the methods of `Tables`."""


class Tables(Protocol):
    """Reads an array of tables of a run's file that this package has no settings for."""

    def from_tables(self, tables: Sequence[Mapping[str, Any]], source: str) -> Any:
        """Return what the tables describe. Raises: ConfigError with all faults."""

    def updates(self, description: Mapping[str, Any], *step_and_model: Any) -> Any:
        """Return `ModelConverter.updates` of the converter so described; None if no package has its kind."""

    def kinds(self) -> Mapping[str, type[Any]]:
        """Return the dataclass of each `kind` of table."""


def converter_tables() -> Tables | None:
    """Return the reader of [[converters]] that an installed package names in the group `titan_ckpt.tables`."""
    found = [entry for entry in entry_points(group=TABLES) if entry.name == "converters"]
    return found[0].load() if found else None
