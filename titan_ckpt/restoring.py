"""Where a run goes on from: its newest step that is whole, or its initial sources, or nothing at all.

Owns the order of a load, and what all ranks must agree on before the next part of it. Which sources there are is
plan.py's to say, what is in them loading.py's and resume.py's; saves and exports are the manager's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_ckpt import plan
from titan_ckpt.base_identity import check_base, identify_base
from titan_ckpt.components import RunState
from titan_ckpt.config import CheckpointConfig, InitialLoadConfig
from titan_ckpt.converter_record import check_converters
from titan_ckpt.directory import CheckpointDirectory
from titan_ckpt.distributed import FAILURES, Coordinator
from titan_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from titan_ckpt.external_weights import ExternalLoad, ExternalWeights
from titan_ckpt.initialize import initialise, mark_filled
from titan_ckpt.loading import PreparedLoad, prepare_load
from titan_ckpt.manifest import Manifest
from titan_ckpt.plan import LoadPlan, ResumeStep
from titan_ckpt.resume import ResumeState
from titan_ckpt.storage import detect_format
from titan_ckpt.storage.shared_check import check_together
from titan_ckpt.transforms import StateDictTransforms
from titan_ckpt.types import Format, LoadReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Where training goes on: `step` is 0 after an initial load or a fresh start."""

    step: int
    plan: LoadPlan
    report: LoadReport


@dataclass(frozen=True, slots=True)
class Restored:
    """A load, and what the steps that follow it record of it."""

    result: LoadResult
    base: dict[str, Any] | None
    """The identity of the base that converter-owned weights stand on; None without such weights."""
    resumed_from: dict[str, Any] | None
    """Step and attempt; None after an initial load or a fresh start."""


