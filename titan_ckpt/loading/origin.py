"""Origin: where a load takes the state of a run from.

Owns what differs between a step of this package, a folder of torchtitan's and initial sources: which weights are read
and what is left out, what else is restored, what the base is compared with, and what later steps record. restore.py
asks an origin in one order; `titan-ckpt plan` asks it for the plan alone, for which it reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from titan_ckpt.components.items.item import DataRank, Stored, in_order
from titan_ckpt.components.optimizer import misfit
from titan_ckpt.components.optimizer_content import PREFIX as OPTIMIZER
from titan_ckpt.components.run_state import RunState
from titan_ckpt.components.snapshot import DATA_RANK, LAYOUT, RUN_STATE, by_key, misshapen, rank_state_name
from titan_ckpt.config import CheckpointConfig, Component, InitialLoadConfig
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.directory.names import may_be_resumed, read_committed, step_of
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    LoadMismatchError,
    NotACheckpointError,
)
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.formats.open import detect_format, locate, open_reader
from titan_ckpt.geometry.chunks import Block, blocks_of
from titan_ckpt.geometry.requests import Fill, TensorReader
from titan_ckpt.loading.adapters import is_adapter
from titan_ckpt.loading.plan import LoadPlan, LoadSource, ResumeStep, resolve
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.store import Place, StoreConfig, open_source
from titan_ckpt.types import Format, StateDict
from titan_ckpt.weights.identity import check_base, check_converters, identify_base
from titan_ckpt.weights.names import MODEL
from titan_ckpt.weights.wrapper import ModelWrapper

_GROUPS = "optimizer.param_groups."
_ALL_BUT_MODEL = frozenset(get_args(Component)) - {"model"}


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The training state of a checkpoint, decoded, with destinations for its tensors; nothing is attached yet."""

    stored: Stored
    tensors: StateDict
    fill: Fill
    """Fills `tensors`. Raises: CorruptCheckpointError; OSError."""


ReaderOf = Callable[[Place], TensorReader]
"""Returns the reader of a step of this package."""
Read = tuple[Stored, TensorReader, Mapping[str, str], Sequence[str]]
"""The training state of a checkpoint: values that were read, a reader of its tensors, with their names there by those
that they have here, and keys of optimizer state, beside tensors, that have no place on this rank."""


@gc_paused()
def plan_state(run_state: RunState, coordinator: Coordinator, read: Callable[[], Read]) -> ResumeState:
    """Check what was read, and plan its tensors; all ranks succeed or all raise. Collective.

    Raises: LoadMismatchError for state that the checkpoint lacks, and for an optimizer that does not fit; as `read`.
    """

    def plan() -> tuple[ResumeState, dict[str, Any]]:
        stored, reader, names, without_place = read()
        run_state.check(stored)
        available = {ours: reader.tensors[theirs] for ours, theirs in names.items()}
        tensors, strangers = run_state.destinations(stored, available)
        requests = [Block(b.chunk, b.data, names[key]) for key, t in tensors.items() for b in blocks_of(t)]
        facts = {"trains": bool(run_state.optimizers), "strangers": sorted({*strangers, *without_place})}
        return ResumeState(stored, tensors, reader.plan(requests)), {"facts": facts}

    planned, distinct = coordinator.exchange_distinct("resume-plan", plan)
    facts = distinct["facts"].values()
    stored_but_untrained = set.intersection(*(set(of_rank["strangers"]) for of_rank in facts))
    # a run without optimizers needs none of their state
    if stored_but_untrained and any(of_rank["trains"] for of_rank in facts):
        raise misfit([*stored_but_untrained])
    return planned


