"""Offline conversion between Hugging Face, native and DCP folders, and to torch.save: one process, bounded memory.

Turns the tensors of a reader into lazy native ones. Tables, formats and proofs are those of a training run.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from titan_ckpt import progress
from titan_ckpt.directory.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.disk import posix
from titan_ckpt.disk.unpublished_folder import StagedFolder
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.paths import require_local
from titan_ckpt.errors import ExportError, KeyMapError, NotACheckpointError
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.formats.huggingface.export import export_huggingface
from titan_ckpt.formats.huggingface.reader import HuggingFaceReader
from titan_ckpt.formats.native.rank_file import write_stream
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.open import open_reader
from titan_ckpt.formats.publish.publication import published
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, Shape, TensorInfo, as_bytes, blocks_of, info_of
from titan_ckpt.geometry.keymap import IDENTITY, KeyGroup, KeyMap
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.stores.store import Place, local_path, store_of
from titan_ckpt.types import StateDict
from titan_ckpt.weights.names import MODEL, model_tensors
from titan_ckpt.weights.transforms import CASTABLE, StateDictTransforms, cast_all

Format = Literal["hf", "native", "dcp"]
_BLOCK_BYTES = 64 << 20


def convert(
    source: str | Place,
    target: str | Place,
    to: Format,
    *,
    key_map: KeyMap | None = None,
    hf_config: Mapping[str, Any] | None = None,
    assets: str | Place | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the model weights of a checkpoint in the format `to`; `target` must not exist.

    `key_map`: the model's table; needed to or from Hugging Face unless its names are the native ones. `hf_config`:
    config.json of a Hugging Face target. `dtype`: the dtype of floating tensors in `target`. Training state is not
    converted. Memory: blocks of 64 MiB and the I/O buffers.
    Raises: ConfigError for a URI; NotACheckpointError for an adapter; KeyMapError; CorruptCheckpointError; ExportError.
    Nothing is written to `target` then.
    """
    named = {"source": source, "target": target, "assets": assets}
    require_local({name: value for name, value in named.items() if isinstance(value, str | Path)})
    source, target = (Path(value) if isinstance(value, str) else value for value in (source, target))
    problems = [] if to in get_args(Format) else [f"to: {to!r} is not one of {', '.join(get_args(Format))}"]
    if dtype not in (None, *CASTABLE):
        problems.append(f"dtype: {dtype} takes scales, so values cannot be cast to it; take a float of 16 bits or more")
    if max_shard_bytes <= 0:
        problems.append(f"max_shard_bytes: {max_shard_bytes} is no size")
    if is_taken(target):
        problems.append(f"{target} is there already; remove it or choose another folder")
    if problems:
        raise ExportError(f"{source} cannot be converted: {'; '.join(problems)}")
    transforms = StateDictTransforms(key_map or KeyMap(identity=True), hf_config)
    with open_reader(source) as reader:
        tensors: dict[str, Any] = native_tensors(reader, transforms.key_map)
        with os_errors_of(f"{source} could not be converted to {target}"):
            if to == "hf":
                export_huggingface(
                    target,
                    transforms.to_file(tensors, None, dtype),
                    config=dict(hf_config or {}),
                    assets=Path(assets) if isinstance(assets, str) else assets,
                    max_shard_bytes=max_shard_bytes,
                    coordinator=Coordinator.current(),
                )
            elif to == "dcp":
                DcpExport(cast_all(tensors, dtype)).write(target, Coordinator.current())
            else:
                write_native(target, cast_all(tensors, dtype))


@contextmanager
def os_errors_of(what: str) -> Iterator[None]:
    """Raise an OSError of the block as an ExportError. `what`: what could not be done."""
    try:
        yield
    except OSError as error:
        raise ExportError(f"{what}: {error}") from error


def is_taken(target: Place) -> bool:
    """Return whether anything is at a place, also a link that leads nowhere. Raises: StoreError."""
    path = local_path(target)
    return bool(store_of(target).seen(target).exists()) if path is None else os.path.lexists(path)


