"""Whether what a source says of itself fits this run: an adapter, in whatever folder it is, and a model's config.json.

Owns the comparison of an adapter's settings with the converters of the run, of the base that a PEFT folder names with
the run's, and of a config.json with the model. A name proves nothing about weights, so a contradiction is a warning;
only revisions that both sides state are compared strictly. A digest, which folders of this package have, makes that
needless (weights/identity.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from torch import nn

from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.encoding.named import converter_tables
from titan_ckpt.errors import BaseMismatchError, LoadMismatchError, counted, listed
from titan_ckpt.formats.huggingface.reader import CONFIG, read_config
from titan_ckpt.formats.native.reader import NativeReader, manifest_of
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.geometry.keymap import KeyMap, selected
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.loading.plan import LoadSource
from titan_ckpt.stores.store import Place, local_path
from titan_ckpt.types import Format, ModelConverter
from titan_ckpt.weights import lora
from titan_ckpt.weights.identity import BASE_RECORD, Description, differences
from titan_ckpt.weights.lora import LoRARecord, lora_tensor
from titan_ckpt.weights.low_rank import StoredUpdates
from titan_ckpt.weights.names import model_tensors
from titan_ckpt.weights.wrapper import ModelWrapper

logger = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_IN_CACHE = re.compile(r"models--([^/]+)/snapshots/([^/]+)")
"""Part of a path in Hugging Face's cache: the id with "--" for "/", and the commit."""
_OF_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Settings of a config.json that a model must share with the folder it loads."""
_OF_VALUES = ("rms_norm_eps", "hidden_act", "num_experts_per_tok", "norm_topk_prob")
"""Settings with which the same weights compute different values."""
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_MOVING = ("main", "master")
"""Revisions that name another commit tomorrow, and so say nothing."""
_LISTED = 12
_OF_RESULT = (
    "rank", "alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "trainable_token_indices",
    "ensure_weight_tying",
)  # fmt: skip
"""LoRA's settings that decide what its tensors compute; the others decide how they are trained."""
_OF_SITES = ("target_modules", "modules_to_save")
_NEXT_STEP = "Give the [[converters]] table the settings that the step was trained with, or take another step"


def is_adapter(path: Place, format_: Format, model: ModelWrapper | None, prefix: str | None = None) -> bool:
    """Return whether a source holds the tensors of converters and none of the base.

    A manifest says it. A DCP folder says nothing, so in a run with converters it is an adapter if a converter owns all
    its weights or LoRA would have named them so. Raises: CorruptCheckpointError; OSError.
    """
    if format_ in ("hf", "peft"):
        return format_ == "peft"
    if format_ == "native" and (manifest := manifest_of(path)) is not None:
        return manifest.kind == "adapter"
    if model is None or model.converter is None:  # the names may be the model's own
        return False
    with open_reader(path, format_) as reader:
        return holds_adapter_alone(reader, model.owns, prefix)


def holds_adapter_alone(
    reader: TensorReader, owns: Callable[[str], bool] = lambda _: False, prefix: str | None = None
) -> bool:
    """Return whether a checkpoint that is open is an adapter; without a manifest, its names say it, as LoRA's do."""
    if (manifest := _manifest_in(reader)) is not None or reader.format not in ("native", "dcp"):
        return reader.format == "peft" if manifest is None else manifest.kind == "adapter"
    _, names = model_tensors(reader, prefix=prefix)
    return bool(names) and all(owns(name) or lora_tensor(name) for name in names)


def updates_in(
    reader: TensorReader, tensors: Mapping[str, TensorInfo], modules: Mapping[str, nn.Module], table: KeyMap
) -> StoredUpdates:
    """Return the updates of weights in a step, by the converters that its manifest describes.

    `tensors`: the step's, by native name. `modules`, `table`: the model's, which say how its weights are used.
    Raises: LoadMismatchError if no manifest says what the tensors do.
    """
    path, manifest, tables = reader.path, _manifest_in(reader), converter_tables()
    found: list[StoredUpdates] = []
    for description in [] if manifest is None else manifest.converters:
        try:
            part = None if tables is None else tables.updates(description, tensors, modules, table)
        except ValueError as error:
            kind = "LoRA" if description["kind"] == lora.KIND else description["kind"]
            raise LoadMismatchError(f"{path}: its manifest describes a {kind} that cannot be merged: {error}") from None
        found += [] if part is None else [part]
    if not found:
        raise LoadMismatchError(
            f"{path}: its manifest describes no LoRA converter, so nothing says the scale of its tensors. Export the "
            'adapter in the run that trained it (format = "peft"), and take that'
        )
    copies = {name: weight for part in found for name, weight in part.copies.items()}
    return StoredUpdates(
        [update for part in found for update in part.updates],
        copies,
        frozenset[str]().union(*(part.of_base for part in found)),
        tied=all(part.tied for part in found),
    )


