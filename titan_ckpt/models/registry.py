"""The architectures by name, and the construction of a model from a flavor, a Hugging Face folder, or one's own code.

Owns the list. A new architecture needs its own module and one line in ARCHITECTURES. A name "package.module:Name" needs
neither: it leads to an Architecture, to a Model, or to a function that returns one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from titan_ckpt.encoding.named import import_named, is_import_name, make_named
from titan_ckpt.errors import ConfigError
from titan_ckpt.models import hf, llama3, qwen3, qwen3_moe
from titan_ckpt.models.config import read_config_json
from titan_ckpt.models.language_model import Model

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, slots=True)
class Architecture(Generic[ConfigT]):
    """One entry of the list of architectures."""

    make: Callable[[ConfigT], Model]
    read: Callable[[Mapping[str, Any], str], ConfigT]
    """(contents of a config.json, its path) -> configuration. Raises: ConfigError."""
    flavors: Mapping[str, ConfigT]
    parallelize: Callable[..., Sequence[nn.Module]] | None = None
    """Distributes a model over the ranks; it has the arguments of titan_ckpt.training.parallel.apply.parallelize, which
    is the default."""
    clip_gradients: Callable[..., float] | None = None
    """Clips the gradients and returns their global norm; it has the arguments of
    titan_ckpt.training.parallel.data_parallel.clip_gradients, which is the default."""


ARCHITECTURES: Mapping[str, Architecture[Any]] = {
    "llama3": Architecture(llama3.Llama3, llama3.Llama3Config.from_hf, llama3.FLAVORS),
    "qwen3": Architecture(qwen3.Qwen3, qwen3.Qwen3Config.from_hf, qwen3.FLAVORS),
    "qwen3_moe": Architecture(qwen3_moe.Qwen3Moe, qwen3_moe.Qwen3MoeConfig.from_hf, qwen3_moe.FLAVORS),
    "hf": Architecture(hf.build, lambda config, source: config, {}),
}


def find_architecture(name: str) -> Architecture[Any] | None:
    """Return what a name leads to; None for one's own model without an Architecture. Raises: ConfigError."""
    if is_import_name(name):
        found = import_named(name, "model.name")
        return found if isinstance(found, Architecture) else None
    if name not in ARCHITECTURES:
        raise ConfigError([f"model.name: {name!r} is unknown; known: {', '.join(ARCHITECTURES)}"])
    return ARCHITECTURES[name]


def read_config(name: str, *, flavor: str | None = None, folder: str | Path | None = None) -> Any:
    """Return the shape of a flavor, or the shape in a folder's config.json; None of one's own model. Nothing is built.

    Raises: ConfigError for an unknown name or flavor, and for a folder that is missing or has a different architecture.
    """
    architecture = find_architecture(name)
    shape = {"flavor": flavor, "folder": folder}
    if architecture is None:
        given = [key for key, value in shape.items() if value is not None]
        if given:
            raise ConfigError([f"model.{key}: your own model takes its shape from model.settings; leave {key} out"
                               for key in given])  # fmt: skip
        return None
    if folder is not None:
        return architecture.read(read_config_json(folder), str(Path(folder) / "config.json"))
    if flavor is None or flavor not in architecture.flavors:
        known = ", ".join(architecture.flavors) or f"none: {name} needs model.folder"
        raise ConfigError([f"model.flavor: {flavor!r} is unknown; known: {known}"])
    return architecture.flavors[flavor]


def build_model(
    name: str,
    *,
    flavor: str | None = None,
    folder: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Model:
    """Return a model of the shape that `read_config` returns, without trained weights; one's own gets `settings`.

    Raises: as `read_config`; ConfigError for settings that do not fit, and for what is no Model.
    """
    config = read_config(name, flavor=flavor, folder=folder)
    if (architecture := find_architecture(name)) is not None:
        if settings:
            raise ConfigError([f"model.settings: {name} has none; its shape is that of a flavor or a folder"])
        return architecture.make(config)
    return make_named(Model, "model.name", name, settings=settings or {})
