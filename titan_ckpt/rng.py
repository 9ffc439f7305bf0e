"""State of this process's random number generators: Python, NumPy, torch CPU and the current CUDA device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """All generators of the process as one Stateful; every rank has its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return every generator's state as tensors and tuples, which typed JSON encodes."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002 - the legacy global generator is what libraries draw from
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator; CUDA's only if both the state and this process have it."""
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])  # noqa: NPY002
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])

    def reseed(self, seed: int) -> None:
        """Seed every generator; a generator left as it is would repeat the numbers of the start of the run."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
