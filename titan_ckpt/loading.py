"""Reading model weights from the sources of a plan into the live parameters, each key exactly once.

Owns the merging of several sources and the verdict over all keys. Decides no precedence (plan.py), knows no format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from titan_ckpt.components import MODEL
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import ConverterError, LoadMismatchError
from titan_ckpt.merging import AdapterMerge, prepare_merge
from titan_ckpt.model_wrapper import ModelWrapper, without_memory
from titan_ckpt.plan import LoadSource
from titan_ckpt.quantising import QuantisesWeights
from titan_ckpt.storage import open_reader
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.engine import collector_held
from titan_ckpt.storage.huggingface import TIED
from titan_ckpt.storage.native import NativeReader
from titan_ckpt.tensors import TensorInfo
from titan_ckpt.transforms import ReadPlan, StateDictTransforms
from titan_ckpt.types import LoadReport, Mismatch, StateDict

logger = logging.getLogger(__name__)
BASE_RECORD = "titan_ckpt_base"
"""Where an adapter folder's metadata holds the identity of its base (base_identity.py)."""
OTHER_COMPONENTS = ("optimizer.", "optim.", "lr_scheduler", "dataloader", "train_state", "states.")
_LISTED = 12
_OF_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Settings of a config.json that a model must share with the folder it loads."""
_OF_VALUES = ("rope_theta", "rms_norm_eps", "hidden_act", "num_experts_per_tok", "norm_topk_prob")
"""Settings that change what the same weights compute."""


@dataclass(frozen=True, slots=True)
class _Opened:
    source: LoadSource
    reader: TensorReader
    plan: ReadPlan
    merge: AdapterMerge | None = None


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """Sources that are open and known to fit. A context manager that closes them."""

    report: LoadReport
    _opened: Sequence[_Opened]
    _stack: ExitStack

    @property
    def parts(self) -> list[tuple[TensorReader, Sequence[ReadRequest]]]:
        """Return what `read` will take, to be verified first."""
        return [(one.reader, one.plan.requests) for one in self._opened]

    def reader_of(self, path: Path) -> NativeReader | None:
        """Return the reader of a step of this package's own format, if the step is among the sources."""
        readers = [one.reader for one in self._opened if one.source.path == path]
        return next((reader for reader in readers if isinstance(reader, NativeReader)), None)

    def read(self) -> None:
        """Fill the model's live tensors with this rank's slices. Raises: CorruptCheckpointError; OSError."""
        for one in self._opened:
            one.reader.read(one.plan.requests)

    @property
    def merges(self) -> bool:
        """Say whether adapters are to become part of the base, once it is read; the same on all ranks."""
        return any(one.source.merge for one in self._opened)

    def merge(self) -> None:
        """Add those adapters to the live weights, in order. Raises: CorruptCheckpointError; OSError."""
        for one in self._opened:
            if one.merge is not None:
                one.merge.apply()

    def adapter_bases(self, *, merged: bool = False) -> list[tuple[Path, dict[str, Any]]]:
        """Return, for each adapter that records the digest of its base, its folder and that record.

        `merged`: of those that become part of the base, else of the converters'.
        """
        chosen = [one for one in self._opened if (one.source.merge if merged else one.source.adapter)]
        found = [(one.source.path, one.reader.metadata().get(BASE_RECORD)) for one in chosen]
        return [(path, record) for path, record in found if record]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()


@collector_held()
def prepare_load(
    sources: Sequence[LoadSource],
    wrapper: ModelWrapper,
    transforms: StateDictTransforms,
    coordinator: Coordinator,
    *,
    require_owned: bool,
) -> PreparedLoad:
    """Open and plan all sources; all ranks agree that everything fits, or all raise. Touches nothing live. Collective.

    `require_owned`: converter-owned keys that no source holds are missing (a resume), not left at initialisation.
    Raises: LoadMismatchError listing every fault; CorruptCheckpointError; NotACheckpointError; PeerError.
    """
    stack = ExitStack()
    wanted: StateDict = {}
    opened: list[_Opened] = []
    try:
        error: BaseException | None = None
        try:
            wanted = wrapper.state_dict("full")
            if sources:
                _check_memory(wanted)
        except Exception as e:
            error = e
        owned = any(coordinator.gather("load-wanted", any(map(wrapper.owns, wanted)), error))
        try:
            for source in sources:
                if source.adapter and not owned:
                    raise LoadMismatchError(
                        f"{source.path} is an adapter, and no converter of this run owns adapter weights: add the "
                        'converter it belongs to, such as [[converters]] kind = "lora"'
                    )
                reader = stack.enter_context(open_reader(source.path, source.format))
                if source.merge:
                    opened.append(_merging(source, reader, wanted, wrapper, transforms))
                else:
                    opened.append(_Opened(source, reader, _plan(source, reader, wanted, wrapper, transforms)))
        except Exception as e:
            error = e
        unexpected = coordinator.gather("load-plan", [list(one.plan.report.unexpected) for one in opened], error)
        everywhere = [set.intersection(*map(set, per_rank)) for per_rank in zip(*unexpected, strict=True)]
        report = LoadReport()
        try:
            report = _verdict(opened, everywhere, wanted, wrapper, require_owned=require_owned)
        except Exception as e:
            error = e
        coordinator.barrier("load-verdict", error)
    except BaseException:
        stack.close()
        raise
    for one in opened:
        logger.info("load: %s: %d tensors", one.source, len(one.plan.report.loaded))
    return PreparedLoad(report, opened, stack)


