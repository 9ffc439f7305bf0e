"""Lightning's Trainer and transformers' with the checkpoints of their runs in a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.stores import servers
from titan_ckpt import CheckpointConfig, SaveConfig, StoreConfig
from titan_ckpt.integrations import lightning, transformers

DATA = torch.randn(64, 17, generator=torch.Generator().manual_seed(1))
ROWS = [{"input_ids": [i % 60] * 8, "labels": [i % 60] * 8} for i in range(64)]


class Regression(L.LightningModule):
    """A small network with dropout, so that a resume needs the generators too."""

    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
        self.network = torch.nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = (self.network(batch[:, :16]) - batch[:, 16:]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: Path, steps: int, config: CheckpointConfig) -> dict[str, torch.Tensor]:
    """Train by Lightning, shuffled, to a step."""
    L.seed_everything(0, verbose=False)
    module = Regression()
    quiet: dict[str, Any] = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False
    )
    trainer = L.Trainer(accelerator="cpu", max_steps=steps, default_root_dir=folder, **quiet)
    lightning.attach(trainer, config)
    trainer.fit(module, DataLoader(DATA, batch_size=4, shuffle=True))  # type: ignore[arg-type]
    return module.state_dict()


def train(folder: Path, steps: int, config: CheckpointConfig) -> dict[str, torch.Tensor]:
    """Train a Llama by transformers' Trainer, shuffled, to a step."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64, attention_dropout=0.1))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        per_device_train_batch_size=4,
        disable_tqdm=True,
        lr_scheduler_type="constant",
    )
    trainer = Trainer(model, arguments, train_dataset=ROWS)
    transformers.attach(trainer, config)
    trainer.train()
    state: dict[str, torch.Tensor] = model.state_dict()
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
