"""Model converters: Float8, QAT and LoRA, alone or combined, under one protocol.

Owns the kinds that TOML knows: the three here, those that installed packages name in the entry-point group
`titan_ckpt.converters`, and any class as "package.module:Name". In a checkout `converters` is another name of the same
modules.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Literal

from titan_ckpt.config import from_dict
from titan_ckpt.converters.container import ModelConvertersContainer
from titan_ckpt.converters.float8 import Float8Config, Float8Converter
from titan_ckpt.converters.lora import LoRAConverter
from titan_ckpt.converters.lora.config import LoRAConfig
from titan_ckpt.converters.qat import QATConfig, QATConverter
from titan_ckpt.encoding.named import ImportName, import_named
from titan_ckpt.errors import ConfigError, collected, refuse
from titan_ckpt.types import ModelConverter
from titan_ckpt.weights.low_rank import StoredUpdates

__all__ = [
    "ConverterConfig",
    "Float8Config",
    "Float8Converter",
    "LoRAConfig",
    "LoRAConverter",
    "ModelConverter",
    "ModelConvertersContainer",
    "QATConfig",
    "QATConverter",
    "build",
    "from_tables",
    "kinds",
    "lora",
    "updates",
]

ConverterConfig = Float8Config | QATConfig | LoRAConfig
GROUP = "titan_ckpt.converters"
"""Entry-point group: the `kind` of a [[converters]] table -> a subclass of ModelConverter."""
_EXPECTED = "name a class that derives from it and has a config_class (docs/write-a-converter.md)"
_OWN: Mapping[str, type[ModelConverter]] = {"float8": Float8Converter, "qat": QATConverter, "lora": LoRAConverter}


def build(configs: Sequence[ConverterConfig]) -> ModelConvertersContainer:
    """Return the converters for these settings. Raises: ConverterError for a wrong order or combination."""
    return ModelConvertersContainer([_OWN[config.kind](config) for config in configs])


def from_tables(tables: Sequence[Mapping[str, Any]], source: str = "config") -> ModelConvertersContainer:
    """Return the converters for TOML's `[[converters]]` tables. Raises: ConfigError with all faults; ConverterError."""
    converters: list[ModelConverter] = []
    problems: list[str] = []
    for i, table in enumerate(tables):
        with collected(problems):
            converters.append(_from_table(table, source, f"converters.{i}"))
    refuse(*problems, source=source)
    return ModelConvertersContainer(converters)


def kinds() -> dict[str, type[Any]]:
    """Return the settings of every kind that has a name: a dataclass each."""
    others = {kind: _checked(entry.load(), kind) for kind, entry in _named().items()}
    return {kind: cls.config_class for kind, cls in {**others, **_OWN}.items()}


def updates(description: Mapping[str, Any], *step_and_model: Any) -> StoredUpdates | None:
    """Return `ModelConverter.updates` of the converter so described; None if no installed package has its kind."""
    kind = description["kind"]
    if (cls := _OWN.get(kind)) is None and (entry := _named().get(kind)) is not None:
        cls = _checked(entry.load(), kind)
    return None if cls is None else cls.updates(description, *step_and_model)


def _from_table(table: object, source: str, path: str) -> ModelConverter:
    """Return the converter of one table. Raises: ConfigError."""
    own = isinstance(table, Mapping) and isinstance(table.get("kind"), str) and table["kind"] in _OWN
    named = {} if own else _named()
    choices: Any = Literal[(*_OWN, *named)] | ImportName
    settings: Any = dict(table) if isinstance(table, Mapping) else table
    only_kind = {"kind": settings["kind"]} if isinstance(table, Mapping) and "kind" in settings else {}
    one: Any = make_dataclass("Table", [("kind", choices)])
    kind: str = from_dict(one, only_kind if isinstance(table, Mapping) else settings, source, path).kind
    if (cls := _OWN.get(kind)) is None:
        where = f"{path}.kind"
        cls = _checked(named[kind].load() if kind in named else import_named(kind, where), kind, where)
        if kind not in named:
            del settings["kind"]  # the dataclass of its settings has a kind of its own
    return cls(from_dict(cls.config_class, settings, source, path))


def _named() -> dict[str, EntryPoint]:
    """Return the kinds of installed packages. All are looked through, which takes longer than everything else here."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _checked(found: object, name: str, where: str = "kind") -> type[ModelConverter]:
    """Return a converter class that TOML can describe. Raises: ConfigError."""
    if not (isinstance(found, type) and issubclass(found, ModelConverter)):
        what = "is no subclass of titan_ckpt.converters.ModelConverter"
        raise ConfigError([f"{where}: {name!r} {what}; {_EXPECTED}"])
    if not hasattr(found, "config_class"):
        what = "has no config_class, the dataclass of its settings, so no table can describe it"
        raise ConfigError([f"{where}: {name!r} {what}; {_EXPECTED}"])
    return found


if __name__ == "converters":  # a checkout's other name: a class must be the same whichever name was imported

    class _SameModule(MetaPathFinder, Loader):
        """Finds `converters.x` as the module `titan_ckpt.converters.x`."""

        def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
            return ModuleSpec(fullname, self) if fullname.startswith("converters.") else None

        def exec_module(self, module: ModuleType) -> None:
            sys.modules[module.__name__] = import_module(f"titan_ckpt.{module.__name__}")

    sys.meta_path.insert(0, _SameModule())
    sys.modules["converters"] = import_module("titan_ckpt.converters")
