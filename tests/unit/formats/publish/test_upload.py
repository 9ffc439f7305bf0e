"""The exchange of bytes between ranks for files in a bucket, where another rank misbehaves."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from titan_ckpt.formats.publish.upload import Courier


def test_a_rank_whose_writing_is_stuck_holds_up_no_other_for_longer_than_the_timeout() -> None:
    """Its courier goes on with the rounds and never says that it has finished."""

    def exchange(ranks: object, send: torch.Tensor, sizes: object, into: torch.Tensor, *_: object) -> Any:
        into.copy_(send)  # the other rank sends empty frames, too
        if into.dtype == torch.int64:
            into[1, 1] = 0
        return SimpleNamespace(wait=lambda: None)

    coordinator: Any = SimpleNamespace(timeout_seconds=0.1, peers=SimpleNamespace(exchange=exchange))
    courier = Courier(coordinator, (0, 1), lambda number, offset, view: None)
    closing = threading.Thread(target=courier.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