def check_mergeable(reader: TensorReader) -> None:
    """Check that a source to be merged is an adapter that says its scale. Raises: LoadMismatchError."""
    manifest = _manifest_in(reader)
    if reader.format == "peft" or (manifest is not None and manifest.kind == "adapter"):
        return
    if reader.format == "dcp":
        raise LoadMismatchError(
            f"{reader.path} is a DCP folder, which says no rank and no alpha, so it cannot be merged: load it into a "
            'run with the [[converters]] it was trained with, export that (format = "peft"), and merge the export'
        )
    raise LoadMismatchError(
        f"{reader.path} is {reader.format} and holds whole weights, and only an adapter can be merged: see `merge`"
    )


def check_settings(path: Place, config: Mapping[str, Any], key_map: KeyMap, converter: ModelConverter | None) -> None:
    """Check that the settings of a PEFT folder fit this run's converter. Raises: LoadMismatchError."""
    adapter = None if converter is None else converter.state_dict_adapter()
    if problems := [] if adapter is None else adapter.misfits(key_map, config):
        raise LoadMismatchError(
            f"{path}: its adapter_config.json and this run's converter disagree; nothing was loaded\n  "
            + listed(problems, "\n  ", most=_LISTED)
            + "\n  Give the [[converters]] table the adapter's rank, alpha and kind, or take another adapter"
        )


def check_fits(
    source: LoadSource, reader: TensorReader, names: Set[str], wanted: Set[str], model: ModelWrapper
) -> None:
    """Check that the converters' tensors in a native or DCP source mean in this run what they meant in their own.

    `names`: the model's tensors in the source; `wanted`: those that it should fill. Those that the source's settings
    leave out are not compared. A scale shows in no shape, so the settings of the converters are compared.
    Raises: LoadMismatchError listing every difference that changes the result.
    """
    path, manifest = source.path, _manifest_in(reader)
    saved = [] if manifest is None else manifest.converters
    running = [] if model.converter is None else model.converter.describe()
    has_lora = source.adapter or lora.KIND in _by_kind(saved)  # else such names are the model's own
    names, wanted = names - selected(names, source.ignore), wanted - selected(wanted, source.initialize)
    owned = [name for name in names if model.owns(name) or (has_lora and lora_tensor(name))]
    if not owned:
        return
    if not any(map(model.owns, owned)):
        theirs, ours = (", ".join(_by_kind(descriptions)) for descriptions in (saved, running))
        advice = f"{ours or 'no converters'}: add the [[converters]] it was trained with"
        if ours and theirs in (ours, ""):
            advice = (
                f"{ours} on other names: compare target_modules, write it by the names of this run's model "
                '(titan-ckpt convert, with --model hf if model.name is "hf")'
            )
        raise LoadMismatchError(
            f"{path} holds {counted(len(owned), 'tensor')} of converters ({theirs}), such as {min(owned)}, and this "
            f"run has {advice}, start from the export of its run, in which they are merged, or leave them out (ignore)"
        )
    if manifest is None:
        logger.warning("load: %s says no rank, alpha and base of its adapter; this run's [[converters]] count", path)
        return
    strangers = [name for name in owned if not model.owns(name)]
    lacking = wanted - names if source.adapter else ()
    settings = _OF_RESULT + (_OF_SITES if strangers or lacking else ())
    if problems := list(_misfits(path, saved, running, owned, settings)):
        raise LoadMismatchError(
            f"{path}: its adapter would compute something else with the converters of this run; nothing was loaded\n  "
            + listed(problems, "\n  ", most=_LISTED)
            + f"\n  {_NEXT_STEP}"
        )


def _manifest_in(reader: TensorReader) -> Manifest | None:
    return reader.manifest if isinstance(reader, NativeReader) else None


def _misfits(
    path: Place,
    saved: Sequence[Description],
    running: Sequence[Description],
    owned: Sequence[str],
    settings: Collection[str],
) -> Iterator[str]:
    """Yield the differences between two sets of converters that change what the `owned` tensors compute."""
    sites = lora.sites_of(owned)
    before, now = (_by_kind(descriptions).get(lora.KIND) for descriptions in (saved, running))
    try:
        records = [LoRARecord.of(description) for description in (before, now) if description is not None]
    except ValueError:  # a converter of somebody else's that has the same name
        records = []
    if not (sites or lora.sites_of(owned, lora.ROWS)) or before is None or now is None or len(records) < 2:
        yield from differences(saved, running)
        return
    rows = [{site: record.trained_rows(site) for site in lora.sites_of(owned, lora.ROWS)} for record in records]
    if (
        settings != _OF_RESULT
        or records[0].ensure_weight_tying != records[1].ensure_weight_tying
        or rows[0] != rows[1]
        or any(_effect(records[0], site) != _effect(records[1], site) for site in sites)
    ):
        yield from differences([_only(before, settings)], [_only(now, settings)])
    others = [[d for d in descriptions if d["kind"] != lora.KIND] for descriptions in (saved, running)]
    if lines := differences(*others):
        if any(lora_tensor(name) is None for name in owned):
            yield from lines
        else:  # these converters own no tensor of the source, so its values mean the same without them
            logger.warning("load: %s was trained with other converters than this run has: %s", path, "; ".join(lines))


