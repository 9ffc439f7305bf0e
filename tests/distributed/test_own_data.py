"""D8 on ranks: data of one's own that ends, and a model of no tokens; each over a kill, and on other ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from tests.dit import Pictures
from tests.forked import Program
from tests.tiny_run import losses, rows, write_toml
from tests.world import on_ranks, tensors, whole
from titan_ckpt.testing import RankError
from titan_ckpt.training.callbacks import Callback
from titan_ckpt.training.run_file import read_run
from titan_ckpt.training.trainer import Trainer

MEASURED = ("loss", "grad_norm", "num_tokens")
CONSTANT = {"kind": "constant", "warmup_ratio": 0.0}


class Kill(Callback):
    """Kills every rank within a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, trainer: Trainer, index: int) -> None:
        if trainer.state.step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Share(IterableDataset[Any]):
    """A share of the pictures that ends, on each rank after a number of its own."""

    def __init__(self, rank: int, nums: list[int]) -> None:
        self.rank, self.num, self.next = rank, nums[rank], 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.num:
            self.next += 1
            yield Pictures()[2 * self.next + self.rank]
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


def diffusion(folder: Path, nums: list[int] | None = None) -> None:
    """Write the run file of three epochs over 21 pictures, in steps of 8, the last of 7; or of shares that end."""
    folder.mkdir(exist_ok=True)
    own: dict[str, Any] = {"dataset": f"{__name__}:Share", "settings": {"nums": nums}}
    length = {"steps": 9} if nums else {"steps": None, "epochs": 3}
    write_toml(
        folder,
        model={"flavor": None, "name": "tests.dit:DiT", "settings": {"depth": 2}},
        data={"tokenizer": None, **(own if nums else {"dataset": "tests.dit:Pictures", "settings": {"num": 21}})},
        training={**length, "batch_size": 2, "global_batch_size": 8, "log_interval": 5 if nums else 1},
        checkpoint={"save": {"interval": 3}, "export": [{"format": "hf"}]},
        schedule=CONSTANT,
    )


def train(folder: Path, kill_in: int | None = None) -> None:
    """Train it, and keep the last step, the number of pictures and the weights."""
    trainer = Trainer(*read_run(str(folder / "run.toml"), []), callbacks=[Kill(kill_in)] if kill_in else [])
    state = trainer.run()
    assert trainer.exit_code == 0
    weights = {name: whole(value) for name, value in trainer.model.state_dict().items()}
    if trainer.ranks.rank == 0:
        torch.save((state.step, state.num_tokens, weights), folder / "trained.pt")


@pytest.mark.parametrize("ranks", [1, 2])
def test_d8_a_diffusion_transformer_trains_is_killed_resumes_bit_for_bit_and_is_exported(
    tmp_path: Path, ranks: int
) -> None:
    """From a run file alone, on map-style pictures; its noise is that of the uninterrupted run."""
    for folder in ("whole", "cut"):
        diffusion(tmp_path / folder)
    on_ranks(ranks, train, tmp_path / "whole")
    if ranks == 1:
        program = Program(train, tmp_path / "cut", 5, output=tmp_path / "log")
        assert program.wait(60) == -signal.SIGKILL, program.text()
    else:
        with pytest.raises(RankError, match="SIGKILL"):
            on_ranks(ranks, train, tmp_path / "cut", kill_in=5)
    on_ranks(ranks, train, tmp_path / "cut")
    step, num_pictures, weights = torch.load(tmp_path / "whole" / "trained.pt")
    again = torch.load(tmp_path / "cut" / "trained.pt")
    assert (step, num_pictures) == again[:2] == ((8, 63) if ranks == 1 else (9, 66))
    assert all(torch.equal(weights[name], again[2][name]) for name in weights) and weights.keys() == again[2].keys()
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert sum(losses(tmp_path / "whole")[-3:]) < sum(losses(tmp_path / "whole")[:3])
    exported = tensors(tmp_path / "cut" / "run" / "exports" / f"step-{step}")
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert (tmp_path / "cut" / "run" / "checkpoints" / f"step-{step}").is_dir()


