"""Exports: the model in a format for other programs, in folders that resuming never reads.

Owns which tensors go into which kind of export, and the folder. Each format writes and proves its own files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan_ckpt import policy
from titan_ckpt.components.files import MODEL
from titan_ckpt.config import ExportConfig, InitialLoadConfig
from titan_ckpt.disk import posix
from titan_ckpt.disk.unpublished_folder import StagedFolder
from titan_ckpt.distributed.coordinator import Coordinator, bounded
from titan_ckpt.errors import CheckpointError, ConverterError, ExportError, listed
from titan_ckpt.formats.dcp.dcp import export_dcp
from titan_ckpt.formats.huggingface.export import OUTPUTS, Base, HuggingFaceExport
from titan_ckpt.formats.huggingface.peft import export_peft
from titan_ckpt.formats.huggingface.reader import TIED
from titan_ckpt.formats.open import detect_format
from titan_ckpt.formats.publish.record import remove_record, why_foreign, write_record
from titan_ckpt.geometry.chunks import LazyTensor, Stage, TensorInfo, can_freeze, frozen, info_of, local_tensor
from titan_ckpt.types import ModelHooks, PlacesTensors, StateDict
from titan_ckpt.weights.identity import BASE_RECORD
from titan_ckpt.weights.quantise import QuantisesWeights, WeightQuantiser, quantised
from titan_ckpt.weights.transforms import StateDictTransforms, with_tied_names
from titan_ckpt.weights.wrapper import ModelWrapper
from titan_ckpt.weights.write_view import FileDtype, cast_all

logger = logging.getLogger(__name__)

_Write = Callable[[Coordinator], None]
"""Writes, proves and publishes one export or several; exchanges with the other ranks by the Coordinator. Collective."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """Makes the exports of one run."""

    _base_folder: Path
    _model: ModelWrapper
    _transforms: StateDictTransforms
    _coordinator: Coordinator
    _initial_load: Sequence[InitialLoadConfig] = ()
    """The sources of the base; an export may take over the dtypes and file layout of the base."""
    _left: set[Path] = field(default_factory=set)
    """Folders that retention leaves, because they are not as this run published them; each was logged."""

    def check(self, configs: Sequence[ExportConfig]) -> None:
        """Check before training that every export can be made. Collective.

        Raises: ExportError listing every export that cannot be made; KeyMapError for names without a file key.
        """
        if not configs:
            return
        # a pipeline stage may have no converter-owned keys
        owned = any(self._coordinator.gather("export-owned", bool(self._model.owned_state_dict())))
        error: BaseException | None = None
        try:
            self._check(configs, owned)
        except Exception as e:
            error = e
        self._coordinator.barrier("export-check", error)
        if any(config.format == "peft" for config in configs):
            self._check_placement()

    def _check_placement(self) -> None:
        """Check that other tools will find a place for every tensor of an adapter. Collective: stages hold parts."""
        groups = self._transforms.to_file(self._model.owned_state_dict(), self._model.hooks, None)
        own: Any = {key: list(info.shape) for group in groups for key, info in group.infos.items()}
        parts: list[Any] = self._coordinator.gather("export-shapes", own)
        error: BaseException | None = None
        try:
            adapter: object = None if self._model.hooks is None else self._model.hooks.state_dict_adapter()
            if self._coordinator.rank == 0 and isinstance(adapter, PlacesTensors):
                shapes = {key: shape for part in parts for key, shape in part.items()}
                if faults := adapter.misplaced(self._transforms.key_map, shapes, self._transforms.hf_config):
                    raise ExportError(
                        f"checkpoint.export: peft: {'; '.join(faults)}. Leave these modules out of target_modules, or "
                        'export merged weights (format = "hf")'
                    )
        except Exception as e:
            error = e
        self._coordinator.barrier("export-placement", error)

    def check_folders(self, configs: Sequence[ExportConfig]) -> None:
        """Check after a load that weights, config.json and base agree, as an export itself does. Collective.

        Raises: ExportError; KeyMapError.
        """
        for config in configs:
            if config.format != "hf":
                continue
            export: HuggingFaceExport | None = None
            error: BaseException | None = None
            try:
                export = self._huggingface(config, self._model.state_dict("base"), self._base_of(config))
            except Exception as e:
                error = e
            self._coordinator.barrier("export-folder", error)
            assert export is not None
            export.check(self._coordinator)

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
            raise ExportError("checkpoint.export cannot be made: " + "; ".join(problems))
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
            groups = self._huggingface(config, base.tensors, self._base_of(config)).groups
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
        folder = self._folder(config, step)
        published = bool(self._coordinator.broadcast("export-there", folder.is_dir()))
        if published:
            logger.warning("export %s is there already and stays as it is", folder)
        return published

    def _folder(self, config: ExportConfig, step: int) -> Path:
        return self._base_folder / config.lands_in(step)

    def export(self, config: ExportConfig, step: int, base: dict[str, Any] | None) -> Path:
        """Write, prove and publish one export of the live weights, and return its folder. Collective.

        Raises: ExportError, KeyMapError and PeerError; nothing is published then.
        """
        write: _Write | None = None
        error: BaseException | None = None
        try:
            write = self._planned(config, step, base, self._tensors(config))
        except Exception as e:
            error = _typed(e, step)
        self._coordinator.barrier("export-plan", error)
        assert write is not None
        write(self._coordinator)
        return self._folder(config, step)

    def stage(
        self,
        configs: Sequence[ExportConfig],
        step: int,
        base: dict[str, Any] | None,
        live: StateDict,
        staged: Mapping[str, LazyTensor],
    ) -> _Write:
        """Return a function that makes these exports from staged copies while training continues. Collective.

        `live`, `staged`: the tensors of a snapshot and their copies. Values that converters compute from other ranks'
        values are gathered in this call. Exports whose values cannot be staged are made in this call, from the live
        weights.
        Raises: ExportError; KeyMapError; PeerError.
        """
        tensors: list[StateDict] = []
        can_wait: list[Any] = []
        error: BaseException | None = None
        try:
            tensors = [self._tensors(config) for config in configs]
            # with several ranks a quantiser gathers each weight by its layout in training
            alone = self._coordinator.world_size == 1
            can_wait = [
                all(map(can_freeze, values.values())) and (alone or not config.quantised)
                for config, values in zip(configs, tensors, strict=True)
            ]
        except Exception as e:
            error = _typed(e, step)
        of_ranks: list[Any] = self._coordinator.gather("export-freeze", can_wait, error)
        writes: list[_Write] = []
        now: list[ExportConfig] = []
        try:
            stage = self._stage_of(live, staged)
            for config, values, *ranks in zip(configs, tensors, *of_ranks, strict=True):
                if all(ranks):
                    frozen_values = {fqn: frozen(value, stage) for fqn, value in values.items()}
                    writes.append(self._planned(config, step, base, frozen_values))
                else:
                    now.append(config)
        except Exception as e:
            error = _typed(e, step)
        self._coordinator.barrier("export-stage", error)
        for config in now:
            logger.info("export of step %d as %s is made at once: its values cannot be staged", step, config.format)
            self.export(config, step, base)
        return partial(_write_all, writes)

    def _stage_of(self, live: StateDict, staged: Mapping[str, LazyTensor]) -> Stage:
        """Return the Stage (geometry/chunks.py) that maps a live tensor to its staged copy, to itself or to a clone.

        `live`: the tensors that `staged` holds, by the same names. Base parameters without a copy are frozen: a save of
        adapters alone leaves them out. They stand for themselves; any other tensor is cloned.
        """
        copies = {_memory_of(value): staged[name] for name, value in live.items() if name.startswith(MODEL)}
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
        with bounded(self._coordinator.timeout_seconds):  # a converter may ask the other ranks
            return self._model.state_dict("export")

    def _planned(self, config: ExportConfig, step: int, base: dict[str, Any] | None, tensors: StateDict) -> _Write:
        """Decide how the tensors are exported and return the function that writes them."""
        folder, came_from = self._folder(config, step), self._base_of(config)
        transforms, hooks, dtype = self._transforms, self._model.hooks, _dtype(config, came_from)
        write: Callable[..., object]
        if config.format == "dcp":
            assert dtype is None or isinstance(dtype, torch.dtype), "the config says so"
            write = partial(export_dcp, folder, cast_all(tensors, dtype))
        elif config.format == "hf":
            write = partial(self._huggingface(config, tensors, came_from).write, folder)
        else:
            adapter = None if hooks is None else hooks.state_dict_adapter()
            assert adapter is not None, "check() comes first"
            about = adapter.file_config(transforms.key_map)
            if base is not None:
                about |= {"base_model_name_or_path": base["path"], "revision": base["revision"], BASE_RECORD: base}
            write = partial(export_peft, folder, transforms.to_file(tensors, hooks, dtype), config=about)

        def write_and_expire(coordinator: Coordinator) -> None:
            became = "failed"
            try:
                write(coordinator=coordinator)
                became = "is published, and what follows it failed"
                logger.info("exported %s to %s", config.format, folder)
                self._record(config, step, coordinator)
                self._expire(config, step, coordinator)
            except ExportError:
                raise
            except Exception as error:
                raise ExportError(f"export of step {step} to {folder} {became}: {error}") from error

        return write_and_expire

    def _huggingface(self, config: ExportConfig, tensors: StateDict, base: Base | None) -> HuggingFaceExport:
        """Return the export of these tensors as a Hugging Face folder, under the names of its base."""
        table = self._transforms.key_map if base is None else base.key_map
        table = with_tied_names(
            table, self._model.tied, lambda key: key not in OUTPUTS if base is None else key in base.tensors
        )
        transforms = replace(self._transforms, key_map=table)
        assets = Path(config.assets) if config.assets else transforms.assets
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
        source = self._source() if config.format == "hf" else None
        if source is None:
            return None
        return Base.read(Path(source.path), self._transforms.key_map, source.initialise, source.ignore)

    def _record(self, config: ExportConfig, step: int, coordinator: Coordinator) -> None:
        """Record on rank 0 that the run has made this export."""
        if coordinator.rank == 0:
            try:
                write_record(self._base_folder, config.lands_in(step))
            except OSError as error:
                logger.warning("%s is not recorded, so it never expires: %s", self._folder(config, step), error)

    def _expire(self, config: ExportConfig, step: int, coordinator: Coordinator) -> None:
        """Remove interval exports that are no longer kept. Collective."""
        error: BaseException | None = None
        try:
            if coordinator.rank == 0 and config.keep is not None:
                for expired in policy.expired_exports(self._own_steps(config), step, config):
                    StagedFolder.discard(self._folder(config, expired))
                    remove_record(self._base_folder, config.lands_in(expired))
                    logger.info("export of step %d removed: the newest %d are kept", expired, config.keep)
        except Exception as e:
            error = e
        coordinator.barrier("export-expire", error)

    def _own_steps(self, config: ExportConfig) -> list[int]:
        """Return the steps whose exports are as this run published them; other folders of such names are named once."""
        before, after = map(re.escape, Path(config.lands_in()).name.split("N"))
        name = re.compile(rf"{before}(0|[1-9][0-9]*){after}")
        matches = map(name.fullmatch, posix.list_folder(self._base_folder / config.folder))
        foreign = {n: why_foreign(self._base_folder, config.lands_in(n)) for n in (int(m[1]) for m in matches if m)}
        left = {self._folder(config, step): why for step, why in foreign.items() if why}
        if new := [f"{path} ({why})" for path, why in left.items() if path not in self._left]:
            logger.warning("retention of exports leaves what is not as this run published it: %s", ", ".join(new))
        self._left.update(left)
        return [step for step, why in foreign.items() if why is None]

    def _source(self) -> InitialLoadConfig | None:
        """Return the Hugging Face folder (or file) that the run's weights came from, if there is exactly one."""
        there = [(source, Path(source.path)) for source in self._initial_load if Path(source.path).exists()]
        sources = [source for source, path in there if (source.format or detect_format(path)) == "hf"]
        return sources[0] if len(sources) == 1 else None


def _write_all(writes: Sequence[_Write], coordinator: Coordinator) -> None:
    """Make every export, even after one has failed. Raises: the first error."""
    first: Exception | None = None
    for write in writes:
        try:
            write(coordinator)
        except Exception as error:
            if first is not None:
                logger.exception("another export failed")
            first = first or error
    if first is not None:
        raise first


def _typed(error: Exception, step: int) -> CheckpointError:
    """Return a CheckpointError as it is; wrap any other in ExportError, such as a failed collective of a converter."""
    if isinstance(error, CheckpointError):
        return error
    made = ExportError(f"export of step {step} could not be prepared, nothing was published: {error}")
    made.__cause__ = error
    return made


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
