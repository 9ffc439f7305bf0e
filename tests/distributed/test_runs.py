"""D9 on two ranks, and over kills: what a step averages and exchanges, and when parameters are freed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.forked import Program
from tests.tiny_run import Gradients, losses, rows, settings, write_toml
from tests.unit.training.test_runs import CONSTANT, LENGTH, Tiny, epochs
from tests.world import gathered, read_all, whole
from titan_ckpt.errors import ConfigError
from titan_ckpt.models import llama3
from titan_ckpt.models.registry import Architecture
from titan_ckpt.testing import distributed
from titan_ckpt.training.callbacks import Callback
from titan_ckpt.training.data.batch import IGNORED, Batch, collate
from titan_ckpt.training.launch.command import main
from titan_ckpt.training.loss import num_predicted
from titan_ckpt.training.trainer import Trainer


class Kill(Callback):
    """Kills the process at a place of a run."""

    def __init__(self, event: str, step: int, index: int = 0) -> None:
        self.place = (event, step, index)

    def on_substep_end(self, trainer: Trainer, index: int) -> None:
        self._at("substep", trainer.state.step + 1, index)

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._at("epoch", trainer.state.step, 0)

    def _at(self, *place: object) -> None:
        if place == self.place:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder: str, place: tuple[str, int, int]) -> int:
    Tiny(epochs(Path(folder)), callbacks=[Kill(*place)]).run()
    return 0


def test_d9_a_run_by_epochs_is_exact_when_it_is_killed_inside_a_step_and_at_an_epochs_end(tmp_path: Path) -> None:
    """Step 3 holds the end of epoch 0, step 5 that of epoch 1."""
    whole = Tiny(epochs(tmp_path / "whole"))
    whole.run()
    for place in (("substep", 3, 0), ("epoch", 5, 0)):
        program = Program(train_until_killed, str(tmp_path / "cut"), place, output=tmp_path / "log")
        assert program.wait(60) == -signal.SIGKILL, program.text()
    last = Tiny(epochs(tmp_path / "cut"))
    assert last.run().step == 8
    for name in ("loss", "grad_norm", "lr", "num_tokens"):
        assert [row[name] for row in rows(tmp_path / "cut")] == [row[name] for row in rows(tmp_path / "whole")]
    assert all(map(torch.equal, whole.model.parameters(), last.model.parameters()))
    assert last.taken == whole.taken[-len(last.taken) :]


class Uneven(Trainer):
    """Ignores most labels of odd sequences, and in step 2 all of theirs."""

    def build_collate(self) -> Any:
        def uneven(samples: Sequence[Batch]) -> Batch:
            batch = collate(samples)
            if self.ranks.data_rank or (self.ranks.data_size == 1 and self.num_made % 2):
                kept = 3 if self.state.step == 0 else 0
                batch["labels"] = torch.cat([batch["labels"][:, :kept], batch["labels"][:, kept:] * 0 + IGNORED], dim=1)
            self.num_made += 1
            return batch

        self.num_made = 0
        return uneven


class MeanOfMeans(Uneven):
    """Computes on one rank, from a micro-batch for each of two ranks, the mean of the ranks' means."""

    def accumulate_gradients(self, micro_batches: Sequence[Batch], divisor: Any) -> torch.Tensor:
        tokens = [num_predicted(batch) for batch in micro_batches]
        self.factors: Iterator[Any] = iter([divisor / (max(n, 1) * sum(map(bool, tokens))) for n in tokens])
        return super().accumulate_gradients(micro_batches, divisor)

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = super().compute_loss(batch) * next(self.factors)
        return loss


def averaged(folder: Path, ranks: int) -> Any:
    training = {"steps": 2, "batch_size": 1, "global_batch_size": 2, "loss_average": "rank" if ranks == 2 else "token"}
    return settings(folder, training=training, checkpoint={"save": None})


def in_three(folder: Path, name: str, training: Mapping[str, Any] | None = None, **parallel: Any) -> Any:
    """Return the settings of steps of twelve sequences: three micro-batches of two on each of two ranks."""
    return settings(
        folder / name,
        training={"steps": 2, "batch_size": 2, "global_batch_size": 12, **(training or {})},
        parallel=parallel,
        checkpoint={"save": None},
        optimizer={"implementation": "fused"},
    )


class Complete(Callback):
    """Checks that no gradient is left in parts when the optimizer gets it."""

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        for name, parameter in trainer.model.named_parameters():
            if isinstance(parameter, DTensor):
                assert isinstance(parameter.grad, DTensor)
                assert parameter.grad.placements == parameter.placements, (step, name)


