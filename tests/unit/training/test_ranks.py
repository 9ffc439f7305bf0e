"""The device of a rank."""

from __future__ import annotations

import pytest
import torch

from titan_ckpt.errors import ConfigError
from titan_ckpt.training.parallel.ranks import find_device


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
