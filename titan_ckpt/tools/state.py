"""Read the state of a checkpoint beside its tensors, under dotted names: run state, manifest, config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from titan_ckpt.components.files import RUN_STATE, rank_state_name
from titan_ckpt.directory.names import read_committed
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import ConfigError, CorruptCheckpointError
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.geometry.chunks import as_bytes
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.models.hf import transformers_config

_MAX_SHOWN = 60
_OF_A_SAVE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Fields of config.json that say how a folder was written, and not what the model is."""


def run_state(reader: TensorReader) -> dict[str, Any]:
    """Return the state of the run: steps, hyperparameters, schedulers, user states; empty for other formats.

    Raises: CorruptCheckpointError; OSError.
    """
    if isinstance(reader, NativeReader):
        return _state_file(reader, RUN_STATE)
    if isinstance(reader, DcpReader):
        return dict(_flat({name: reader.item(name) for name in reader.items}, ""))
    return {}


def rank_state(reader: TensorReader, rank: int = 0) -> dict[str, Any]:
    """Return the state of one rank: generators and data position; empty for other formats. Raises: as run_state."""
    return _state_file(reader, rank_state_name(rank)) if isinstance(reader, NativeReader) else {}


def settings(reader: TensorReader) -> dict[str, Any]:
    """Return what decides the meaning of the tensors: converters and base of a step, config.json of other folders."""
    if isinstance(reader, NativeReader):
        manifest = reader.manifest
        if manifest is None:
            return {}
        base = manifest.base and {"digest": manifest.base.get("digest")}
        return dict(_flat({"converters": manifest.converters, "base": base}, ""))
    config = {key: value for key, value in reader.metadata().items() if key not in _OF_A_SAVE}
    return dict(_flat(config, ""))


def settings_as_read(reader: TensorReader) -> dict[str, Any]:
    """Return config.json in the newest form, with transformers' defaults for what it leaves out.

    Empty without transformers, and for a model that it does not have.
    """
    config = reader.metadata()
    try:
        whole = transformers_config(config).to_dict()
    except (ImportError, ConfigError):
        return {}
    whole |= {key: value for key, value in config.items() if key == "quantization_config"}
    return dict(_flat({key: value for key, value in whole.items() if key not in _OF_A_SAVE}, ""))


def _state_file(reader: NativeReader, name: str) -> dict[str, Any]:
    records = reader.manifest.files if reader.manifest is not None else ()
    record = next((record for record in records if record.name == name), None)
    if record is None:
        return {}
    path = reader.path / name
    try:
        data = read_committed(path, record)
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}", str(path)) from error
    return dict(_flat(typed_json.loads(data, str(path)), ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, text) of every leaf; long leaves are told apart by a digest of their text."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}.{index}" if path else str(index))
    elif path:
        yield path, _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return str(value.item())
        digest = xxhash.xxh3_64_hexdigest(as_bytes(value).numpy().tobytes())
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {digest}"
    text = str(value) if not isinstance(value, str) else value
    return (
        text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 20]}... {xxhash.xxh3_64_hexdigest(text.encode())}"
    )
