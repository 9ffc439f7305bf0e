"""Adapters by native name: LoRA's tensors in PEFT folders, native steps and DCP folders, and the settings they need.

Owns the [[converters]] table that an adapter_config.json amounts to. The converter that reads this table, attached to a
model without memory, knows the name of every tensor on both sides. An entry point says which package has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from titan_ckpt import progress
from titan_ckpt.converting import stored_tensor, translated_tensors
from titan_ckpt.encoding.named import converter_tables
from titan_ckpt.errors import ConfigError, KeyMapError, LoadMismatchError, NotACheckpointError, listed
from titan_ckpt.formats.huggingface.peft import CONFIG, PeftReader, unselected
from titan_ckpt.formats.huggingface.peft_fields import is_trained_bias
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import LazyTensor, dtype_name, info_of
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.loading.adapters import holds_adapter_alone
from titan_ckpt.stores.store import Place
from titan_ckpt.tools.models import ModelTable, find_table, require_config
from titan_ckpt.types import ModelConverter
from titan_ckpt.weights import lora
from titan_ckpt.weights.digest import digest_of
from titan_ckpt.weights.identity import another_base, base_digest, named_base
from titan_ckpt.weights.lora import LoRARecord, TrainedRows, lora_tensor
from titan_ckpt.weights.low_rank import AddedBias, LowRank
from titan_ckpt.weights.names import model_tensors
from titan_ckpt.weights.transforms import CASTABLE, cast_all

_GUESSES = (torch.float32, torch.bfloat16, torch.float16)
_BY_NAME: Mapping[Any, torch.dtype] = {dtype_name(dtype): dtype for dtype in CASTABLE}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter by native name."""

    tensors: dict[str, LazyTensor]
    converters: Sequence[Mapping[str, Any]]
    """Descriptions of the converters that its tensors belong to; empty if nothing says them."""
    base: Mapping[str, Any] | None
    """The identity of its base, if the adapter records one."""
    converter: ModelConverter | None = None
    """The converters, if the tensors were found by them."""

    @property
    def lora(self) -> Mapping[str, Any] | None:
        """Return the settings of LoRA among the descriptions."""
        return next((d for d in self.converters if d["kind"] == lora.KIND), None)


def adapted_weights(reader: TensorReader) -> set[str]:
    """Return the weights that LoRA's tensors in a native or DCP checkpoint change, by native name."""
    return _weights(model_tensors(reader)[1])


def open_adapter(reader: TensorReader, table: ModelTable | None = None) -> Adapter:
    """Return the adapter in a checkpoint. `table`: the model's, which a PEFT folder needs.

    Raises: NotACheckpointError without an adapter; LoadMismatchError if it does not fit the model.
    """
    if isinstance(reader, PeftReader):
        assert table is not None, "a PEFT folder has the names of another tool"
        return _of_peft(reader, table)
    prefix, names = model_tensors(reader)
    alone = holds_adapter_alone(reader)
    tensors = {name: stored_tensor(reader, prefix + name) for name in names if alone or lora_tensor(name)}
    if not tensors:
        raise NotACheckpointError(f"{reader.path} is {reader.format} and holds whole weights: no adapter is in it")
    manifest = reader.manifest if isinstance(reader, NativeReader) else None
    return Adapter(tensors, manifest.converters if manifest else (), manifest.base if manifest else None)


def with_settings(adapter: Adapter, path: Place, folder: Place | None, table: ModelTable | None) -> Adapter:
    """Return the adapter with settings, which `folder` has if its own checkpoint at `path` says none.

    Raises: LoadMismatchError if neither says them, or if they are those of another adapter.
    """
    if adapter.converters:
        return adapter
    if folder is None:
        raise LoadMismatchError(
            f"{path} says no rank and no alpha of its adapter: name a PEFT folder or a native step that has the "
            "settings of this adapter with --settings"
        )
    with open_reader(folder) as reader:
        if isinstance(reader, PeftReader):
            table = find_table(require_config(reader, None), _weights(adapter.tensors)) if table is None else table
        other = open_adapter(reader, table)
        mine, theirs = ({name: v.info.shape for name, v in a.tensors.items()} for a in (adapter, other))
        if mine != theirs:
            raise LoadMismatchError(f"{folder} has settings of another adapter: its tensors are not those of {path}")
    return Adapter(adapter.tensors, other.converters, adapter.base or other.base)


def _weights(names: Iterable[str]) -> set[str]:
    parts = (lora_tensor(name) for name in names)  # a bias of B may be for a module that has none
    return {part.weight for part in parts if part is not None and part.role != lora.BIAS}


