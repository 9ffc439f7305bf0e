"""Loops over what accelerate has prepared, each with settings, data and a form that a seed has drawn.

Many run one after another in the same processes: once whole, of which a copy is left as a kill would leave it, and in
new processes from that copy on.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from datasets import Dataset
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from tests.integrations.accelerate_runs import Counted, wait
from tests.integrations.loader_cases import Sized, Stream
from tests.integrations.phases import forget
from tests.world import gathered, heard
from titan_ckpt import CheckpointConfig, SaveConfig
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.accelerate import accelerate_manager

STEPS = 9


class Vectors(torch.utils.data.Dataset[torch.Tensor]):
    """Numbered vectors, with noise of the process's random state if it is asked for."""

    def __init__(self, samples: int, noise: float = 0.1) -> None:
        values = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
        self.values, self.noise = torch.cat([torch.arange(samples)[:, None], values], 1), noise

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> torch.Tensor:
        value = self.values[index]
        if self.noise:
            noise = self.noise * torch.rand_like(value)
            noise[..., 0] = 0
            value = value + noise
        return value


class Turned(Vectors):
    """Vectors that the number of the epoch changes, which accelerate tells them."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(index) + torch.tensor([0.0, self.epoch / 4, 0.0, 0.0])


class Seeded(IterableDataset[torch.Tensor]):
    """The vectors in an order of its generator, which accelerate seeds by the epoch if it divides the stream."""

    def __init__(self, samples: int) -> None:
        self.vectors, self.generator = Vectors(samples), torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(len(self.vectors), generator=self.generator).tolist()
        return iter([self.vectors[number] for number in order])


def rows(samples: int, shards: int = 0, *, noise: float = 0.1, is_shuffled: bool = False) -> Any:
    vectors = Vectors(samples, noise)
    data: Any = Dataset.from_dict({"at": [*range(samples)]})
    if not shards:
        return data.with_transform(lambda found: {"vector": [vectors[at] for at in found["at"]]})
    data = data.to_iterable_dataset(num_shards=shards)
    data = data.shuffle(7, buffer_size=4) if is_shuffled else data
    return data.map(lambda row: {"vector": vectors[row["at"]]})


DATA: dict[str, Callable[[int], Any]] = {
    "vectors": Vectors,
    "vectors without noise": lambda samples: Vectors(samples, 0),
    "vectors that are told the epoch": Turned,
    "rows": rows,
    "a stream of one shard": lambda samples: rows(samples, 1),
    "a stream of two shards": lambda samples: rows(samples, 2),
    "a stream of four shards": lambda samples: rows(samples, 4),
    "a shuffled stream": lambda samples: rows(samples, 2, is_shuffled=True),
    "a stream of one's own": lambda samples: Stream(Vectors(samples)),
    "a stream of one's own with a length": lambda samples: Sized(Vectors(samples)),
    "a stream of one's own with a generator": Seeded,
}
MAPS = [name for name in DATA if "stream" not in name]


def collated(found: Any) -> torch.Tensor:
    if isinstance(found, list):
        return torch.stack([row["vector"] if isinstance(row, dict) else row for row in found])
    batch: torch.Tensor = torch.stack(found["vector"]) if isinstance(found, dict) else found
    return batch  # a sampler of batches asks for all rows at once


class Varied(BatchSampler):
    """Batches of one and of two samples in turn."""

    def __init__(self, samples: int) -> None:
        super().__init__(RandomSampler(range(samples)), 2, drop_last=False)
        self.batch_size = None  # type: ignore[assignment]  # as accelerate asks of batches of several sizes

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(self.sampler)
        for number in count():
            if not (batch := [*islice(order, number % 2 + 1)]):
                return
            yield batch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), 3)  # type: ignore[arg-type]  # a sampler of a length
        return 2 * whole + rest


LOADING = (
    "dispatch_batches", "split_batches", "even_batches", "use_seedable_sampler", "data_seed", "non_blocking",
    "use_stateful_dataloader",
)  # fmt: skip
ACCUMULATING = ("sync_with_dataloader", "sync_each_batch", "adjust_scheduler")
ACCELERATING = ("mixed_precision", "step_scheduler_with_optimizer", "rng_types")


def drawn(number: int) -> dict[str, Any]:
    """Return the case of a seed: settings of accelerate by their names, what is read, and how."""
    draw = random.Random(number)

    def rarely(chance: float, *values: Any, otherwise: Any = None) -> Any:
        return draw.choice(values) if draw.random() < chance else otherwise

    interval = draw.choice([1, 2, 3])
    return {
        "data": draw.choice(MAPS if draw.random() < 0.65 else [name for name in DATA if name not in MAPS]),
        "samples": draw.randint(5, 17),
        "batch_size": draw.randint(1, 5),
        "shuffle": draw.random() < 0.7,
        "generator": draw.random() < 0.2,
        "drop_last": draw.random() < 0.3,
        "sampler": rarely(0.15, "batches as a sampler", "batches of several sizes"),
        "workers": rarely(0.1, "1", "2", "1 kept"),
        "dispatch_batches": rarely(0.05, True, otherwise=draw.choice([None, False, False, False])),
        "split_batches": draw.random() < 0.3,
        "even_batches": draw.random() < 0.7,
        "use_seedable_sampler": draw.random() < 0.4,
        "data_seed": rarely(0.25, 5),
        "non_blocking": draw.random() < 0.3,
        "use_stateful_dataloader": draw.random() < 0.3,
        "accumulated": draw.choice([1, 2, 3]),
        "sync_with_dataloader": draw.random() < 0.75,
        "sync_each_batch": draw.random() < 0.25,
        "adjust_scheduler": draw.random() < 0.75,
        "mixed_precision": draw.choice(["no", "bf16"]),
        "step_scheduler_with_optimizer": draw.random() < 0.75,
        "rng_types": rarely(0.25, ["torch"], ["generator"], ["torch", "generator"]),
        "loop": draw.choice(["while", "epochs", "set_epoch", "next", "broken off", "next_epoch", "skip_first_batches"]),
        "beside": draw.random() < 0.2,
        "limit": draw.randint(1, 4),
        "interval": interval,
        "stop": draw.randint(interval + 1, STEPS - 1),
    }


def loader_of(case: dict[str, Any]) -> Any:
    data, workers = DATA[case["data"]](case["samples"]), case["workers"] or "0"
    given: dict[str, Any] = {
        "collate_fn": collated, "num_workers": int(workers[0]), "persistent_workers": "kept" in workers,
    }  # fmt: skip
    if case["data"] not in MAPS:
        return DataLoader(data, case["batch_size"], drop_last=case["drop_last"], **given)
    generator = torch.Generator().manual_seed(3) if case["generator"] else None
    if case["sampler"] == "batches of several sizes":
        return DataLoader(data, batch_sampler=Varied(case["samples"]), **given)
    if case["sampler"]:
        order: Any = RandomSampler(data, generator=generator) if case["shuffle"] else range(case["samples"])
        return DataLoader(data, None, sampler=BatchSampler(order, case["batch_size"], case["drop_last"]), **given)
    shuffle: dict[str, Any] = {"shuffle": case["shuffle"], "generator": generator, "drop_last": case["drop_last"]}
    return DataLoader(data, case["batch_size"], **shuffle, **given)


def accelerator_of(case: dict[str, Any]) -> Accelerator:
    forget()
    accumulating = {name: case[name] for name in ACCUMULATING}
    return Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(**{name: case[name] for name in LOADING}),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=case["accumulated"], **accumulating),
        **{name: case[name] for name in ACCELERATING},
    )


def num_batches(accelerator: Any, case: dict[str, Any]) -> list[int]:
    """Return how many batches each rank has in an epoch."""
    loader = accelerator.prepare(loader_of(case))
    found = [sum(1 for _ in loader.base_dataloader)]
    if accelerator.num_processes > 1:
        found = gathered(found[0])
    accelerator._dataloaders.clear()
    return found


def train(case: dict[str, Any], path: Path, stopped_at: int | None) -> dict[str, Any]:
    """Train, and return what each step has read, its losses and rates, and the state at the end."""
    accelerator: Any = accelerator_of(case)
    if not min(numbers := num_batches(accelerator, case)) or min(numbers) < max(numbers):
        return {"verdict": "left out: accelerate gives the ranks no batches, or not equally many"}
    set_seed(5, device_specific=True)
    torch.manual_seed(0)
    bare = network = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-2)
    scheduler: Any = OneCycleLR(optimizer, 1e-2, total_steps=20 * STEPS)
    torch.manual_seed(7 + accelerator.process_index)
    loader: Any = loader_of(case)
    torch.rand(5 if stopped_at else 9)  # another process has drawn other numbers before
    network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    beside: Any = DataLoader(Vectors(6), 3, shuffle=True, collate_fn=collated) if case["beside"] else None
    beside = accelerator.prepare(beside)
    micro = Counted()
    accelerator.register_for_checkpointing(micro)
    read: dict[int, list[Any]] = {}
    rates: dict[int, Any] = {}
    config = CheckpointConfig(save=SaveConfig(interval=case["interval"], timeout_seconds=30.0))
    with accelerate_manager(accelerator, config, dataloader=loader, base_folder=path) as manager:
        step = manager.load().step
        for batch in batches_of(case, loader, accelerator, micro):
            if step == stopped_at:
                wait(path / "checkpoints" / f"step-{(step - 1) // case['interval'] * case['interval']}")
                leave_a_copy(path)
            with accelerator.accumulate(network):
                loss = (network(batch[:, 1:]) - batch[:, 1:2]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            read.setdefault(step + 1, []).append([*batch[:, 0].int().tolist(), float(loss.detach())])
            micro.number += 1
            if accelerator.sync_gradients:
                step += 1
                if beside is not None and step % 2:
                    read[step].append([values.tolist() for values in beside])
                rates[step] = scheduler.get_last_lr()
                if case["loop"] == "next_epoch" and not step % (case["limit"] + 1):
                    loader.next_epoch()
                manager.save(step, last_step=step == STEPS)
                if step == STEPS:
                    break
    weights = {name: value.clone() for name, value in bare.state_dict().items()}
    return {"read": read, "rates": rates, "weights": weights, "random": (torch.rand(1), random.random())}


def batches_of(case: dict[str, Any], loader: Any, accelerator: Any, micro: Counted) -> Iterator[Any]:
    """Yield batches of epoch after epoch as a loop of the user's reads them."""
    form, limit = case["loop"], case["limit"]
    for epoch in count(loader.iteration if form != "while" else 0):
        if form == "set_epoch":
            loader.set_epoch(epoch)
        now = loader
        if form == "skip_first_batches":
            now = accelerator.skip_first_batches(loader, limit) if limit > 2 else skip_first_batches(loader, limit)
        if form == "next":
            batches = iter(now)
            while (batch := next(batches, None)) is not None:
                yield batch
            continue
        for batch in now:
            yield batch
            if form == "broken off" and not micro.number % (2 * limit + 1):
                break


