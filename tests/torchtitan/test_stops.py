"""A run of torchtitan's Trainer that is stopped saves its step, and goes on bit for bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torchtitan.runs import config, distributed, same, steps_in, train
from titan_ckpt.guard import outside_request

# isort: split
from torchtitan.trainer import Trainer

STEPS = 8


def _config(assets: Path, folder: Path, **settings: Any) -> Any:
    return config(assets, folder, steps=STEPS, layers=2, interval=100, last_save_model_only=True, **settings)


def _stopped(assets: Path, folder: Path, case: dict[str, Any]) -> None:
    whole = train(_config(assets, folder / "whole", **case))

    def signalled(step: int) -> None:
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step >= 2:
            time.sleep(0.5)  # a step takes as long as it takes to be noticed

    reasons: list[str | None] = []
    stopped = train(
        _config(assets, folder / "run", **case),
        logged=signalled,
        then=lambda trainer: reasons.append(trainer.checkpointer.stopped),
    )
    assert reasons == [f"SIGTERM to rank {dist.get_world_size() - 1}"]
    assert 2 <= stopped.step < STEPS
    assert steps_in(folder / "run") == [stopped.step]
    resumed = train(_config(assets, folder / "run", **case))
    assert len(resumed.losses) == STEPS - stopped.step
    same(whole, resumed, losses=STEPS - stopped.step)
    if dist.get_world_size() == 1:  # the same Trainer goes on, too
        same(whole, train(_config(assets, folder / "again", **case), logged=signalled, then=Trainer.train), STEPS)


def _raised(assets: Path, folder: Path, case: dict[str, Any]) -> None:
    whole = train(_config(assets, folder / "whole", **case))
    computed = Trainer.forward_backward_step

    def broken(self: Any, **inputs: Any) -> torch.Tensor:
        if self.step == 5:
            raise ZeroDivisionError
        made: torch.Tensor = computed(self, **inputs)
        return made

    Trainer.forward_backward_step = broken
    with pytest.raises(ZeroDivisionError):
        train(_config(assets, folder / "run", **case))
    Trainer.forward_backward_step = computed
    assert steps_in(folder / "run") == [4]
    same(whole, train(_config(assets, folder / "run", **case)), losses=4)


@distributed(1)
def _alone(assets: Path, folder: Path, name: str) -> None:
    BODIES[name](assets, folder, {})


@distributed(2)
def _sharded(assets: Path, folder: Path, name: str) -> None:
    BODIES[name](assets, folder, {"degrees": {"data_parallel_shard": 2}, "async_mode": "async_with_pinned_mem"})


BODIES = {"signal": _stopped, "error": _raised}
WORLDS = {"1": _alone, "2": _sharded}


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_signal_to_one_rank_saves_the_step_and_ends_the_run(assets: Path, tmp_path: Path, ranks: str) -> None:
    """The run's last step would hold the model alone; torchtitan's Trainer ends as after its last step."""
    WORLDS[ranks](assets, tmp_path, "signal")


@pytest.mark.parametrize("ranks", WORLDS)
def test_an_error_on_all_ranks_saves_the_last_completed_step(assets: Path, tmp_path: Path, ranks: str) -> None:
    """The error reaches the user, and the run goes on from the step before it."""
    WORLDS[ranks](assets, tmp_path, "error")


@distributed(1)
def _asked(assets: Path, folder: Path) -> None:
    names: list[str] = []

    def ask(step: int) -> None:
        if step == 2:
            names.append(outside_request.ask(folder / "run"))
        if step >= 2:
            time.sleep(0.5)

    run = train(_config(assets, folder / "run", last_save_in_hf=True), logged=ask)
    assert run.step == STEPS
    answer = outside_request.await_answer(folder / "run", names[0], 10.0)
    assert answer.error is None
    assert steps_in(folder / "run") == [answer.step]
    assert 2 <= answer.step < STEPS


def test_a_request_saves_a_step_that_no_interval_asks_for(assets: Path, tmp_path: Path) -> None:
    """As `titan-ckpt save` makes it; the run goes on, and its last step is an export alone."""
    _asked(assets, tmp_path)