class Gathers(TorchDispatchMode):
    """Counts the collectives that gather parameters."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "c10d" in str(func) and "allgather" in str(func).replace("_", "")
        return func(*args, **(kwargs or {}))


RESHARD: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({}, 3 * (2 * 3 + 1)),
    "always": ({"reshard_after_forward": "always"}, 3 * (2 * 3 + 2)),
    "never": ({"reshard_after_forward": "never"}, 4),
}
"""Settings, and how often a step of three micro-batches gathers the parameters of three layers and what is around."""


def reductions(trainer: Trainer) -> int:
    """Return how many sums over all ranks a run takes."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        trainer.run()
    return sums.call_count


class Stop(Callback):
    """Gets a signal in the first micro-batch of step 2, and waits until both ranks know of it."""

    def on_substep_end(self, trainer: Trainer, index: int) -> None:
        if trainer.state.step == 1 and index == 0:
            if trainer.ranks.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            while not trainer.guard._board._due:
                time.sleep(0.01)


def stopped(folder: Path) -> Any:
    return settings(
        folder,
        training={"steps": 3, "batch_size": 1, "accumulation": 3},
        parallel={"reshard_after_forward": "never"},
        checkpoint={"save": {"interval": 10}},
        data={"sequence_length": 8},
        schedule=CONSTANT,
    )


class Loaded(Callback):
    """Writes down the weights that a run starts with."""

    def on_train_begin(self, trainer: Trainer) -> None:
        self.weights = whole({f"model.{n}": p for part in trainer.model_parts for n, p in part.named_parameters()})


SEED: dict[str, Any] = {"fsdp": {}, "tensor": {"tensor_parallel": 2}, "copies": {"data_parallel_replicate": 2}}


@distributed(nproc=2)
def from_the_seed(tmp_path: Path) -> None:
    """Each layout starts from the seed, although its own initial values would be others."""
    stored = read_all(tmp_path / "run/checkpoints/step-0")
    for number, layout in enumerate(SEED.values(), 1):
        config = replace(settings(tmp_path / f"{number}", parallel=layout, training={"steps": 1}), seed=number)
        loaded = Loaded()
        Trainer(config, callbacks=[loaded]).run()
        assert loaded.weights and all(torch.equal(stored[name], value) for name, value in loaded.weights.items())


