"""Replicas: the part of its copies that a rank compares before a save, and how the parts are shared out."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from titan_ckpt.distributed import replicas
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.replicas import SAMPLED_BYTES, SAMPLED_TENSORS
from titan_ckpt.distributed.sharing import tally
from titan_ckpt.geometry.chunks import Chunk, TensorInfo


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
        replicas.check_replicas(tensors, {(0, 1): tuple(sorted(tensors))}, line, mode, step)
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


INFO = TensorInfo((8, 4), torch.float32)
WHOLE = tally([("w", INFO, Chunk.whole(INFO.shape)), ("v", INFO, Chunk.whole(INFO.shape))])


def rows(*starts: int) -> list[tuple[str, TensorInfo, Chunk]]:
    """Return both tensors, the one whole, the other in parts of two rows."""
    parts = [("w", INFO, Chunk((start, 0), (2, 4))) for start in starts]
    return [("v", INFO, Chunk.whole(INFO.shape)), *parts]


def test_parts_of_a_tensor_tally_with_the_whole() -> None:
    """In any order, and cut along any dims; a tensor without dims too."""
    columns = [("v", INFO, Chunk((0, column), (8, 1))) for column in range(4)]
    assert tally(rows(4, 0, 6, 2)) == WHOLE
    assert tally([*columns, *rows(0, 2, 4, 6)[1:]]) == WHOLE
    assert tally([("s", TensorInfo((), torch.int64), Chunk((), ()))])[0] == 8


@pytest.mark.parametrize("starts", [(0, 0, 2, 4), (0, 0, 6, 6), (2, 2, 4, 4), (0, 2, 4, 4)])
def test_parts_that_overlap_do_not(starts: tuple[int, ...]) -> None:
    """As many bytes, and even the same mean place, are not enough."""
    found = tally(rows(*starts))
    assert found[0] == WHOLE[0]
    assert found != WHOLE
