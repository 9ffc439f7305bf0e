"""Reading model weights from the sources of a plan into the live parameters, each key exactly once.

Owns how several sources are combined, and the verdict over all keys. Decides no precedence (plan.py), knows no format.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import ConverterError, LoadMismatchError, counted
from titan_ckpt.formats.huggingface.peft import PeftReader, unselected
from titan_ckpt.formats.huggingface.reader import TIED, HuggingFaceReader
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.geometry.keymap import selected
from titan_ckpt.geometry.requests import Fill, TensorReader
from titan_ckpt.loading.adapters import check_fits, check_model_config, check_named_base, check_settings
from titan_ckpt.loading.merge import AdapterMerge, prepare_merge
from titan_ckpt.loading.misfits import problems_of
from titan_ckpt.loading.plan import LoadSource, Partial, partial_of, refuse_unmatched
from titan_ckpt.loading.tables import Tables, check_tables, take_tables
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.store import Place
from titan_ckpt.types import LoadReport, ModelConverter, StateDict
from titan_ckpt.weights.identity import BASE_RECORD
from titan_ckpt.weights.initialize import empty_tensors, flag_loaded
from titan_ckpt.weights.names import StoredNames, clean_fqn
from titan_ckpt.weights.transforms import ReadPlan, StateDictTransforms, with_tied_names
from titan_ckpt.weights.wrapper import ModelState, ModelWrapper, without_memory

logger = logging.getLogger(__name__)

_SAME_NAMES = StateDictTransforms()


@dataclass(frozen=True, slots=True)
class _Opened:
    source: LoadSource
    reader: TensorReader
    plan: ReadPlan
    merge: AdapterMerge | None = None
    partial: Partial = field(default_factory=Partial)
    tables: Tables = field(default_factory=dict)
    """What an adapter's folder has of the base."""


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """Open sources that fit the model. A context manager that closes them."""

    report: LoadReport
    state: ModelState
    """The model's state, whose tensors are filled."""
    made: frozenset[str]
    """Names of the values that are no live memory on some rank, and that the model's own code must load."""
    gives_back: bool
    """Whether the model's own code loads anything on any rank; the same on all ranks."""
    fills: Sequence[tuple[Sequence[str], Fill]]
    """In order, the names of live tensors, and the function that fills them with this rank's slices. Raises:
    CorruptCheckpointError; OSError."""
    _opened: Sequence[_Opened]
    _stack: ExitStack

    def reader_of(self, path: Place) -> NativeReader:
        """Return the reader of a step of this package's own format; open it if the step is not among the sources."""
        readers = (opened.reader for opened in self._opened if opened.source.path == path)
        reader = next((reader for reader in readers if isinstance(reader, NativeReader)), None)
        return reader or self._stack.enter_context(NativeReader(path))

    def read_grown(self) -> None:
        """Fill the rows of grown tables again, after all of their rows were initialized."""
        for opened in self._opened:
            if opened.partial.requests:
                opened.reader.read(opened.partial.requests)

    def give_back(self, values: Mapping[str, Any], model: ModelWrapper, coordinator: Coordinator) -> None:
        """Let the model's own code load `values`, and the tensors that are no live memory. Collective.

        Raises: LoadMismatchError naming each tensor that did not get what was read.
        """
        if self.gives_back:
            state, loaded, empty = self.state, self.report.loaded, empty_tensors(model.parts)
            coordinator.together("load-own", lambda: state.check_whole(loaded, empty))
            coordinator.together("load-own", lambda: flag_loaded(model, state.give_back(loaded, values, self.made)))

    def prove(self, model: ModelWrapper, coordinator: Coordinator) -> None:
        """Check that the state that the model's own code returns can be stored and loaded again. Collective."""
        values = self.state.values
        coordinator.together("own-values", lambda: typed_json.encode(model.extra_state() | values, "model"))
        if self.made and not self.gives_back:  # a load has proved it just now
            coordinator.together("own-proof", lambda: model.state("full", room=True).prove(self.made))

    def check_tables(self) -> None:
        """Check that what adapters' folders have of the base is what the base is. Raises: LoadMismatchError."""
        for opened in self._opened:
            if opened.tables:
                check_tables(opened.source.path, opened.reader, opened.tables, self.state.tensors)

    @property
    def merges(self) -> list[AdapterMerge]:
        """Return the adapters to be merged into the base, in order; as many on all ranks."""
        return [opened.merge for opened in self._opened if opened.merge is not None]

    def adapter_bases(self) -> list[tuple[Place, dict[str, Any]]]:
        """Return, for each adapter of a converter that records the digest of its base, its folder and that record."""
        records = [(o.source.path, o.reader.metadata().get(BASE_RECORD)) for o in self._opened if o.source.adapter]
        return [(path, record) for path, record in records if record]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()


