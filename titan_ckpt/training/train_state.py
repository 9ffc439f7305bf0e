"""The progress of a training run."""

from __future__ import annotations

import math
from typing import Any

_GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale of the loss in float16 is doubled."""
_COUNTS = ("step", "num_tokens", "seconds")
_SCALE = ("loss_scale", "finite_steps")
_SETTINGS = ("optimizer", "schedule", "numerics")
"""Settings of a run that its checkpoints record; `saved_*` has those of the run that saved."""


class TrainState:
    """The progress of a run; saved in its checkpoints."""

    def __init__(self) -> None:
        """Start at step 0."""
        self.step = 0
        self.num_tokens = 0
        self.seconds = 0.0
        """Time spent in steps since step 0, over all resumes, without the end of the newest; equal on every rank."""
        self.loss_scale = 2.0**16
        """Factor of the loss when it is computed in float16."""
        self.finite_steps = 0
        """Number of steps since the scale was changed."""
        self.numerics: dict[str, Any] = {}
        """The settings that the last bits of a step depend on (precision.py), as rank 0 has them."""
        self.saved_numerics: dict[str, Any] = {}
        """Those of the run that saved the checkpoint; empty before a load and in checkpoints without them."""
        self.optimizer: dict[str, Any] = {}
        """The settings of the optimizer by the run file, under their names in its groups."""
        self.saved_optimizer: dict[str, Any] = {}
        """Those of the run that saved the checkpoint; empty before a load and in checkpoints without them."""
        self.schedule: dict[str, Any] = {}
        """The settings that the learning rate depends on, to be compared on a resume."""
        self.saved_schedule: dict[str, Any] = {}
        """The schedule of the run that saved the checkpoint; empty before a load and in checkpoints without one."""

    def has_overflowed(self, grad_norm: float) -> bool:
        """Return whether gradients in float16 have overflowed, so that the step is left out; adjust the loss's scale.

        Where a scale is left to halve; a gradient that is not finite without any stops the run, as in every dtype.
        Source: torch.amp.GradScaler, with its factors.
        """
        is_finite = math.isfinite(grad_norm)
        if self.loss_scale <= 1 and not is_finite:
            return False
        self.finite_steps += 1
        if not is_finite:
            self.loss_scale, self.finite_steps = self.loss_scale / 2, 0
        elif self.finite_steps == _GROWTH_STEPS:
            self.loss_scale, self.finite_steps = self.loss_scale * 2, 0
        return not is_finite

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_COUNTS, *_SCALE, *_SETTINGS)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in _COUNTS:
            setattr(self, name, state_dict[name])
        for name in _SCALE:  # checkpoints of an earlier version have none
            setattr(self, name, state_dict.get(name, getattr(self, name)))
        for name in _SETTINGS:
            setattr(self, f"saved_{name}", dict(state_dict.get(name, {})))
