"""The progress of a training run."""

from __future__ import annotations

from typing import Any


class TrainState:
    """The progress of a run; saved in its checkpoints."""

    def __init__(self) -> None:
        self.step = 0
        self.num_tokens = 0
        self.seconds = 0.0
        """Time spent in steps since step 0, over all resumes; equal on every rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "num_tokens": self.num_tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.num_tokens, self.seconds = (state_dict[name] for name in ("step", "num_tokens", "seconds"))