class Origin:
    """The initial sources; without any, initial values."""

    step = 0
    """The step after which training goes on."""
    is_whole = True
    """Whether a run can go on from it; a step that holds the model alone has no training state."""
    manifest: Manifest | None = None
    """What a step of this package records."""
    in_place = False
    """Whether it is a folder of torchtitan's in the run's own folder, which no setting names."""
    resumed_from: dict[str, Any] | None = None
    """What manifests of later steps record of it."""

    def plan(self, config: CheckpointConfig, model: ModelWrapper | None = None) -> LoadPlan:
        """Return what is read, and what is not. `model`: tells by its converters the adapters that do not say it.

        Raises: CheckpointNotFoundError for weights that are not on disk.
        """
        return resolve(config, None, partial(_describe, store=config.store, model=model))

    def check(self, model: ModelWrapper) -> None:
        """Check what its record says of the model. Raises: ConverterError."""

    def open_state(
        self, load_plan: LoadPlan, run: RunState, coordinator: Coordinator, reader_of: ReaderOf, own: Collection[str]
    ) -> ResumeState | None:
        """Return the training state, read and planned; None if it has none. Collective.

        `own`: as `Stored.model_values`.
        """
        return None

    def identify_base(
        self,
        load_plan: LoadPlan,
        model: ModelWrapper,
        coordinator: Coordinator,
        fresh: Collection[str],
        adapter_bases: Callable[[], Sequence[tuple[Place, Mapping[str, Any]]]],
    ) -> dict[str, Any] | None:
        """Digest the base under converter-owned weights, and compare it with the record of each adapter. Collective.

        `fresh`: the tensors that no source has, in full. `adapter_bases`: returns the folder and the record of each
        adapter that has one.
        Saves hold a base that is in the run's own folder and that no setting names, so that a resume needs no such
        step; so they do if parts of the base were initialized, which no source has, or are trained beside the adapter.
        Return None for a base that is trained, or was.
        """
        if not coordinator.anywhere("owned", model.owned_state_dict):
            return None
        manifest = None if load_plan.has_new_weights else self.manifest
        source = manifest.base if manifest is not None and manifest.kind == "full" else None
        is_seed = manifest is not None and manifest.kind == "model"  # retention may delete it: saves hold the base
        was_trained = manifest is not None and manifest.kind == "full" and manifest.base is None
        # a pipeline stage may have initialized nothing, and its saves are of the same kind as the others'
        is_partly_new = bool(load_plan.sources) and coordinator.anywhere(
            "fresh base", lambda: {*fresh} - model.owned_state_dict().keys()
        )
        if source is None and not (is_seed or self.in_place or is_partly_new):
            source = load_plan.base
        base = identify_base(model, source, coordinator)
        merged = [str(source.path) for source in load_plan.sources if source.merge]
        if manifest is not None and manifest.base is not None:
            check_base(base, manifest.base, f"step {manifest.step}", merged)
        for path, recorded in adapter_bases():
            check_base(base, recorded, str(path), merged)
        # a pipeline stage may train nothing of its base
        is_trained = coordinator.anywhere("trained base", model.trained_base)
        return None if is_trained or was_trained else base | ({"merged": merged} if merged else {})


