"""Converting a model or an adapter into another format, and merging adapters into a base, with config.json's table.

Sources are only read. The target appears complete under its name or not at all (disk/unpublished_folder.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import PurePath
from typing import Any, Literal

import torch

from titan_ckpt.converting import convert, is_taken, native_tensors, os_errors_of, write_native, write_torch_file
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ConfigError, ExportError, LoadMismatchError, listed
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.formats.huggingface.export import export_huggingface
from titan_ckpt.formats.huggingface.peft import PeftFormat, PeftReader
from titan_ckpt.formats.huggingface.reader import TIED
from titan_ckpt.formats.open import open_reader
from titan_ckpt.formats.publish.run import FolderExport
from titan_ckpt.geometry.chunks import LazyTensor
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.loading.adapters import check_named_base, holds_adapter_alone
from titan_ckpt.loading.merge import AdapterMerge, SharedWeightError, prepare_merge, settle_tables
from titan_ckpt.loading.plan import LoadSource
from titan_ckpt.models.config import read_config_json
from titan_ckpt.stores.store import Place, local_path, store_of
from titan_ckpt.tools.adapters import Adapter, RecordedBase, adapted_weights, attached, open_adapter, with_settings
from titan_ckpt.tools.models import CONFIG, ModelTable, find_config, find_table, own_config, require_config, tables_of
from titan_ckpt.tools.weights import model_keys
from titan_ckpt.types import Format
from titan_ckpt.weights.identity import BASE_RECORD, base_settings
from titan_ckpt.weights.transforms import StateDictTransforms, cast_all

Target = Literal["native", "dcp", "hf", "torch", "peft"]


@dataclass(frozen=True, slots=True)
class Options:
    """Settings with which a target is written."""

    config: Place | None = None
    """Folder of the model's config.json; absent: the source's own, or one that the source's run left."""
    architecture: str | None = None
    """The native side has the names of this model: llama3, qwen3, qwen3_moe, hf, or an Architecture as
    "package.module:Name"; absent: found from config.json."""
    dtype: torch.dtype | None = None
    max_shard_bytes: int = 5_000_000_000
    settings: Place | None = None
    """PEFT folder or native step with the settings of an adapter in a DCP folder, which says none."""


@dataclass(frozen=True, slots=True)
class Written:
    """A folder or file that was written."""

    target: str
    format: str
    num_tensors: int
    num_bytes: int
    names: str
    """The program whose tensor names it has."""
    merged: int = 0
    """Number of weights that adapters changed."""
    notes: tuple[str, ...] = ()
    """The facts that are known about the base of each merged adapter, and what only --config says."""


def convert_checkpoint(source: Place, target: Place, to: Target, options: Options) -> Written:
    """Write the model weights of a checkpoint, or its adapter, in another format.

    Raises: NotACheckpointError without a config.json where names have to be translated; LoadMismatchError for an
    adapter that does not fit the model, and for tensors that are not those of config.json; as converting.convert.
    """
    _check_target(target, [source])
    with open_reader(source) as reader:
        if to == "peft" or holds_adapter_alone(reader):
            return _convert_adapter(reader, target, to, options)
        names = None if reader.format == "hf" else list(model_keys(reader))
        table = _table(reader, names, to, options)
        faults = [] if table is None else [*table.misfits(native_tensors(reader, table.key_map))]
        if faults:
            raise LoadMismatchError(
                f"{reader.path}: its tensors are not those of the model in {CONFIG}; nothing was written\n  "
                + listed(faults, "\n  ")
                + "\n  Name the folder of the model's own config.json with --config"
            )
        notes = _about_config(reader, options.config) if table is not None or to == "hf" else ()
        assets = find_config(reader, options.config) if to == "hf" else None
    hf_config = None if assets is None else read_config_json(assets) if table is None else table.config
    if to == "torch":
        with open_reader(source) as reader:
            tensors: dict[str, Any] = native_tensors(reader, table.key_map if table else KeyMap(identity=True))
            with os_errors_of(f"{source} could not be converted to {target}"):
                write_torch_file(target, cast_all(tensors, options.dtype))
    else:
        convert(
            source,
            target,
            to,
            key_map=table.key_map if table is not None else None,
            hf_config=hf_config,
            assets=assets,
            dtype=options.dtype,
            max_shard_bytes=options.max_shard_bytes,
        )
    return _written(target, to, table, notes=notes)


def _check_target(target: Place, sources: Sequence[Place]) -> None:
    """Raises: ExportError if the target is there already, or would lie in a source, which is only read."""
    if is_taken(target):
        raise ExportError(f"{target} is there already; remove it or choose another place")
    for source in sources:
        if _resolved(target).is_relative_to(_resolved(source)):
            raise ExportError(f"{target} is inside {source}, which is only read; choose another folder")


def _resolved(place: Place) -> PurePath:
    return PurePath(str(place) if (path := local_path(place)) is None else os.path.realpath(path))


