"""torchtitan's Trainer with our checkpointer in place of its own: the same steps, bit for bit, and both ways."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torchtitan.runs import Run, config, distributed, killed, same, steps_in, train
from titan_ckpt import CheckpointError

FSDP, TP = {"data_parallel_shard": 2}, {"tensor_parallel": 2, "data_parallel_shard": 1}
PP = {"pipeline_parallel": 2, "data_parallel_shard": 1}
LLAMA, QWEN = "llama3_debugmodel", "qwen3_debugmodel"
THEIRS, OURS = "theirs", "ours"
"""The dump folders of the runs that torchtitan's checkpointer and ours are compared in."""


@distributed(1)
def _alone(assets: Path, folder: Path, flavour: str, layers: int | None) -> None:
    def run(dump: str, **settings: Any) -> Run:
        return train(config(assets, folder / dump, flavour, recompute=True, layers=layers, **settings))

    theirs = run(THEIRS, titan=False)
    for step in (2, 4):
        shutil.copytree(folder / THEIRS / f"checkpoint/step-{step}", folder / f"run/checkpoint/step-{step}")

    same(theirs, run(OURS, async_mode="async"))
    assert steps_in(folder / OURS) == [2, 4, 6]
    upgraded = run("run", async_mode="async")
    assert len(upgraded.losses) == 2
    same(theirs, upgraded, losses=2)
    assert steps_in(folder / "run") == [2, 4, 6]

    by_path = {"initial_load_path": str(folder / THEIRS / "checkpoint/step-2"), "initial_load_model_only": False}
    run("path", steps=4, last_save_in_dcp=True, **by_path)
    back = run("path", titan=False, folder="dcp")
    assert len(back.losses) == 2
    same(theirs, back, losses=2)
    by_path["initial_load_path"] = str(folder / "path/checkpoint/step-4")
    same(theirs, run("fork", load_only=True, **by_path), losses=2)


@pytest.mark.parametrize(
    ("flavour", "layers"), [(LLAMA, 2), *(pytest.param(f, None, marks=pytest.mark.full) for f in (LLAMA, QWEN))]
)
def test_one_rank_goes_on_either_way(assets: Path, tmp_path: Path, flavour: str, layers: int | None) -> None:
    """6 steps have torchtitan's losses, weights and moments; so has a run that changes its checkpointer half-way.

    From torchtitan's step in the same folder, and by path; from our export of the step with torchtitan's checkpointer;
    and from our own step by path.
    """
    _alone(assets, tmp_path, flavour, layers)


Case = dict[str, Any]
"""Keywords of `config`: degrees of parallelism, an async mode, and the model's layers."""


@distributed(1)
def _seeded(assets: Path, folder: Path, flavour: str, layers: int | None) -> None:
    settings: dict[str, Any] = {"steps": 0, "create_seed_checkpoint": True, "layers": layers}
    for dump in (THEIRS, OURS):
        made = config(assets, folder / dump, flavour, titan=dump == OURS, **settings)
        made.debug.seed = 7  # not that of the runs, whose own initial weights differ then
        train(made, then=lambda trainer: trainer.checkpointer.save(curr_step=0, last_step=True))  # as torchtitan's main


@distributed(2)
def _killed(assets: Path, folder: Path, flavour: str, case: Case) -> None:
    rank = dist.get_rank()

    def made(dump: str, **settings: Any) -> Any:
        return config(assets, folder / dump, flavour, **case | {"async_mode": "disabled"} | settings)

    theirs = train(made(THEIRS, titan=False))
    torch.save(vars(theirs), folder / f"{rank}.pt")
    if rank == 0:
        shutil.copytree(folder / THEIRS / "checkpoint/step-2", folder / "run/checkpoint/step-2")
    dist.barrier()

    upgraded = train(made("run", steps=4, last_save_in_dcp=True))
    assert len(upgraded.losses) == 2
    assert steps_in(folder / "run") == [2, 4]
    back = train(made("run", titan=False, folder="dcp"))
    assert len(back.losses) == 2
    same(theirs, back, losses=2)

    def compare(run: Run) -> None:
        same(theirs, run)
        assert len(run.losses) == 6
        dist.barrier()

    train(made(OURS, steps=7, async_mode=case["async_mode"]), until=6, before_death=compare)


@distributed(2)
def _resumed(assets: Path, folder: Path, flavour: str, case: Case) -> None:
    resumed = train(config(assets, folder / OURS, flavour, **case))
    assert len(resumed.losses) == 2
    same(Run(**torch.load(folder / f"{dist.get_rank()}.pt")), resumed, losses=2)


PINNED, IN_THREAD = {"async_mode": "async_with_pinned_mem"}, {"async_mode": "async"}


@pytest.mark.parametrize(
    ("flavour", "case"),
    [
        pytest.param(LLAMA, {"degrees": FSDP, "layers": 2, **PINNED}, id="small-llama-fsdp"),
        pytest.param(LLAMA, {"degrees": TP, "layers": 2, **IN_THREAD}, id="small-llama-tp"),
        pytest.param(LLAMA, {"degrees": PP, "layers": 4, **IN_THREAD}, id="small-llama-pp"),
        pytest.param(QWEN, {"degrees": FSDP, "layers": 2, **IN_THREAD}, id="small-qwen-fsdp"),
        pytest.param(LLAMA, {"degrees": FSDP, **PINNED}, id="llama-fsdp", marks=pytest.mark.full),
        pytest.param(LLAMA, {"degrees": TP, **IN_THREAD}, id="llama-tp", marks=pytest.mark.full),
        pytest.param(LLAMA, {"degrees": PP, **IN_THREAD}, id="llama-pp", marks=pytest.mark.full),
        pytest.param(QWEN, {"degrees": FSDP, "recompute": True, **PINNED}, id="qwen-fsdp", marks=pytest.mark.full),
        pytest.param(QWEN, {"degrees": TP, **IN_THREAD}, id="qwen-tp", marks=pytest.mark.full),
    ],
)
def test_two_ranks_go_on_either_way_and_after_a_kill(assets: Path, tmp_path: Path, flavour: str, case: Case) -> None:
    """6 steps from a seed of one rank have the bits of 6 steps with torchtitan's checkpointer from a seed of its own.

    A run goes on with our checkpointer, and back with torchtitan's. A run that is killed in the middle of the save of
    its sixth step resumes its fourth, and ends with the same bits.
    """
    layers = case.get("layers")
    _seeded(assets, tmp_path, flavour, layers)
    assert steps_in(tmp_path / OURS) == steps_in(tmp_path / THEIRS) == [0]
    killed(_killed, assets, tmp_path, flavour, case)
    assert steps_in(tmp_path / OURS) == [0, 2, 4]
    _resumed(assets, tmp_path, flavour, case)
    assert steps_in(tmp_path / OURS) == [0, 2, 4, 6]
    if case["degrees"] == FSDP:
        (tmp_path / THEIRS / "checkpoint/step-6/__1_0.distcp").unlink()
        _without_a_shard(assets, tmp_path, flavour, layers)


@distributed(1)
def _without_a_shard(assets: Path, folder: Path, flavour: str, layers: int | None) -> None:
    """Refuse a folder of two ranks that lacks the file of one; then the step before it is taken, without its data."""
    settings: dict[str, Any] = {"load_only": True, "exclude_from_loading": ["dataloader"], "layers": layers}
    with pytest.raises(CheckpointError, match=r"step-6/__1_0\.distcp, needed for .* is missing"):
        train(config(assets, folder / THEIRS, flavour, load_step=6, **settings))
    assert train(config(assets, folder / THEIRS, flavour, steps=4, **settings)).step == 4