class CommittedStep(Origin):
    """A step of this package, of this run or of another. Step 0 may be a seed, of which the model alone is loaded."""

    manifest: Manifest

    def __init__(self, path: Place, manifest: Manifest) -> None:
        self.path, self.manifest, self.step = path, manifest, manifest.step
        self.is_whole = manifest.kind != "model" or manifest.step == 0
        self.resumed_from = {"step": manifest.step, "attempt": manifest.attempt}

    def plan(self, config: CheckpointConfig, model: ModelWrapper | None = None) -> LoadPlan:
        step = ResumeStep(self.step, self.manifest.kind, self.path)
        load_plan = resolve(config, step, partial(_describe, store=config.store, model=model))
        if self.manifest.kind != "model":
            return load_plan
        return replace(load_plan, exclude=load_plan.exclude | _ALL_BUT_MODEL)

    def check(self, model: ModelWrapper) -> None:
        running = model.converter.describe() if model.converter else []
        if running or self.manifest.converters:
            check_converters(self.manifest.converters, running, self.step)

    def open_state(
        self, load_plan: LoadPlan, run: RunState, coordinator: Coordinator, reader_of: ReaderOf, own: Collection[str]
    ) -> ResumeState:
        values = self._values(run, load_plan.exclude, coordinator)

        def read() -> Read:
            reader = reader_of(self.path)
            names = {key: key for key in reader.tensors if not key.startswith(MODEL)}
            return Stored(self.step, values, load_plan.exclude, [*own]), reader, names, ()

        return plan_state(run, coordinator, read)

    def _values(self, run: RunState, exclude: frozenset[str], coordinator: Coordinator) -> dict[str, Any]:
        """Return the values that this rank takes over, by keys of items. Collective.

        1 Every rank reads the run's values and, if the number of ranks is unchanged, its own. 2 All exchange whether
        the layout is unchanged. 3 If any data-parallel rank has changed, all divide the reading of the values of
        shares.
        """
        manifest = self.manifest
        if manifest.kind == "model" and all(file.name != RUN_STATE for file in manifest.files):  # a converted folder
            return {}

        def unchanged() -> tuple[tuple[dict[str, Any], dict[str, Any]], dict[str, bool]]:
            of_run, is_same_size = self._read(RUN_STATE, run), manifest.world_size == coordinator.world_size
            own = self._read(rank_state_name(coordinator.rank), run) if is_same_size else {}
            share = DataRank(*own[DATA_RANK]) if DATA_RANK in own else run.data_rank
            is_same_share = bool(own) and share == run.data_rank
            return (of_run, own), {"layout": own.get(LAYOUT) == run.layout, "data": is_same_share}

        (values, own), of_ranks = coordinator.exchange("resume-layout", unchanged)
        scopes = {kind.component: kind.scope for kind in run.kinds}
        taken = {"run", "rank"} if all(of_rank["layout"] for of_rank in of_ranks) else {"run"}
        values |= {key: value for key, value in own.items() if scopes.get(key.partition(".")[0]) in taken}
        for name in (name for name, scope in scopes.items() if scope == "share"):
            if name not in manifest.components or name in exclude:
                continue
            if name in own and all(of_rank["data"] for of_rank in of_ranks):
                rank, size = own[DATA_RANK]  # this rank will look at no other share
                values[name] = [own[name] if number == rank else None for number in range(size)]
            else:
                values[name] = self._shares(name, run, coordinator)
        return values

    def _shares(self, name: str, run: RunState, coordinator: Coordinator) -> list[Any]:
        """Return the value of every data-parallel rank that saved; each rank reads some of their files. Collective."""

        def values() -> list[Any]:
            ranks = range(coordinator.rank, self.manifest.world_size, coordinator.world_size)
            stored = (own for rank in ranks if name in (own := self._read(rank_state_name(rank), run)))
            return [[*own[DATA_RANK], typed_json.encode(own[name])] for own in stored]

        gathered = coordinator.gather_results("data positions", values)
        stored_by = [(DataRank(rank, size), value) for of_rank in gathered for rank, size, value in of_rank]
        return [typed_json.decode(value, str(self.path)) for value in in_order(stored_by, str(self.path))]

    def _read(self, name: str, run: RunState) -> dict[str, Any]:
        """Return the values in a state file, by keys of items. Raises: CorruptCheckpointError naming the file."""
        path = self.path / name
        record = next((f for f in self.manifest.files if f.name == name), None)
        if record is None:
            raise CorruptCheckpointError(
                f"{self.path}: the manifest lists no {name}. Take another checkpoint", str(path)
            )
        state = typed_json.loads(read_committed(path, record), str(path))
        if wrong := misshapen(state, name != RUN_STATE, self.step, run.kinds):
            raise CorruptCheckpointError(
                f"{path}: not the state of a run: {', '.join(wrong)}. Take another checkpoint", str(path)
            )
        return by_key(state)


@dataclass(frozen=True)
class TorchtitanFolder(Origin):
    """A DCP folder of torchtitan. Step 0 is a seed: its model alone is loaded."""

    path: Place
    step: int
    in_place: bool = True
    is_whole: bool = True
    is_seed: bool = False
    cast: bool = True
    prefix: str | None = None
    resumed_from: dict[str, Any] | None = None

    @staticmethod
    def look(path: Place, source: InitialLoadConfig, step: int | None = None) -> TorchtitanFolder:
        """Read what a folder says of itself. `step`: the number in its name, if it is in the run's own folder.

        Raises: NotACheckpointError for a folder of another package; CorruptCheckpointError if it says no step.
        """
        with open_reader(path, source.format) as reader:
            if type(reader) is not DcpReader:  # one of torch_checkpointing has weights alone for us
                raise NotACheckpointError(
                    f"{path} holds no training state: only steps of this package and DCP folders of torchtitan do; "
                    'leave load = "training_state" out to load its weights'
                )
            stored = step_of_folder(reader, path)
            names = (*reader.items, *reader.tensors)
            is_whole = any(name.startswith((OPTIMIZER, "lr_scheduler.")) for name in names)
        number = stored if step is None else step
        return TorchtitanFolder(
            path, number, in_place=step is not None, is_whole=is_whole or not stored, is_seed=not stored,
            cast=source.cast, prefix=source.prefix, resumed_from={"step": number, "path": str(path)},
        )  # fmt: skip

    def plan(self, config: CheckpointConfig, model: ModelWrapper | None = None) -> LoadPlan:
        exclude = (frozenset(config.resume.exclude) | config.left_out() | {"rng"}) - {"model"}
        weights = LoadSource(self.path, "dcp", self.cast, prefix=self.prefix)
        resume = ResumeStep(self.step, "full", self.path)
        return LoadPlan(resume, (weights,), _ALL_BUT_MODEL if self.is_seed else exclude)

    def open_state(
        self, load_plan: LoadPlan, run: RunState, coordinator: Coordinator, reader_of: ReaderOf, own: Collection[str]
    ) -> ResumeState:
        def read() -> Read:
            reader = DcpReader(self.path)
            items = run.restored(load_plan.exclude)
            values = {item.key: value for item in items if (value := item.from_torchtitan(reader)) is not None}
            of_model = {name: reader.item(name) for name in own if name in reader.items}
            values["model"] = values.get("model", {}) | of_model
            names = {ours: theirs for item in items for ours, theirs in item.torchtitan_tensors(reader).items()}
            strangers = []
            if "optimizer" not in load_plan.exclude:  # also those without tensors
                trained = {fqn for groups in values.get("optimizer", []) for group in groups for fqn in group["fqns"]}
                settings = [name.removeprefix(_GROUPS) for name in reader.items if name.startswith(_GROUPS)]
                fqns = {name.rpartition(".")[0] for name in settings}
                strangers = [f"{OPTIMIZER}{fqn}.state" for fqn in fqns - trained]
            stored = Stored(self.step, values, load_plan.exclude, [*own])
            return stored, reader, names, strangers

        return plan_state(run, coordinator, read)


