"""The tensors of two checkpoints under the same names, whatever their formats.

Owns the choice of the names: those in the folders if they agree, else native ones by the table of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from titan_ckpt.converting import native_tensors, stored_tensor
from titan_ckpt.errors import ConfigError, KeyMapError, NotACheckpointError
from titan_ckpt.geometry.chunks import LazyTensor
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.stores.store import Place
from titan_ckpt.tools.adapters import Adapter, adapted_weights, open_adapter
from titan_ckpt.tools.models import ModelTable, find_config, find_table, require_config
from titan_ckpt.weights.names import model_tensors

Tensors = dict[str, LazyTensor]
"""Name -> values, which are read when their blocks are asked for."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """Two checkpoints' model weights under common names. `names`: whose names these are, in words."""

    left: Tensors
    right: Tensors
    names: str
    adapters: tuple[Adapter, Adapter] | None = None
    """Both as adapters, if one has the names of PEFT and the other one native ones."""


def model_keys(reader: TensorReader) -> dict[str, str]:
    """Return name -> file key of the model's tensors, or of an adapter's; the names have no component prefix."""
    if reader.format not in ("native", "dcp"):
        return {key: key for key in reader.tensors}
    prefix, names = model_tensors(reader)
    return {name: prefix + name for name in names}


def other_keys(reader: TensorReader) -> dict[str, str]:
    """Return the keys of all other tensors, such as optimizer state, each to itself."""
    of_model = set(model_keys(reader).values())
    return {key: key for key in reader.tensors if key not in of_model}


def stored(reader: TensorReader, keys: Mapping[str, str]) -> Tensors:
    """Return the tensors with these keys as they are stored."""
    return {name: stored_tensor(reader, key) for name, key in keys.items()}


def align(left: TensorReader, right: TensorReader, config: Place | None) -> Aligned:
    """Return the model weights of both under common names.

    Raises: NotACheckpointError if the names have nothing in common and no config.json says how they are related.
    """
    own = model_keys(left), model_keys(right)
    common = own[0].keys() & own[1].keys()
    raw = Aligned(stored(left, own[0]), stored(right, own[1]), "the names in the folders")
    formats = {left.format, right.format}
    if "peft" in formats and formats <= {"peft", "native", "dcp"} and len(formats) == 2:
        return _aligned_adapters(left, right, config)
    if own[0].keys() == own[1].keys() or "hf" not in formats or len(formats) == 1:
        if not common and own[0] and own[1]:
            raise NotACheckpointError(
                f"{left.path} and {right.path} have no tensor name in common: {next(iter(own[0]))} and "
                f"{next(iter(own[1]))}, for example. Are they checkpoints of the same model, both of its weights or "
                "both of an adapter?"
            )
        return raw
    hf, other = (left, right) if left.format == "hf" else (right, left)
    folder = find_config(hf, config) or find_config(other, config)
    if folder is not None:
        there = stored(other, model_keys(other))
        with suppress(ConfigError, NotACheckpointError, KeyMapError):  # the names in the folders are left
            table = find_table(folder, there)
            converted = native_tensors(hf, table.key_map)
            if len(converted.keys() & there.keys()) > len(common):
                _complete_ties(converted, there, table)
                pair = (converted, there) if hf is left else (there, converted)
                return Aligned(*pair, f"the names of {table.architecture}")
    if not common:
        raise NotACheckpointError(
            f"{left.path} and {right.path} have no tensor name in common, and "
            + ("no config.json was found" if folder is None else f"the model of {folder} has other names")
            + ": name the folder of the model's config.json with --config"
        )
    return raw


def _aligned_adapters(left: TensorReader, right: TensorReader, config: Place | None) -> Aligned:
    """Return the adapters of a PEFT folder and of a native or DCP checkpoint by native name."""
    peft, other = (left, right) if left.format == "peft" else (right, left)
    there = open_adapter(other)
    folder = find_config(peft, config) or require_config(other, config)
    table = find_table(folder, adapted_weights(other))
    here = open_adapter(peft, table)
    pair = (here, there) if peft is left else (there, here)
    return Aligned(pair[0].tensors, pair[1].tensors, f"the names of {table.architecture}", pair)


def _complete_ties(converted: Tensors, there: Tensors, table: ModelTable) -> None:
    """Give a tied tensor that the Hugging Face folder has once both of its names, as far as the other side has them."""
    for alias, first in table.tied.items():
        for name, same in ((alias, first), (first, alias)):
            if name in there and name not in converted and same in converted:
                converted[name] = converted[same]
            if same not in there and name in there:
                converted.pop(same, None)
