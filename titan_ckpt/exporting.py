"""The model as the outside world should see it, in a folder of its own that a resume never meets.

Owns which tensors go into which kind of export, and where. Writing and proving are each format's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.config import ExportConfig, InitialLoadConfig
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import ConverterError, ExportError
from titan_ckpt.loading import BASE_RECORD
from titan_ckpt.model_wrapper import ModelWrapper
from titan_ckpt.quantising import QuantisesWeights, WeightQuantiser, quantised
from titan_ckpt.storage import detect_format
from titan_ckpt.storage.dcp import export_dcp
from titan_ckpt.storage.huggingface import TIED
from titan_ckpt.storage.huggingface_export import Base, export_huggingface
from titan_ckpt.storage.peft import export_peft
from titan_ckpt.tensors import cast, info_of
from titan_ckpt.transforms import CASTABLE, FileDtype, StateDictTransforms
from titan_ckpt.types import ModelHooks, StateDict

logger = logging.getLogger(__name__)


class Exporter:
    """Makes the exports of one run."""

    def __init__(
        self,
        base_folder: Path,
        model: ModelWrapper,
        transforms: StateDictTransforms,
        coordinator: Coordinator,
        initial_load: Sequence[InitialLoadConfig] = (),
    ) -> None:
        """`initial_load`: where the base came from, which an export is compared with."""
        self._base_folder = base_folder
        self._initial_load = initial_load
        self._model = model
        self._transforms = transforms
        self._coordinator = coordinator

    def check(self, configs: Sequence[ExportConfig]) -> None:
        """Find before training what would make an export fail after it. Collective.

        Raises: ExportError listing every export that cannot be made; KeyMapError for names without a file key.
        """
        if not configs:
            return
        owned = self._owned_anywhere()
        error: BaseException | None = None
        try:
            self._check(configs, owned)
        except Exception as e:
            error = e
        self._coordinator.barrier("export-check", error)

    def _owned_anywhere(self) -> bool:
        """Say whether any rank has converter-owned keys: a pipeline stage may have none. Collective."""
        return any(self._coordinator.gather("export-owned", bool(self._model.owned_state_dict())))

    def _check(self, configs: Sequence[ExportConfig], owned: bool) -> None:
        problems = []
        hooks = self._model.hooks
        for config in configs:
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
        """Yield why no quantised export can be made; compute no value."""
        try:
            quantiser = _quantiser(self._model.hooks)
            if quantiser is None:
                yield 'quantised: no converter quantises weights; add [[converters]] kind = "qat" or "float8"'
                return
            groups = self._transforms.to_file(self._model.state_dict("base"), None, self._file_dtype(config))
            stored = quantised(groups, quantiser)
        except (ConverterError, ExportError) as error:
            yield f"quantised: {error}"
            return
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
        """Say whether this export was published before, as rank 0 sees it. Collective."""
        folder = self._folder(config, step)
        found = bool(self._coordinator.broadcast("export-there", folder.is_dir()))
        if found:
            logger.warning("export %s is there already and stays as it is", folder)
        return found

    def _folder(self, config: ExportConfig, step: int) -> Path:
        return self._base_folder / config.lands_in(step)

    def export(self, config: ExportConfig, step: int, base: dict[str, Any] | None) -> Path:
        """Write, prove and publish one export, and return its folder. Collective.

        Raises: ExportError; OSError; PeerError. Nothing is left under the folder's name then.
        """
        folder = self._folder(config, step)
        write: Callable[[], object] | None = None
        error: BaseException | None = None
        try:
            write = self._planned(config, folder, base)
        except Exception as e:
            error = e
        self._coordinator.barrier("export-plan", error)
        assert write is not None
        write()
        logger.info("exported %s to %s", config.format, folder)
        return folder

    def _planned(self, config: ExportConfig, folder: Path, base: dict[str, Any] | None) -> Callable[[], object]:
        """Decide what the export holds, and return what writes it."""
        transforms, hooks = self._transforms, self._model.hooks
        if config.format == "hf":
            return self._planned_hf(config, folder)
        dtype = self._file_dtype(config)
        assert dtype is None or isinstance(dtype, torch.dtype), "the config says so"
        if config.format == "dcp":
            return partial(export_dcp, folder, self._under_own_names(dtype), self._coordinator)
        adapter = None if hooks is None else hooks.state_dict_adapter()
        assert adapter is not None, "check() comes first"
        file_config = adapter.file_config(transforms.key_map)
        if base is not None:
            file_config |= {"base_model_name_or_path": base["path"], "revision": base["revision"], BASE_RECORD: base}
        groups = transforms.to_file(self._model.owned_state_dict(), hooks, dtype)
        return partial(export_peft, folder, groups, config=file_config, coordinator=self._coordinator)

    def _planned_hf(self, config: ExportConfig, folder: Path) -> Callable[[], object]:
        transforms = self._transforms
        source = self._source()
        came_from = None if source is None else Base.read(source, transforms.key_map.ignores)
        assets = Path(config.assets) if config.assets else transforms.assets
        return partial(
            export_huggingface,
            folder,
            transforms.to_file(self._model.state_dict("export"), self._model.hooks, self._file_dtype(config)),
            config=dict(transforms.hf_config or {}),
            assets=assets or (source if source is not None and source.is_dir() else None),
            max_shard_bytes=config.max_shard_bytes,
            coordinator=self._coordinator,
            base=came_from,
            as_base=config.file_layout == "base",
            quantiser=_quantiser(self._model.hooks) if config.quantised else None,
        )

    def _file_dtype(self, config: ExportConfig) -> FileDtype:
        """Return what floating tensors become."""
        if config.dtype != "original":
            return None if config.dtype is None else getattr(torch, config.dtype)
        source = self._source()
        assert source is not None, "check() comes first"
        return Base.read(source, self._transforms.key_map.ignores).dtypes

    def _source(self) -> Path | None:
        """Return the Hugging Face folder (or file) that the run's weights came from, if there is exactly one."""
        paths = [(Path(source.path), source.format) for source in self._initial_load]
        found = [p for p, format_ in paths if p.exists() and (format_ or detect_format(p)) == "hf"]
        return found[0] if len(found) == 1 else None

    def _under_own_names(self, dtype: torch.dtype | None) -> StateDict:
        """Return the export's tensors under native names, floating ones cast when they are written."""
        tensors = self._model.state_dict("export")
        if dtype is None:
            return tensors
        return {n: cast(v, dtype) if info_of(v).dtype in CASTABLE else v for n, v in tensors.items()}


def _quantiser(hooks: ModelHooks | None) -> WeightQuantiser | None:
    offers: object = hooks
    return offers.weight_quantiser() if isinstance(offers, QuantisesWeights) else None
