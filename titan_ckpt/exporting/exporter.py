"""Exporter: decides the exports of a run: which tensors go into which kind of export, and the folder.

Each format writes and proves its own files. checks.py asks before training whether all exports can be made.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.components.optimizer_content import PREFIX as OPTIMIZER
from titan_ckpt.components.run_state import RunState
from titan_ckpt.config import ExportConfig, InitialLoadConfig
from titan_ckpt.distributed.coordinator import Coordinator, bounded
from titan_ckpt.errors import CheckpointError, CheckpointNotFoundError, ExportError, listed
from titan_ckpt.exporting.torchtitan_state import flat_tensors, flat_values, state_digests
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.formats.huggingface.export import Base, HuggingFaceFormat
from titan_ckpt.formats.huggingface.peft import PeftFormat
from titan_ckpt.formats.open import detect_format, locate
from titan_ckpt.formats.publish.record import Exports, exports_at
from titan_ckpt.formats.publish.run import FolderExport
from titan_ckpt.geometry.chunks import LazyTensor, Stage, TensorInfo, can_freeze, frozen, info_of, local_tensor
from titan_ckpt.stores.store import Place, StoreConfig, open_location, open_source, split_url, store_of
from titan_ckpt.telemetry.events import Telemetry
from titan_ckpt.types import ModelConverter, StateDict
from titan_ckpt.weights.identity import base_settings
from titan_ckpt.weights.live_memory import Watched
from titan_ckpt.weights.names import MODEL
from titan_ckpt.weights.quantize import WeightQuantizer, quantized
from titan_ckpt.weights.transforms import FileDtype, FileGroup, StateDictTransforms, cast_all, with_tied_names
from titan_ckpt.weights.wrapper import ModelWrapper

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExportJob:
    """One export that is decided and not yet made."""

    config: ExportConfig
    step: int
    folder: Place
    writer: FolderExport | DcpExport
    made: Exports
    unsaved_in: str | None = None
    """The place of the steps of a run that has committed none yet; None for other runs."""

    def run(self, coordinator: Coordinator) -> None:
        """Record and publish the folder, and remove exports that have expired. Collective. Raises: ExportError."""
        became = "failed"
        try:
            record = partial(self.made.record, self.config, self.step, self.unsaved_in)
            self.writer.write(self.folder, coordinator, record)
            became = "is published, and what follows it failed"
            coordinator.on_rank_0("export-expire", lambda: self.made.expire(self.config, self.step))
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(f"export of step {self.step} to {self.folder} {became}: {error}") from error


@dataclass
class Exporter:
    """Makes the exports of one run."""

    base_folder: Path
    run_state: RunState
    transforms: StateDictTransforms
    coordinator: Coordinator
    background: Coordinator
    """The line that exports of staged copies are given."""
    initial_load: Sequence[InitialLoadConfig]
    """Sources of the base, whose dtypes and file layout exports may take over."""
    store: StoreConfig
    """How buckets are reached."""
    telemetry: Telemetry
    """Gets an event for each export that `export` and `run` make."""
    exported: dict[ExportConfig, Place] = field(default_factory=dict)
    """The newest export of each kind that this process has made, or found there when it was due."""
    went_back_to: int | None = None
    """The step that the user told this run to go back to, until the exports made after it are set aside."""
    unsaved_in: str | None = None
    """The place of this run's steps while none is committed, so that a restart would begin at step 0 again."""
    _made: dict[str, Exports] = field(default_factory=dict)

    @property
    def model(self) -> ModelWrapper:
        """Return the model of the run."""
        return self.run_state.model

    def leave_abandoned_branch(self, configs: Sequence[ExportConfig], above: int) -> None:
        """Set aside the exports of the branch that this run went back from, to the step `above`. Collective.

        A run that was interrupted replays its steps with identical weights, so its exports stay.
        Raises: as `refuse_foreign_branch`; PeerError.
        """

        def leave() -> None:
            self.refuse_foreign_branch(configs, above)
            for config in configs:
                self.made(config).set_aside(config, above)

        self.coordinator.on_rank_0("export-leave", leave)
        self.went_back_to = None  # only now: if a rename failed, the next save or export tries it again

    def refuse_foreign_branch(self, configs: Sequence[ExportConfig], above: int) -> None:
        """Refuse what is not set aside and would be taken for an export of the branch after the step `above`.

        Rank 0 alone calls this. Raises: ExportError naming all of it; OSError.
        """
        left = [(self.folder(c, step), why) for c in configs for step, why in self.made(c).foreign_after(c, above)]
        if left:
            raise ExportError(
                f"{listed([f'{folder} ({why})' for folder, why in left], ', ', ' ')}: this run goes back to step "
                f"{above}, and would take it for its own export of a later step: move it away, or choose another folder"
            )

    def start_over(self, configs: Sequence[ExportConfig]) -> None:
        """Set aside the exports that this run made before it was ended without a committed step.

        Rank 0 alone calls this. Raises: OSError.
        """
        for config in configs:
            if (place := self._unsaved_in(config)) is not None:
                self.made(config).set_aside(config, 0, place)

    def _unsaved_in(self, config: ExportConfig) -> str | None:
        """Return `unsaved_in` if it tells apart all runs that export there: many machines have one path on a disk."""
        is_known = self.unsaved_in is not None and (split_url(self.unsaved_in) or not split_url(config.folder))
        return self.unsaved_in if is_known else None

    def is_there(self, config: ExportConfig, step: int) -> bool:
        """Return whether rank 0 sees that this export was published before. Collective."""
        folder = self.folder(config, step)
        made = self.made(config)
        published = self.coordinator.on_rank_0("export-there", lambda: made.is_there(config.lands_in(step)))
        if published:
            logger.warning("export %s is there already and stays as it is", folder)
            self.exported[config] = folder
        return published

    def folder(self, config: ExportConfig, step: int) -> Place:
        """Return where an export of this step is, or will be."""
        return self.made(config).folder(config, step)

    def made(self, config: ExportConfig) -> Exports:
        """Return the exports at the place of a config's own."""
        url = config.folder if split_url(config.folder) else ""  # a mounted file system has one record for all
        if url not in self._made:
            self._made[url] = exports_at(open_location(url, self.base_folder, self.store))
        return self._made[url]

    @contextlib.contextmanager
    def _told(self, config: ExportConfig, step: int, folder: Place, *, background: bool) -> Iterator[None]:
        """Record the export that the block makes, with its size, which is rank 0's."""
        about = {"step": step, "format": config.format, "folder": str(folder), "background": background}
        with self.telemetry.event("export", **about) as event:
            yield
            self.exported[config], num_bytes = folder, None
            if self.coordinator.rank == 0:
                with contextlib.suppress(OSError):
                    num_bytes = store_of(folder).folder_bytes(folder)
            event.note(num_bytes=num_bytes)

    def run(self, job: ExportJob, coordinator: Coordinator) -> None:
        """Make an export of a staged copy, and record it. Collective. Raises: ExportError."""
        with self._told(job.config, job.step, job.folder, background=True):
            job.run(coordinator)

    def export(self, config: ExportConfig, step: int, base: dict[str, Any] | None) -> None:
        """Make an export of the live weights, and record it. Collective. Raises: ExportError; KeyMapError."""
        with self._told(config, step, self.folder(config, step), background=False):
            self._export(config, step, base)

    def _export(self, config: ExportConfig, step: int, base: dict[str, Any] | None) -> None:
        """Write, prove and publish one export of the live weights. Collective.

        Raises: ExportError, KeyMapError and PeerError; nothing is published then.
        """

        def plan() -> ExportJob:
            with _export_errors(step):
                job = self._job(config, step, base, self._tensors(config))
                return replace(job, unsaved_in=self._unsaved_in(config))

        self.coordinator.together("export-plan", plan).run(self.coordinator)

    def stage(
        self,
        configs: Sequence[ExportConfig],
        step: int,
        base: dict[str, Any] | None,
        live: StateDict,
        staged: Mapping[str, LazyTensor],
    ) -> tuple[list[ExportJob], list[ExportConfig]]:
        """Return exports of staged copies, to be run while training continues, and what must be made now. Collective.

        `live`, `staged`: the tensors of a snapshot and their copies. Values that converters compute from other ranks'
        values are gathered in this call, and the ranks that exchange bytes of a file are connected. The second are the
        exports whose values cannot be staged.
        Raises: ExportError; KeyMapError; PeerError.
        """
        tensors: list[StateDict] = []
        # with several ranks a quantizer gathers each weight by its layout in training
        alone = self.coordinator.world_size == 1

        def can_wait() -> list[bool]:
            with _export_errors(step):
                tensors.extend(self._tensors(config) for config in configs)
            return [
                all(map(can_freeze, values.values())) and (alone or not config.quantized)
                for config, values in zip(configs, tensors, strict=True)
            ]

        of_ranks = self.coordinator.gather_results("export-freeze", can_wait)
        waits = [all(answers) for answers in zip(*of_ranks, strict=True)]

        def jobs() -> list[ExportJob]:
            with _export_errors(step):
                constant = self._constant(live)
                stage, changed = self._stage_of(live, staged, constant), Watched(constant).changed
                made = [
                    self._job(config, step, base, {fqn: frozen(value, stage) for fqn, value in values.items()})
                    for config, values, wait in zip(configs, tensors, waits, strict=True)
                    if wait
                ]
                return [replace(job, writer=replace(job.writer, changed=changed)) for job in made]

        made = self.coordinator.together("export-stage", jobs)

        self.background.peers.connect(
            self.coordinator, lambda: {r for job in made for r in job.writer.peers(job.folder, self.coordinator)}
        )
        return made, [config for config, wait in zip(configs, waits, strict=True) if not wait]

    def close(self) -> None:
        """Close the connections of exports in the background."""
        self.background.peers.discard()

    def _constant(self, live: StateDict) -> StateDict:
        """Return the base parameters without a copy. They are frozen: a save of adapters alone leaves them out."""
        parameters = set(self.model.parameter_names().values())
        base = self.model.state_dict("base")
        return {fqn: v for fqn, v in base.items() if fqn in parameters and MODEL + fqn not in live}

    def _stage_of(self, live: StateDict, staged: Mapping[str, LazyTensor], constant: StateDict) -> Stage:
        """Return the Stage (geometry/chunks.py) that maps a live tensor to its staged copy, to itself or to a clone.

        `live`: the tensors that `staged` holds, by the same names. Those of `constant` stand for themselves; any tensor
        that is in neither is cloned.
        """
        stored = {name: value for name, value in live.items() if name.startswith((MODEL, OPTIMIZER))}
        copies = {_memory_of(value): staged[name] for name, value in stored.items()}
        frozen_memory = {*map(_memory_of, constant.values())}

        def stage(value: torch.Tensor) -> torch.Tensor | LazyTensor:
            if not local_tensor(value).numel():
                return LazyTensor(info_of(value), lambda: (), like=())
            memory = _memory_of(value)
            if memory in copies:
                return copies[memory]
            return value if memory in frozen_memory else value.detach().clone()

        return stage

    def _tensors(self, config: ExportConfig) -> StateDict:
        if config.container == "peft":
            return self.model.owned_state_dict()
        if config.training_state:
            return self.model.state_dict("full") | flat_tensors(self.run_state.items)
        with bounded(self.coordinator.timeout_seconds):  # a converter may ask the other ranks
            return self.model.state_dict("export")

    def _job(self, config: ExportConfig, step: int, base: dict[str, Any] | None, tensors: StateDict) -> ExportJob:
        """Decide how the tensors are exported."""
        writer: FolderExport | DcpExport
        dtype = None if config.dtype is None or config.container == "hf" else getattr(torch, config.dtype)
        if config.container == "hf":
            writer = self.huggingface(config, tensors)
        elif config.container == "dcp":
            if config.format == "torchtitan_weights":
                names = self.transforms.names_in_torchtitan(tensors)
                tensors = {name: value for fqn, value in tensors.items() for name in names[fqn]}
            else:  # a tied one is there under each of its names
                tensors = tensors | {alias: tensors[fqn] for alias, fqn in self.model.tied.items() if fqn in tensors}
            writer = DcpExport(cast_all(tensors, dtype))
            if config.training_state:
                of_model = self.model.extra_state() | self.model.state("full").values
                values = flat_values(self.run_state.items, of_model)
                writer = replace(writer, values=values, digests=state_digests(self.run_state.items))
        else:
            converter = self.model.converter
            adapter = None if converter is None else converter.state_dict_adapter()
            assert adapter is not None, "check() comes first"
            about = adapter.file_config(self.transforms.key_map)
            if base is not None:
                about |= base_settings(base)
            groups = self.transforms.to_file(tensors, converter, dtype)
            writer = FolderExport(groups, PeftFormat(about), buffers=self.model.buffers().keys())
        return ExportJob(config, step, self.folder(config, step), writer, self.made(config))

    def huggingface(self, config: ExportConfig, tensors: StateDict) -> FolderExport:
        """Return the export of these tensors as a Hugging Face folder, under the names of its base."""
        base: Base | None = None
        if (found := self.source()) is not None:
            source, path = found
            base = Base.read(path, self.transforms.key_map, source.initialize, source.ignore)
        elif config.follows_base:
            raise ExportError(
                f"{listed([source.path for source in self.initial_load], ', ')}: no Hugging Face folder is there any "
                'more, and dtype = "original" and max_shard_bytes = "base" are its own: put it back'
            )
        known = self.transforms.key_map if base is None else base.key_map
        table = with_tied_names(
            known, self.model.tied, self.model.linear_weights(), None if base is None else base.tensors
        )
        base = None if base is None else base.without(key for key, _ in table.repeats)
        transforms = replace(self.transforms, key_map=table)
        assets: Place | None = Path(config.assets) if config.assets else transforms.assets
        if assets is None and base is not None and base.path.is_dir():
            assets = base.path
        if assets is None and self.coordinator.rank == 0:
            for source in self.initial_load:
                if self._located(source) is None:
                    logger.warning("%s: not there, so the export gets no tokenizer from it", source.path)
        quantizer = quantizer_of(self.model.converter) if config.quantized else None
        groups: Sequence[FileGroup] = transforms.to_file(tensors, self.model.converter, _dtype(config, base))
        format_ = HuggingFaceFormat(
            config=dict(transforms.hf_config or {}),
            assets=assets,
            max_shard_bytes=0 if config.max_shard_bytes == "base" else config.max_shard_bytes,
            quantizer=quantizer,
            base=base,
            as_base=config.max_shard_bytes == "base",
            verified=transforms.key_map.verified,
            generation_config=transforms.generation_config,
        )
        groups = groups if quantizer is None else quantized(groups, quantizer)
        return FolderExport(groups, format_, buffers=self.model.buffers().keys())

    def source(self) -> tuple[InitialLoadConfig, Place] | None:
        """Return the Hugging Face folder (or file) that the run's weights came from, if there is exactly one."""
        found = [
            (source, path)
            for source in self.initial_load
            if (path := self._located(source)) is not None and (source.format or detect_format(path)) == "hf"
        ]
        return found[0] if len(found) == 1 else None

    def _located(self, source: InitialLoadConfig) -> Place | None:
        """Return where the source lies, or None if it is not there (any more)."""
        try:
            return locate(open_source(source.path, self.store, source.revision))
        except CheckpointNotFoundError:
            return None


@contextlib.contextmanager
def _export_errors(step: int) -> Iterator[None]:
    """Raise any error that is no CheckpointError as an ExportError, such as a failed collective of a converter."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        message = f"export of step {step} could not be prepared, nothing was published: {error}"
        raise ExportError(message) from error


def _dtype(config: ExportConfig, came_from: Base | None) -> FileDtype:
    """Return the dtype of floating tensors in the export."""
    if config.dtype == "original":
        return None if came_from is None else {key: info.dtype for key, info in came_from.tensors.items()}
    return None if config.dtype is None else getattr(torch, config.dtype)


def quantizer_of(converter: ModelConverter | None) -> WeightQuantizer | None:
    """Return the scheme of the converter that quantizes weights, if one does."""
    return None if converter is None else converter.weight_quantizer()


def _memory_of(value: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], TensorInfo]:
    """Return a key of the memory that a tensor shows: converters wrap and unwrap tensors, so their objects differ."""
    local = local_tensor(value)
    return local.data_ptr(), local.shape, tuple(local.stride()), info_of(value)
