"""State of this process's random number generators: Python, NumPy, and torch on the CPU and on all CUDA devices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
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
            if others := _other_devices():  # this process trains on several; their numbers are their names
                state["cuda_others"] = {str(i): torch.cuda.get_rng_state(i) for i in others}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator; those of CUDA devices only if both the state and this process have them.

        The state of the device that was the current one goes to the one that is now: a rank may get another device.
        """
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])  # noqa: NPY002
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])
            others = state_dict.get("cuda_others", {})
            for i in _other_devices():
                if str(i) in others:
                    torch.cuda.set_rng_state(others[str(i)], i)

    def reseed(self, seed: int) -> None:
        """Seed every generator; a generator left as it is would repeat the numbers of the start of the run."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)


def is_random(value: Any) -> bool:
    """Return whether an object is a generator of random numbers, of Python, NumPy or torch."""
    return isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState))


def get_random(generator: Any) -> Any:
    """Return the state of one generator, as typed JSON encodes it."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_random(generator: Any, state: Any) -> None:
    """Set the state of one generator."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


@contextmanager
def generators_kept() -> Iterator[RandomState]:
    """Put the generators back after a block that draws from them or sets them."""
    random_state = RandomState()
    before = random_state.state_dict()
    try:
        yield random_state
    finally:
        random_state.load_state_dict(before)


def _other_devices() -> list[int]:
    """Return the numbers of the visible CUDA devices except the current one. A generator's state takes no memory."""
    current = torch.cuda.current_device()
    return [i for i in range(torch.cuda.device_count()) if i != current]