def mounted_target(target: Place) -> Path:
    """Return the path of a target that appears by a rename. Raises: ExportError for one in a bucket."""
    if (path := local_path(target)) is None:
        raise ExportError(
            f"{target}: a bucket takes the formats hf, peft and dcp. Steps are committed there by their run alone, and "
            "a file of torch.save is written in place: convert into a folder of this machine, and copy that"
        )
    return path


def native_tensors(reader: TensorReader, key_map: KeyMap) -> dict[str, LazyTensor]:
    """Return a checkpoint's model weights by native name; values are read in blocks of 64 MiB when they are written.

    Raises: KeyMapError listing keys that the table lacks and groups that are incomplete; NotACheckpointError.
    """
    manifest = reader.manifest if isinstance(reader, NativeReader) else None
    kind = reader.format if manifest is None else manifest.kind
    if kind in ("peft", "adapter"):
        raise NotACheckpointError(
            f"{reader.path} holds an adapter, which is no model by itself. `titan-ckpt merge BASE {reader.path} TARGET`"
            " writes a model; `titan-ckpt convert` writes the adapter in another format"
        )
    if kind == "external":
        raise NotACheckpointError(f"{reader.path} holds no model weights: its run took them from outside")
    if reader.format == "hf":
        assert isinstance(reader, HuggingFaceReader)
        table = key_map.of_folder(reader.tensors)
        reader.leave_out(table.repeats)
        return translated_tensors(reader, table)
    prefix, names = model_tensors(reader)
    return {name: stored_tensor(reader, prefix + name) for name in names}


def translated_tensors(reader: TensorReader, key_map: KeyMap) -> dict[str, LazyTensor]:
    """Return all tensors of a folder of another tool by native name. Raises: KeyMapError, as native_tensors does."""
    out = {}
    for group in _groups(reader, key_map):
        infos = [reader.tensors[key] for key in group.keys]
        shapes = group.op.native_shapes([info.shape for info in infos])
        for index, fqn in enumerate(group.fqns):
            out[fqn] = _lazy(reader, group, index, shapes, infos[0].dtype)
    return out


def stored_tensor(reader: TensorReader, key: str) -> LazyTensor:
    """Return a tensor of a checkpoint as it is stored; its blocks are runs of rows of at most 64 MiB, in order."""
    info = reader.tensors[key]
    return _lazy(reader, KeyGroup((key,), (key,), IDENTITY), 0, [info.shape], info.dtype)


def _groups(reader: TensorReader, key_map: KeyMap) -> list[KeyGroup]:
    """Return the groups of all file keys. Raises: KeyMapError listing every fault."""
    groups: dict[tuple[str, ...], KeyGroup] = {}
    problems = []
    for key in reader.tensors:
        if key_map.ignores(key):
            continue
        try:
            group = key_map.group_of_key(key)
        except KeyMapError as error:
            problems.append(str(error))
            continue
        groups.setdefault(group.keys, group)
        if absent := [k for k in group.keys if k not in reader.tensors]:
            problems.append(f"{key} is of no use without {', '.join(absent)}")
    if problems:
        raise KeyMapError(f"{reader.path}: {len(problems)} problem(s)\n  " + "\n  ".join(sorted(set(problems))))
    return list(groups.values())


def _lazy(reader: TensorReader, group: KeyGroup, index: int, shapes: list[Shape], dtype: torch.dtype) -> LazyTensor:
    shape = shapes[index]

    def blocks() -> Iterator[Block]:
        for chunk in _row_chunks(shape, dtype.itemsize):
            block = Block(chunk, torch.empty(chunk.sizes, dtype=dtype))
            reader.read([*group.op.pieces(index, shapes, block, group.keys)])
            yield block

    return LazyTensor(TensorInfo(shape, dtype), blocks)


