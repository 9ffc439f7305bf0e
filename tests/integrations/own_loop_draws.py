"""Loops of one's own whose data, samplers, collate function, training and form a seed has drawn."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset, concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests.integrations.draws import Record, digest, random_state
from tests.integrations.loader_cases import Estimated, Jumping, Sized, Stream
from titan_ckpt import CheckpointConfig, CheckpointManager, PositionedLoader, RunGuard, SaveConfig

STEPS = 14


class Rows(torch.utils.data.Dataset[Any]):
    """Numbers with noise of the process's generators, or of a generator of their own."""

    def __init__(self, samples: int, noise: str | None = None, first: int = 0) -> None:
        self.samples, self.noise, self.first = samples, noise, first
        self.own = np.random.default_rng(3) if noise == "own" else None
        self.epoch = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return float(self.first + index), noise_of(self.noise, self.own)


class Turned(Rows):
    """Numbers that the epoch changes."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        number, noise = super().__getitem__(index)
        return number, noise + self.epoch


class Many(Rows):
    """Numbers that are fetched together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        noise = noise_of(self.noise, self.own)
        return [(float(self.first + index), noise) for index in indices]


def noise_of(kind: str | None, own: Any = None) -> float:
    drawing: dict[str | None, Callable[[], float]] = {
        "torch": lambda: float(torch.rand(())), "random": random.random, "numpy": np.random.rand,
        "own": lambda: float(own.random()),
    }  # fmt: skip
    return float(drawing[kind]()) if kind else 0.0


class Turning(Stream):
    """Numbers in an order that is drawn anew for each epoch, which the state says."""

    seed = 3

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed)).tolist()
        while self.next < len(order):
            self.next += 1
            yield self.rows[order[self.next - 1]]
        self.next, self.seed = 0, self.seed + 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.seed = state["next"], state["seed"]


def of_datasets(samples: int, steps: tuple[str, ...], seed: int) -> Any:
    """Return a stream of datasets with operations on it."""

    def rows(first: int, length: int, shards: int) -> Any:
        found = Dataset.from_dict({"at": [float(first + number) for number in range(length)]})
        return found.to_iterable_dataset(num_shards=min(shards, length))

    data = rows(0, samples, 1 + seed % 4)
    for step in steps:
        if step == "map":
            data = data.map(lambda row: {"at": row["at"] + 100})
        elif step == "noisy map":
            data = data.map(lambda row: {"at": row["at"] + random.random()})
        elif step == "batched map":
            data = data.map(lambda found: {"at": [2 * at for at in found["at"]]}, batched=True, batch_size=3)
        elif step == "filter":
            data = data.filter(lambda row: int(row["at"]) % 5 != 1)
        elif step == "take":
            data = data.take(samples - 2)
        elif step == "skip":
            data = data.skip(2)
        elif step == "shuffle":
            data = data.shuffle(seed=seed, buffer_size=4)
        elif step == "repeat":
            data = data.repeat(2)
        elif step == "interleave":
            data = interleave_datasets([data, rows(1000, samples, 2)], stopping_strategy="all_exhausted")
        elif step == "drawn interleave":
            data = interleave_datasets([data, rows(1000, samples, 2)], probabilities=[0.4, 0.6], seed=seed)
        elif step == "concatenate":
            data = concatenate_datasets([data, rows(1000, 4, 2)])
    return data


OPERATIONS = (
    "map", "noisy map", "batched map", "filter", "take", "skip", "shuffle", "repeat", "interleave", "drawn interleave",
    "concatenate",
)  # fmt: skip
MAPS: dict[str, Callable[[int, str | None], Any]] = {
    "rows": Rows,
    "rows that are told the epoch": Turned,
    "rows fetched together": Many,
    "a subset": lambda samples, noise: Subset(Rows(samples + 3, noise), [*range(3, samples + 3)]),
    "two parts": lambda samples, noise: ConcatDataset([Rows(3, noise), Rows(samples - 3, noise, first=3)]),
    "stacked": lambda samples, noise: StackDataset(Rows(samples, noise), Rows(samples, first=100)),
    "a table": lambda samples, noise: Dataset.from_dict({"at": [float(number) for number in range(samples)]}),
    "a table with a transform": lambda samples, noise: Dataset.from_dict(
        {"at": [float(number) for number in range(samples)]}
    ).with_transform(partial(noisy_table, noise)),
}
STREAMS: dict[str, Callable[[int, str | None], Any]] = {
    "a stream": lambda *rows: Stream(Rows(*rows)),
    "a stream with a length": lambda *rows: Sized(Rows(*rows)),
    "a stream that draws its order": lambda *rows: Turning(Rows(*rows)),
    "streams in a chain": lambda samples, noise: ChainDataset([Stream(Rows(each, noise)) for each in (samples, 4)]),
}


