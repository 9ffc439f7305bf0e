"""Lightning's Trainer and transformers' with the checkpoints of their runs in a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tests.integrations import lightning_runs
from tests.integrations.trainer_runs import Tokens, arguments, model
from tests.stores import servers
from titan_ckpt import CheckpointConfig, SaveConfig, StoreConfig
from titan_ckpt.integrations.transformers import attach


def fit(folder: Path, steps: int, config: CheckpointConfig) -> dict[str, torch.Tensor]:
    """Train by Lightning, shuffled, to a step."""
    L.seed_everything(0, verbose=False)
    module = lightning_runs.Regression(None, 1, folder)
    trainer = lightning_runs.attached(str(folder), config, max_steps=steps)
    trainer.fit(module, lightning_runs.shuffled(lightning_runs.Samples(20)), DataLoader(lightning_runs.Samples(4), 2))
    return module.state_dict()


def train(folder: Path, steps: int, config: CheckpointConfig) -> dict[str, torch.Tensor]:
    """Train a Llama by transformers' Trainer, shuffled, to a step."""
    settings = arguments(folder, max_steps=steps, eval_strategy="no", lr_scheduler_type="constant")
    trainer = Trainer(trained := model(), TrainingArguments(**settings), train_dataset=Tokens(18))
    attach(trainer, config)
    trainer.train()
    state: dict[str, torch.Tensor] = trained.state_dict()
    return state


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the endpoint of a server that answers as S3 does."""
    servers.require_installed()
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server.endpoint


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of Lightning's
@pytest.mark.parametrize("run", [fit, train])
def test_a_run_goes_on_from_the_bucket_on_another_machine(
    tmp_path: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[Path, int, CheckpointConfig], dict[str, torch.Tensor]],
) -> None:
    """9 steps, and from an empty folder 3 more, are 12 steps bit for bit; no checkpoint is in either folder."""
    for name, value in servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    save, store = SaveConfig(interval=4), StoreConfig(endpoint=endpoint, retry_seconds=5.0)
    whole = run(tmp_path / "whole", 12, CheckpointConfig(save=save))
    in_bucket = CheckpointConfig(f"s3://box/{run.__name__}/checkpoints", store=store, save=save)
    first = run(tmp_path / "first", 9, in_bucket)
    second = run(tmp_path / "second", 12, in_bucket)
    assert not all(torch.equal(value, first[name]) for name, value in whole.items())
    assert all(torch.equal(value, second[name]) for name, value in whole.items())
    assert (
        sorted(path.name for folder in ("first", "second") for path in (tmp_path / folder).rglob("*"))
        == ["telemetry.jsonl"] * 2
    )
