"""Exporter: decides the exports of a run, and checks before training that all of them can be made.

Owns which tensors go into which kind of export, and the folder. Each format writes and proves its own files.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from titan_ckpt.components.flat_state import flat_tensors, flat_values
from titan_ckpt.components.optimizer import PREFIX as OPTIMIZER
from titan_ckpt.components.run_state import RunState
from titan_ckpt.config import ExportConfig, InitialLoadConfig
from titan_ckpt.disk import posix
from titan_ckpt.distributed.coordinator import Coordinator, bounded
from titan_ckpt.distributed.peer_groups import Ranks
from titan_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConverterError,
    ExportError,
    ExportSettingError,
    listed,
)
from titan_ckpt.exporting.job import ExportJob, FolderWriter
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.formats.huggingface.export import Base, HuggingFaceExport
from titan_ckpt.formats.huggingface.peft import PeftExport
from titan_ckpt.formats.huggingface.reader import TIED
from titan_ckpt.formats.open import detect_format, locate
from titan_ckpt.formats.publish.bucket_record import BucketExports
from titan_ckpt.formats.publish.columns import row_peers
from titan_ckpt.formats.publish.record import MadeExports
from titan_ckpt.formats.publish.upload import everyone
from titan_ckpt.geometry.chunks import LazyTensor, Stage, TensorInfo, can_freeze, frozen, info_of, local_tensor
from titan_ckpt.stores.bucket import BucketPath, Location, open_location
from titan_ckpt.stores.settings import StoreConfig, split_url
from titan_ckpt.stores.source import Source
from titan_ckpt.types import ModelHooks, PlacesTensors, StateDict
from titan_ckpt.weights.identity import base_settings
from titan_ckpt.weights.quantise import QuantisesWeights, WeightQuantiser, quantised
from titan_ckpt.weights.stored_names import MODEL
from titan_ckpt.weights.transforms import FileDtype, StateDictTransforms, cast_all, with_tied_names

logger = logging.getLogger(__name__)


class Exporter:
    """Makes the exports of one run."""

    def __init__(
        self,
        base_folder: Path,
        run: RunState,
        transforms: StateDictTransforms,
        coordinator: Coordinator,
        background: Coordinator,
        initial_load: Sequence[InitialLoadConfig],
        store: StoreConfig | None = None,
    ) -> None:
        """Bind to a run.

        `background`: the line that exports of staged copies are given. `initial_load`: sources of the base, whose
        dtypes and file layout exports may take over. `store`: how buckets are reached.
        """
        self._run = run
        self._base_folder = base_folder
        self._model = run.model
        self._transforms = transforms
        self._coordinator = coordinator
        self._background = background
        self._initial_load = initial_load
        self._store = store or StoreConfig()
        self._on_disk = MadeExports(base_folder)
        self._in_buckets: dict[str, BucketExports] = {}

    def check(self, configs: Sequence[ExportConfig]) -> None:
        """Check before training that every export can be made. Collective.

        Raises: ExportSettingError listing every export that cannot be made; KeyMapError for names without a file key.
        """
        if not configs:
            return
        # a pipeline stage may have no converter-owned keys
        owned = any(self._coordinator.gather("export-owned", bool(self._model.owned_state_dict())))
        self._coordinator.together("export-check", lambda: self._check(configs, owned))
        if any(config.format == "peft" for config in configs):
            self._check_placement()

    def _check_placement(self) -> None:
        """Check that other tools will find a place for every tensor of an adapter. Collective: stages hold parts."""

        def shapes() -> dict[str, list[int]]:
            groups = self._transforms.to_file(self._model.owned_state_dict(), self._model.hooks, None)
            return {key: list(info.shape) for group in groups for key, info in group.infos.items()}

        of_ranks = self._coordinator.gather_results("export-shapes", shapes)

        def check() -> None:
            adapter: object = None if self._model.hooks is None else self._model.hooks.state_dict_adapter()
            if not isinstance(adapter, PlacesTensors):
                return
            everywhere = {key: shape for of_rank in of_ranks for key, shape in of_rank.items()}
            if faults := adapter.misplaced(self._transforms.key_map, everywhere, self._transforms.hf_config):
                raise ExportError(
                    f"checkpoint.export: peft: {'; '.join(faults)}. Leave these modules out of target_modules, or "
                    'export merged weights (format = "hf")'
                )

        self._coordinator.on_rank_0("export-placement", check)

    def check_folders(self, configs: Sequence[ExportConfig], *, fresh: bool) -> None:
        """Check after a load that weights, config.json and base agree, as an export itself does. Collective.

        A bucket is asked whether this run may write, list and delete there.

        `fresh`: the run begins at step 0, so no export that is there is its own; those are logged.
        Raises: ExportError; KeyMapError; StoreError.
        """
        for made in map(self._made, configs):
            if isinstance(made, BucketExports):
                self._coordinator.on_rank_0("export-place", made.check)
        if fresh and configs:

            def steps_there() -> list[str]:
                return [str(self.folder(c, step)) for c in configs for step in self._made(c).steps_there(c)]

            there = self._coordinator.on_rank_0("export-before", steps_there)
            if there and self._coordinator.rank == 0:
                logger.warning(
                    "%s is there from before this run, which will not export over it: move it away, or choose another "
                    "folder",
                    listed(there, ", ", " "),
                )
        for config in configs:
            if config.format == "hf":
                make = partial(self._huggingface, config, "base")
                self._coordinator.together("export-folder", make).check(self._coordinator)

    def _check(self, configs: Sequence[ExportConfig], owned: bool) -> None:
        problems = []
        hooks = self._model.hooks
        state = self._model.state("full")
        whole = {*self._model.memory(), *state.made}
        inside = [fqn for fqn in state.tensors if fqn not in whole]
        for config in configs:
            if config.format != "peft" and inside:
                problems.append(
                    f"{config.format}: weights that are made of other tensors, such as {inside[0]}, are not for other "
                    "programs; export the model before quantising it, or its adapter alone (peft)"
                )
                continue
            if config.format == "hf" and self._transforms.hf_config is None:
                problems.append(
                    "hf: the model has no table to Hugging Face names; give the manager "
                    "sd_transforms=StateDictTransforms(key_map=..., hf_config=...)"
                )
            if config.format == "peft" and not (owned and hooks is not None and hooks.state_dict_adapter() is not None):
                problems.append('peft: no converter owns adapter weights; add [[converters]] kind = "lora"')
            if config.format == "peft" and (trained := self._model.trained_base()):
                problems.append(
                    f"peft: {len(trained)} parameters of the base are trained too, such as {trained[0]}, and an "
                    'adapter does not hold them; freeze them, or export merged weights (format = "hf")'
                )
            if config.names == "torchtitan" and (lacking := self._unknown_to_torchtitan()):
                problems.append(
                    f"dcp: there are no names of torchtitan for {listed(lacking)}; the manager takes them from "
                    "sd_transforms=StateDictTransforms(torchtitan=...)"
                )
            if split_url(config.folder) is None and (why := posix.why_no_folder(self._base_folder / config.folder)):
                problems.append(f"folder: {why}")
            if config.assets is not None and not Path(config.assets).is_dir():
                problems.append(f"assets: {config.assets} is no folder")
            if config.follows_base and self._source() is None:
                problems.append(
                    'dtype = "original" and file_layout = "base" are the base\'s: name its Hugging Face folder, and no '
                    "second one, in [[checkpoint.initial_load]]"
                )
            elif config.quantised:
                problems += self._quantising_problems(config)
        if problems:
            raise ExportSettingError("checkpoint.export cannot be made: " + "; ".join(problems))
        if any(config.format == "hf" for config in configs):
            self._transforms.to_file(self._model.state_dict("base"), None, None)
        if any(config.format == "peft" for config in configs):
            self._transforms.to_file(self._model.owned_state_dict(), self._model.hooks, None)

    def _quantising_problems(self, config: ExportConfig) -> Iterator[str]:
        """Yield the reasons why the quantised export cannot be made, without computing a value."""
        try:
            quantiser = _quantiser(self._model.hooks)
            if quantiser is None:
                yield 'quantised: no converter quantises weights; add [[converters]] kind = "qat" or "float8"'
                return
            base = self._model.state("base")
            groups = self._huggingface(config, base.tensors).groups
            stored = quantised(groups, quantiser)
        except (ConverterError, ExportError) as error:
            yield f"quantised: {error}"
            return
        hidden = [fqn for own in base.own for fqn in own.hidden if quantiser.claims(fqn)]
        if hidden:
            yield (
                f"quantised: the model's own state_dict() stores {listed(hidden, ', ')} in another form, and the "
                "scheme quantises weights as they are trained; leave them out of the converter"
            )
        claimed = sum(quantiser.claims(fqn) for group in groups for fqn in group.fqns)
        if claimed and not any(group.quantised for group in stored):
            yield f"quantised: none of its {claimed} weights has a shape that the scheme can store"
        tied = (self._transforms.hf_config or {}).get("tie_word_embeddings")
        if tied and any(TIED[1] in group.quantised for group in stored):
            yield (
                f"quantised: the output matrix is tied to {TIED[1]}, which is quantised, and was trained as it is; "
                "leave embeddings out of the converter, or untie them"
            )

    def is_there(self, config: ExportConfig, step: int) -> bool:
        """Return whether rank 0 sees that this export was published before. Collective."""
        folder = self.folder(config, step)
        made = self._made(config)
        published = self._coordinator.on_rank_0("export-there", lambda: made.is_there(config.lands_in(step)))
        if published:
            logger.warning("export %s is there already and stays as it is", folder)
        return published

    def folder(self, config: ExportConfig, step: int) -> Location:
        """Return where an export of this step is, or will be."""
        made = self._made(config)
        if isinstance(made, BucketExports):
            return made.root / config.lands_in(step).rpartition("/")[2]
        return self._base_folder / config.lands_in(step)

    def _made(self, config: ExportConfig) -> MadeExports | BucketExports:
        """Return the exports at the place of a config's own."""
        if split_url(config.folder) is None:
            return self._on_disk
        if config.folder not in self._in_buckets:
            root = open_location(config.folder, settings=self._store)
            assert isinstance(root, BucketPath)
            self._in_buckets[config.folder] = BucketExports(root)
        return self._in_buckets[config.folder]

    def export(self, config: ExportConfig, step: int, base: dict[str, Any] | None) -> Location:
        """Write, prove and publish one export of the live weights, and return its folder. Collective.

        Raises: ExportError, KeyMapError and PeerError; nothing is published then.
        """

        def plan() -> ExportJob:
            with _export_errors(step):
                return self._job(config, step, base, self._tensors(config))

        job = self._coordinator.together("export-plan", plan)
        job.run(self._coordinator)
        return job.folder

    def stage(
        self,
        configs: Sequence[ExportConfig],
        step: int,
        base: dict[str, Any] | None,
        live: StateDict,
        staged: Mapping[str, LazyTensor],
    ) -> list[ExportJob]:
        """Return exports of staged copies, to be run while training continues. Collective.

        `live`, `staged`: the tensors of a snapshot and their copies. Values that converters compute from other ranks'
        values are gathered in this call, and the ranks that exchange bytes of a file are connected. Exports whose
        values cannot be staged are made in this call, from the live weights.
        Raises: ExportError; KeyMapError; PeerError.
        """
        tensors: list[StateDict] = []
        # with several ranks a quantiser gathers each weight by its layout in training
        alone = self._coordinator.world_size == 1

        def can_wait() -> list[bool]:
            with _export_errors(step):
                tensors.extend(self._tensors(config) for config in configs)
            return [
                all(map(can_freeze, values.values())) and (alone or not config.quantised)
                for config, values in zip(configs, tensors, strict=True)
            ]

        of_ranks = self._coordinator.gather_results("export-freeze", can_wait)
        waits = [all(answers) for answers in zip(*of_ranks, strict=True)]

        def jobs() -> list[ExportJob]:
            with _export_errors(step):
                stage = self._stage_of(live, staged)
                return [
                    self._job(config, step, base, {fqn: frozen(value, stage) for fqn, value in values.items()})
                    for config, values, wait in zip(configs, tensors, waits, strict=True)
                    if wait
                ]

        made = self._coordinator.together("export-stage", jobs)
        self._background.peers.connect(self._coordinator, lambda: {ranks for job in made for ranks in self._peers(job)})
        for config, wait in zip(configs, waits, strict=True):
            if not wait:
                logger.info("export of step %d as %s is made at once: its values cannot be staged", step, config.format)
                self.export(config, step, base)
        return made

    def _peers(self, job: ExportJob) -> set[Ranks]:
        """Return the groups of ranks that exchange bytes while an export is written."""
        if self._coordinator.world_size == 1:
            return set()
        if isinstance(job.folder, BucketPath):
            return set() if job.config.format == "dcp" else {everyone(self._coordinator)}
        return {*row_peers(job.writer.groups).values()}

    def close(self) -> None:
        """Close the connections of exports in the background."""
        self._background.peers.discard()

    def _stage_of(self, live: StateDict, staged: Mapping[str, LazyTensor]) -> Stage:
        """Return the Stage (geometry/chunks.py) that maps a live tensor to its staged copy, to itself or to a clone.

        `live`: the tensors that `staged` holds, by the same names. Base parameters without a copy are frozen: a save of
        adapters alone leaves them out. They stand for themselves; any other tensor is cloned.
        """
        stored = {name: value for name, value in live.items() if name.startswith((MODEL, OPTIMIZER))}
        copies = {_memory_of(value): staged[name] for name, value in stored.items()}
        parameters = set(self._model.parameter_names().values())
        base = self._model.state_dict("base")
        constant = {_memory_of(value) for fqn, value in base.items() if fqn in parameters}

        def stage(value: torch.Tensor) -> torch.Tensor | LazyTensor:
            if not local_tensor(value).numel():
                return LazyTensor(info_of(value), lambda: (), like=())
            memory = _memory_of(value)
            if memory in copies:
                return copies[memory]
            return value if memory in constant else value.detach().clone()

        return stage

    def _tensors(self, config: ExportConfig) -> StateDict:
        if config.format == "peft":
            return self._model.owned_state_dict()
        if config.training_state:
            return self._model.state_dict("full") | flat_tensors(self._run)
        with bounded(self._coordinator.timeout_seconds):  # a converter may ask the other ranks
            return self._model.state_dict("export")

    def _job(self, config: ExportConfig, step: int, base: dict[str, Any] | None, tensors: StateDict) -> ExportJob:
        """Decide how the tensors are exported."""
        writer: FolderWriter
        if config.format == "hf":
            writer = self._huggingface(config, tensors)
        elif config.format == "dcp":
            tensors = self._dcp_names(config, tensors)
            values = flat_values(self._run, self._model.state("full").values) if config.training_state else {}
            dtype = None if config.dtype is None else getattr(torch, config.dtype)
            writer = DcpExport(cast_all(tensors, dtype), values)
        else:
            hooks, dtype = self._model.hooks, _dtype(config, None)
            adapter = None if hooks is None else hooks.state_dict_adapter()
            assert adapter is not None, "check() comes first"
            about = adapter.file_config(self._transforms.key_map)
            if base is not None:
                about |= base_settings(base)
            writer = PeftExport(self._transforms.to_file(tensors, hooks, dtype), about)
        return ExportJob(config, step, self.folder(config, step), writer, self._made(config))

    def _dcp_names(self, config: ExportConfig, tensors: StateDict) -> StateDict:
        """Return the tensors by the names in a DCP folder, which has a tied one under each of its names."""
        if config.names == "torchtitan":
            names = self._transforms.names_in_torchtitan(tensors)
            return {name: value for fqn, value in tensors.items() for name in names[fqn]}
        return tensors | {alias: tensors[fqn] for alias, fqn in self._model.tied.items() if fqn in tensors}

    def _unknown_to_torchtitan(self) -> list[str]:
        base = self._model.state_dict("base")
        return sorted(base.keys() - self._transforms.names_in_torchtitan(base).keys())

    def _huggingface(self, config: ExportConfig, tensors: StateDict | Literal["base"]) -> HuggingFaceExport:
        """Return the export of these tensors, or of the base, as a Hugging Face folder, under the names of its base."""
        tensors = self._model.state_dict("base") if tensors == "base" else tensors
        base = self._base_of(config)
        known = self._transforms.key_map if base is None else base.key_map
        table = with_tied_names(
            known, self._model.tied, self._model.linear_weights(), None if base is None else base.tensors
        )
        base = None if base is None else base.without(key for key, _ in table.repeats)
        transforms = replace(self._transforms, key_map=table)
        assets: Source | None = Path(config.assets) if config.assets else transforms.assets
        if assets is None and base is not None and base.path.is_dir():
            assets = base.path
        return HuggingFaceExport(
            transforms.to_file(tensors, self._model.hooks, _dtype(config, base)),
            config=dict(transforms.hf_config or {}),
            assets=assets,
            max_shard_bytes=config.max_shard_bytes,
            quantiser=_quantiser(self._model.hooks) if config.quantised else None,
            base=base,
            as_base=config.file_layout == "base",
            verified=transforms.key_map.verified,
        )

    def _base_of(self, config: ExportConfig) -> Base | None:
        """Return what the export takes over from the Hugging Face folder of the base; None without such a folder."""
        found = self._source() if config.format == "hf" else None
        if found is None:
            return None
        source, path = found
        return Base.read(path, self._transforms.key_map, source.initialise, source.ignore)

    def _source(self) -> tuple[InitialLoadConfig, Source] | None:
        """Return the Hugging Face folder (or file) that the run's weights came from, if there is exactly one."""
        found: list[tuple[InitialLoadConfig, Source]] = []
        for source in self._initial_load:
            with contextlib.suppress(CheckpointNotFoundError):
                path = locate(open_location(source.path, settings=self._store))
                if (source.format or detect_format(path)) == "hf":
                    found.append((source, path))
        return found[0] if len(found) == 1 else None


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
        return None if came_from is None else came_from.dtypes
    return None if config.dtype is None else getattr(torch, config.dtype)


def _quantiser(hooks: ModelHooks | None) -> WeightQuantiser | None:
    offers: object = hooks
    return offers.weight_quantiser() if isinstance(offers, QuantisesWeights) else None


def _memory_of(value: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], TensorInfo]:
    """Return a key of the memory that a tensor shows: converters wrap and unwrap tensors, so their objects differ."""
    local = local_tensor(value)
    return local.data_ptr(), local.shape, tuple(local.stride()), info_of(value)
