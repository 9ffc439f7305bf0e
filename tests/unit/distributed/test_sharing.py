"""The shares of the ranks make up each whole tensor."""

from __future__ import annotations

import pytest
import torch

from titan_ckpt.distributed.sharing import tally
from titan_ckpt.geometry.chunks import Chunk, TensorInfo

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
