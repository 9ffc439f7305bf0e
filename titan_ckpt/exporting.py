"""The model as the outside world should see it, in a folder of its own that a resume never meets.

Owns which tensors go into which kind of export, and where. Writing and proving are each format's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.config import ExportConfig
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import ExportError
from titan_ckpt.loading import BASE_RECORD
from titan_ckpt.model_wrapper import ModelWrapper
from titan_ckpt.storage.dcp import export_dcp
from titan_ckpt.storage.huggingface_export import export_huggingface
from titan_ckpt.storage.peft import export_peft
from titan_ckpt.tensors import cast, info_of
from titan_ckpt.transforms import CASTABLE, StateDictTransforms
from titan_ckpt.types import StateDict

logger = logging.getLogger(__name__)


class Exporter:
    """Makes the exports of one run."""

    def __init__(
        self, base_folder: Path, model: ModelWrapper, transforms: StateDictTransforms, coordinator: Coordinator
    ) -> None:
        self._base_folder = base_folder
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
        if problems:
            raise ExportError("checkpoint.export cannot be made: " + "; ".join(problems))
        if any(config.format == "hf" for config in configs):
            self._transforms.to_file(self._model.state_dict("base"), None, None)
        if any(config.format == "peft" for config in configs):
            self._transforms.to_file(self._model.owned_state_dict(), self._model.hooks, None)

    def is_there(self, config: ExportConfig, step: int) -> bool:
        """Say whether this export was published before, as rank 0 sees it. Collective."""
        folder = self._folder(config, step)
        found = bool(self._coordinator.broadcast("export-there", folder.is_dir()))
        if found:
            logger.info("export %s is there already", folder)
        return found

    def _folder(self, config: ExportConfig, step: int) -> Path:
        name = f"step-{step}-peft" if config.format == "peft" else f"step-{step}"
        return self._base_folder / config.folder / name

    def export(self, config: ExportConfig, step: int, base: dict[str, Any] | None) -> Path:
        """Write, prove and publish one export, and return its folder. Collective.

        Raises: ExportError; OSError; PeerError. Nothing is left under the folder's name then.
        """
        dtype: torch.dtype | None = None if config.dtype is None else getattr(torch, config.dtype)
        folder = self._folder(config, step)
        write: Callable[[], object] | None = None
        error: BaseException | None = None
        try:
            write = self._planned(config, folder, dtype, base)
        except Exception as e:
            error = e
        self._coordinator.barrier("export-plan", error)
        assert write is not None
        write()
        logger.info("exported %s to %s", config.format, folder)
        return folder

    def _planned(
        self, config: ExportConfig, folder: Path, dtype: torch.dtype | None, base: dict[str, Any] | None
    ) -> Callable[[], object]:
        """Decide what the export holds, and return what writes it."""
        transforms, hooks = self._transforms, self._model.hooks
        if config.format == "dcp":
            return partial(export_dcp, folder, self._under_own_names(dtype), self._coordinator)
        if config.format == "hf":
            return partial(
                export_huggingface,
                folder,
                transforms.to_file(self._model.state_dict("export"), hooks, dtype),
                config=dict(transforms.hf_config or {}),
                assets=Path(config.assets) if config.assets else transforms.assets,
                max_shard_bytes=config.max_shard_bytes,
                coordinator=self._coordinator,
            )
        adapter = None if hooks is None else hooks.state_dict_adapter()
        assert adapter is not None, "check() comes first"
        file_config = adapter.file_config(transforms.key_map)
        if base is not None:
            file_config |= {"base_model_name_or_path": base["path"], "revision": base["revision"], BASE_RECORD: base}
        groups = transforms.to_file(self._model.owned_state_dict(), hooks, dtype)
        return partial(export_peft, folder, groups, config=file_config, coordinator=self._coordinator)

    def _under_own_names(self, dtype: torch.dtype | None) -> StateDict:
        """Return the export's tensors under native names, floating ones cast when they are written."""
        tensors = self._model.state_dict("export")
        if dtype is None:
            return tensors
        return {n: cast(v, dtype) if info_of(v).dtype in CASTABLE else v for n, v in tensors.items()}
