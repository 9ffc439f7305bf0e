"""Python objects that settings name as "package.module:Name".

Owns the syntax of such a name and its import. Whoever uses the object checks what it is.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from titan_ckpt.encoding.toml import Check

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

ImportName = Annotated[str, Check('a name such as "package.module:Name"', _NAME.fullmatch)]
"""The type of a setting that names one's own code."""


class BadNameError(ValueError):
    """A name leads to nothing, or to what cannot be called with these settings."""


def is_import_name(text: object) -> bool:
    """Return whether a setting names code, and no built-in choice."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def find_names_here() -> None:
    """Let names lead to modules in the current folder, too; they come last, so that no file here hides a package."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def import_named(name: str) -> Any:
    """Import the module and return the attribute.

    Raises: BadNameError that says what is not there, and where to put it. An error inside the module's own code is
        raised as it is, because its traceback is what helps.
    """
    module_name, _, attribute = name.partition(":")
    if not is_import_name(name):
        raise BadNameError(f'{name!r}: expected "package.module:Name"')
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        where = "the folder that the run is started in, PYTHONPATH, or an installed package"
        raise BadNameError(f"{name!r}: there is no module {error.name!r} in {where}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadNameError(f"{name!r}: module {module_name!r} has no attribute {attribute!r}")
        found = getattr(found, part)
    return found


def call_named(name: str, *arguments: object, settings: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
    """Call what `name` names with `arguments`, all `settings`, and those of `offered` that it has parameters for.

    Raises: BadNameError for settings that it has no parameters for, or that it needs and are not given.
    """
    target = import_named(name)
    if not callable(target):
        raise BadNameError(f"{name!r} is a {type(target).__name__}, expected a class or a function")
    signature = inspect.signature(target)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given = {key: value for key, value in offered.items() if takes_all or key in signature.parameters} | {**settings}
    try:
        signature.bind(*arguments, **given)
    except TypeError as error:
        raise BadNameError(f"{name!r}: {error}; its parameters: {signature}") from None
    return target(*arguments, **given)
