"""Generators of CUDA devices, with states that torch would give."""

from __future__ import annotations

import pytest
import torch

from titan_ckpt.encoding import typed_json
from titan_ckpt.process import RandomState


def test_the_generators_of_all_devices_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device's state follows the rank to another device; the others' belong to their numbers."""
    states = {i: torch.tensor([i], dtype=torch.uint8) for i in range(3)}
    current = [1]
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: current[0],
        "device_count": lambda: len(states),
        "get_rng_state": lambda i=None: states[current[0] if i is None else i].clone(),
        "set_rng_state": lambda state, i=None: states.update({current[0] if i is None else i: state}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    stored = typed_json.loads(typed_json.dumps(RandomState().state_dict(), "rng"), "rng")
    states |= {i: torch.tensor([9], dtype=torch.uint8) for i in range(3)}
    RandomState().load_state_dict(stored)
    assert [int(states[i]) for i in range(3)] == [0, 1, 2]
    del states[2]
    current[0] = 0
    RandomState().load_state_dict(stored)
    assert [int(states[i]) for i in range(2)] == [1, 1]
