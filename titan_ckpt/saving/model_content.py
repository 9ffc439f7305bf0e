"""ModelContent: a step holds the whole model, its adapter alone, the model without training state, or nothing of it.

Owns the decision, and what follows where training changes a base that was to be left out. Saves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from titan_ckpt.config import CheckpointConfig, ExportConfig
from titan_ckpt.directory.manifest import Kind
from titan_ckpt.errors import ConfigError, ExportSettingError, counted
from titan_ckpt.weights.identity import TrackedBase
from titan_ckpt.weights.wrapper import ModelState, ModelWrapper

logger = logging.getLogger(__name__)


class ModelContent:
    """The model's part of the steps of one run."""

    def __init__(self, config: CheckpointConfig, model: ModelWrapper, base: TrackedBase) -> None:
        self._config, self._model, self._base = config, model, base
        self.is_settled = False
        """Whether the first step since the load has shown if training changes the base; it must not change it later."""

    @property
    def is_adapter_only(self) -> bool:
        """Whether a save leaves out the base, because it is on disk already."""
        return self._base.is_stored and self._config.save is not None and not self._config.save.include_base

    def kind(self, model_only: bool | str) -> Kind:
        """Return the kind of the next step. `model_only`: whether it is the model alone, or in which dtype."""
        if self._config.external:
            return "external"
        return "model" if model_only else "adapter" if self.is_adapter_only else "full"

    def num_bytes(self) -> int:
        """Return this rank's bytes of the model in a step."""
        return 0 if self._config.external else self._model.num_bytes(owned=self.is_adapter_only)

    def state(self, *, room: bool = False) -> ModelState:
        """Return what a step holds. `room`: as memory to fill. Raises: ConfigError for a base that changes late."""
        if self._config.external:
            return ModelState({}, {}, ())
        state = self._model.state("full", room=room)
        if not self.is_adapter_only:
            return state
        if self.is_settled and (changed := self._base.changes()):
            problem = (
                f"save.include_base: training changes {counted(len(changed), 'tensor')} of the base, such as "
                f"{changed[0]}, and saves of the adapter alone lose them: set it to true, and start the "
                "run again from its newest step"
            )
            raise ConfigError([problem], "checkpoint")
        return replace(state, tensors={fqn: value for fqn, value in state.tensors.items() if self._model.owns(fqn)})

    def settle(self) -> None:
        """After the first step, let saves hold the base too if the step has changed it. Collective.

        Raises: ExportSettingError for an export of the adapter alone, which would lose the changes.
        """
        was_left_out = self.is_adapter_only
        changed = self._base.forget_if_changed()
        self.refuse_adapter_of_changed_base(self._config.export, changed)
        if changed and was_left_out:
            logger.warning("%s: every save holds the base, not the adapter alone", _changes(changed))
        self.is_settled = True

    def refuse_adapter_of_changed_base(self, exports: Sequence[ExportConfig], changed: Sequence[str] = ()) -> None:
        """Raises: ExportSettingError for an export of the adapter alone if training changes the base."""
        if self._base.is_changed and any(export.format == "peft" for export in exports):
            raise ExportSettingError(
                f"checkpoint.export: peft: {_changes(changed)}, which an adapter does not hold: export merged weights "
                '(format = "hf"), or start a run whose base is frozen, its buffers included'
            )


def _changes(changed: Sequence[str]) -> str:
    what = f"{counted(len(changed), 'tensor')} of the base, such as {changed[0]}" if changed else "the base"
    return f"training changes {what}"