@gc_paused()
def prepare_load(
    sources: Sequence[LoadSource],
    wrapper: ModelWrapper,
    transforms: StateDictTransforms,
    coordinator: Coordinator,
    *,
    require_owned: bool,
) -> PreparedLoad:
    """Open and plan all sources; all ranks agree that everything fits, or all raise. Changes nothing live. Collective.

    `require_owned`: treat converter-owned keys that no source holds as missing, as a resume does; otherwise they are
    initialized.
    Raises: LoadMismatchError listing every fault; CorruptCheckpointError; NotACheckpointError; PeerError.
    """
    state, owned, made, gives_back = _state_to_fill(sources, wrapper, coordinator)
    with ExitStack() as stack:

        def open_all(wanted: StateDict) -> list[_Opened]:
            return [_open(source, stack, wanted, wrapper, transforms, owned=owned) for source in sources]

        def plan() -> tuple[tuple[ModelState, list[_Opened]], dict[str, list[Any]]]:
            opened, filled = open_all(state.tensors), state
            others = {m.key: m.shape for o in opened for m in o.plan.report.mismatched if m.shape is not None}
            if others and (shapes := wrapper.shaped_by_loading(others)):
                filled = state.with_room(shapes)
                opened = open_all(filled.tensors)
            base = next((source for source in sources if not (source.adapter or source.merge)), None)
            for folder in opened:
                if folder.source.format == "peft":
                    check_named_base(folder.source.path, folder.reader.metadata(), base)
            lists = ([[*o.partial.unmatched], [*o.plan.report.unexpected]] for o in opened)
            of_sources = {str(number): of_source for number, of_source in enumerate(lists)}
            return (filled, opened), of_sources | {"shaped": sorted(filled.made - state.made)}

        (state, opened), of_sources = coordinator.exchange_distinct("load-plan", plan)
        if any(isinstance(o.reader, HuggingFaceReader) and o.reader.is_untied for o in opened):
            one, other = (transforms.key_map.group_of_key(key).fqns[0] for key in TIED)
            for merge in (o.merge for o in opened if o.merge is not None):
                merge.share(one, other)
        if shaped := {fqn for of_rank in of_sources.pop("shaped").values() for fqn in of_rank}:
            made, gives_back = made | shaped, True
        strangers = []
        for source, distinct in zip(sources, of_sources.values(), strict=True):
            if source.initialize:
                refuse_unmatched(source, "initialize", [unmatched for unmatched, _ in distinct.values()], state.tensors)
            strangers.append(sorted(set.intersection(*(set(unexpected) for _, unexpected in distinct.values()))))

        def verdict() -> tuple[LoadReport, list[tuple[Sequence[str], Fill]]]:
            report, twice = _verdict(opened, strangers, state.tensors, wrapper, require_owned=require_owned)
            unused = [[*_unused(o)] for o in opened]
            if twice or report.mismatched or report.unexpected or report.missing or any(unused):
                judged = [(opened[i].source, opened[i].plan, strangers[i], unused[i]) for i in range(len(opened))]
                problems = problems_of(report, judged, twice, resuming=require_owned)
                text = "the weights do not fit the model; nothing was loaded\n  " + "\n  ".join(problems)
                raise LoadMismatchError(text, report)
            return report, [(o.plan.report.loaded, o.reader.plan(o.plan.requests)) for o in opened]

        report, fills = coordinator.together("load-verdict", verdict)
        for folder in opened:
            logger.info("load: %s: %s", folder.source, counted(len(folder.plan.report.loaded), "tensor"))
            for line in folder.partial.lines():
                logger.info("load: %s: %s", folder.source.path, line)
        return PreparedLoad(report, state, made, gives_back, fills, opened, stack.pop_all())