def _check_memory(wanted: StateDict) -> None:
    if names := without_memory(wanted):
        raise LoadMismatchError(
            f"{len(names)} tensors of the model have no memory to load into, such as {names[0]}: materialise a model "
            "that was built on meta (model.to_empty(device=...)), and run a lazy one once, before load()"
        )


def _merging(
    source: LoadSource, reader: TensorReader, wanted: StateDict, wrapper: ModelWrapper, transforms: StateDictTransforms
) -> _Opened:
    if source.format != "peft":
        raise LoadMismatchError(f"{source.path} is {source.format}, and only a PEFT adapter can be merged: see `merge`")
    base = {fqn: value for fqn, value in wanted.items() if not wrapper.owns(fqn)}
    tied = set(wrapper.tied.values())
    if (transforms.hf_config or {}).get("tie_word_embeddings"):  # a model may use one weight twice without sharing it
        tied |= {fqn for fqn in base if TIED[1] in transforms.key_map.group_of_fqn(fqn).keys}
    merge = prepare_merge(reader, base, tied, transforms.key_map)
    return _Opened(source, reader, ReadPlan([], merge.report), merge)


def _plan(
    source: LoadSource, reader: TensorReader, wanted: StateDict, wrapper: ModelWrapper, transforms: StateDictTransforms
) -> ReadPlan:
    if source.adapter:
        wanted = {fqn: value for fqn, value in wanted.items() if wrapper.owns(fqn)}
    if source.format == "peft":
        _check_adapter_config(source, reader, wrapper, transforms)
    if source.format == "hf":
        _check_model_config(source, reader.metadata(), transforms.hf_config or {})
        if reader.metadata().get("quantization_config") and _quantises(wrapper):
            logger.warning(
                "load: %s holds quantised weights, and this run quantises them again, which gives other values even "
                "before the first step: to go on with a run, resume it, or start from its plain export",
                source.path,
            )
    if source.format not in ("native", "dcp"):
        return transforms.from_file(wanted, reader.tensors, wrapper.hooks, cast=source.cast)
    prefix, available = _under_own_names(reader, wanted)
    plan = StateDictTransforms().from_file(wanted, available, None, cast=source.cast)
    requests = [ReadRequest(prefix + r.key, r.chunk, r.into) for r in plan.requests]
    return replace(plan, requests=requests)


def _quantises(wrapper: ModelWrapper) -> bool:
    """Say whether this run trains for quantised weights."""
    try:
        return isinstance(wrapper.hooks, QuantisesWeights) and wrapper.hooks.weight_quantiser() is not None
    except ConverterError:  # two schemes, which only an export minds
        return True


def _check_adapter_config(
    source: LoadSource, reader: TensorReader, wrapper: ModelWrapper, transforms: StateDictTransforms
) -> None:
    """Raise where the adapter's own settings give its tensors another meaning than this run's converter would."""
    adapter = None if wrapper.hooks is None else wrapper.hooks.state_dict_adapter()
    problems = [] if adapter is None else adapter.misfits(transforms.key_map, reader.metadata())
    if problems:
        raise LoadMismatchError(
            f"{source.path}: its adapter_config.json and this run's converter disagree; nothing was loaded\n  "
            + "\n  ".join(problems[:_LISTED])
            + ("" if len(problems) <= _LISTED else f"\n  and {len(problems) - _LISTED} more")
            + "\n  Give the [[converters]] table the adapter's rank, alpha and kind, or take another adapter"
        )


