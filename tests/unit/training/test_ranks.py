"""A rank: its device, and which of several speaks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from titan_ckpt.errors import ConfigError
from titan_ckpt.training.parallel import ranks
from titan_ckpt.training.parallel.ranks import Ranks, find_device


def test_each_rank_of_a_host_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number, or the only one that its launcher lets it see; never device 0 for want of another."""
    visible = [4]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible[0])
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert find_device("auto") == torch.device("cuda", 3)
    visible[0] = 1
    assert find_device("cuda") == torch.device("cuda", 0)
    visible[0] = 2
    with pytest.raises(ConfigError, match="at most 2 ranks"):
        find_device("auto")


def test_one_rank_of_a_host_is_the_first_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run of the same processes says its error again; without a store each rank says it."""
    store = dist.HashStore()
    monkeypatch.setattr(ranks, "_get_default_store", lambda: store)
    cpu = torch.device("cpu")
    asked = [Ranks(rank, 2, cpu, run=run).is_first("wrong") for run in (0, 1) for rank in (1, 0)]
    assert asked == [True, False, True, False]
    monkeypatch.undo()
    assert Ranks(1, 2, cpu).is_first("wrong")