def _state_to_fill(
    sources: Sequence[LoadSource], wrapper: ModelWrapper, coordinator: Coordinator
) -> tuple[ModelState, bool, frozenset[str], bool]:
    """Return the model's state, and for all ranks: whether converters own keys, `made` and `gives_back`. Collective.

    Raises: LoadMismatchError for tensors without memory.
    """

    def look() -> tuple[ModelState, dict[str, Any]]:
        state = wrapper.state("full", room=bool(sources))
        if sources and (names := without_memory(state.tensors)):
            raise LoadMismatchError(
                f"no memory to load into for {counted(len(names), 'tensor')} of the model, such as {names[0]}: "
                "materialize a model that was built on meta (model.to_empty(device=...)), and run a lazy one once, "
                "before load()"
            )
        facts = {
            "owned": any(map(wrapper.owns, state.tensors)),
            "made": sorted(state.made),
            "loads": any(own.loads for own in state.own),
        }
        return state, {"facts": facts}

    state, distinct = coordinator.exchange_distinct("load-wanted", look)
    everywhere = distinct["facts"].values()
    # a rank whose shard of a tensor is empty cannot tell whether it is live, and must take part all the same
    made = frozenset(fqn for of_rank in everywhere for fqn in of_rank["made"])
    gives_back = bool(sources) and (bool(made) or any(of_rank["loads"] for of_rank in everywhere))
    return state, any(of_rank["owned"] for of_rank in everywhere), made, gives_back


def _open(
    source: LoadSource,
    stack: ExitStack,
    wanted: StateDict,
    wrapper: ModelWrapper,
    transforms: StateDictTransforms,
    *,
    owned: bool,
) -> _Opened:
    """Open and plan one source; `stack` closes it."""
    if source.adapter and not owned:
        raise LoadMismatchError(
            f"{source.path} is an adapter, and no converter of this run owns adapter weights: add the "
            'converter it belongs to, such as [[converters]] kind = "lora"'
        )
    reader = open_reader(source.path, source.format, ignore=source.ignore)
    stack.callback(reader.close)
    if isinstance(reader, PeftReader):
        reader.require_supported()
    prepare = _plan_merge if source.merge else _plan
    return prepare(source, reader, wanted, wrapper, transforms)


def _plan_merge(
    source: LoadSource, reader: TensorReader, wanted: StateDict, wrapper: ModelWrapper, transforms: StateDictTransforms
) -> _Opened:
    base = {fqn: value for fqn, value in wanted.items() if not wrapper.owns(fqn)}
    modules = {clean_fqn(name): module for part in wrapper.parts for name, module in part.named_modules()}
    merge = prepare_merge(reader, base, wrapper.tied, transforms.key_map, modules, transforms.hf_config or {})
    plan = ReadPlan({}, cast=False)
    plan.report = merge.report
    return _Opened(source, reader, plan, merge)


def _plan(
    source: LoadSource, reader: TensorReader, wanted: StateDict, wrapper: ModelWrapper, transforms: StateDictTransforms
) -> _Opened:
    base = wanted
    if source.adapter or source.base_only:
        wanted = {fqn: value for fqn, value in wanted.items() if wrapper.owns(fqn) is source.adapter}
    if source.format == "peft":
        check_settings(source.path, reader.metadata(), transforms.key_map, wrapper.converter)
    tables: Tables = {}
    if isinstance(reader, PeftReader) and (adapter := wrapper.converter and wrapper.converter.state_dict_adapter()):
        owned = adapter.key_map(transforms.key_map, reader.tensors)
        reader.leave_out(owned.repeats)
        tables = take_tables(reader, owned, transforms.key_map, base, wrapper.tied)
    if source.format == "hf":
        if transforms.check_folder is not None:
            transforms.check_folder(str(source.path), reader.metadata())
        else:
            check_model_config(source, reader.metadata(), transforms.hf_config or {})
        if reader.metadata().get("quantization_config") and _quantizes(wrapper):
            logger.warning(
                "load: %s holds quantized weights, and this run quantizes them again, which gives other values even "
                "before the first step: to go on with a run, resume it, or start from its plain export",
                source.path,
            )
    if isinstance(reader, HuggingFaceReader):
        named = (fqn for fqn in wanted if not wrapper.owns(fqn) and fqn not in transforms.key_map.nameless)
        if any(TIED[0] in transforms.key_map.group_of_fqn(fqn).keys for fqn in named):
            reader.untie()
        keys = reader.tensors.keys() - selected(reader.tensors, source.ignore)
        table = with_tied_names(transforms.key_map.of_folder(keys), wrapper.tied, wrapper.linear_weights(), keys)
        reader.leave_out(table.repeats)
        transforms = replace(transforms, key_map=table)
    if source.format not in ("native", "dcp"):
        plan, partial = _plan_partly(source, reader.tensors, wanted, transforms, wrapper.converter)
        return _Opened(source, reader, plan, partial=partial, tables=tables)
    theirs = transforms.names_in_torchtitan(wanted) if source.format == "dcp" else {}
    names = StoredNames.find(reader, wanted, theirs, wrapper.tied, source.prefix, source.ignore)
    available = names.available
    if source.base_only:
        available = {fqn: info for fqn, info in available.items() if not wrapper.owns(fqn)}
    manifest = reader.manifest if isinstance(reader, NativeReader) else None
    if manifest is not None and manifest.kind == "external":
        raise LoadMismatchError(
            f"{source.path} holds no model weights: its run took them from outside. Name another source"
        )
    if source.adapter or wrapper.converter is not None or (manifest is not None and manifest.converters):
        check_fits(source, reader, available.keys(), wanted.keys(), wrapper)
    plan, partial = _plan_partly(source, available, wanted, _SAME_NAMES, None)
    plan.requests = names.to_file_names(plan.requests)
    return _Opened(source, reader, plan, partial=replace(partial, requests=names.to_file_names(partial.requests)))


