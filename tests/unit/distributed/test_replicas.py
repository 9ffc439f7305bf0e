"""Replicas: the part of its copies that a rank compares before a save."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from titan_ckpt.distributed import replicas
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.replicas import SAMPLED_BYTES, SAMPLED_TENSORS


def read(
    monkeypatch: pytest.MonkeyPatch,
    tensors: dict[str, torch.Tensor],
    step: int,
    mode: Literal["sampled", "full"] = "sampled",
) -> dict[str, int]:
    """Return the bytes that a check reads of each tensor."""
    taken: dict[str, int] = {}
    pieces = replicas._pieces

    def watched(name: str, local: torch.Tensor, budget: int | None, step: int) -> list[torch.Tensor]:
        found = list(pieces(name, local, budget, step))
        taken[name] = sum(piece.nbytes for piece in found)
        return found

    line = Coordinator(0, 1, None, "", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(replicas, "_pieces", watched)
        replicas.check_replicas(tensors, {(0, 1): tuple(sorted(tensors))}, (), line, mode, step)
    return taken


def test_a_sample_is_small_however_many_tensors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save reads a bounded number of 5,000 small tensors, others at other steps; of 3 large ones a bounded part."""
    many = {f"t{number}": torch.zeros(64) for number in range(5000)}
    seen: set[str] = set()
    for step in range(100, 4100, 100):
        taken = read(monkeypatch, many, step)
        assert len(taken) == SAMPLED_TENSORS
        seen |= taken.keys()
    assert seen == many.keys()
    assert len(read(monkeypatch, many, 1, "full")) == 5000
    large = {name: torch.zeros(4096, 2048) for name in "abc"}
    assert 0.9 * SAMPLED_BYTES < sum(read(monkeypatch, large, 1).values()) <= SAMPLED_BYTES
    assert sum(read(monkeypatch, large, 1, "full").values()) == 3 * 4096 * 2048 * 4
