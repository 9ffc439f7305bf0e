"""Random number generator state of this process: Python, NumPy, torch CPU and the current accelerator."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """The process's generators as one Stateful; per rank, never shared between ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return every generator's state; tensors and tuples, for typed JSON."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002 - the legacy global generator is what libraries draw from
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator; a CUDA state is left out where there is no CUDA, and the other way round."""
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])  # noqa: NPY002
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])

    def reseed(self, seed: int) -> None:
        """Start every generator afresh: one that is left alone would repeat what it drew at the start of the run."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