def noisy_table(noise: str | None, found: dict[str, Any]) -> dict[str, Any]:
    return {"at": [at + noise_of(noise if noise != "own" else "torch") for at in found["at"]]}


class Told(Sampler[int]):
    """An order that the epoch decides."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def __len__(self) -> int:
        return self.samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(self.samples).tolist())


class Giving(Told):
    """An order that changes with each one drawn, which its state says."""

    def set_epoch(self, epoch: int) -> None:
        """Nothing."""

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


SAMPLERS: dict[str, Callable[[Any, int, Any], Any]] = {
    "random": lambda data, samples, generator: RandomSampler(data, generator=generator),
    "with replacement": lambda data, samples, generator: RandomSampler(
        data, replacement=True, num_samples=samples + 3, generator=generator
    ),
    "more than all": lambda data, samples, generator: RandomSampler(
        data, num_samples=2 * samples + 1, generator=generator
    ),
    "weighted": lambda data, samples, generator: WeightedRandomSampler(
        [1 + number % 3 for number in range(samples)], samples, generator=generator
    ),
    "of a part": lambda data, samples, generator: SubsetRandomSampler(range(1, samples), generator=generator),
    "told the epoch": lambda data, samples, generator: Told(samples),
    "with a state": lambda data, samples, generator: Giving(samples),
    "with a position": lambda data, samples, generator: Jumping(samples),
}


class Jittered:
    def __init__(self, inner: Any) -> None:
        self.inner, self.random = inner, random.Random(5)

    def __call__(self, rows: Any) -> torch.Tensor:
        batch: torch.Tensor = self.inner(rows)
        return batch + 0.1 * self.random.random()


def numbers_in(row: Any) -> list[float]:
    if isinstance(row, dict):
        return numbers_in(row["at"])
    if isinstance(row, (list, tuple)):
        return [number for value in row for number in numbers_in(value)]
    return [float(row)]


def collated(noise: str | None, rows: Any) -> torch.Tensor:
    """Return a batch of two numbers for each row."""
    rows = rows if isinstance(rows, list) else [rows]
    found = [sum(numbers_in(row)) for row in rows]
    return torch.tensor([[number / 50, noise_of(noise)] for number in found])


def drawn(number: int) -> dict[str, Any]:
    """Return the case of a seed."""
    draw = random.Random(1000 + number)

    def rarely(chance: float, *values: Any, otherwise: Any = None) -> Any:
        return draw.choice(values) if draw.random() < chance else otherwise

    kind = draw.choice(["map", "map", "map", "own stream", "datasets", "datasets"])
    workers = rarely(0.25, 1, 2, otherwise=0)
    samples = draw.randint(5, 15)
    return {
        "kind": kind,
        "data": draw.choice([*(MAPS if kind == "map" else STREAMS)]),
        "operations": tuple(draw.sample(OPERATIONS, draw.choice([0, 1, 1, 2, 3]))),
        "samples": samples,
        "seed": draw.randint(0, 9),
        "noise": rarely(0.6, "torch", "random", "numpy", "own"),
        "collate": rarely(0.5, "torch", "random", "numpy", "object"),
        "loader": draw.choice(["torch", "torch", "torchdata", "torchdata, as it is"]),
        "sampler": rarely(0.6, *SAMPLERS),
        "batch sampler": rarely(0.15, "batches", "of an estimated length"),
        "batch_size": rarely(0.1, None, otherwise=draw.randint(1, 4)),
        "drop_last": draw.random() < 0.3,
        "generator": draw.random() < 0.3,
        "workers": workers,
        "persistent_workers": workers > 0 and draw.random() < 0.4,
        "prefetch_factor": rarely(0.3, 1, 3) if workers else None,
        "in_order": workers == 0 or draw.random() < 0.9,
        "loop": draw.choice(["for", "for", "next", "next_epoch", "next_epoch"]),
        "limit": draw.randint(1, 5),
        "accumulated": draw.choice([1, 1, 2, 3]),
        "optimizer": draw.choice(["AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "Adam amsgrad"]),
        "schedule": draw.choice(["none", "OneCycle", "cosine", "plateau", "sequential", "cyclic"]),
        "average": draw.random() < 0.25,
        "module": draw.choice(["plain", "batch norm", "checkpointed"]),
        "beside": rarely(0.3, "shuffled", "workers", "kept workers"),
        "parallel": draw.choice(["ddp", "fsdp2"]),
        "asynchronous": draw.random() < 0.5,
        "interval": draw.choice([1, 2, 3]),
        "kills": [(draw.randint(1, 7), draw.choice([0, 0, draw.random() * 40])) for _ in range(draw.choice([1, 2, 3]))],
    }


def loader_of(case: dict[str, Any], rank: int, ranks: int) -> Any:
    """Return the loader of a rank."""
    noise, samples, workers = case["noise"], case["samples"], case["workers"]
    collate: Any = partial(collated, case["collate"] if case["collate"] != "object" else None)
    collate = Jittered(collate) if case["collate"] == "object" else collate
    kind: Any = DataLoader if case["loader"] == "torch" else StatefulDataLoader
    given: dict[str, Any] = {
        "collate_fn": collate, "num_workers": workers, "persistent_workers": case["persistent_workers"],
        "prefetch_factor": case["prefetch_factor"], "in_order": case["in_order"],
        "generator": torch.Generator().manual_seed(3 + rank) if case["generator"] else None,
    }  # fmt: skip
    size, drop_last = case["batch_size"], case["drop_last"] and case["batch_size"] is not None
    if case["kind"] == "datasets":
        data = split_dataset_by_node(of_datasets(samples, case["operations"], case["seed"]), rank, ranks)
        return kind(data, size, drop_last=drop_last, **given)
    if case["kind"] == "own stream":
        return kind(STREAMS[case["data"]](samples, noise), size, drop_last=drop_last, **given)
    data, sampler = MAPS[case["data"]](samples, noise), None
    generator = torch.Generator().manual_seed(8 + rank) if case["seed"] % 2 else None
    if case["sampler"] == "with a state" and case["loader"] == "torchdata, as it is":
        return loader_of(case | {"sampler": "with a position"}, rank, ranks)  # torchdata asks for the latter alone
    if case["sampler"]:
        sampler = SAMPLERS[case["sampler"]](data, samples, generator)
    elif ranks > 1 or case["seed"] % 3 == 0:
        share = StatefulDistributedSampler if kind is StatefulDataLoader and case["seed"] % 2 else DistributedSampler
        sampler = share(data, ranks, rank, seed=case["seed"])
    if case["batch sampler"] and sampler is not None and size:
        batches: Any = Estimated if case["batch sampler"] == "of an estimated length" else BatchSampler
        return kind(data, batch_sampler=batches(sampler, size, drop_last), **given)
    shuffle: dict[str, Any] = {"sampler": sampler} if sampler is not None else {"shuffle": case["seed"] % 5 < 3}
    return kind(data, size, drop_last=drop_last, **shuffle, **given)


def model_of(case: dict[str, Any]) -> nn.Sequential:
    middle = nn.BatchNorm1d(4) if case["module"] == "batch norm" else nn.Dropout(0.2)
    return nn.Sequential(nn.Linear(2, 4), middle, nn.ReLU(), nn.Linear(4, 1))


def optimizer_of(case: dict[str, Any], parameters: Any) -> Any:
    name = case["optimizer"].partition(" ")[0]
    settings: dict[str, dict[str, Any]] = {
        "SGD": {"momentum": 0.9, "nesterov": True}, "Adam": {"amsgrad": True}, "RMSprop": {"centered": True},
    }  # fmt: skip
    return getattr(torch.optim, name)(parameters, lr=1e-2, **settings.get(name, {}))


def schedule_of(case: dict[str, Any], optimizer: Any) -> Any:
    make: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "OneCycle": lambda: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=3 * STEPS, cycle_momentum=False),
        "cosine": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.5),
        "sequential": lambda: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [4],
        ),
        "cyclic": lambda: lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=3, cycle_momentum=False),
    }  # fmt: skip
    return make[case["schedule"]]()


def batches_of(case: dict[str, Any], loader: Any) -> Iterator[Any]:
    """Yield batches of epoch after epoch as a loop of the user's reads them."""
    form, read, ended = case["loop"], 0, 0
    while True:
        before = read
        if form == "next":
            batches = iter(loader)
            while (batch := next(batches, None)) is not None:
                read += 1
                yield batch
        else:
            for batch in loader:
                read += 1
                yield batch
        ended = 0 if read > before else ended + 1  # the rest of one that was resumed at its end has none
        if ended == 2:
            raise EOFError("an epoch has no batch")


