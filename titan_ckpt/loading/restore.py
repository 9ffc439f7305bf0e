"""Restoring a run: from its newest valid step, or from its initial sources, or from step 0 without either.

Owns the order of a load, and what all ranks must agree on before its next part. plan.py decides which sources there
are, sources.py and origin.py read them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from titan_ckpt.components.run_state import RunState
from titan_ckpt.components.snapshot import RUN_STATE, rank_state_name
from titan_ckpt.config import CheckpointConfig, InitialLoadConfig
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.names import rank_file_name
from titan_ckpt.distributed.coordinator import FAILURES, Coordinator
from titan_ckpt.distributed.peer_groups import ExchangeBroken
from titan_ckpt.encoding.paths import snapshot_of
from titan_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptCheckpointError,
    LoadMismatchError,
    PeerError,
    counted,
    listed,
)
from titan_ckpt.formats.reading.engine import SliceFill
from titan_ckpt.formats.reading.shared import awaited, share_reads
from titan_ckpt.geometry.requests import Fill
from titan_ckpt.loading.external import ExternalWeights, take_from_outside
from titan_ckpt.loading.merge import merge_in_order
from titan_ckpt.loading.origin import CommittedStep, Origin, ResumeState, TorchtitanFolder, check_run, look_at_run
from titan_ckpt.loading.plan import LoadPlan
from titan_ckpt.loading.sources import PreparedLoad, prepare_load
from titan_ckpt.types import LoadReport
from titan_ckpt.weights.initialize import empty_tensors, flag_loaded
from titan_ckpt.weights.transforms import StateDictTransforms

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load: training continues after `step`, which is 0 unless a step was resumed."""

    step: int
    plan: LoadPlan
    report: LoadReport


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a load, and the facts that manifests of later steps record about it."""

    result: LoadResult
    base: dict[str, Any] | None
    """The identity of the base under converter-owned weights; None without such weights."""
    resumed_from: dict[str, Any] | None
    """Step and attempt; None unless a step was resumed."""
    traffic: tuple[int, int] | None
    """Bytes that all ranks have read, and received from each other; None if a format does not say it."""


@dataclass(frozen=True, slots=True)
class Restorer:
    """Loads one run's objects. Every method is collective over all ranks."""

    _config: CheckpointConfig
    _directory: CheckpointDirectory
    _run: RunState
    _transforms: StateDictTransforms
    _external_weights: ExternalWeights | None
    """The handler that fills the model; given if `config.components` leaves the model out."""
    _coordinator: Coordinator
    _initialize: Callable[[Collection[str]], None]
    """Gives values to what a load has left without any; called with the converters' own tensors that no source had."""

    def restore(self, step: int | None) -> Restored:
        """Resume `step`, or the newest valid one if it is None; without any, load the initial sources or start from 0.

        A run that saves takes the lease when all is read, so that a load that fails disturbs nobody. If another process
        has committed a step by then, which takes minutes for large models, everything is loaded again.
        Raises: as CheckpointManager.load. The run is marked as half loaded then, unless nothing live has changed.
        """
        saves = self._config.save is not None
        before = self._directory.present() if saves else []
        restored = self._restore(step)
        if saves and self._directory.claim(before):
            if step is not None:
                raise CommitConflictError(
                    f"{self._directory.root}: another process saved here, or went back, while this one loaded step "
                    f"{step}. No step was set aside: stop that process, look at the steps that are there now, and "
                    "start again"
                )
            logger.warning("%s: another process has changed the steps meanwhile; loading again", self._directory.root)
            restored = self._restore(step)
        self._run.half_loaded.end()
        return restored

    def _restore(self, step: int | None) -> Restored:
        resumed = self._resume_newest() if step is None else self._resume_by_number(step)
        if resumed is None and self._config.initial_load and self._config.initial_load[-1].load == "training_state":
            resumed = self._resume_source()
        return resumed or self._load(Origin())

    def _resume_by_number(self, step: int) -> Restored:
        try:
            restored = self._resume(step)
        except OSError as error:
            if isinstance(error, CheckpointError) or self._directory.exists_here(step):
                raise
            raise CheckpointNotFoundError(
                f"{self._directory.step_path(step)}: was deleted while it was loaded; load another step"
            ) from error
        if restored is None:
            raise CheckpointNotFoundError(
                f"step {step} holds model weights only, so training cannot resume from it; name it in "
                "[[checkpoint.initial_load]] of another run instead"
            )
        return restored

    def _resume_newest(self) -> Restored | None:
        """Resume the newest valid step; return None if the folder has no step.

        If another run writes into the folder and deletes the step that is being read, the steps are listed again.
        Raises: the error of the oldest step; CheckpointNotFoundError if all steps hold weights only.
        """
        failure: BaseException | None = None
        weights_only: list[int] = []
        candidates, as_listed = self._directory.candidates(), True
        while candidates:
            candidate = candidates.pop()
            if candidate == 0 and weights_only:  # a seed would train again what is trained
                break
            try:
                result = self._resume(candidate, as_listed)
            except BaseException as error:  # every rank has raised something, and all decide together
                stop = None if isinstance(error, FAILURES) else error
                is_corrupt = any(self._coordinator.gather("ladder", isinstance(error, CorruptCheckpointError), stop))
                if not self._directory.exists(candidate) and (steps := self._directory.candidates()):
                    logger.info("step %d was deleted while it was loaded; going on to step %d", candidate, steps[-1])
                    candidates, as_listed, failure = steps, True, None
                    continue
                if not is_corrupt:
                    raise
                logger.warning("step %d cannot be resumed from; going on to the one before it: %s", candidate, error)
                as_listed, failure = False, error
                continue
            if result is not None:
                return result
            as_listed = False
            weights_only.append(candidate)
            logger.warning("step %d holds the model alone; going on to the step before it", candidate)
        if failure is not None:
            raise failure
        if weights_only:
            raise CheckpointNotFoundError(
                f"{self._directory.root}: step {weights_only[0]} holds the model alone, and no step there can be "
                "resumed from. Train on from its weights in another folder with [[checkpoint.initial_load]], or choose "
                "another folder: a run is not started afresh beside it"
            )
        return None

    def _load(self, origin: Origin) -> Restored:
        """Load from an origin. Collective.

        1 Plan. 2 Open everything and check that it fits. 3 Read. 4 Initialize. 5 Give the owners their other state.
        """
        load_plan, model = self._agree(origin), self._run.model
        origin.check(model)
        is_resumed = load_plan.resume is not None and not load_plan.has_new_weights
        opened = (load_plan.sources, model, self._transforms, self._coordinator)
        with prepare_load(*opened, require_owned=is_resumed) as prepared:
            values = prepared.state.values
            state = origin.open_state(load_plan, self._run, self._coordinator, prepared.reader_of, values)
            moved = self._read(load_plan, prepared, state)
            report = self._complete(load_plan, prepared)
            if state is None and self._config.save is not None and not self._config.external:
                prepared.prove(model, self._coordinator)
            fresh = [*prepared.report.initialized, *prepared.report.grown]
            base = origin.identify_base(load_plan, model, self._coordinator, fresh, prepared.adapter_bases)
            kept = [*model.extra_state_names(), *values] if load_plan.sources else []
        if state is not None:
            self._apply(state)
        else:
            self._coordinator.together("load-end", self._run.half_loaded.check_replaced)
        if kept and state is None:
            logger.warning(
                "initial load: a source gives tensors alone, so that the extra state of %s stays as the model "
                "was built: %s. If the source's is needed, set it after load(), or resume the source with "
                'load = "training_state"',
                counted(len(kept), "module"),
                listed(kept, ", ", " "),
            )
        return Restored(LoadResult(origin.step, load_plan, report), base, origin.resumed_from, moved)

    def _resume(self, step: int, as_listed: bool = False) -> Restored | None:
        """Resume one step. Return None for a step that holds weights only, from which no run can resume but a seed.

        `as_listed`: the directory has just listed its candidates.
        Raises: CommitConflictError for newer folders of torchtitan's, because saves of these steps would find them.
        """
        origin: Origin
        if self._directory.is_dcp(step, as_listed=as_listed):
            path = self._directory.step_path(step)
            if self._config.save is not None and (blocked := self._directory.blocked_after(step)):
                raise CommitConflictError(
                    f"{self._directory.root}: the run goes on from torchtitan's step {step}, and "
                    f"{listed(blocked, ', ')} would be in the way of its saves: move it away"
                )
            source = InitialLoadConfig(str(path), cast=True)
            origin = self._coordinator.together("dcp-look", lambda: TorchtitanFolder.look(path, source, step))
        else:
            origin = self._committed(self._directory, step, as_listed)
        if not origin.is_whole:
            return None
        restored = self._load(origin)
        self._directory.resume_from(step)
        return restored

    def _resume_source(self) -> Restored:
        """Resume the step that the last initial source names, another run's or torchtitan's. Collective.

        Raises: as CheckpointManager.load.
        """
        path, found = self._coordinator.together("source-format", lambda: look_at_run(self._config))
        origin: Origin
        if isinstance(found, TorchtitanFolder):
            origin = found
        else:
            origin = self._committed(CheckpointDirectory(path.parent, self._coordinator), found)
        check_run(self._config, path, origin)
        return self._load(origin)

    def _committed(self, directory: CheckpointDirectory, step: int, as_listed: bool = False) -> CommittedStep:
        rank = self._coordinator.rank
        files = (RUN_STATE, rank_state_name(rank), rank_file_name(rank), rank_file_name(0))
        manifest, path = directory.committed(step, files, as_listed=as_listed)
        return CommittedStep(path, manifest)

    def _apply(self, state: ResumeState) -> None:
        """Give the state to its owners, when every tensor is right, and log the ranks' warnings once. Collective."""

        def act() -> tuple[list[str], bool]:
            self._run.half_loaded.overwrite(state.tensors)  # its owners get them now, and any of them may fail
            self._run.half_loaded.check_replaced()
            return self._run.apply(state.stored, state.tensors)

        of_ranks = self._coordinator.gather_results("load-apply", act)
        if any(waits for _, waits in of_ranks):
            together = partial(self._run.apply_together, state.stored, state.tensors)
            self._coordinator.together("load-apply-together", together)
        if self._coordinator.rank == 0:
            for line in dict.fromkeys(line for lines, _ in of_ranks for line in lines):
                logger.warning("%s", line)

    def _agree(self, origin: Origin) -> LoadPlan:
        """Return the plan of an origin, which is that of all ranks. Collective.

        Raises: LoadMismatchError if the ranks' hosts would read different snapshots of the hub.
        """

        def decide() -> tuple[LoadPlan, list[list[str]]]:
            made = origin.plan(self._config, self._run.model)
            return made, [[*(snapshot_of(str(source.path)) or ())] for source in made.sources]

        made, of_ranks = self._coordinator.exchange("load-sources", decide)
        for source, commits in zip(made.sources, zip(*of_ranks, strict=True), strict=True):
            if len(different := {" at ".join(commit) or "no snapshot" for commit in commits}) > 1:
                found = ", ".join(sorted(different))
                raise LoadMismatchError(
                    f"{source.path}: the Hugging Face caches of the ranks' hosts differ: {found}. Download the same on "
                    "each, or name one by its revision"
                )
        logger.info("%s", made)
        return made

    def _read(self, load_plan: LoadPlan, prepared: PreparedLoad, state: ResumeState | None) -> tuple[int, int] | None:
        """Fill the live tensors; return the bytes that all ranks have read and received. Collective.

        1 All ranks mark the run as half loaded. 2 When all have, they agree on what they read together, and fill the
        live tensors. 3 The model's own code takes what is no live memory. 4 Adapters to be merged are added to the base
        in order, if it is the base that they record.
        """
        model = self._run.model
        fills = [*prepared.fills]
        overwritten = {*prepared.report.loaded, *filter(model.owns, prepared.report.initialized)}
        if load_plan.external:
            overwritten.update(prepared.state.tensors)
        if state is not None:
            fills.append((list(state.tensors), state.fill))
            overwritten |= self._run.may_be_live(state.tensors)
        self._run.half_loaded.begin(load_plan.title, overwritten)
        fill = self._fill_together if self._coordinator.world_size > 1 else fill_in_order
        moved = fill(joined(fills))
        values = {} if state is None or load_plan.has_new_weights else state.stored.values.get("model", {})
        prepared.give_back(values, model, self._coordinator)
        if merges := prepared.merges:
            merged = partial(prepared.give_back, values, model, self._coordinator)
            merge_in_order(merges, load_plan.base, model, self._coordinator, merged)
        return moved

    def _fill_together(self, rounds: Sequence[tuple[Sequence[str], Fill]]) -> tuple[int, int] | None:
        """Fill live tensors while all ranks do, which read for each other; return what `_read` does. Collective.

        Raises: this rank's own error; PeerError naming the rank that failed or fell silent, also if reading together
        with it broke off here.
        """
        line, is_on = self._coordinator, self._config.resume.share_reads
        shared = share_reads("load-begin", [fill for _, fill in rounds], line, is_on=is_on)
        broken: tuple[str, float] | None = None
        error: BaseException | None = None
        moved: tuple[int, int] | None = None
        try:
            moved = fill_in_order([(names, fill) for (names, _), fill in zip(rounds, shared, strict=True)])
        except ExchangeBroken as caught:
            broken = str(caught), caught.seconds
        except BaseException as caught:
            error = caught
        if broken or error:
            line.peers.discard()  # so that the others do not wait for this rank
        try:
            # who has waited for a silent rank waits as long again at most
            seconds = line.timeout_seconds / 2 if broken else None
            of_ranks: list[Any] = line.gather("load-read", [broken and [*broken], moved and [*moved]], error, seconds)
        finally:
            line.peers.discard()
        if causes := {rank: cause for rank, (cause, _) in enumerate(of_ranks) if cause}:
            late = awaited({rank: seconds for rank, (_, seconds) in causes.items()}, line.timeout_seconds)
            who = f", because rank {listed([*map(str, late)], ', ')} was late" if late else ""
            raise PeerError(f"{next(iter(causes.values()))[0]}{who}", late)
        return _sums([of_rank for _, of_rank in of_ranks])

    def _complete(self, load_plan: LoadPlan, prepared: PreparedLoad) -> LoadReport:
        """Take weights from outside if the plan says so; then initialize the tensors that still have no values.

        Afterwards every tensor has its value, and what adapters' folders have of the base is compared with it.
        """
        report = prepared.report
        if load_plan.external:
            assert self._external_weights is not None, "the constructor refuses"
            report = take_from_outside(self._external_weights, load_plan, self._run.model, self._coordinator)
        if empty_tensors(self._run.model.parts):
            flag_loaded(self._run.model, report.loaded)

        def complete() -> None:
            self._initialize(report.initialized)
            prepared.read_grown()
            prepared.check_tables()

        self._coordinator.together("load-initialize", complete)
        return report


