"""torchtitan's Trainer with our checkpointer in place of its own: the same steps, bit for bit, and both ways."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torchtitan.runs import Run, config, distributed, same, steps_in, train
from titan_ckpt import CheckpointError
from titan_ckpt.testing.ranks import RankError

ALONE: dict[str, int] = {}
FSDP, TP = {"data_parallel_shard": 2}, {"tensor_parallel": 2, "data_parallel_shard": 1}
LLAMA, QWEN = "llama3_debugmodel", "qwen3_debugmodel"
THEIRS, WHOLE = "theirs", "theirs.pt"
"""The dump folder of a run with torchtitan's checkpointer, and the file of what it computed."""


def _both_ways(assets: Path, folder: Path, flavour: str, mode: str, degrees: dict[str, int]) -> None:
    def run(dump: str, **settings: Any) -> Run:
        return train(config(assets, folder / dump, flavour, degrees=degrees, recompute=degrees != TP, **settings))

    theirs = run(THEIRS, titan=False)
    if dist.get_rank() == 0:
        torch.save(vars(theirs), folder / WHOLE)
        for step in (2, 4):
            shutil.copytree(folder / THEIRS / f"checkpoint/step-{step}", folder / f"run/checkpoint/step-{step}")
    dist.barrier()

    same(theirs, run("ours", async_mode=mode))
    assert steps_in(folder / "ours") == [2, 4, 6]
    upgraded = run("run", async_mode=mode)
    assert len(upgraded.losses) == 2
    same(theirs, upgraded, losses=2)
    assert steps_in(folder / "run") == [2, 4, 6]

    if dist.get_rank() == 0:
        shutil.copytree(folder / "ours/checkpoint/step-2", folder / "killed/checkpoint/step-2")
    by_path = {"initial_load_path": str(folder / THEIRS / "checkpoint/step-2"), "initial_load_model_only": False}
    run("path", steps=4, last_save_in_dcp=True, **by_path)
    back = run("path", titan=False, folder="dcp")
    assert len(back.losses) == 2
    same(theirs, back, losses=2)
    by_path["initial_load_path"] = str(folder / "path/checkpoint/step-4")
    if degrees == ALONE:
        same(theirs, run("fork", load_only=True, **by_path), losses=2)


@distributed(1)
def _alone(assets: Path, folder: Path, flavour: str) -> None:
    _both_ways(assets, folder, flavour, "async", ALONE)


@distributed(2)
def _on_two(assets: Path, folder: Path, flavour: str, mode: str, degrees: dict[str, int]) -> None:
    _both_ways(assets, folder, flavour, mode, degrees)


@distributed(2)
def _killed_at_4(assets: Path, folder: Path, flavour: str, degrees: dict[str, int]) -> None:
    def die(trainer: Any) -> None:
        trainer.checkpointer.maybe_wait_for_saving()
        os.kill(os.getpid(), signal.SIGKILL)

    made = config(assets, folder, flavour, async_mode="async", degrees=degrees, recompute=degrees != TP)
    train(made, until=5, then=die)


@distributed(2)
def _resumed(assets: Path, folder: Path, whole: Path, flavour: str, degrees: dict[str, int]) -> None:
    made = config(assets, folder, flavour, async_mode="async", degrees=degrees, recompute=degrees != TP)
    resumed = train(made)
    assert len(resumed.losses) == 2
    same(Run(**torch.load(whole)), resumed, losses=2)


@pytest.mark.parametrize("flavour", [LLAMA, pytest.param(QWEN, marks=pytest.mark.full)])
def test_one_rank_goes_on_either_way(assets: Path, tmp_path: Path, flavour: str) -> None:
    """6 steps have torchtitan's losses, weights and moments; so has a run that changes its checkpointer half-way.

    From torchtitan's step in the same folder, and by path; from our export of the step with torchtitan's checkpointer;
    and from our own step by path.
    """
    _alone(assets, tmp_path, flavour)


@pytest.mark.parametrize(
    ("flavour", "degrees", "mode"),
    [
        pytest.param(QWEN, FSDP, "async_with_pinned_mem", id="qwen-fsdp"),
        pytest.param(LLAMA, TP, "disabled", id="llama-tp"),
        pytest.param(LLAMA, FSDP, "async_with_pinned_mem", id="llama-fsdp", marks=pytest.mark.full),
        pytest.param(QWEN, TP, "disabled", id="qwen-tp", marks=pytest.mark.full),
    ],
)
def test_two_ranks_go_on_either_way_and_after_a_kill(
    assets: Path, tmp_path: Path, flavour: str, degrees: dict[str, int], mode: str
) -> None:
    """As on one rank; and a run that is killed after its fifth step resumes its fourth, and ends with the same bits.

    That run began with our step 2, so that it trains again what was not yet saved.
    """
    _on_two(assets, tmp_path, flavour, mode, degrees)
    killed = tmp_path / "killed"
    with pytest.raises(RankError):
        _killed_at_4(assets, killed, flavour, degrees)
    assert steps_in(killed) == [2, 4]
    _resumed(assets, killed, tmp_path / WHOLE, flavour, degrees)
    if degrees == FSDP:
        (tmp_path / THEIRS / "checkpoint/step-6/__1_0.distcp").unlink()
        _without_a_shard(assets, tmp_path, flavour)


@distributed(1)
def _without_a_shard(assets: Path, folder: Path, flavour: str) -> None:
    """Refuse a folder of two ranks that lacks the file of one; then the step before it is taken, without its data."""
    settings: dict[str, Any] = {"load_only": True, "exclude_from_loading": ["dataloader"]}
    with pytest.raises(CheckpointError, match=r"step-6/__1_0\.distcp, needed for .* is missing"):
        train(config(assets, folder / THEIRS, flavour, load_step=6, **settings))
    assert train(config(assets, folder / THEIRS, flavour, steps=4, **settings)).step == 4