@pytest.mark.parametrize("ranks", [1, 2])
def test_d8_data_that_ends_ends_the_run_on_all_ranks_at_a_last_step(tmp_path: Path, ranks: int) -> None:
    """It is saved, logged and exported as the last of so many steps; with more data the run goes on bit for bit."""
    short, long = ([18], [24]) if ranks == 1 else ([12, 9], [12, 12])
    for folder, nums in (("whole", long), ("cut", short)):
        diffusion(tmp_path / folder, nums)
        on_ranks(ranks, train, tmp_path / folder)
    run = tmp_path / "cut" / "run"
    last = 3 if ranks == 1 else 2
    for _ in range(2):  # another start of a run that has ended changes nothing
        assert [path.name for path in sorted((run / "checkpoints").glob("step-*"))] == [f"step-{last}"]
        assert [path.name for path in (run / "exports").iterdir()] == [f"step-{last}"]
        assert [row["step"] for row in rows(tmp_path / "cut")] == [1, last]
        step, num_pictures, _ = torch.load(tmp_path / "cut" / "trained.pt")
        assert (step, num_pictures) == (last, 18 if ranks == 1 else 16)
        on_ranks(ranks, train, tmp_path / "cut")
    diffusion(tmp_path / "cut", long)
    on_ranks(ranks, train, tmp_path / "cut")
    whole_run, again = (torch.load(tmp_path / name / "trained.pt") for name in ("whole", "cut"))
    assert whole_run[:2] == (3, 24) and again[:2] == ((4, 24) if ranks == 1 else (3, 24))
    if ranks == 2:  # else the last step of the shorter data had fewer pictures
        assert all(torch.equal(again[2][name], value) for name, value in whole_run[2].items())


class Sentences(Dataset[Any]):
    """Seven sequences of tokens."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, number: int) -> Any:
        return {"tokens": torch.arange(16) + number, "labels": torch.arange(1, 17) + number}


def pipeline(folder: Path, ranks: int) -> None:
    """Write the run file of two epochs over them, in steps of four, the last of two."""
    folder.mkdir()
    write_toml(
        folder,
        model={"flavor": "debug-2m"},
        data={"tokenizer": None, "dataset": f"{__name__}:Sentences"},
        training={"steps": None, "epochs": 2, "batch_size": 2, "accumulation": 2, "log_interval": 1},
        parallel={"pipeline_parallel": ranks} if ranks > 1 else {},
        checkpoint={"save": {"interval": 3}},
        schedule=CONSTANT,
    )


def test_d8_the_last_step_of_data_that_ends_is_taken_by_a_pipeline_too(tmp_path: Path) -> None:
    """Sequences without a loss fill it: its loss and its tokens are those of one rank, also after a resume."""
    for name, ranks in (("one", 1), ("whole", 2), ("cut", 2)):
        pipeline(tmp_path / name, ranks)
    on_ranks(1, train, tmp_path / "one")
    on_ranks(2, train, tmp_path / "whole")
    with pytest.raises(RankError, match="SIGKILL"):
        on_ranks(2, train, tmp_path / "cut", kill_in=4)
    on_ranks(2, train, tmp_path / "cut")
    one, both, again = (torch.load(tmp_path / name / "trained.pt") for name in ("one", "whole", "cut"))
    assert one[:2] == both[:2] == again[:2] == (4, 2 * 7 * 16)
    assert all(torch.equal(both[2][name], value) for name, value in again[2].items())
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for alone, of_stages in zip(rows(tmp_path / "one"), rows(tmp_path / "whole"), strict=True):
        assert [of_stages[name] for name in MEASURED] == pytest.approx([alone[name] for name in MEASURED], rel=1e-4)