def attached(table: ModelTable, settings: Mapping[str, Any], source: str) -> ModelConverter:
    """Attach LoRA with these settings to the model of the table, which has no memory, and return the converters.

    Raises: ConfigError; ConverterError for settings that do not fit the model.
    """
    tables = converter_tables()
    if tables is None:
        raise ConfigError(['adapters: no installed package knows LoRA; run: pip install "titan-ckpt"'], source)
    converter: Any = tables.from_tables([settings], source)
    converter.convert(table.modules[""])
    return converter  # type: ignore[no-any-return]


def _of_peft(reader: PeftReader, table: ModelTable) -> Adapter:
    reader.require_supported()
    if ignored := unselected(reader):
        raise LoadMismatchError(f"{reader.path}: target_modules does not select {listed(ignored)}: PEFT ignores them")
    converter = attached(table, lora_settings(reader, table), str(reader.path / CONFIG))
    names = converter.state_dict_adapter()
    assert names is not None, "LoRA has one"
    if faults := names.misfits(table.key_map, reader.metadata()):
        raise LoadMismatchError(f"{reader.path} cannot be read as a LoRA of this package: {listed(faults)}")
    key_map = names.key_map(table.key_map, reader.tensors)
    reader.leave_out(key_map.repeats)
    tensors = translated_tensors(reader, key_map)
    own = {name: info_of(value).shape for name, value in table.modules[""].state_dict().items()}
    faults = [f"{name} is not there" for name in own if converter.key_filter(name) and name not in tensors]
    faults += [
        f"{name}: expected {list(own[name])}, found {list(value.info.shape)}"
        for name, value in tensors.items()
        if value.info.shape != own[name]
    ]
    if faults:
        raise LoadMismatchError(
            f"{reader.path} does not fit the model ({table.architecture}): {listed(faults)}. Is it an adapter of "
            "another model? Name the folder of its base's config.json with --config"
        )
    return Adapter(tensors, converter.describe(), named_base(reader.metadata()), converter)


def lora_settings(reader: PeftReader, table: ModelTable) -> dict[str, Any]:
    """Return the [[converters]] table of the adapter in a PEFT folder, with native names of modules.

    Raises: LoadMismatchError listing the modules that the model does not have.
    """
    reader.pass_by()
    config, sites, copied, unknown = reader.metadata(), dict[str, LowRank](), dict[str, None](), list[str]()
    beside, frozen, rows = reader.beside(), dict[str, None](), dict[str, list[int]]()
    for update in reader.updates():
        if isinstance(update, LowRank) and reader.is_on_parameter(update):
            update = reader.on_parameter(update, table.modules)
            sites[update.site] = update
            continue
        fqns = _native_names(update.weight, table)
        if isinstance(update, TrainedRows):
            rows |= {fqn.rpartition(".")[0]: [*update.indices] for fqn in fqns}
        if not isinstance(update, LowRank):
            unknown += [] if fqns or isinstance(update, AddedBias) else [*update.tensors]
            continue
        if fqns:
            sites |= {native.site: native for native in _native_updates(update, fqns, config)}
        else:
            unknown.append(update.a)
    seen: dict[tuple[str, ...], str] = {}
    for key, weight in sorted(reader.copies().items(), key=lambda copy: copy[1] in table.tied):
        fqns = _native_names(weight, table)
        if key in beside:
            fqns = tuple(table.tied.get(fqn, fqn) for fqn in fqns)
            if reader.are_equal(key, seen.get(fqns, "")):
                reader.pass_by({key})  # the table of a module that shares its weight, once more
                continue
            seen[fqns] = key
        unknown += [] if fqns else [key]
        if not is_trained_bias(config, key):
            (frozen if key in beside else copied).update({fqn.rpartition(".")[0]: None for fqn in fqns})
    if unknown:
        raise LoadMismatchError(
            f"{reader.path}: the model ({table.architecture}) has no place for {listed(unknown)}. Is it an adapter of "
            "another model? Name the folder of its base's config.json with --config"
        )
    if not sites:
        raise LoadMismatchError(f"{reader.path} holds no pair of LoRA's, and modules alone have no form here")
    floats = {info.dtype for info in reader.tensors.values()}
    return {
        "kind": lora.KIND,
        "target_modules": _targets(sites, table),
        **lora.common_settings([*sites.values()]),
        "dropout": float(config.get("lora_dropout") or 0),
        "use_rslora": bool(config.get("use_rslora")),
        "use_dora": bool(config.get("use_dora")),
        "modules_to_save": list(copied),
        "frozen_copies": list(frozen),
        "bias": config.get("bias") or "none",
        "lora_bias": bool(config.get("lora_bias")),
        "trainable_token_indices": rows,
        "ensure_weight_tying": bool(config.get("ensure_weight_tying")),
        "dtype": "bfloat16" if floats == {torch.bfloat16} else "float32",
    }


