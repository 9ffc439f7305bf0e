"""The classes that the installed libraries offer, found in their sources, so that none of a newer version is missed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_ckpt.components.classes import LIBRARIES


def below(root: type[Any], libraries: Collection[str] = LIBRARIES) -> set[str]:
    """Return the full names of all classes of the libraries that are derived from `root`.

    Every module is imported that derives a class from one whose name ends as `root`'s does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _deriving(root.__name__.lstrip("_"), libraries):
            with suppress(Exception):  # it needs a package that is not installed, or is no module to be imported
                importlib.import_module(name)
    pending, found = [root], set()
    while pending:
        kinds = pending.pop().__subclasses__()
        pending += kinds
        found |= {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    return {name for name in found if name.partition(".")[0] in libraries and "<locals>" not in name}


def _deriving(name: str, libraries: Collection[str]) -> Iterator[str]:
    pattern = re.compile(rb"class \w+\([^)]*%s\b" % name.encode())
    for library in sorted(libraries):
        spec = importlib.util.find_spec(library)
        for place in spec.submodule_search_locations or () if spec else ():
            for path in sorted(Path(place).rglob("*.py")):
                if pattern.search(path.read_bytes()):
                    parts = path.relative_to(place).with_suffix("").parts
                    yield ".".join([library, *parts]).removesuffix(".__init__")
