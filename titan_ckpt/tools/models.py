"""The key table of a model, found from a config.json: what file tensors are called, and how they are arranged.

Owns the choice of the architecture. A model is built on meta, so it needs no memory; nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from titan_ckpt.encoding.named import find_names_here, is_import_name
from titan_ckpt.encoding.paths import hub_folder
from titan_ckpt.errors import CheckpointNotFoundError, ConfigError, KeyMapError, NotACheckpointError, listed
from titan_ckpt.formats.huggingface.peft import PeftReader
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.geometry.chunks import LazyTensor, TensorInfo, info_of
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.models import hf
from titan_ckpt.models.config import read_config_json
from titan_ckpt.models.hf_keys import find_key_map
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.models.registry import ARCHITECTURES, find_architecture
from titan_ckpt.stores.store import Place, local_path, store_of
from titan_ckpt.weights.wrapper import ModelWrapper

CONFIG = "config.json"
_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ModelTable:
    """A model without weights: its names, shapes, modules, and its table to Hugging Face names."""

    architecture: str
    """As in [model] name: llama3, qwen3, qwen3_moe, hf for any class of transformers, or "package.module:Name"."""
    key_map: KeyMap
    tensors: Mapping[str, TensorInfo]
    """By native name; the dtypes are those of a new model."""
    tied: Mapping[str, str]
    modules: Mapping[str, nn.Module]
    config: Mapping[str, Any]
    """The content of config.json, without its quantization; it names the class that opens this model."""

    def misfits(self, found: Mapping[str, LazyTensor]) -> Iterator[str]:
        """Yield a line for each tensor that is missing, unknown or of a wrong shape. `found`: by native name."""
        shapes = {name: value.info.shape for name, value in found.items()}
        for name, info in self.tensors.items():
            others = [alias for alias, first in self.tied.items() if first == name]
            shape = next((shapes[n] for n in (name, *others) if n in shapes), None)
            if shape is None and name not in self.key_map.nameless:
                yield f"{CONFIG}: the model's {name} is not there"
            elif shape is not None and shape != info.shape and math.prod(shape) != math.prod(info.shape):
                yield f"{CONFIG}: the model's {name} has the shape {list(info.shape)}, found {list(shape)}"
        for name in shapes.keys() - self.tensors.keys() - self.tied.keys():
            yield f"{CONFIG}: the model has no {name}"


def find_table(
    folder: Place,
    names: Collection[str] | None = None,
    architecture: str | None = None,
    changes: Mapping[str, Any] = _NONE,
) -> ModelTable:
    """Return the table of the model in a folder's config.json.

    `names`: the native names of a checkpoint, by which the architecture is chosen if several read this config; without
    them the first one is taken, which is the model's own if it has one. `architecture`: the only one to try. `changes`:
    settings in place of those in config.json.
    Raises: ConfigError listing why no architecture reads the config; NotACheckpointError if the names are no model's.
    """
    problems: list[str] = []
    tables: list[ModelTable] = []
    for table in tables_of(folder, architecture, problems, changes):
        if names is None or table.tensors.keys() | table.tied.keys() >= set(names):
            return table
        tables.append(table)
    if names is None or not tables:
        raise ConfigError(problems or [f"model: no architecture reads {folder / CONFIG}"], str(folder / CONFIG))
    best = max(tables, key=lambda table: len(table.tensors.keys() & set(names)))
    unknown = sorted(set(names) - best.tensors.keys() - best.tied.keys())
    raise NotACheckpointError(
        f"{folder / CONFIG} is the config of a model that has no {listed(unknown, ', ', ' ', most=3)} "
        f"({best.architecture}). Name the folder of the model's own config.json with --config"
    )


def tables_of(
    folder: Place, architecture: str | None, problems: list[str], changes: Mapping[str, Any] = _NONE
) -> Iterator[ModelTable]:
    """Yield the table of each architecture that reads the config; add a line to `problems` for each other one."""
    if architecture is not None and architecture not in ARCHITECTURES:
        known = f'{", ".join(ARCHITECTURES)}, or your own Architecture as "package.module:Name"'
        if not is_import_name(architecture):
            raise ConfigError([f"--model: {architecture!r} is unknown; known: {known}"])
        find_names_here()
        if find_architecture(architecture) is None:
            raise ConfigError([f"--model: {architecture!r} is no Architecture, which reads a {CONFIG}; known: {known}"])
    read = {**read_config_json(folder), **changes}
    plain = {key: value for key, value in read.items() if key != "quantization_config"}
    for name, build in _builders(folder, read, architecture):
        try:
            with torch.device("meta"):
                model, key_map = build()
        except (ConfigError, KeyMapError) as error:
            lines = error.problems if isinstance(error, ConfigError) else [" ".join(str(error).split())]
            first, *others = lines
            more = f" (and {len(others)} more; --model {name} shows them)" if others and not architecture else ""
            problems += [f"{name}: {p}" for p in (lines if architecture else [first + more])]
            continue
        wrapper = ModelWrapper([model])
        tensors = {fqn: info_of(value) for fqn, value in wrapper.state_dict().items()}
        config = plain | {"architectures": _opened_by(model, plain)}
        yield ModelTable(name, key_map, tensors, wrapper.tied, dict(model.named_modules()), config)


def _opened_by(model: nn.Module, config: Mapping[str, Any]) -> Any:
    """Return `architectures` of this model, which may be another one than the config names."""
    if not isinstance(model, LanguageModel):
        return [type(model).__name__]
    with suppress(NotImplementedError):  # a user's own architecture
        return model.hf_config().get("architectures", config.get("architectures"))
    return config.get("architectures")


def _builders(
    folder: Place, config: Mapping[str, Any], architecture: str | None
) -> Iterator[tuple[str, Callable[[], tuple[nn.Module, KeyMap]]]]:
    """Yield what makes a model and its table, by architecture; `config`: that of the folder, perhaps changed.

    If the config names a class of transformers that is no causal language model, a model of this class is the first,
    because the folder's tensors are its own.
    """

    def named() -> tuple[nn.Module, KeyMap]:
        model = hf.build_named(config)
        return model, find_key_map(model)

    def by_name(name: str) -> tuple[nn.Module, KeyMap]:
        found = find_architecture(name)
        assert found is not None, "a name that is none was refused above"
        model = found.make(found.read(dict(config), str(folder / CONFIG)))
        return model, model.key_map()

    if architecture in (None, "hf"):
        with suppress(ConfigError):  # the builder of "hf" says what is wrong
            if hf.names_another_class(config):
                yield "hf", named
    for name in [architecture] if architecture else ARCHITECTURES:
        yield name, partial(by_name, name)


def find_config(reader: TensorReader, given: Place | None) -> Place | None:
    """Return the folder with the config.json of a checkpoint's model, the given one or `own_config`; None without one.

    Raises: NotACheckpointError if the given one has none.
    """
    if given is None:
        return own_config(reader)
    folder: Place = given.parent if given.name == CONFIG else given
    folder = store_of(folder).seen(folder)
    if not (folder / CONFIG).is_file():
        raise NotACheckpointError(f"--config {given}: holds no {CONFIG}; name the folder of the model's {CONFIG}")
    return folder


def own_config(reader: TensorReader) -> Place | None:
    """Return the folder with a config.json that a checkpoint has or leads to; None without one.

    It is the checkpoint's own, that of the base that it names, or that of an export of the same run.
    """
    local, base, revision = local_path(reader.path), None, None
    path: Place = reader.path if local is None else local.absolute()
    if isinstance(reader, NativeReader) and reader.manifest is not None:
        base, revision = ((reader.manifest.base or {}).get(name) for name in ("path", "revision"))
    elif isinstance(reader, PeftReader):
        base, revision = (reader.metadata().get(name) for name in ("base_model_name_or_path", "revision"))
    places: list[Place] = [path if path.is_dir() else path.parent]
    if isinstance(base, str) and base:
        with suppress(CheckpointNotFoundError):
            places.append(hub_folder(base, revision if isinstance(revision, str) else None))
    if local is not None and reader.format in ("native", "dcp"):
        places += sorted((local.absolute().parent.parent / "exports").glob("step-*"), reverse=True)
    return next((place for place in places if (place / CONFIG).is_file()), None)


def require_config(reader: TensorReader, given: Place | None) -> Place:
    """Return what find_config does. Raises: NotACheckpointError if no config.json is known."""
    folder = find_config(reader, given)
    if folder is None:
        raise NotACheckpointError(
            f"{reader.path}: no {CONFIG} is known for its model, which says what the tensors are called in Hugging "
            "Face folders; name the folder that has it with --config"
        )
    return folder
