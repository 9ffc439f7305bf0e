"""The content of one checkpoint: tensors by component, their sharding, state, manifest, and figures of one tensor.

State beside tensors, the manifest and config.json are given as texts under dotted names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import xxhash

from titan_ckpt import progress
from titan_ckpt.components.snapshot import RUN_STATE, rank_state_name
from titan_ckpt.converting import stored_tensor
from titan_ckpt.directory.names import read_committed
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Chunk, LazyTensor, Shape, TensorInfo, as_bytes, dtype_name
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.models.hf import transformers_config
from titan_ckpt.stores.store import Place
from titan_ckpt.weights import digest
from titan_ckpt.weights.names import OTHER_COMPONENTS

BINS = 20
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_PIECE = 1 << 20
"""Elements that are looked at as float64 at a time."""
_MAX_SHOWN = 60
_OF_A_SAVE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Fields of config.json that say how a folder was written, and not what the model is."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors whose names differ in their numbers alone, with one shape, dtype and sharding."""

    pattern: str
    """The name, with * for a number that differs."""
    count: int
    shape: Shape
    dtype: str
    num_bytes: int
    sharding: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ComponentContent:
    """The tensors of one component, such as the model or the optimizer."""

    component: str
    num_tensors: int
    num_bytes: int
    dtypes: Mapping[str, int]
    """dtype -> bytes."""
    groups: tuple[TensorGroup, ...]


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a checkpoint."""

    path: str
    format: str
    components: tuple[ComponentContent, ...]
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """The manifest of a native step, without its list of files."""
    num_files: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json or adapter_config.json."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The state of the run, as text by dotted names."""


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Figures of one tensor; those of values are over finite elements."""

    name: str
    shape: Shape
    dtype: str
    num_bytes: int
    sharding: str
    digest: str
    num_nan: int
    num_infinite: int
    num_zero: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    norm: float | None
    histogram: tuple[tuple[float, float, int], ...]
    """(lower edge, upper edge, number of values) of equally wide bins from the minimum to the maximum."""


def inspect(path: Place) -> Content:
    """Return the content of a checkpoint; no tensor is read. Raises: as open_reader."""
    with open_reader(path) as reader:
        manifest = reader.manifest if isinstance(reader, NativeReader) else None
        about = {} if manifest is None else {k: v for k, v in asdict(manifest).items() if k not in ("files", "attempt")}
        return Content(
            str(path),
            reader.format,
            tuple(_components(reader)),
            about,
            None if manifest is None else len(manifest.files),
            {} if manifest is not None else reader.metadata(),
            run_state(reader),
        )


def _components(reader: TensorReader) -> list[ComponentContent]:
    parts: dict[str, dict[str, TensorInfo]] = {}
    for key, info in reader.tensors.items():
        parts.setdefault(_component_of(key, reader.format), {})[key] = info
    shardings = _shardings(reader)
    made = []
    for component, tensors in parts.items():
        dtypes: dict[str, int] = {}
        for info in tensors.values():
            dtypes[dtype_name(info.dtype)] = dtypes.get(dtype_name(info.dtype), 0) + info.nbytes
        groups = _grouped(tensors, shardings)
        made.append(ComponentContent(component, len(tensors), sum(dtypes.values()), dtypes, tuple(groups)))
    return made


def _component_of(key: str, format_: str) -> str:
    if format_ == "peft":
        return "adapter"
    if format_ == "hf":
        return "model"
    prefixes = ("model.", *OTHER_COMPONENTS)
    known = next((prefix.rstrip(".") for prefix in prefixes if key.startswith(prefix)), "model")
    return "optimizer" if known == "optim" else known


def _grouped(tensors: Mapping[str, TensorInfo], shardings: Mapping[str, str]) -> list[TensorGroup]:
    """Group the tensors of equal layers, in the order of the checkpoint."""
    groups: dict[tuple[str, TensorInfo, str], list[str]] = {}
    for key, info in tensors.items():
        groups.setdefault((_NUMBER.sub("*", key), info, shardings[key]), []).append(key)
    return [
        TensorGroup(
            names[0] if len(names) == 1 else pattern,
            len(names),
            info.shape,
            dtype_name(info.dtype),
            info.nbytes * len(names),
            sharding,
            tuple(names),
        )
        for (pattern, info, sharding), names in groups.items()
    ]


def _shardings(reader: TensorReader) -> dict[str, str]:
    """Return how each tensor is stored, in words: "whole", "4 x rows", "2 x columns", "8 boxes"."""
    chunks = reader.stored_chunks() if isinstance(reader, (NativeReader, DcpReader)) else {}
    return {key: _sharding(info.shape, chunks.get(key, ())) for key, info in reader.tensors.items()}


def _sharding(shape: Shape, chunks: Sequence[Chunk]) -> str:
    parts = [chunk for chunk in chunks if chunk.numel]
    if len(parts) < 2:
        return "whole"
    cut = [dim for dim in range(len(shape)) if any(chunk.sizes[dim] != shape[dim] for chunk in parts)]
    if len(cut) == 1:
        return f"{len(parts)} x {'rows' if cut == [0] else 'columns' if cut == [1] else f'dim {cut[0]}'}"
    return f"{len(parts)} boxes"


def statistics(path: Place, name: str) -> TensorStatistics:
    """Read one tensor block by block and return its figures. `name` may leave out the component.

    Raises: CheckpointNotFoundError for an unknown name, with the nearest ones; as open_reader.
    """
    with open_reader(path) as reader:
        key = next((key for key in (name, f"model.{name}") if key in reader.tensors), None)
        if key is None:
            import difflib

            near = difflib.get_close_matches(name, list(reader.tensors), 3, 0.3) or list(reader.tensors)[:3]
            raise CheckpointNotFoundError(f"{path} has no tensor {name}; near it: {', '.join(near)}")
        info = reader.tensors[key]
        value = stored_tensor(reader, key)
        with progress.shown("reading twice", 2 * info.nbytes) as count:
            total, sums = _summed(value, count)
            counts, squares = _around_mean(value, sums, count)
        width = (sums.maximum - sums.minimum) / BINS if sums.count else 0.0
        bins = [(sums.minimum + i * width, sums.minimum + (i + 1) * width, int(counts[i])) for i in range(BINS)]
        return TensorStatistics(
            key, info.shape, dtype_name(info.dtype), info.nbytes, _shardings(reader)[key], digest.finish(info, total),
            sums.num_nan, sums.num_infinite, sums.num_zero, *sums.figures(squares), tuple(bins) if sums.count else (),
        )  # fmt: skip


def _summed(value: LazyTensor, count: progress.Count) -> tuple[digest.Partial, _Sums]:
    total, sums = (0, 0), _Sums()
    for block in value.blocks():
        total = digest.add(total, digest.partial_digest(value.info, block.chunk, block.data))
        for piece in block.data.reshape(-1).split(_PIECE):
            sums.take(piece)
        count(block.data.nbytes)
    return total, sums


def _around_mean(value: LazyTensor, sums: _Sums, count: progress.Count) -> tuple[torch.Tensor, float]:
    """Return the number of values in each bin of the histogram, and the sum of the squares of their distances."""
    counts, squares = torch.zeros(BINS, dtype=torch.int64), 0.0
    if not sums.count or sums.maximum == sums.minimum:
        counts[0] = sums.count
        count(value.info.nbytes)
        return counts, squares
    for piece in pieces(value):
        numbers = numbers_of(piece)
        finite = numbers[numbers.isfinite()]
        counts += torch.histc(finite, BINS, sums.minimum, sums.maximum).to(torch.int64)
        squares += float((finite - sums.mean).square().sum())
        count(piece.nbytes)
    return counts, squares


class _Sums:
    """The running figures of a tensor's finite values, in float64."""

    def __init__(self) -> None:
        self.num_nan = self.num_infinite = self.num_zero = self.count = 0
        self.minimum, self.maximum = math.inf, -math.inf
        self.mean = self._squares = 0.0

    def take(self, values: torch.Tensor) -> None:
        """Add values."""
        whole = numbers_of(values)
        numbers = whole[whole.isfinite()]
        self.num_nan += int(whole.isnan().sum())
        self.num_infinite += int(whole.isinf().sum())
        self.num_zero += int((numbers == 0).sum())
        if not len(numbers):
            return
        self.minimum, self.maximum = min(self.minimum, float(numbers.min())), max(self.maximum, float(numbers.max()))
        self.count += len(numbers)
        self.mean += (float(numbers.mean()) - self.mean) * len(numbers) / self.count
        self._squares += float(numbers @ numbers)

    def figures(self, squares: float) -> tuple[float | None, float | None, float | None, float | None, float | None]:
        """Return minimum, maximum, mean, standard deviation and norm; None without a finite value."""
        if not self.count:
            return None, None, None, None, None
        return self.minimum, self.maximum, self.mean, math.sqrt(squares / self.count), math.sqrt(self._squares)


def pieces(value: LazyTensor) -> Iterator[torch.Tensor]:
    """Yield the values in rows of bounded length, in the order of the blocks; none is empty."""
    for block in value.blocks():
        if block.data.numel():
            yield from block.data.reshape(-1).split(_PIECE)


def numbers_of(values: torch.Tensor) -> torch.Tensor:
    """Return the values in one row as float64; a complex one is two numbers."""
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1).to(torch.float64)


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
        content = xxhash.xxh3_64_hexdigest(as_bytes(value).numpy().tobytes())
        return f"{dtype_name(value.dtype)}{list(value.shape)} {content}"
    text = str(value) if not isinstance(value, str) else value
    return (
        text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 20]}... {xxhash.xxh3_64_hexdigest(text.encode())}"
    )