def step_of_folder(reader: DcpReader, path: Place) -> int:
    """Return the step that a folder says it is of. Raises: CorruptCheckpointError if it says none."""
    step = reader.item("train_state.step") if "train_state.step" in reader.items else None
    if step is None and path.name.startswith("step-") and path.name[5:].isdecimal():
        step = int(path.name[5:])
    if type(step) is not int or step < 0:
        raise CorruptCheckpointError(
            f"{path}: neither train_state.step nor the folder's name, step-N, says which step it is of; name it so",
            str(path),
        )
    return step


def look_at_run(config: CheckpointConfig) -> tuple[Place, int | TorchtitanFolder]:
    """Return where the run is that the last initial source names by training_state: torchtitan's, or step N of ours.

    Raises: NotACheckpointError; CheckpointNotFoundError; CorruptCheckpointError; OSError.
    """
    source = config.initial_load[-1]
    path = open_source(source.path, config.store, source.revision)
    found = locate(path)
    if (source.format or detect_format(found)) != "native":
        return path, TorchtitanFolder.look(found, source)
    if not may_be_resumed(found):
        raise NotACheckpointError(
            f"{path} is a copy of a step's folder, of which a bucket gives the weights alone: leave "
            'load = "training_state" out, copy the folder to a mounted file system, or name a step where its run has '
            "saved it"
        )
    step = step_of(path.name)
    if step is None:
        raise NotACheckpointError(f"{path} is not named step-N, as a step is: give it its name back to resume it")
    return path, step


def check_run(config: CheckpointConfig, path: Place, run: Origin) -> None:
    """Check that a run which an initial source names can be resumed, and beside the sources before it.

    Raises: LoadMismatchError.
    """
    if not run.is_whole:
        raise LoadMismatchError(
            f'{path} holds no training state: leave load = "training_state" out to load its weights'
        )
    is_adapter = run.manifest is not None and run.manifest.kind == "adapter"
    if len(config.initial_load) > 1 and not is_adapter:
        raise LoadMismatchError(
            f"{path} holds a whole {'run' if run.manifest is None else 'model'}: leave the sources before it out of "
            "checkpoint.initial_load; only a step that holds an adapter alone needs its base there"
        )


def _describe(source: InitialLoadConfig, store: StoreConfig, model: ModelWrapper | None) -> tuple[Place, Format, bool]:
    """Return the place of an initial source, its format, and whether it is an adapter, as far as it says so.

    `model`: as of `Origin.plan`.
    Raises: CheckpointNotFoundError; ConfigError.
    """
    try:
        path = locate(open_source(source.path, store, source.revision))
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"checkpoint.initial_load: {error}") from None
    format_ = source.format or detect_format(path)
    if source.prefix is not None and format_ != "dcp":
        raise ConfigError([f"initial_load.prefix: only a DCP folder nests the model, and {path} is {format_}"])
    return path, format_, is_adapter(path, format_, model, source.prefix)