def _row_chunks(shape: Shape, itemsize: int) -> Iterator[Chunk]:
    """Cut a tensor into runs of rows of at most 64 MiB, or of one row."""
    whole = Chunk.whole(shape)
    if not shape or not whole.numel:
        yield whole
        return
    rows = max(1, _BLOCK_BYTES // (whole.numel // shape[0] * itemsize))
    for start in range(0, shape[0], rows):
        yield Chunk((start, *whole.offsets[1:]), (min(rows, shape[0] - start), *shape[1:]))


def write_native(
    place: Place,
    tensors: Mapping[str, LazyTensor],
    *,
    kind: Literal["model", "adapter"] = "model",
    converters: Sequence[Mapping[str, Any]] = (),
    base: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that is a source of weights, of one rank and without training state.

    `converters`: their descriptions, which say what an adapter's tensors mean. `base`: the identity of its base.
    Raises: ExportError for a bucket; OSError; FileExistsError. Nothing has the folder's name then.
    """
    target = mounted_target(place)
    alone = Coordinator(0, 1, None, "", 0.0)
    total = sum(value.info.nbytes for value in tensors.values())
    with published(target, alone, "", lambda: None) as made, progress.shown(f"writing {target.name}", total) as count:
        record = write_stream(made.path, {MODEL + fqn: value for fqn, value in tensors.items()}, count)
        manifest = Manifest(
            step=0,
            kind=kind,
            attempt=uuid.uuid4().hex,
            world_size=1,
            created_unix_seconds=time.time(),
            components=("model",),
            converters=[dict(description) for description in converters],
            base=None if base is None else dict(base),
            resumed_from=None,
            files=(record,),
        )
        store_of(made.path).put_new(made.path / MANIFEST_NAME, manifest.to_bytes())


def write_torch_file(place: Place, tensors: StateDict) -> None:
    """Write a file that `torch.load(weights_only=True)` reads, tensor by tensor in bounded memory, whole or not at all.

    torch reserves the place of every tensor (`skip_data`), and the values are written there afterwards. The checksums
    of the file's zip entries are then not those of the values; torch does not look at them.
    The blocks of lazy tensors must be runs of whole rows. Raises: ExportError for a bucket; FileExistsError; OSError.
    """
    target = mounted_target(place)
    staged = StagedFolder.begin(target)
    try:
        draft = staged.path / target.name
        offsets = _reserve(draft, tensors)
        total = sum(info_of(value).nbytes for value in tensors.values())
        fd = os.open(draft, os.O_WRONLY | os.O_CLOEXEC)
        try:
            with progress.shown(f"writing {target.name}", total) as count:
                for offset, value in zip(offsets, tensors.values(), strict=True):
                    _fill(fd, offset, value, count)
            posix.fsync(fd)
        finally:
            posix.close(fd)
        posix.rename_noreplace(draft, target)
        posix.fsync_folder(target.parent)
    finally:
        staged.abandon()


def _reserve(path: Path, tensors: StateDict) -> list[int]:
    """Write the file without values; return the place of each tensor's values."""
    infos = {name: info_of(value) for name, value in tensors.items()}
    with FakeTensorMode():
        empty = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
    with skip_data(materialize_fake_tensors=True):
        torch.save(empty, path)
    reader: Any = torch._C.PyTorchFileReader(str(path))  # noqa: SLF001 - what torch.load itself uses
    return [reader.get_record_offset(f"data/{index}") for index in range(len(tensors))]


def _fill(fd: int, offset: int, value: torch.Tensor | LazyTensor, count: progress.Count) -> None:
    info = info_of(value)
    row_bytes = info.nbytes // info.shape[0] if info.shape and info.shape[0] else info.nbytes
    for block in blocks_of(value):
        if not block.data.numel():
            continue
        start = block.chunk.offsets[0] * row_bytes if info.shape else 0
        data = as_bytes(block.data).numpy()
        posix.pwrite_all(fd, data, offset + start)
        count(data.nbytes)
