"""torchtitan's Trainer with our checkpointer in place of its own: the same steps, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.runs import config, distributed, same, steps_in, train
from titan_ckpt.testing.ranks import RankError

FSDP, TP = {"data_parallel_shard": 2}, {"tensor_parallel": 2, "data_parallel_shard": 1}


def _equal(assets: Path, folder: Path, flavour: str, mode: str, degrees: dict[str, int] | None = None) -> None:
    theirs = train(config(assets, folder / "theirs", flavour, titan=False, degrees=degrees))
    ours = train(config(assets, folder / "ours", flavour, async_mode=mode, degrees=degrees))
    same(theirs, ours)
    assert steps_in(folder / "ours") == [2, 4, 6]


@distributed(1)
def _equal_alone(assets: Path, folder: Path, flavour: str, mode: str) -> None:
    _equal(assets, folder, flavour, mode)


@distributed(2)
def _equal_on_two(assets: Path, folder: Path, flavour: str, mode: str, degrees: dict[str, int]) -> None:
    _equal(assets, folder, flavour, mode, degrees)


@pytest.mark.parametrize("flavour", ["llama3_debugmodel", "qwen3_debugmodel_non_fused_qkv"])
def test_six_steps_are_torchtitans_own(assets: Path, tmp_path: Path, flavour: str) -> None:
    """Losses, weights and moments of 6 steps are those with torchtitan's checkpointer."""
    _equal_alone(assets, tmp_path, flavour, "async")


@pytest.mark.parametrize(("degrees", "mode"), [(FSDP, "async_with_pinned_mem"), (TP, "disabled")], ids=["fsdp", "tp"])
def test_six_steps_on_two_ranks_are_torchtitans_own(
    assets: Path, tmp_path: Path, degrees: dict[str, int], mode: str
) -> None:
    """Losses, weights and moments of 6 steps on 2 ranks are those with torchtitan's checkpointer."""
    _equal_on_two(assets, tmp_path, "llama3_debugmodel", mode, degrees)


@distributed(2)
def _killed_at_4(assets: Path, folder: Path, flavour: str, degrees: dict[str, int]) -> None:
    def die(trainer: Any) -> None:
        trainer.checkpointer.maybe_wait_for_saving()
        os.kill(os.getpid(), signal.SIGKILL)

    train(config(assets, folder, flavour, async_mode="async", degrees=degrees), until=5, then=die)


@distributed(2)
def _resumed(assets: Path, folder: Path, flavour: str, degrees: dict[str, int]) -> None:
    whole = train(config(assets, folder / "whole", flavour, degrees=degrees))
    resumed = train(config(assets, folder, flavour, async_mode="async", degrees=degrees))
    assert len(resumed.losses) == 2
    same(whole, resumed, losses=2)


@pytest.mark.parametrize("degrees", [FSDP, TP], ids=["fsdp", "tp"])
def test_a_killed_run_goes_on_with_the_same_losses(assets: Path, tmp_path: Path, degrees: dict[str, int]) -> None:
    """A run killed in its fifth step resumes its fourth, and ends with the bits of a run that was not killed."""
    with pytest.raises(RankError):
        _killed_at_4(assets, tmp_path, "qwen3_debugmodel", degrees)
    assert steps_in(tmp_path) == [2, 4]
    _resumed(assets, tmp_path, "qwen3_debugmodel", degrees)