class Restorer:
    """Loads one run's objects. Every method is collective over all ranks."""

    def __init__(
        self,
        config: CheckpointConfig,
        directory: CheckpointDirectory,
        run: RunState,
        transforms: StateDictTransforms,
        external_weights: ExternalWeights | None,
        coordinator: Coordinator,
    ) -> None:
        """Bind; `external_weights` is there where `config.components` leaves the model out."""
        self._config = config
        self._directory = directory
        self._run = run
        self._model = run.model
        self._transforms = transforms
        self._external_weights = external_weights
        self._coordinator = coordinator

    def restore(self, step: int | None) -> Restored:
        """Resume `step`, or the newest one where it is None; else load the initial sources, or start afresh.

        Raises: as CheckpointManager.load says.
        """
        found = self._resume_newest() if step is None else self._resume(step, by_number=True)
        return found or self._load_initial()

    def _resume_newest(self) -> Restored | None:
        """Resume the newest step that is whole, else one before it; None where there is none to resume from."""
        failure: BaseException | None = None
        for candidate in self._directory.steps()[::-1]:
            try:
                result = self._resume(candidate, by_number=False)
            except FAILURES as error:  # whatever it is on this rank, all ranks are here, and decide together
                if not any(self._coordinator.gather("ladder", isinstance(error, CorruptCheckpointError))):
                    raise
                logger.warning("step %d cannot be resumed from; going on to the one before it: %s", candidate, error)
                failure = error
                continue
            if result is not None:
                return result
        if failure is not None:
            raise failure
        return None

    def _load_initial(self) -> Restored:
        load_plan = self._resolve(None)
        with self._prepare(load_plan, resuming=False) as prepared:
            self._read(prepared)
            report = self._complete(load_plan, prepared)
            base = self._identify_base(load_plan, prepared, None)
        return Restored(LoadResult(0, load_plan, report), base, None)

    def _resume(self, step: int, *, by_number: bool) -> Restored | None:
        """1 Plan. 2 Open everything and check that it fits. 3 Read. 4 Initialise. 5 Hand over what is not a tensor.

        Returns None for a step that holds weights only, which is a source of weights but cannot be resumed from.
        """
        manifest = self._directory.manifest(step)
        if manifest.kind == "model":
            if by_number:
                raise CheckpointNotFoundError(
                    f"step {step} holds model weights only, so training cannot resume from it; name it in "
                    "[[checkpoint.initial_load]] of another run instead"
                )
            return None
        path = self._directory.step_path(step)
        load_plan = self._resolve(ResumeStep(step, manifest.kind, path))
        hooks = self._model.hooks
        check_converters(manifest.converters, hooks.describe() if hooks else [], manifest.step)
        with self._prepare(load_plan, resuming=True) as prepared:
            opened = prepared.reader_of(path)
            with ResumeState.open(path, manifest, self._run, load_plan.exclude, self._coordinator, opened) as state:
                self._read(prepared, state)
            report = self._complete(load_plan, prepared)
            base = self._identify_base(load_plan, prepared, manifest)
        self._together("load-apply", lambda: state.apply(self._run, load_plan.exclude))
        self._directory.resume_from(step)
        return Restored(LoadResult(step, load_plan, report), base, {"step": step, "attempt": manifest.attempt})

    def _resolve(self, step: ResumeStep | None) -> LoadPlan:
        plans: list[LoadPlan] = []
        self._together("load-sources", lambda: plans.append(plan.resolve(self._config, step, self._describe)))
        logger.info("%s", plans[0])
        return plans[0]

    def _prepare(self, load_plan: LoadPlan, *, resuming: bool) -> PreparedLoad:
        return prepare_load(load_plan.sources, self._model, self._transforms, self._coordinator, require_owned=resuming)

    def _read(self, prepared: PreparedLoad, state: ResumeState | None = None) -> None:
        """1 The ranks verify what memory holds of their files. 2 When all have, live tensors are filled.

        3 Adapters that become part of the base are added to it, if it is the one they know.
        """
        parts: list[PreparedLoad | ResumeState] = [prepared] if state is None else [prepared, state]
        check_together([one for part in parts for one in part.parts], self._coordinator)
        self._together("load-read", lambda: [part.read() for part in parts])
        if prepared.merges:
            if bases := prepared.adapter_bases(merged=True):
                unmerged = identify_base(self._model, (), None, self._coordinator)
                for path, recorded in bases:
                    check_base(unmerged, recorded, str(path))
            self._together("load-merge", prepared.merge)

    def _complete(self, load_plan: LoadPlan, prepared: PreparedLoad) -> LoadReport:
        """Take weights from outside, where they come from there; then initialise what still has no values."""
        report = self._take_from_outside(load_plan) if load_plan.external else prepared.report
        mark_filled(self._model, report.loaded)
        self._together("load-initialise", lambda: initialise(self._model, report.initialised))
        return report

    def _take_from_outside(self, load_plan: LoadPlan) -> LoadReport:
        """Let the handler fill the model. Raises: LoadMismatchError unless it filled all of it; what it raises."""
        assert self._external_weights is not None, "the constructor refuses"
        handler = self._external_weights
        event = ExternalLoad(load_plan.resume.step if load_plan.resume else 0, self._model.state_dict("full"))
        # at the start converters may give their own tensors values, as after any initial load
        may_lack = frozenset() if load_plan.resume else frozenset(filter(self._model.owns, event.tensors))

        def fill() -> None:
            handler(event)
            event.verify(may_lack)

        self._together("load-external", fill)
        return LoadReport(tuple(event.filled), initialised=tuple(may_lack - event.filled))

    def _together(self, tag: str, act: Callable[[], object]) -> None:
        """Act on every rank; where one fails, all raise. Collective."""
        error: BaseException | None = None
        try:
            act()
        except FAILURES as e:
            error = e
        self._coordinator.barrier(tag, error)

    def _identify_base(
        self, load_plan: LoadPlan, prepared: PreparedLoad, manifest: Manifest | None
    ) -> dict[str, Any] | None:
        """Digest the base that converter-owned weights stand on, and hold it against what each adapter records."""
        if not any(self._coordinator.gather("owned", bool(self._model.owned_state_dict()))):
            return None
        own_base = manifest.base if manifest is not None and manifest.kind == "full" else None
        base = identify_base(self._model, load_plan.sources, own_base, self._coordinator)
        if manifest is not None and manifest.base is not None:
            check_base(base, manifest.base, f"step {manifest.step}")
        for path, recorded in prepared.adapter_bases():
            check_base(base, recorded, str(path))
        return base

    def _describe(self, source: InitialLoadConfig) -> tuple[Format, bool]:
        path = Path(source.path)
        if not path.exists():
            raise CheckpointNotFoundError(
                f"checkpoint.initial_load: {path} is not there; name an existing folder or file"
            )
        found = source.format or detect_format(path)
        return found, found == "peft"