def _native_names(key: str, table: ModelTable) -> tuple[str, ...]:
    """Return the model's names of a tensor of the base; none if the model does not have it."""
    with suppress(KeyMapError):
        fqns = table.key_map.group_of_key(key).fqns
        if all(fqn in table.tensors or fqn in table.tied for fqn in fqns):
            return fqns
    return ()


def _native_updates(update: LowRank, fqns: Sequence[str], config: Mapping[str, Any]) -> Iterator[LowRank]:
    """Yield the updates of the native weights that PEFT's one consists of; the parts of a fused one share its scale."""
    ranks = (config.get(lora.PARTS) or {}).get(update.site) or [update.rank] * len(fqns)
    power = 0.5 if config.get("use_rslora") else 1.0
    for fqn, rank in zip(fqns, ranks, strict=True):
        if rank:
            alpha = update.alpha if rank == update.rank else update.alpha * (rank / update.rank) ** power
            yield replace(update, weight=fqn, rank=rank, alpha=alpha)


def _targets(sites: Collection[str], table: ModelTable) -> list[str]:
    """Return target_modules: the last parts of the names, if these select nothing else, or the full names."""
    last = {name.rpartition(".")[2] for name in sites}
    selected = {name for name in table.modules if name.rpartition(".")[2] in last}
    return sorted(last) if selected == {*sites} else list(sites)


def effects(adapter: Adapter, source: Place) -> dict[str, str]:
    """Return what an adapter's settings do to its tensors: the scale of each product, by native name; and its base.

    Raises: LoadMismatchError for settings that no run would have recorded.
    """
    if adapter.lora is None:
        return {}
    try:
        record = LoRARecord.of(adapter.lora)
    except ValueError as error:
        raise LoadMismatchError(f"{source}: its manifest describes a LoRA that cannot be read: {error}") from None
    sites = lora.sites_of(adapter.tensors)
    scales = {f"{site} scale": f"{record.low_rank(site).scaling:.9g}" for site in sites}
    digest = None if adapter.base is None else adapter.base.get("digest")
    base = {} if digest is None else {"base.digest": str(digest)}
    return {**scales, "use_dora": str(record.use_dora), **base}


@dataclass
class RecordedBase:
    """The digests that the weights of a base may have had in the memory of the run that trained an adapter on it.

    A run casts weights as it was told and has the names of its own architecture. An adapter records no architecture,
    and no dtype if its step is of an earlier version, or if the base had several.
    """

    path: Place
    variants: Callable[[], Iterator[tuple[ModelTable, Mapping[str, LazyTensor]]]]
    """Yields the base's tensors by the names of each architecture that reads it."""
    _digests: dict[tuple[frozenset[str], torch.dtype | None], str] = field(default_factory=dict)

    def check(self, adapter: Place, record: Mapping[str, Any] | None) -> str:
        """Return in words what the digest says. Raises: BaseMismatchError if the adapter has another base."""
        if record is None:
            return f"{adapter} records no digest of its base, so nothing shows that this one is it"
        expected, dtype = record.get("digest"), _BY_NAME.get(record.get("dtype"))
        found: list[str] = []
        lacking: list[str] = []
        for table, tensors in self.variants():
            lacking += (missing := [name for name in table.tensors if name not in tensors])
            floats = {v.info.dtype for v in tensors.values() if v.info.dtype in CASTABLE}
            for cast in () if missing else (None, *_GUESSES) if dtype is None else (dtype,):
                found.append(self._digest(tensors, None if floats == {cast} else cast))
                if found[-1] == expected:
                    return f"{adapter} was trained on this base: digest {expected}"
        if not found:
            names = listed(lacking, ", ", " ")
            return f"the base of {adapter} is not compared by digest: {self.path} lacks {names}"
        raise another_base(
            {"path": str(self.path), "digest": found[0]}, record, str(adapter), "or merge it into that base"
        )

    def _digest(self, tensors: Mapping[str, LazyTensor], dtype: torch.dtype | None) -> str:
        if (known := (frozenset(tensors), dtype)) not in self._digests:
            values: Any = cast_all(dict(tensors), dtype)
            with progress.shown(f"reading {self.path.name}", sum(v.info.nbytes for v in values.values())) as count:
                digests = {}
                for name, value in values.items():
                    digests[name] = digest_of(value)
                    count(value.info.nbytes)
            self._digests[known] = base_digest(digests)
        return self._digests[known]