def _check_model_config(source: LoadSource, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise where a folder's config.json describes another model than the one at hand, which shapes cannot show.

    Heads say how the rows of a weight are arranged. What a run may change on purpose, such as the rotary base, is
    logged. Raises: LoadMismatchError with both values.
    """
    there, here = (_described(config) for config in (theirs, ours))
    both = [key for key in here if here[key] is not None and there[key] is not None]
    differing = {key: f"{key}: {there[key]} there, {here[key]} here" for key in both if here[key] != there[key]}
    if faults := [line for key, line in differing.items() if key in _OF_SHAPE]:
        raise LoadMismatchError(
            f"{source.path}: its config.json describes another model than this run's; nothing was loaded\n  "
            + "\n  ".join(faults)
            + "\n  Take the model's shape from that folder, or restore its config.json"
        )
    if differing:
        logger.warning("load: %s has another config.json than this run: %s", source.path, "; ".join(differing.values()))


def _described(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of these settings, None where it says nothing."""
    found = {key: config.get(key) for key in (*_OF_SHAPE, *_OF_VALUES)}
    rotary = config.get("rope_parameters")
    if found["rope_theta"] is None and isinstance(rotary, Mapping):
        found["rope_theta"] = rotary.get("rope_theta")
    return found


def _under_own_names(reader: TensorReader, wanted: StateDict) -> tuple[str, dict[str, TensorInfo]]:
    """Find the model in a checkpoint under native names: where most wanted tensors are, at the top or under `model.`.

    Source of the names at the top: torchtitan, components/checkpoint.py, which flattens the model there.
    """
    inside = {k.removeprefix(MODEL): info for k, info in reader.tensors.items() if k.startswith(MODEL)}
    top = {k: info for k, info in reader.tensors.items() if not k.startswith(OTHER_COMPONENTS)}
    if reader.format == "native" or sum(k in inside for k in wanted) > sum(k in top for k in wanted):
        return MODEL, inside
    return "", top


def _verdict(
    opened: Sequence[_Opened],
    unknown: Sequence[set[str]],
    wanted: StateDict,
    wrapper: ModelWrapper,
    *,
    require_owned: bool,
) -> LoadReport:
    """Merge the sources' reports; raise one error that lists everything wrong.

    `unknown`: per source the keys that no rank has a place for (a pipeline stage lacks the others' keys).
    """
    if not opened:
        return LoadReport(initialised=tuple(wanted))
    loaded: dict[str, LoadSource] = {}
    twice: list[str] = []
    unexpected: list[str] = []
    mismatched: list[Mismatch] = []
    cast: dict[str, str] = {}
    problems: list[str] = []
    for one, strangers in zip(opened, unknown, strict=True):
        report = one.plan.report
        for fqn in report.loaded:
            if fqn in loaded:
                twice.append(f"{fqn} (in {loaded[fqn].path} and {one.source.path})")
            loaded[fqn] = one.source
        cast |= report.cast
        unexpected += sorted(strangers)
        mismatched += [*report.mismatched]
        if report.mismatched:
            lines = [f"{m.key}: expected {m.expected}, found {m.found}" for m in report.mismatched]
            problems.append(f"{one.source.path}: {len(lines)} of another shape or dtype: {_listed(lines)}")
        if strangers:
            near = {key: one.plan.near(key) for key in sorted(strangers)[:_LISTED]}
            lines = [f"{key} (like {', '.join(found)}?)" if found else key for key, found in near.items()]
            lines += sorted(strangers)[_LISTED:]
            problems.append(f"{one.source.path}: {len(lines)} that the model does not have: {_listed(lines)}")
    misfits = {m.key for m in mismatched}
    absent = [fqn for fqn in wanted if fqn not in loaded and fqn not in misfits]
    has_adapter = any(one.source.adapter for one in opened)
    initialised = [] if require_owned or has_adapter else [fqn for fqn in absent if wrapper.owns(fqn)]
    kept = set(initialised)
    missing = [fqn for fqn in absent if fqn not in kept]
    if missing:
        where = ", ".join(str(one.source.path) for one in opened)
        alone = ". Name the base of this adapter before it" if all(one.source.adapter for one in opened) else ""
        problems.append(f"{where}: {len(missing)} missing: {_listed(missing)}{alone}")
    if twice:
        both = ", or merge all adapters but one into the base (merge = true)" if has_adapter else ""
        problems.append(f"{len(twice)} in two sources: {_listed(twice)}. Name each weight's source once{both}")
    report = LoadReport(tuple(loaded), tuple(missing), tuple(unexpected), tuple(mismatched), tuple(initialised), cast)
    if problems:
        raise LoadMismatchError(
            "the weights do not fit the model; nothing was loaded\n  "
            + "\n  ".join(problems)
            + "\n  Was it saved from a different model config?",
            report,
        )
    return report


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