def test_a5_a_run_of_no_steps_saves_a_seed_for_every_layout(tmp_path: Path) -> None:
    """`--training.steps 0` on one process: step 0 holds the initial model alone, bit for bit what each layout loads."""
    path = write_toml(tmp_path)
    for _ in range(2):  # a second time it is there
        assert main([str(path), "--training.steps", "0"]) == 0
        assert [p.name for p in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-0"]
    stored = read_all(tmp_path / "run/checkpoints/step-0")
    fresh = Loaded()
    Trainer(settings(tmp_path / "fresh", training={"steps": 1}), callbacks=[fresh]).run()
    assert fresh.weights.keys() == stored.keys(), "no optimizer, no schedule"
    assert all(torch.equal(stored[name], value) for name, value in fresh.weights.items())
    for number, _ in enumerate(SEED, 1):
        shutil.copytree(tmp_path / "run", tmp_path / f"{number}/run")
    from_the_seed(tmp_path)
    assert main([str(path), "--training.steps", "1"]) == 0
    assert main([str(path), "--training.steps", "0"]) == 2


def on_a_mesh_of_its_own(model: nn.Module, *arguments: Any) -> Sequence[nn.Module]:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return [model]


NAMELESS: Architecture[Any] = Architecture(
    llama3.Llama3, llama3.Llama3Config.from_hf, {"tiny": llama3.FLAVORS["debug-0.5m"]}, on_a_mesh_of_its_own
)


@distributed(nproc=2)
def run_on_two(tmp_path: Path) -> None:
    """Every run of this file that has two ranks."""
    with pytest.raises(ConfigError, match=r"NAMELESS.* tok_embeddings.*mesh of its own.*ranks\.mesh\(\"fsdp\"\)"):
        Trainer(settings(tmp_path / "nameless", model={"name": f"{__name__}:NAMELESS", "flavor": "tiny"})).run()

    sparse: dict[str, dict[str, Any]]
    sparse = {"model": {"name": "qwen3_moe", "flavor": "debug-1m"}, "parallel": {"tensor_parallel": 2}}
    with pytest.raises(ConfigError, match=r'optimizer\.implementation: "fused" .* which it leaves whole; leave it out'):
        Trainer(settings(tmp_path / "mixed", optimizer={"implementation": "fused"}, **sparse)).run()

    rank = dist.get_rank()
    gradients = Gradients()
    Uneven(averaged(tmp_path / "two", 2), callbacks=[gradients]).run()
    if rank == 0:
        torch.save(gradients.found, tmp_path / "gradients.pt")

    assert reductions(Trainer(in_three(tmp_path, "packed"))) == 2, "one a step"
    seldom = {"steps": 5, "log_interval": 3, "check_gradients": "log"}
    assert reductions(Trainer(in_three(tmp_path, "seldom", seldom))) == 3, "one a log: in steps 1, 3 and 5"
    for check in ("step", "log"):
        tensor = in_three(tmp_path, f"tensor_{check}", seldom | {"check_gradients": check}, tensor_parallel=2)
        Trainer(tensor, callbacks=[Complete()]).run()
    half = Trainer(in_three(tmp_path, "half", {"compute_dtype": "float16"}))
    half.state.loss_scale = 2.0**40
    half.run()
    assert half.state.loss_scale == 2.0 ** (40 - 2), "on both ranks"
    Trainer(in_three(tmp_path, "half_fits", {"compute_dtype": "float16"})).run()
    uneven = Uneven(in_three(tmp_path, "uneven", {"max_grad_norm": 1e-3}))
    assert reductions(uneven) == 2 * 2, "and one that counts labels; clipping takes none"

    for name, (parallel, expected) in RESHARD.items():
        gathers = Gathers()  # type: ignore[no-untyped-call]
        with gathers:
            trainer = Trainer(in_three(tmp_path, name, {"steps": 1}, **parallel, backend="gloo"))
            trainer.run()
        assert trainer.accumulation == 3
        assert gathers.count == expected, name

    by_epochs = Tiny(epochs(tmp_path / "epochs", accumulation=1))
    by_epochs.run()
    taken = gathered(by_epochs.taken)
    order = [number for step in zip(*taken, strict=True) for pair in zip(*step, strict=True) for number in pair]
    assert [sorted(order[first : first + 10]) for first in (0, 10, 20)] == [[*range(10)]] * 3

    Trainer(stopped(tmp_path / "whole")).run()
    cut = Trainer(stopped(tmp_path / "cut"), callbacks=[Stop()])
    cut.run()
    assert cut.guard.stopped is not None and cut.state.step == 1, "the step under way was abandoned"
    assert all(isinstance(p, DTensor) for p in cut.model.parameters()), "its gathered parameters are freed for the save"
    Trainer(stopped(tmp_path / "cut")).run()


def test_d9_two_ranks_average_gather_and_go_on_as_the_settings_say(tmp_path: Path) -> None:
    """Rank averages and global batches are those of one rank; freeing changes no bit; a stop inside a step neither.

    A model on a mesh that gives gradients no norm is refused on both ranks, as one of them would wait for the other.
    """
    run_on_two(tmp_path)

    gradients = Gradients()
    MeanOfMeans(averaged(tmp_path / "one", 1), callbacks=[gradients]).run()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    for found, expected in zip(torch.load(tmp_path / "gradients.pt"), gradients.found, strict=True):
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert [row["num_tokens"] for row in rows(tmp_path / "two")] == [16 + 3, 16]

    for half, full in zip(rows(tmp_path / "half_fits"), rows(tmp_path / "packed"), strict=True):
        assert [half["loss"], half["grad_norm"]] == pytest.approx([full["loss"], full["grad_norm"]], rel=1e-2)
    assert losses(tmp_path / "tensor_log") == losses(tmp_path / "tensor_step"), (
        "partial gradients are summed in all steps"
    )
    one = Trainer(in_three(tmp_path, "alone"))
    one.run()
    assert one.accumulation == 6
    assert losses(tmp_path / "packed") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    for name in RESHARD:
        assert losses(tmp_path / name) == losses(tmp_path / "packed")[:1], name

    alone = Tiny(epochs(tmp_path / "by_one"))
    alone.run()
    assert losses(tmp_path / "epochs") == pytest.approx(losses(tmp_path / "by_one"), rel=1e-5)
    assert [row["num_tokens"] for row in rows(tmp_path / "epochs")] == [4 * LENGTH] * 7 + [2 * LENGTH]
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    own = json.loads((tmp_path / "whole" / "run" / "checkpoints" / "step-3" / "rank-00001.json").read_text())
    assert "states" not in own, "counters are equal on all ranks, so another number of ranks can go on"