def _plan_partly(
    source: LoadSource,
    available: Mapping[str, TensorInfo],
    wanted: StateDict,
    transforms: StateDictTransforms,
    converter: ModelConverter | None,
) -> tuple[ReadPlan, Partial]:
    """Plan a source without what its settings leave out. The requests include the rows that it has of grown tables."""
    base = {fqn: value for fqn, value in wanted.items() if converter is None or not converter.key_filter(fqn)}
    named = source.initialize or source.ignore
    base = {fqn: value for fqn, value in base.items() if fqn not in transforms.key_map.nameless}
    partial = partial_of(source, base, available, transforms.key_map) if named else Partial()
    wanted = {fqn: value for fqn, value in wanted.items() if fqn not in partial.fresh}
    available = {key: info for key, info in available.items() if key not in partial.passed_by}
    plan = transforms.from_file(wanted, available, converter, cast=source.cast)
    partial = replace(partial, nameless=frozenset(plan.report.initialized))
    plan.requests += partial.requests
    return plan, partial


def _unused(opened: _Opened) -> Iterator[str]:
    """Yield the keys of a PEFT folder that PEFT would ignore, but those that its settings pass by."""
    keys = unselected(opened.reader) if isinstance(opened.reader, PeftReader) else ()
    yield from (key for key in keys if key not in opened.partial.passed_by)


def _quantizes(wrapper: ModelWrapper) -> bool:
    """Return whether this run trains for quantized weights."""
    try:
        return wrapper.converter is not None and wrapper.converter.weight_quantizer() is not None
    except ConverterError:  # two schemes, which only an export refuses
        return True


def _verdict(
    opened: Sequence[_Opened],
    strangers: Sequence[Sequence[str]],
    wanted: StateDict,
    wrapper: ModelWrapper,
    *,
    require_owned: bool,
) -> tuple[LoadReport, list[tuple[str, Place, Place]]]:
    """Return a report on all sources, and the weights that two sources have, each with these sources.

    `strangers`: per source, the keys that no rank has a place for (a pipeline stage lacks the keys of other stages).
    """
    if not opened:
        return LoadReport(initialized=tuple(wanted)), []
    loaded: dict[str, Place] = {}
    twice: list[tuple[str, Place, Place]] = []
    for folder in opened:
        for fqn in folder.plan.report.loaded:
            if fqn in loaded:
                twice.append((fqn, loaded[fqn], folder.source.path))
            loaded[fqn] = folder.source.path
    reports = [o.plan.report for o in opened]
    mismatched = [mismatch for report in reports for mismatch in report.mismatched]
    misfits = {m.key for m in mismatched}
    absent = [fqn for fqn in wanted if fqn not in loaded and fqn not in misfits]
    has_adapter = any(o.source.adapter for o in opened)
    fresh = frozenset().union(*(o.partial.fresh | o.partial.nameless for o in opened))
    initialized = dict.fromkeys([] if require_owned or has_adapter else filter(wrapper.owns, absent))
    initialized |= dict.fromkeys(fqn for fqn in absent if fqn in fresh)
    report = LoadReport(
        tuple(loaded),
        tuple(fqn for fqn in absent if fqn not in initialized),
        tuple(key for keys in strangers for key in keys),
        tuple(mismatched),
        tuple(initialized),
        {fqn: dtypes for report in reports for fqn, dtypes in report.cast.items()},
        {fqn: rows for o in opened for fqn, rows in o.partial.grown.items()},
        tuple(key for o in opened for key in (*o.plan.report.ignored, *sorted(o.partial.passed_by))),
    )
    return report, twice
