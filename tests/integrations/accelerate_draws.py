"""Loops over what accelerate has prepared, each with settings, data and a form that a seed has drawn.

Many run one after another in the same processes: once whole, of which a copy is left as a kill would leave it, and in new
processes from that copy on.
"""

from __future__ import annotations

import logging
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
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from datasets import Dataset
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from tests.integrations.accelerate_runs import Counted, wait
from tests.integrations.phases import leave_behind
from tests.world import heard
from titan_ckpt import CheckpointConfig, SaveConfig
from titan_ckpt.errors import CheckpointError, ConfigError
from titan_ckpt.integrations.accelerate import accelerate_manager

STEPS = 9


class Vectors(torch.utils.data.Dataset[torch.Tensor]):
    """Numbered vectors, with noise of the process's random state if it is asked for."""

    def __init__(self, samples: int, noise: float = 0.1) -> None:
        values = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
        self.values, self.noise = torch.cat([torch.arange(samples)[:, None], values], 1), noise

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        value = self.values[index]
        return value + self.noise * torch.cat([torch.zeros(1), torch.rand(3)]) if self.noise else value


class Turned(Vectors):
    """Vectors that the number of the epoch changes, which accelerate tells them."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.tensor([0.0, self.epoch / 4, 0.0, 0.0])


class Stream(IterableDataset[torch.Tensor]):
    """The vectors one after another; its position is the next one."""

    def __init__(self, samples: int) -> None:
        self.vectors, self.next = Vectors(samples), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < len(self.vectors):
            self.next += 1
            yield self.vectors[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.vectors)


class Seeded(IterableDataset[torch.Tensor]):
    """The vectors in an order of its generator, which accelerate seeds by the epoch if it divides the stream."""

    def __init__(self, samples: int) -> None:
        self.vectors, self.generator = Vectors(samples), torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(len(self.vectors), generator=self.generator).tolist()
        return iter([self.vectors[number] for number in order])


def rows(samples: int, shards: int = 0, *, is_shuffled: bool = False) -> Any:
    vectors = Vectors(samples)
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
    "a stream of one's own": Stream,
    "a stream of one's own with a length": Sized,
    "a stream of one's own with a generator": Seeded,
}
MAPS = [name for name in DATA if "stream" not in name]


def collated(found: Any) -> torch.Tensor:
    return torch.stack([row["vector"] if isinstance(row, dict) else row for row in found])


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
        samples = len(self.sampler)  # type: ignore[arg-type]
        return 2 * (samples // 3) + (samples % 3 + 1) // 2 + (samples % 3 == 2) * 0


def drawn(number: int) -> dict[str, Any]:
    """Return the settings of a case, by the names under which the sentences of a failure should have them."""
    draw = random.Random(number)

    def rarely(value: Any, otherwise: Any = None, chance: float = 0.25) -> Any:
        return value if draw.random() < chance else otherwise

    interval = draw.choice([1, 2, 3])
    is_map = draw.random() < 0.65
    return {
        "data": draw.choice(MAPS if is_map else [*DATA.keys() - MAPS]) if is_map else draw.choice(sorted({*DATA} - {*MAPS})),
        "samples": draw.randint(5, 17),
        "batch_size": draw.randint(1, 5),
        "shuffle": draw.random() < 0.7,
        "generator": draw.random() < 0.2,
        "drop_last": draw.random() < 0.3,
        "sampler": rarely(draw.choice(["batches as a sampler", "batches of several sizes"]), "", 0.15),
        "workers": rarely(draw.choice(["1", "2", "1 kept"]), "", 0.08),
        "dispatch_batches": rarely(True, draw.choice([None, False, False, False]), 0.05),
        "split_batches": draw.random() < 0.3,
        "even_batches": draw.random() < 0.7,
        "use_seedable_sampler": draw.random() < 0.4,
        "data_seed": rarely(5),
        "non_blocking": draw.random() < 0.3,
        "use_stateful_dataloader": draw.random() < 0.3,
        "accumulated": draw.choice([1, 2, 3]),
        "sync_with_dataloader": draw.random() < 0.75,
        "sync_each_batch": draw.random() < 0.25,
        "adjust_scheduler": draw.random() < 0.75,
        "mixed_precision": draw.choice(["no", "bf16"]),
        "step_scheduler_with_optimizer": draw.random() < 0.75,
        "rng_types": rarely(draw.choice([["torch"], ["generator"], ["torch", "generator"]])),
        "loop": draw.choice(["while", "epochs", "set_epoch", "next", "broken off", "skip_first_batches"]),
        "beside": draw.random() < 0.2,
        "limit": draw.randint(1, 4),
        "interval": interval,
        "stop": draw.randint(interval + 1, STEPS - 1),
    }


def loader_of(case: dict[str, Any]) -> Any:
    data, workers = DATA[case["data"]](case["samples"]), case["workers"]
    given: dict[str, Any] = {"collate_fn": collated}
    if workers:
        given |= {"num_workers": int(workers[0]), "persistent_workers": "kept" in workers}
    if isinstance(data, IterableDataset) or hasattr(data, "_ex_iterable"):
        return DataLoader(data, case["batch_size"], drop_last=case["drop_last"], **given)
    generator = torch.Generator().manual_seed(3) if case["generator"] else None
    if case["sampler"] == "batches of several sizes":
        return DataLoader(data, batch_sampler=Varied(case["samples"]), **given)
    if case["sampler"]:
        order = RandomSampler(data, generator=generator) if case["shuffle"] else range(case["samples"])
        return DataLoader(data, None, sampler=BatchSampler(order, case["batch_size"], case["drop_last"]), **given | {"collate_fn": as_batch})
    shuffle = {"shuffle": case["shuffle"], "generator": generator, "drop_last": case["drop_last"]}
    return DataLoader(data, case["batch_size"], **shuffle, **given)


def as_batch(found: Any) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else collated(found)


class Batches(Vectors):
    """A map that is asked for a batch of indices at once."""


def accelerator_of(case: dict[str, Any]) -> Accelerator:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    names = "dispatch_batches split_batches even_batches use_seedable_sampler data_seed non_blocking use_stateful_dataloader"
    plugin = GradientAccumulationPlugin(
        num_steps=case["accumulated"],
        **{name: case[name] for name in ("sync_with_dataloader", "sync_each_batch", "adjust_scheduler")},
    )
    return Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(**{name: case[name] for name in names.split()}),
        gradient_accumulation_plugin=plugin,
        **{name: case[name] for name in ("mixed_precision", "step_scheduler_with_optimizer", "rng_types")},
    )


def num_batches(accelerator: Any, case: dict[str, Any]) -> list[int]:
    """Return how many batches each rank has in an epoch."""
    loader = accelerator.prepare(loader_of(case))
    inner = getattr(loader, "base_dataloader", loader)
    found = [0] * accelerator.num_processes
    mine = sum(1 for _ in inner)
    if accelerator.num_processes > 1:
        dist.all_gather_object(found, mine)
    else:
        found = [mine]
    accelerator._dataloaders.clear()
    return found


def train(case: dict[str, Any], path: Path, stopped_at: int | None) -> dict[str, Any]:
    """Train, and return what each step has read, its losses and rates, and the state at the end."""
    accelerator = accelerator_of(case)
    if len({*num_batches(accelerator, case)}) > 1:
        return {"uneven": True}
    if not num_batches(accelerator, case)[0]:
        return {"empty": True}
    set_seed(5, device_specific=True)
    torch.manual_seed(0)
    bare = network = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-2)
    scheduler: Any = OneCycleLR(optimizer, 1e-2, total_steps=20 * STEPS)
    torch.manual_seed(7 + accelerator.process_index)
    evaluated: Any = None
    loader: Any = loader_of(case)
    torch.rand(5 if stopped_at else 9)
    network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    if case["beside"]:
        evaluated = accelerator.prepare(DataLoader(Vectors(6), 3, shuffle=True, collate_fn=collated))
    counted, steps = Counted(), Counted()
    accelerator.register_for_checkpointing(counted)
    accelerator.register_for_checkpointing(steps)
    read: dict[int, list[Any]] = {}
    rates: dict[int, Any] = {}
    config = CheckpointConfig(save=SaveConfig(interval=case["interval"], timeout_seconds=30.0))
    with accelerate_manager(accelerator, config, dataloader=loader, base_folder=path) as manager:
        resumed = steps.number = manager.load().step

        def one(batch: torch.Tensor) -> None:
            if steps.number == stopped_at:
                saved = (stopped_at - 1) // case["interval"] * case["interval"]
                wait(path / "checkpoints" / f"step-{saved}")
                leave_behind(path)
            with accelerator.accumulate(network):
                loss = (network(batch[:, 1:]) - batch[:, 1:2]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            read.setdefault(steps.number + 1, []).append([*batch[:, 0].int().tolist(), float(loss.detach())])
            counted.number += 1
            if accelerator.sync_gradients:
                steps.number += 1
                if evaluated is not None and steps.number % 2:
                    read[steps.number].append([values.tolist() for values in evaluated])
                rates[steps.number] = scheduler.get_last_lr()
                manager.save(steps.number, last_step=steps.number == STEPS)

        for _ in epochs(case, loader, accelerator, one, counted, steps, resumed):
            pass
    return {
        "read": read, "rates": rates, "weights": {k: v.clone() for k, v in bare.state_dict().items()},
        "random": (torch.rand(1), random.random()),
    }  # fmt: skip


def epochs(
    case: dict[str, Any], loader: Any, accelerator: Any, one: Callable[[Any], None], counted: Any, steps: Any, resumed: int
) -> Iterator[None]:
    """Read epoch after epoch in the form that a case has."""
    form = case["loop"]
    for epoch in count(loader.iteration):
        if form == "set_epoch":
            loader.set_epoch(epoch)
        now = loader
        if form == "skip_first_batches" and epoch == 0 and not (resumed and case["limit"] % 2):
            now = skip_first_batches(loader, case["limit"]) if case["limit"] > 2 else accelerator.skip_first_batches(loader, case["limit"])
        if form == "next":
            batches = iter(now)
            while (batch := next(batches, None)) is not None:
                one(batch)
                if steps.number == STEPS:
                    return
            continue
        for batch in now:
            one(batch)
            if steps.number == STEPS:
                return
            if form == "broken off" and not counted.number % (2 * case["limit"] + 1):
                break
        yield


def run_drawn(folder: str, numbers: Sequence[int], is_whole: bool) -> None:
    """Run each case; write what comes of it."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    for number in numbers:
        case, part = drawn(number), "whole" if is_whole else "resumed"
        path = Path(folder, str(number), part)
        result: dict[str, Any] = {}
        if not is_whole and not (path / "checkpoints").exists():
            continue
        path.mkdir(parents=True, exist_ok=True)
        with heard() as lines:
            try:
                result = train(case, path, case["stop"] if is_whole else None)
            except ConfigError as error:
                result = {"refused": str(error)}
            except CheckpointError as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            except Exception as error:
                result = {"raised": f"{type(error).__name__}: {error}"}
        torch.save({**result, "lines": lines}, Path(folder, f"{number}-{part}-{rank}.pt"))
        print(number, part, rank, {k: v for k, v in result.items() if isinstance(v, (str, bool))}, flush=True)
