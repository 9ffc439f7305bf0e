"""A run goes on in another layout of ranks with the data that it would have read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchtitan.runs import config, distributed, same_tensors, train
from tests.world import heard

# isort: split
from torchtitan.trainer import Trainer

Degrees = dict[str, int]
ONE: Degrees = {}
FSDP, HSDP_4, FSDP_4 = (
    {"data_parallel_shard": 2},
    {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    {"data_parallel_shard": 4},
)
TP, PP = ({f"{kind}_parallel": 2, "data_parallel_shard": 1} for kind in ("tensor", "pipeline"))
TP_FSDP, PP_FSDP, CP_FSDP = (
    {f"{kind}_parallel": 2, "data_parallel_shard": 2} for kind in ("tensor", "pipeline", "context")
)


def _read(assets: Path, folder: Path, degrees: Degrees, steps: int) -> None:
    """Train to a step from the newest one, and keep what each data-parallel rank reads."""
    seen: dict[str, list[torch.Tensor]] = {}
    taken = Trainer.train_step

    def noted(self: Any, batches: Any) -> None:
        def kept() -> Any:
            for inputs, labels in batches:
                seen.setdefault(f"{self.step}", []).append(inputs["input"].clone())
                yield inputs, labels

        taken(self, kept())

    Trainer.train_step = noted
    ends: list[tuple[int, int]] = []
    with heard() as lines:
        run = train(
            config(assets, folder / "run", steps=steps, layers=2, degrees=degrees),
            then=lambda t: ends.append((t.dataloader.dp_rank, t.dataloader.dp_world_size)),
        )
    assert not any("dataloader" in line or "data position" in line for line in lines), lines
    ((rank, size),) = ends
    read = {f"{rank} of {size}, step {step}": torch.cat(parts) for step, parts in seen.items()}
    assert len(run.losses) == len(read) == 2
    path = folder / f"{rank}-{steps}.pt"
    if path.exists():
        same_tensors(read, torch.load(path))
    else:
        torch.save(read, path)


@distributed(1)
def _one(assets: Path, folder: Path, degrees: Degrees, steps: int) -> None:
    _read(assets, folder, degrees, steps)


@distributed(2)
def _two(assets: Path, folder: Path, degrees: Degrees, steps: int) -> None:
    _read(assets, folder, degrees, steps)


@distributed(4)
def _four(assets: Path, folder: Path, degrees: Degrees, steps: int) -> None:
    _read(assets, folder, degrees, steps)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param((_two, FSDP), [(_four, TP_FSDP), (_two, FSDP)], id="fsdp-tp"),
        pytest.param((_one, ONE), [(_two, TP), (_two, PP), (_one, ONE)], id="one-tp-pp"),
        pytest.param((_four, FSDP_4), [(_four, HSDP_4)], id="fsdp-hsdp", marks=pytest.mark.full),
        pytest.param((_two, FSDP), [(_four, CP_FSDP), (_four, PP_FSDP)], id="fsdp-cp-pp", marks=pytest.mark.full),
    ],
)
def test_the_data_goes_on_at_the_same_number_of_data_parallel_ranks(
    assets: Path, tmp_path: Path, first: Any, then: list[Any]
) -> None:
    """On more ranks and on fewer ones: each data-parallel rank reads what it would have read."""
    whole, degrees = first
    whole(assets, tmp_path, degrees, 2)
    begun = tmp_path / "begun"
    shutil.copytree(tmp_path / "run", begun)
    whole(assets, tmp_path, degrees, 4)
    for other, of_ranks in then:
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(begun, tmp_path / "run")
        other(assets, tmp_path, of_ranks, 4)
