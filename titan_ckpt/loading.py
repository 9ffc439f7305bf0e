"""Reading model weights from the sources of a plan into the live parameters, each key exactly once.

Owns the merging of several sources and the verdict over all keys. Decides no precedence (plan.py), knows no format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from titan_ckpt.components import MODEL
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.model_wrapper import ModelWrapper
from titan_ckpt.plan import LoadSource
from titan_ckpt.storage import open_reader
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.tensors import TensorInfo
from titan_ckpt.transforms import ReadPlan, StateDictTransforms
from titan_ckpt.types import LoadReport, Mismatch, StateDict

logger = logging.getLogger(__name__)
_LISTED = 12


@dataclass(frozen=True, slots=True)
class _Opened:
    source: LoadSource
    reader: TensorReader
    plan: ReadPlan


def load_model(
    sources: Sequence[LoadSource],
    wrapper: ModelWrapper,
    transforms: StateDictTransforms,
    coordinator: Coordinator,
    *,
    require_owned: bool,
) -> LoadReport:
    """Fill the model from all sources; every rank reads its own slices. Returns what became of every key.

    Steps: 1 every rank opens and plans every source; 2 all ranks agree that everything fits, or all raise;
    3 every rank reads; 4 all ranks agree that everything was read.
    `require_owned`: converter-owned keys that no source holds are missing (a resume), not left at initialisation.
    Raises: LoadMismatchError listing every fault; before step 3 nothing live is touched.
    """
    wanted = wrapper.state_dict("full")
    with ExitStack() as stack:
        error: BaseException | None = None
        opened: list[_Opened] = []
        report = LoadReport()
        try:
            for source in sources:
                reader = stack.enter_context(open_reader(source.path, source.format))
                opened.append(_Opened(source, reader, _plan(source, reader, wanted, wrapper, transforms)))
            report = _verdict(opened, wanted, wrapper, require_owned=require_owned)
        except Exception as e:
            error = e
        coordinator.barrier("load-plan", error)
        for one in opened:
            logger.info("load: %s: %d tensors", one.source, len(one.plan.report.loaded))
        try:
            for one in opened:
                one.reader.read(one.plan.requests)
        except Exception as e:
            error = e
        coordinator.barrier("load-read", error)
    return report


def native_requests(wanted: StateDict, available: Mapping[str, TensorInfo]) -> ReadPlan:
    """Plan a read under the same names, dtypes and shapes: how this package reads its own files."""
    return StateDictTransforms().from_file(wanted, available, None, cast=False)


def _plan(
    source: LoadSource, reader: TensorReader, wanted: StateDict, wrapper: ModelWrapper, transforms: StateDictTransforms
) -> ReadPlan:
    if source.adapter:
        wanted = {fqn: value for fqn, value in wanted.items() if wrapper.owns(fqn)}
        if not wanted:
            raise LoadMismatchError(
                f"{source.path} is an adapter, and no converter of this run owns adapter weights: add the converter it "
                'belongs to, such as [[converters]] kind = "lora"'
            )
    if source.format != "native":
        return transforms.from_file(wanted, reader.tensors, wrapper.hooks, cast=source.cast)
    available = {k.removeprefix(MODEL): info for k, info in reader.tensors.items() if k.startswith(MODEL)}
    plan = StateDictTransforms().from_file(wanted, available, None, cast=source.cast)
    requests = [ReadRequest(MODEL + r.key, r.chunk, r.into) for r in plan.requests]
    return replace(plan, requests=requests)


def _verdict(
    opened: Sequence[_Opened], wanted: StateDict, wrapper: ModelWrapper, *, require_owned: bool
) -> LoadReport:
    """Merge the sources' reports; raise one error that lists everything wrong."""
    loaded: dict[str, LoadSource] = {}
    twice: list[str] = []
    unexpected: list[str] = []
    mismatched: list[Mismatch] = []
    cast: dict[str, str] = {}
    problems: list[str] = []
    for one in opened:
        report = one.plan.report
        for fqn in report.loaded:
            if fqn in loaded:
                twice.append(f"{fqn} (in {loaded[fqn].path} and {one.source.path})")
            loaded[fqn] = one.source
        cast |= report.cast
        unexpected += [*report.unexpected]
        mismatched += [*report.mismatched]
        if report.mismatched:
            lines = [f"{m.key}: expected {m.expected}, found {m.found}" for m in report.mismatched]
            problems.append(f"{one.source.path}: {len(lines)} of another shape or dtype: {_listed(lines)}")
        if report.unexpected:
            problems.append(
                f"{one.source.path}: {len(report.unexpected)} that the model does not have: {_listed(report.unexpected)}"
            )
    misfits = {m.key for m in mismatched}
    absent = [fqn for fqn in wanted if fqn not in loaded and fqn not in misfits]
    has_adapter = any(one.source.adapter for one in opened)
    initialised = [] if require_owned or has_adapter else [fqn for fqn in absent if wrapper.owns(fqn)]
    kept = set(initialised)
    missing = [fqn for fqn in absent if fqn not in kept]
    if missing:
        where = ", ".join(str(one.source.path) for one in opened)
        problems.append(f"{where}: {len(missing)} missing: {_listed(missing)}")
    if twice:
        problems.append(f"{len(twice)} in two sources: {_listed(twice)}. Name each weight's source once")
    report = LoadReport(
        tuple(loaded), tuple(missing), tuple(unexpected), tuple(mismatched), tuple(initialised), cast
    )
    if problems:
        raise LoadMismatchError(
            "the weights do not fit the model; nothing was loaded\n  " + "\n  ".join(problems)
            + "\n  Was it saved from a different model config?",
            report,
        )
    return report


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
