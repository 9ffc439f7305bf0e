"""A step of the trainer beside the same step of a plain PyTorch loop: python -m benchmarks.step [--nproc N].

Both have the same shape of model, data, optimizer, schedule and clipping, in one process and in turn. The trainer does
all of a run by default: it logs every step, watches gradients, and keeps each step so that it could be saved.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.common import Options, alternate, parse, quartiles, run, say
from titan_ckpt.config import from_dict
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.models.registry import build_model
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.data.sequences import DummyDataset
from titan_ckpt.training.schedule import rate_factor
from titan_ckpt.training.trainer import Trainer

STEPS = 2
"""Steps of a turn; few, so that both cases of a turn meet the same machine."""
FLAVOR, BATCH, LENGTH = "debug-2m", 4, 256


class Measured(Trainer):
    """Hands its steps out instead of taking them all at once."""

    def train(self) -> None:
        steps = self.take_steps()
        cases: dict[str, Callable[[], object]] = {
            "the trainer": lambda: [next(steps) for _ in range(STEPS)],
            "a plain loop": lambda: [next(plain) for _ in range(STEPS)],
        }
        plain = plain_loop(self.config, self.ranks.data_rank, self.ranks.data_size)
        self.times = alternate(cases, self.pairs)
        steps.close()  # type: ignore[attr-defined]  # a generator

    pairs = 1
    times: dict[str, list[float]]


def settings(options: Options) -> RunConfig:
    return from_dict(
        RunConfig,
        {
            "output_folder": options.folder,
            "model": {"flavor": FLAVOR},
            "data": {"corpus": "dummy", "sequence_length": LENGTH},
            "training": {"steps": 1_000_000, "batch_size": BATCH, "max_grad_norm": 1.0, "device": "cpu"},
            "checkpoint": {"save": {"interval": 1_000_000}},
        },
    )


def plain_loop(config: RunConfig, rank: int, num_ranks: int) -> Iterator[float]:
    """Train as a script of 30 lines would, and yield the loss of each step."""
    model = build_model(config.model.name, flavor=config.model.flavor)
    assert isinstance(model, LanguageModel)
    model.init_weights()
    if num_ranks > 1:
        for layer in model.layers.children():
            fully_shard(layer)
        fully_shard(model)
    dataset = DummyDataset(model.vocab_size, LENGTH, config.seed, rank=rank, num_ranks=num_ranks)
    batches = iter(DataLoader(dataset, BATCH))
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=config.optimizer.lr, betas=config.optimizer.betas)
    scheduler = LambdaLR(optimizer, rate_factor(config.schedule, 1_000_000))
    while True:
        batch = next(batches)
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def main(options: Options) -> dict[str, Any]:
    """Compare turns of two steps each."""
    trainer = Measured(settings(options))
    trainer.pairs = options.pairs
    trainer.run()
    per_step = {name: [seconds / STEPS for seconds in turns] for name, turns in trainer.times.items()}
    ours, plain = (statistics.median(per_step[name]) for name in ("the trainer", "a plain loop"))
    say(f"a step of {FLAVOR}, {BATCH} sequences of {LENGTH} tokens on each of {options.nproc} ranks")
    for name, seconds in per_step.items():
        spread = f"{min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f}"
        say(f"  {name:14s} {statistics.median(seconds) * 1e3:9.2f} ms  {spread}")
    return {
        "ratio": round(ours / plain, 4),
        "ratio_of_fastest": round(min(per_step["the trainer"]) / min(per_step["a plain loop"]), 4),
        "ratio_quartiles": quartiles(per_step["the trainer"], per_step["a plain loop"]),
        "seconds": round(ours, 6),
        "plain_seconds": round(plain, 6),
        "added_microseconds": round((ours - plain) * 1e6, 1),
        "pairs": options.pairs,
    }


if __name__ == "__main__":
    run(parse("a step of the trainer beside a plain loop", pairs=60), main)