def _convert_adapter(reader: TensorReader, target: Place, to: Target, options: Options) -> Written:
    """Write the adapter of a checkpoint. Only PEFT folders have the names of another tool."""
    if to == "hf":
        raise ExportError(
            f"{reader.path} is an adapter, which is no model by itself: titan-ckpt merge BASE {reader.path} {target} "
            "writes the base with the adapter in it"
        )
    table, notes = None, tuple[str, ...]()
    if "peft" in (reader.format, to):
        names = None if reader.format == "peft" else adapted_weights(reader)
        table = find_table(require_config(reader, options.config), names, options.architecture)
        notes = _about_config(reader, options.config)
    adapter = open_adapter(reader, table)
    if to in ("native", "peft"):
        adapter = with_settings(adapter, reader.path, options.settings, table)
    tensors: dict[str, Any] = cast_all(dict(adapter.tensors), options.dtype)
    with os_errors_of(f"{reader.path} could not be converted to {target}"):
        if to == "peft":
            assert table is not None
            _write_peft(target, adapter, table, options, str(reader.path))
        elif to == "native":
            write_native(target, tensors, kind="adapter", converters=adapter.converters, base=adapter.base)
        elif to == "dcp":
            DcpExport(tensors).write(target, Coordinator.current())
        else:
            write_torch_file(target, tensors)
    return _written(target, to, None if to == reader.format else table, notes=notes)


def _write_peft(target: Place, adapter: Adapter, table: ModelTable, options: Options, source: str) -> None:
    """Write the folder that the run of an adapter would export."""
    if adapter.lora is None:
        raise LoadMismatchError(f"{source} holds the tensors of converters that PEFT does not have")
    converter = adapter.converter or attached(table, adapter.lora, source)
    names = converter.state_dict_adapter()
    assert names is not None, "LoRA has one"
    config = dict(names.file_config(table.key_map))
    if adapter.base is not None:
        config |= base_settings(adapter.base)
    tensors: dict[str, Any] = dict(adapter.tensors)
    groups = StateDictTransforms(table.key_map).to_file(tensors, converter, options.dtype)
    FolderExport(groups, PeftFormat(config)).write(target, Coordinator.current())


def _table(reader: TensorReader, names: list[str] | None, to: Target, options: Options) -> ModelTable | None:
    """Return the table that translates between the source's names and the target's; None if they are the same."""
    if (reader.format == "hf") is (to == "hf"):
        return None
    if reader.format == "hf" and options.architecture is None and find_config(reader, options.config) is None:
        return None  # the names in the folder stay
    return find_table(require_config(reader, options.config), names, options.architecture)


def _about_config(reader: TensorReader, given: Place | None) -> tuple[str, ...]:
    """Return a note if --config alone says of which class the tensors are: other classes have the same names.

    Raises: LoadMismatchError if the checkpoint leads to a config.json of another class.
    """
    if given is None:
        return ()
    config, own, theirs = read_config_json(require_config(reader, given)), None, None
    kind = config.get("model_type")
    with suppress(ConfigError, OSError):  # --config may be named because its own cannot be read
        own = own_config(reader)
        theirs = None if own is None else read_config_json(own)
    if own is None or theirs is None:
        return (f"nothing in {reader.path} shows that it is of the {kind} in --config: other models have its names",)
    stored = theirs.get("model_type")
    if None in (kind, stored) or kind in _model_types(theirs) or stored in _model_types(config):
        return ()
    raise LoadMismatchError(
        f"{reader.path}: its model is a {stored}, as {own / CONFIG} says, and that of --config is a {kind}, which may "
        "compute something else with tensors of the same names: leave --config out"
    )


def _model_types(config: Mapping[str, Any]) -> set[Any]:
    """Return the model_type of a config and of its parts, such as the language model in a composite one."""
    return {part.get("model_type") for part in (config, *config.values()) if isinstance(part, Mapping)}


def _written(
    target: Place, to: Target, table: ModelTable | None, merged: int = 0, notes: tuple[str, ...] = ()
) -> Written:
    foreign = {"hf": "Hugging Face", "peft": "PEFT"}
    names = "as in the source" if table is None else foreign.get(to, table.architecture)
    if to == "torch":
        tensors: Mapping[str, torch.Tensor] = torch.load(str(target), weights_only=True, mmap=True)
        return Written(str(target), to, len(tensors), store_of(target).size(target), names)
    with open_reader(target) as reader:
        total = sum(info.nbytes for info in reader.tensors.values())
        return Written(str(target), to, len(reader.tensors), total, names, merged, notes)