def run(folder: str, case: dict[str, Any], kill: tuple[int, float] | None) -> None:
    """Train; write each step, or the error that ends the run."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    path = Path(folder)
    try:
        train(path, case, rank, ranks, Record(path, rank, kill))
    except Exception as error:
        (path / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        raise
    (path / f"done-{rank}").touch()


def train(path: Path, case: dict[str, Any], rank: int, ranks: int, record: Record) -> None:
    torch.manual_seed(0)
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - the process's generator is what is tested
    bare: Any = model_of(case)
    network: Any = bare
    if ranks > 1:
        network = DistributedDataParallel(bare) if case["parallel"] == "ddp" else fully_shard(bare)
    torch.manual_seed(rank + 1)
    loader = loader_of(case, rank, ranks)
    is_told = case["workers"] and (case["noise"] or case["collate"])  # the log says that workers draw anew then
    position = loader if case["loader"] == "torchdata, as it is" and not is_told else PositionedLoader(loader)
    is_resumed = any(path.glob("checkpoints/step-*"))
    torch.rand(9 if is_resumed else 5)  # another process has drawn other numbers before
    optimizer = optimizer_of(case, bare.parameters())
    case = case | {"schedule": "none"} if ranks > 1 and case["schedule"] == "plateau" else case  # by each rank's loss
    schedule = schedule_of(case, optimizer)
    states: dict[str, Any] = {}
    average: Any = None
    if case["average"] and not (ranks > 1 and case["parallel"] == "fsdp2"):  # FSDP2 refuses the copy
        average = states["average"] = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    workers = (
        {"num_workers": 1, "persistent_workers": "kept" in case["beside"]} if "w" in (case["beside"] or "") else {}
    )
    noise = None if workers.get("persistent_workers") else "random"  # new workers draw other noise
    beside: Any = DataLoader(Rows(6, noise), 3, shuffle=True, **workers) if case["beside"] else None  # type: ignore[arg-type]
    config = CheckpointConfig(save=SaveConfig(interval=case["interval"], timeout_seconds=60.0))
    with (
        CheckpointManager(
            config,
            model_parts=[bare],
            optimizers=[optimizer],
            lr_schedulers=[schedule] if schedule is not None else [],
            dataloader=position,
            states=states,
            base_folder=path,
        ) as manager,
        RunGuard(manager) as guard,
    ):
        batches = batches_of(case, position)
        for step in range(manager.load().step + 1, STEPS + 1):
            read, losses = [], []
            for batch in islice(batches, case["accumulated"]):
                read.append(batch.flatten().tolist())
                loss = network(batch if len(batch) > 1 else torch.cat([batch, batch])).square().mean()
                (loss / case["accumulated"]).backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step(*[losses[-1]] * (case["schedule"] == "plateau"))
            if average is not None:
                average.update_parameters(bare)
            seen = (
                [[value.tolist() for value in found] for found in beside]
                if beside is not None and step % 3 == 0
                else []
            )
            record.add(
                step,
                read=read,
                losses=losses,
                seen=seen,
                rates=[group["lr"] for group in optimizer.param_groups],
                weights=digest(bare.state_dict()),
                optimizer=digest(optimizer.state_dict()),
                average=digest(average.state_dict()) if average is not None else "",
                drawn=random_state(),
            )
            if case["loop"] == "next_epoch" and step % case["limit"] == 0 and position is not loader:
                position.next_epoch()
            manager.save(step, last_step=step == STEPS)
            if guard.step_ended(step):
                break