def _effect(record: LoRARecord, site: str) -> tuple[int, float, bool]:
    update = record.low_rank(site)
    return update.rank, update.scaling, record.use_dora


def _only(description: Description, names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in description.items() if name in ("kind", *names)}


def _by_kind(descriptions: Sequence[Description]) -> Mapping[str, Description]:
    return {description["kind"]: description for description in descriptions}


def check_named_base(adapter: Place, config: Mapping[str, Any], base: LoadSource | None) -> None:
    """Compare the base that adapter_config.json names with the run's; warn if the names contradict each other.

    Raises: BaseMismatchError if the adapter and `base` both state a revision and they differ.
    """
    if base is None or BASE_RECORD in config:
        return
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if revision and base.revision and not _same_revision(revision, base.revision):
        raise BaseMismatchError(
            f"{adapter} was trained on another revision of its base\n"
            f"  expected {name or 'its base'} at revision {revision}\n"
            f"  found    {base.path} at revision {base.revision}\n"
            "  Load that revision. If both hold the same weights, leave `revision` out of [[checkpoint.initial_load]]",
            {"path": name, "revision": revision},
            {"path": str(base.path), "revision": base.revision},
        )
    path = local_path(base.path)
    for doubt in _doubts(name, revision, path) if path is not None else ():
        logger.warning("load: %s was trained on %s. Nothing shows that the weights are the same", adapter, doubt)


def _doubts(name: str | None, revision: str | None, base: Path) -> Iterator[str]:
    """Yield what the adapter says of its base and the run's folder contradicts."""
    cached = _IN_CACHE.search(base.resolve().as_posix())
    folder = base if base.is_dir() else base.parent
    if name and _exists(name):
        if not _is_same_folder(Path(name), folder):
            yield f"{name}, and the base of this run is another folder, {base}"
    elif name and _HUB_ID.fullmatch(name):
        stated = [read_config(folder / CONFIG).get("_name_or_path"), cached[1].replace("--", "/") if cached else None]
        names = [other for other in stated if isinstance(other, str) and other]
        if names and not any(_is_same_name(name, other) for other in names):
            yield f"{name}, and the base of this run, {base}, is called {' or '.join(dict.fromkeys(names))}"
    elif name:
        yield f"{name}, which is not here, and the base of this run is {base}"
    if revision and cached and not _same_revision(revision, cached[2]):
        yield f"revision {revision}, and the base of this run is revision {cached[2]}"


def _same_revision(one: str, other: str) -> bool:
    """Return whether two revisions may be the same: equal, one a shortened commit of the other, or a moving branch."""
    shortened = all(map(_COMMIT.fullmatch, (one, other))) and (one.startswith(other) or other.startswith(one))
    return one == other or shortened or one in _MOVING or other in _MOVING


def _is_same_name(one: str, other: str) -> bool:
    """Return whether two names of a model are the same; an organisation counts if both have one."""
    parts = [name.rstrip("/").casefold().split("/")[-2:] for name in (one, other)]
    return parts[0] == parts[1] if len(parts[0]) == len(parts[1]) else parts[0][-1] == parts[1][-1]


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # such as a name that is too long
        return False


def _is_same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths hold the same files, directly or through links."""
    pairs = [(one, other), *((one / name, other / name) for name in _WEIGHTS)]
    return any(a.exists() and b.exists() and a.samefile(b) for a, b in pairs)


def check_model_config(source: LoadSource, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise if a folder's config.json describes a different model than this run's, which shapes cannot show.

    The number of heads, for example, decides how the rows of a weight are arranged. Settings that a run may change on
    purpose, such as the rotary base, are only logged.
    Raises: LoadMismatchError with both values.
    """
    theirs, ours = _settings(theirs), _settings(ours)
    if source.initialize or source.ignore:  # layers may be new or dropped, and each of their tensors has to be named
        del ours["num_hidden_layers"]
    both = [key for key in ours if ours[key] is not None and theirs.get(key) is not None]
    differing = {key: f"{key}: {theirs[key]} there, {ours[key]} here" for key in both if ours[key] != theirs[key]}
    if faults := [line for key, line in differing.items() if key in _OF_SHAPE]:
        raise LoadMismatchError(
            f"{source.path}: its config.json describes another model than this run's; nothing was loaded\n  "
            + "\n  ".join(faults)
            + "\n  Take the model's shape from that folder, or restore its config.json"
        )
    if differing:
        logger.warning("load: %s has another config.json than this run: %s", source.path, "; ".join(differing.values()))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are compared; one that a config.json does not have is absent or None."""
    settings = {key: config.get(key) for key in (*_OF_SHAPE, *_OF_VALUES)}
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rotary, Mapping) or any(isinstance(value, Mapping) for value in rotary.values()):
        return settings  # each kind of layer has its own, which transformers 4 spelled in many ways
    if rotary or "rope_theta" in config:
        settings |= {"rope_theta": config.get("rope_theta"), "rope_type": rotary.get("type", "default"), **rotary}
    return settings
