"""Runs of torchtitan's Trainer that are killed at random moments end with the bits of a run that never was.

TITAN_CKPT_SOAK=1 kills each layout of ranks 40 times.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torchtitan.runs import Run, config, distributed, same, steps_in, train
from titan_ckpt import StopConfig
from titan_ckpt.integrations.torchtitan import TitanCheckpointer
from titan_ckpt.testing.ranks import RankError

KILLS = int(os.environ.get("TITAN_CKPT_SOAK", 0)) * 40 or 2
STEPS = 10 if KILLS > 2 else 6
Case = dict[str, Any]


def _config(assets: Path, folder: Path, case: Case) -> Any:
    stop = StopConfig(grace_seconds=1.0)  # the other ranks of a killed one wait for it this long
    flavour, settings = case.get("flavour", "llama3_debugmodel"), {k: v for k, v in case.items() if k != "flavour"}
    return config(assets, folder, flavour, steps=STEPS, layers=2, interval=1, keep_latest_k=2, stop=stop, **settings)


def _whole(assets: Path, folder: Path, case: Case) -> None:
    """Train without a kill, and keep what it computed and how long a step took."""
    begun: list[float] = []
    _before("save", 0, lambda: begun.append(time.monotonic()))
    run = train(_config(assets, folder / "whole", case))
    torch.save((vars(run), (time.monotonic() - begun[0]) / (STEPS - 1)), folder / f"{dist.get_rank()}.pt")


def _round(assets: Path, folder: Path, case: Case, seed: int | None) -> None:
    """Train from the newest step on, to a kill at a moment that the seed draws; without a seed to the end.

    The moment is in one of the steps that are left, or in the load before them, however fast the machine is.
    """
    rank = dist.get_rank()
    computed, seconds = torch.load(folder / f"{rank}.pt")
    if seed is not None:
        drawn = random.Random(seed)
        step = drawn.randrange(STEPS - max(steps_in(folder / "run"), default=0))
        moment, victims = drawn.uniform(0, seconds), drawn.choice([[*range(dist.get_world_size())], None])
        if rank in (victims or [drawn.randrange(dist.get_world_size())]):
            timer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL))
            _before("save" if step else "load", max(step - 1, 0), timer.start)
    resumed = train(_config(assets, folder / "run", case))
    same(Run(**computed), resumed, losses=len(resumed.losses))


def _before(name: str, calls: int, act: Callable[[], object]) -> None:
    """Act once, before the checkpointer's method is called for the first time after so many calls."""
    method, made = getattr(TitanCheckpointer, name), iter(range(calls + 1))

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(made, None) == calls:
            act()
        return method(self, *args, **kwargs)

    setattr(TitanCheckpointer, name, called)


@distributed(2)
def _whole_on_2(assets: Path, folder: Path, case: Case) -> None:
    _whole(assets, folder, case)


@distributed(4)
def _whole_on_4(assets: Path, folder: Path, case: Case) -> None:
    _whole(assets, folder, case)


@distributed(2)
def _round_on_2(assets: Path, folder: Path, case: Case, seed: int | None) -> None:
    _round(assets, folder, case, seed)


@distributed(4)
def _round_on_4(assets: Path, folder: Path, case: Case, seed: int | None) -> None:
    _round(assets, folder, case, seed)


def _shards(degree: int, **degrees: int) -> dict[str, int]:
    return {"data_parallel_shard": degree} | degrees


LAYOUTS: dict[str, Case] = {
    "pp": {"degrees": _shards(1, pipeline_parallel=2), "async_mode": "async"},
    "cp": {"degrees": _shards(1, context_parallel=2), "async_mode": "async_with_pinned_mem"},
    "hsdp": {"degrees": _shards(2, data_parallel_replicate=2), "async_mode": "async"},
    "pp-fsdp": {"degrees": _shards(2, pipeline_parallel=2), "async_mode": "async_with_pinned_mem"},
    "cp-fsdp": {"degrees": _shards(2, context_parallel=2), "async_mode": "disabled"},
    "experts": {
        "degrees": _shards(2, expert_parallel=2),
        "async_mode": "async_with_pinned_mem",
        "flavour": "qwen3_debugmodel_moe_param_groups",
    },
}
OFTEN = ("pp", "cp", "hsdp")
"""Layouts that every run of the tests kills; a full run and a soak kill all."""


@pytest.mark.timeout(14400 if KILLS > 2 else 600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full) for name in LAYOUTS]
)
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(
    assets: Path, tmp_path: Path, name: str
) -> None:
    """All ranks at once, or one whose peers end with an error: losses, weights, moments and counters are equal."""
    case = LAYOUTS[name]
    on_4 = 4 in (case["degrees"].get("data_parallel_replicate", 1) * 2, *([4] if name.endswith("-fsdp") else []))
    whole, one_round = (_whole_on_4, _round_on_4) if on_4 else (_whole_on_2, _round_on_2)
    whole(assets, tmp_path, case)
    path = tmp_path / "run"
    resumable = 0
    for seed in range(5 * KILLS):
        if resumable == KILLS:
            break
        if STEPS in steps_in(path):  # it has come to its end: the next one begins anew
            shutil.rmtree(path)
        _let_die(one_round, assets, tmp_path, case, seed)
        resumable += 0 < max(steps_in(path), default=0) < STEPS
    assert resumable == KILLS
    one_round(assets, tmp_path, case, None)


def _let_die(one_round: Callable[..., None], *arguments: Any) -> None:
    """Let a round end by a kill, if no rank has found other bits."""
    try:
        one_round(*arguments)
    except RankError as error:
        if "ended by SIGKILL" not in str(error) or "in same" in str(error):
            raise
