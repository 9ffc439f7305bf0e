"""Reading Hugging Face folders: the safetensors files that belong to a folder, and config.json.

Owns the folder's structure and every check of it. formats/safetensors reads the bytes, export.py writes such folders.
Source: transformers, `modeling_utils.py` (which file wins), huggingface_hub, `serialization/_base.py` (the index).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.encoding import strict_json
from titan_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadMismatchError,
    NotACheckpointError,
    listed,
)
from titan_ckpt.formats.quantized.open import open_quantized
from titan_ckpt.formats.safetensors.container import Layout, SafetensorsFiles, read_header
from titan_ckpt.geometry.boxes import boxes
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo
from titan_ckpt.geometry.keymap import selected
from titan_ckpt.geometry.requests import Fill, TensorReader
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.store import Place, store_of

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""Names of the output and the embedding matrix in nearly every causal language model."""
MAX_JSON_BYTES = 1 << 28
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


class HuggingFaceReader(TensorReader):
    """A folder of safetensors files, with or without an index, or a single file. Names are those of the files."""

    format = "hf"
    path: Place

    def __init__(self, path: Place, *, dequantize: bool = True, ignore: Sequence[str] = ()) -> None:
        """Check config, index and headers; read no tensor. Without `dequantize` tensors are listed as they are stored.

        `ignore`: patterns of tensors that the caller leaves out, so that they need not equal those they are tied to.

        Raises: CheckpointNotFoundError; NotACheckpointError if there are no safetensors files; CorruptCheckpointError
        if files and index disagree, or scales are missing; LoadMismatchError for an unknown quantization, or for an
        output matrix that is tied and yet differs from the embeddings.
        """
        self.path = path
        folder = path if path.is_dir() else path.parent
        self._config = read_config(folder / CONFIG)
        headers = _headers(path)
        self.file_of: Mapping[str, str] = {key: header.path.name for header in headers for key in header.entries}
        quantized = open_quantized(path, self._config, headers) if dequantize else None
        self.is_untied = False
        self._files = quantized or SafetensorsFiles(headers)
        self._tensors = quantized.tensors if quantized else {k: e.info for h in headers for k, e in h.entries.items()}
        if self._config.get("tie_word_embeddings") and not set(TIED) - self._tensors.keys() | selected(TIED, ignore):
            self.leave_out([TIED])

    def leave_out(self, repeats: Sequence[tuple[str, str]]) -> None:
        """List no tensor that repeats a second one, to which it is tied; `repeats` has the keys of both.

        Raises: LoadMismatchError if one differs; the reader is closed then.
        """
        for key, other in repeats:
            if self._tensors[key] != self._tensors[other] or not self._are_equal(self._tensors[key], key, other):
                self._files.close()
                raise LoadMismatchError(
                    f"{self.path}: {CONFIG} says tie_word_embeddings = true, and {key} is not equal to {other}: "
                    f"transformers would untie them. Set it to false if {key} was trained, or remove that tensor, or "
                    "name it in checkpoint.initial_load.ignore"
                )
            logger.info("%s: %s repeats %s, to which it is tied, and is passed by", self.path, key, other)
        repeating = {key for key, _ in repeats}
        self._tensors = {key: info for key, info in self._tensors.items() if key not in repeating}

    def untie(self) -> None:
        """List an output matrix that the folder leaves out because it is tied, for a model that has one of its own."""
        if self._config.get("tie_word_embeddings") and TIED[0] not in self._tensors and TIED[1] in self._tensors:
            self.is_untied = True
            self._tensors = {**self._tensors, TIED[0]: self._tensors[TIED[1]]}

    def _are_equal(self, info: TensorInfo, *keys: str) -> bool:
        """Return whether two tensors are equal byte by byte; compares some MiB at a time."""
        for box in boxes(Chunk.whole(info.shape), IO_BYTES // info.dtype.itemsize):
            values = [torch.empty(box.sizes, dtype=info.dtype) for _ in keys]
            self.read([Block(box, into, key) for key, into in zip(keys, values, strict=True)])
            if not torch.equal(*(value.view(torch.uint8) for value in values)):
                return False
        return True

    def plan(self, requests: Sequence[Block]) -> Fill:
        """Open the files of every request. Raises: CorruptCheckpointError if one has changed since; OSError.

        The function that fills them raises CorruptCheckpointError if a file was cut short since it was opened.
        """
        if self.is_untied:
            requests = [part._replace(key=TIED[1]) if part.key == TIED[0] else part for part in requests]
        return self._files.plan(requests)

    def metadata(self) -> dict[str, Any]:
        """Return config.json; empty if there is none."""
        return self._config

    def close(self) -> None:
        self._files.close()


def read_config(path: Place) -> dict[str, Any]:
    """Return a JSON object that people write by hand; empty if the file is absent.

    As lenient as transformers (`Infinity` occurs in published configs). Raises: CorruptCheckpointError.
    """
    try:
        data = _read_json_file(path)
    except FileNotFoundError:
        return {}
    try:
        config = strict_json.decode_floats(strict_json.loads_by_hand(data))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: not JSON: {error}", str(path)) from error
    if not isinstance(config, dict):
        raise CorruptCheckpointError(f"{path}: expected a JSON object, found {type(config).__name__}", str(path))
    return config


def to_json(value: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file as transformers and PEFT write them."""
    return (json.dumps(strict_json.encode_floats(value), indent=2, sort_keys=True) + "\n").encode()


def _read_json_file(path: Place) -> bytes:
    """Read a small file, which may be a download cache's link. Raises: FileNotFoundError; CorruptCheckpointError."""
    try:
        return store_of(path).read_whole(path, MAX_JSON_BYTES, through_links=True)
    except (FileNotFoundError, StoreError):
        raise
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: cannot be read: {error.strerror}", str(path)) from error


def is_huggingface(path: Place) -> bool:
    """Return whether this is a folder or file that the reader takes for this format."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / INDEX).exists() or bool(_weight_files(path))


def _weight_files(folder: Place) -> list[Place]:
    return sorted((p for p in folder.glob("*.safetensors") if not p.name.startswith("adapter_")), key=lambda p: p.name)


def _headers(path: Place) -> list[Layout]:
    if path.is_file():
        return [read_header(path)]
    if not path.is_dir():
        raise CheckpointNotFoundError(f"{path} is not there; name an existing folder or .safetensors file")
    if (path / INDEX).exists():
        return _indexed(path)
    if (path / WEIGHTS).exists():
        return [read_header(path / WEIGHTS)]
    return [read_header(file) for file in _shards(path)]


def _shards(folder: Place) -> list[Place]:
    """Return the files of a folder without an index; a numbered series must be complete."""
    files = _weight_files(folder)
    if not files:
        pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pth"))
        hint = ""
        if pickles:
            hint = (
                f"; its weights are pickles ({pickles[0]}), which can run code when they are loaded: convert them once "
                "with transformers' from_pretrained and save_pretrained"
            )
        raise NotACheckpointError(f"{folder}: no {WEIGHTS}, no {INDEX} and no other .safetensors file{hint}")
    numbered = [match for file in files if (match := _SHARD.fullmatch(file.name))]
    if not numbered:
        _require(folder, [file.name for file in files], "listed there")
        return files
    series = {(match["stem"], int(match["count"])) for match in numbered}
    if len(series) > 1:
        names = ", ".join(f"{stem}-*-of-{count:05d}" for stem, count in sorted(series))
        raise CorruptCheckpointError(f"{folder}: files of several exports and no {INDEX}: {names}", str(folder))
    ((stem, count),) = series
    expected = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    _require(folder, expected, f"of the series of {count}")
    return [folder / name for name in expected]


def _indexed(folder: Place) -> list[Layout]:
    """Return the headers of the files that the index names, after comparing them with the index key by key."""
    path = folder / INDEX
    index = strict_json.parse(_read_json_file(path), MAX_JSON_BYTES, str(path))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(f"{path}: no weight_map that names a file for each tensor", str(path))
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CorruptCheckpointError(
                f"{path}: tensor {key!r} is said to be in {name!r}, which is not the name of a .safetensors file here",
                str(path),
            )
    names = sorted({str(name) for name in weight_map.values()})
    _require(folder, names, f"named by {INDEX}")
    if WEIGHTS not in names and (folder / WEIGHTS).exists():
        raise CorruptCheckpointError(
            f"{folder}: there are both {WEIGHTS} and an {INDEX} that does not name it: remove what is not wanted",
            str(folder),
        )
    headers = [read_header(folder / name) for name in names]
    _compare(path, weight_map, headers)
    return headers


def _compare(path: Place, weight_map: Mapping[str, strict_json.Json], headers: Sequence[Layout]) -> None:
    """Raise CorruptCheckpointError unless the index names exactly the tensors of the files, each with its file."""
    stored = [(key, header.path.name) for header in headers for key in header.entries]
    faults = [
        f"{key} is in {name}, and the index says {weight_map[key]}"
        if key in weight_map
        else f"{key} is in {name} and not in the index"
        for key, name in stored
        if weight_map.get(key) != name
    ]
    absent = weight_map.keys() - {key for key, _ in stored}
    faults += [
        f"{key} is not in {name}, where the index says it is" for key, name in weight_map.items() if key in absent
    ]
    if faults:
        raise CorruptCheckpointError(
            f"{path}: {len(faults)} tensor(s) are not where it says: {listed(faults)}. "
            "Are the files of one and the same export?",
            str(path),
        )


def _require(folder: Place, names: Sequence[str], why: str) -> None:
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise CorruptCheckpointError(
            f"{folder}: {len(missing)} of {len(names)} files {why} are missing: {listed(missing, ', ', ' ')}. "
            "Is the download complete?",
            str(folder),
        )
