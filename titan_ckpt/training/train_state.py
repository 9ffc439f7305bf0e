"""How far a training run has come."""

from __future__ import annotations

from typing import Any


class TrainState:
    """How far a run has come; saved with it."""

    def __init__(self) -> None:
        self.step = 0
        self.num_tokens = 0
        self.seconds = 0.0
        """Time spent in steps, by all processes of the run one after the other; the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "num_tokens": self.num_tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.num_tokens = state_dict["step"], state_dict["num_tokens"]
        self.seconds = state_dict["seconds"]