def leave_a_copy(path: Path) -> None:
    """Copy a run's folder as a kill would leave it now, without what is being written, once, on rank 0."""
    resumed = path.with_name("resumed")
    if not int(os.environ.get("RANK", "0")) and not resumed.exists():
        shutil.copytree(path, resumed, ignore=shutil.ignore_patterns(".staging"))


def run_drawn(folder: str, cases: Sequence[dict[str, Any]], is_whole: bool) -> None:
    """Run each case; write what comes of it."""
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    part = "whole" if is_whole else "resumed"
    for number, case in enumerate(cases):
        path = Path(folder, str(number), part)
        if not is_whole and not path.exists():
            continue
        path.mkdir(parents=True, exist_ok=True)
        with heard() as lines:
            try:
                result = train(case, path, case["stop"] if is_whole else None)
            except ConfigError as error:
                result = {"verdict": f"refused: {error}"}
            except Exception as error:
                result = {"verdict": f"{type(error).__name__}: {error}"}
        torch.save({"verdict": None, **result, "lines": lines}, path / f"result-{rank}.pt")


def verdict(folder: Path, number: int, rank: int) -> str:
    """Return "exact", why the case was refused or left out, or what differs without a warning."""
    whole, resumed = (folder / str(number) / part / f"result-{rank}.pt" for part in ("whole", "resumed"))
    expected = torch.load(whole)
    if expected["verdict"]:
        return str(expected["verdict"])
    found = torch.load(resumed)
    if found["verdict"]:
        return f"resumed: {found['verdict']}"
    steps = found["read"].keys()
    differing = [name for name in ("read", "rates") if found[name] != {s: expected[name][s] for s in steps}]
    differing += ["random"] * (found["random"] != expected["random"])
    differing += [name for name, value in found["weights"].items() if not torch.equal(value, expected["weights"][name])]
    differing += ["it began anew"] * (min(steps) == 1)
    if differing and any("data: the loop leaves epoch" in line for line in expected["lines"]):
        return "told: the loop leaves an epoch"
    return f"different: {', '.join(differing)}" if differing else "exact"