def joined(fills: Sequence[tuple[Sequence[str], Fill]]) -> list[tuple[Sequence[str], Fill]]:
    """Make neighbouring fills of slices one, so that no read of one waits for the last of the other."""
    rounds: list[tuple[Sequence[str], Fill]] = []
    for names, fill in fills:
        before = rounds[-1][1] if rounds else None
        if isinstance(fill, SliceFill) and isinstance(before, SliceFill) and not (fill.check or before.check):
            rounds[-1] = [*rounds[-1][0], *names], before + fill
        else:
            rounds.append((names, fill))
    return rounds


def fill_in_order(fills: Sequence[tuple[Sequence[str], Fill]]) -> tuple[int, int] | None:
    """Fill live tensors; return what each Fill does, of all.

    Raises: CorruptCheckpointError naming all that was overwritten, also by the fills before.
    """
    filled: list[str] = []
    moved: list[tuple[int, int] | None] = []
    for names, fill in fills:
        try:
            moved.append(fill())
        except CorruptCheckpointError as error:
            if not filled:
                raise
            raise CorruptCheckpointError(
                f"{error}. Before it, {counted(len(filled), 'tensor was', 'tensors were')} overwritten: "
                f"{listed(filled, ', ', ' ')}",
                error.path,
                [*filled, *error.overwritten],
            ) from error
        filled += names
    return _sums(moved)


def _sums(moved: Sequence[Sequence[int] | None]) -> tuple[int, int] | None:
    """Add up bytes that were read, and received; None if any is not known."""
    return None if None in moved else (sum(m[0] for m in moved if m), sum(m[1] for m in moved if m))