def merge_adapters(base: Place, adapters: Sequence[Place], target: Place, options: Options) -> Written:
    """Write a Hugging Face folder of a base with these adapters merged into it, one after the other.

    Raises: LoadMismatchError for an adapter that does not fit; ExportError; as open_reader.
    """
    _check_target(target, [base, *adapters])
    with ExitStack() as stack:
        reader = stack.enter_context(open_reader(base))
        if reader.format == "peft":
            raise LoadMismatchError(f"{base} is an adapter: name the base model first, then its adapters")
        folder = require_config(reader, options.config)
        readers = [stack.enter_context(open_reader(path)) for path in adapters]
        names = set().union(*(adapted_weights(r) for r in readers if r.format == "native"))
        names |= set() if reader.format == "hf" else set(model_keys(reader))
        by_parameter = any(isinstance(r, PeftReader) and any(map(r.is_on_parameter, r.pairs())) for r in readers)
        architecture = options.architecture or ("hf" if by_parameter else None)
        table = find_table(folder, names or None, architecture)
        tensors = native_tensors(reader, table.key_map)
        recorded = RecordedBase(base, partial(_variants, reader, folder, table, tensors))
        part = None
        try:
            merges = [_opened(adapter, base, tensors, table, reader.format) for adapter in readers]
        except SharedWeightError:
            table, tensors, aliases = _untied(table, tensors, folder, architecture)
            merges = [_opened(adapter, base, tensors, table, reader.format) for adapter in readers]
            for merge, pair in product(merges, aliases.items()):
                merge.share(*pair)
        except LoadMismatchError as error:  # it may be of the causal language model in a composite one
            others = (other for other, _ in _variants(reader, folder, table, tensors) if other.architecture == "hf")
            if (other := next((other for other in others if other is not table), None)) is None:
                raise
            table, tensors = other, native_tensors(reader, other.key_map)
            recorded = RecordedBase(base, partial(_variants, reader, folder, table, tensors))
            try:
                merges = [_opened(adapter, base, tensors, table, reader.format) for adapter in readers]
            except LoadMismatchError:
                raise error from None
            (name,) = table.config["architectures"]
            part = f"{base} is merged as the {name} that the adapter is of, without its rest"
        settle_tables(merges, [merge.other_tables(tensors) for merge in merges])
        notes = (
            *_about_config(reader, options.config),
            *filter(None, [part]),
            *(recorded.check(adapter.path, adapter.metadata().get(BASE_RECORD)) for adapter in readers),
        )
        changed = set().union(*(merge.changes for merge in merges))
        merged: dict[str, Any] = dict(tensors)
        for merge in merges:
            merged |= {fqn: merge.merged(fqn, merged[fqn]) for fqn in merge.changes}
        transforms = StateDictTransforms(table.key_map, table.config)
        with os_errors_of(f"{base} could not be merged into {target}"):
            export_huggingface(
                target,
                transforms.to_file(merged, None, options.dtype),
                config=dict(table.config),
                assets=folder,
                max_shard_bytes=options.max_shard_bytes,
                coordinator=Coordinator.current(),
            )
    return _written(target, "hf", table, len(changed), notes)


def _untied(
    table: ModelTable, tensors: Mapping[str, LazyTensor], folder: Place, architecture: str | None
) -> tuple[ModelTable, dict[str, LazyTensor], dict[str, str]]:
    """Return the same model with a weight of its own for each module, its tensors, and which of them were one.

    Raises: LoadMismatchError if it ties them whatever its config says.
    """
    untied = find_table(folder, None, architecture or table.architecture, {"tie_word_embeddings": False})
    both = [untied.key_map.group_of_key(key).fqns[0] for key in TIED]
    aliases = dict(table.tied) or {both[0]: both[1]}
    if untied.tied or untied.tensors.keys() - tensors.keys() - aliases.keys():
        raise LoadMismatchError(
            f"{folder}: the adapter acts on one of the modules that share a weight, and this model shares it also with "
            "tie_word_embeddings = false, so that no merged weight can be written: serve the adapter beside its base"
        )
    return untied, dict(tensors) | {alias: tensors[first] for alias, first in aliases.items()}, aliases


def _variants(
    reader: TensorReader, folder: Place, table: ModelTable, tensors: Mapping[str, LazyTensor]
) -> Iterator[tuple[ModelTable, Mapping[str, LazyTensor]]]:
    """Yield the base's tensors by the names of this table, and of each other one if those in the folder are foreign."""
    yield table, tensors
    for other in tables_of(folder, None, []) if reader.format == "hf" else ():
        if other.tensors.keys() != table.tensors.keys():
            yield other, native_tensors(reader, other.key_map)


def _opened(
    reader: TensorReader,
    base: Place,
    tensors: Mapping[str, LazyTensor],
    table: ModelTable,
    base_format: str,
) -> AdapterMerge:
    """Find the weights that an adapter changes. Raises: LoadMismatchError."""
    path = reader.path
    format_: Format = "hf" if base_format == "hf" else "native"
    check_named_base(path, reader.metadata(), LoadSource(base, format_))
    shapes: dict[str, Any] = {
        fqn: torch.empty(value.info.shape, dtype=value.info.dtype, device="meta") for fqn, value in tensors.items()
    }
    merge = prepare_merge(reader, shapes, table.tied, table.key_map, table.modules, table.config)
    faults = [f"{key}: the base has no place for it" for key in merge.report.unexpected]
    faults += [f"{m.key}: expected {m.expected}, found {m.found}" for m in merge.report.mismatched]
    if faults:
        raise LoadMismatchError(f"{path} does not fit {base}: {listed(faults)}. Is it an adapter of another model?")
    return merge
