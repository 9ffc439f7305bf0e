"""Loops over drawn loaders: killed by SIGKILL at drawn batches, resumed until they end, and compared with whole ones.

`python -m tests.integrations.loader_draws 0 400` plays the cases of these seeds and says how many are exact.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as of_torchdata

from tests.forked import fork
from tests.integrations.draws import random_state
from tests.integrations.loader_cases import Early, Jittered, Jumping, Sized, Stream, plain
from titan_ckpt.components.items.data_position import DataPosition
from titan_ckpt.components.items.item import DataRank
from titan_ckpt.components.known.loaders import unwrapped_faults
from titan_ckpt.components.known.streams import stream_faults
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import refuse
from titan_ckpt.integrations.loader_position import PositionedLoader
from titan_ckpt.process import RandomState

STEPS = 16


class Rows(torch.utils.data.Dataset[float]):
    """Numbers with noise of the process, or of a generator that the data holds."""

    def __init__(self, length: int, noise: str) -> None:
        self.length, self.noise = length, noise
        self.own = random.Random(5) if noise == "own" else None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> float:
        drawing: dict[str, Callable[[], float]] = {
            "": lambda: 0.0, "torch": lambda: float(torch.rand(())), "random": random.random,
            "own": lambda: self.own.random() if self.own else 0.0,
        }  # fmt: skip
        return index + drawing[self.noise]() / 2


class Stated(Rows):
    """Rows that know how many were read before, which their state says, and with it their generator."""

    num_read = 0

    def __getitem__(self, index: int) -> float:
        self.num_read += 1
        return super().__getitem__(index) + 100 * self.num_read

    def state_dict(self) -> dict[str, Any]:
        return {"num_read": self.num_read, "own": self.own.getstate() if self.own else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_read = state["num_read"]
        if self.own:
            self.own.setstate(state["own"])


class Omitting(Stated):
    """The same, whose state leaves its generator out."""

    def state_dict(self) -> dict[str, Any]:
        return {"num_read": self.num_read, "own": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_read = state["num_read"]


class Turned(Sampler[int]):
    """An order that the epoch decides, which it is told."""

    epoch = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(self.length).tolist())


class Reader:
    """An iterator that is no generator, over a stream."""

    def __init__(self, stream: Stepping) -> None:
        self.stream = stream

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        stream = self.stream
        if stream.next == stream.rows.length:
            stream.next = 0
            raise StopIteration
        stream.next += 1
        return stream.rows[stream.next - 1]


class Stepping(Sized):
    def __iter__(self) -> Any:
        return Reader(self)


class Holding(Stream):
    """A stream whose state has its generator."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "own": self.rows.own.getstate() if self.rows.own else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]
        if self.rows.own:
            self.rows.own.setstate(state["own"])


class Dealt(Stream):
    """A stream of which each worker reads a share, the first one the least."""

    def __iter__(self) -> Iterator[float]:
        info: Any = get_worker_info()
        share = range(self.rows.length)
        if info and info.num_workers > 1:
            share = share[:2] if info.id == 0 else share[1 + info.id :: info.num_workers - 1]
        while self.next < len(share):
            self.next += 1
            yield self.rows[share[self.next - 1]]
        self.next = 0


DATA: dict[str, Any] = {
    "rows": Rows, "stated": Stated, "omitting": Omitting,
    "part": lambda length, noise: Subset(Stated(length, noise), range(length)),
}  # fmt: skip
STREAMS: dict[str, Any] = {
    "stream": Stream,
    "sized stream": Sized,
    "no generator": Stepping,
    "holding": Holding,
    "dealt": Dealt,
}
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "random": lambda length: RandomSampler(range(length), generator=torch.Generator().manual_seed(3)),
    "of the process": lambda length: RandomSampler(range(length)),
    "more": lambda length: RandomSampler(range(length), replacement=True, num_samples=length + 2),
    "told": Turned, "positioned": Jumping, "early": Early,
    "distributed": lambda length: DistributedSampler(Rows(length, ""), 1, 0),
    "torchdata": lambda length: of_torchdata.RandomSampler(range(length), generator=torch.Generator().manual_seed(4)),
    "torchdata, distributed": lambda length: of_torchdata.StatefulDistributedSampler(Rows(length, ""), 1, 0),
    "seedable": lambda length: SeedableRandomSampler(range(length), data_seed=3),
}  # fmt: skip
BATCHES: dict[str, Any] = {"torch": BatchSampler, "torchdata": of_torchdata.BatchSampler}


def drawn(number: int) -> dict[str, Any]:
    """Return the case of a seed."""
    draw = random.Random(7000 + number)
    workers, loader = draw.choice([0, 0, 0, 1, 2, 3]), draw.choice(["torch", "torchdata", "raw", "raw"])
    size, noise = draw.choice([None, 1, 2, 2, 3, 3, 4, 5]), draw.choice(["", "torch", "random", "own"])
    data = draw.choice(["rows", *DATA, *STREAMS])
    if loader == "raw" and (data not in ("rows", "stated", "holding") if noise == "own" else workers):
        noise = ""  # docs/resume.md says that these numbers do not go on
    if data == "dealt" and workers > 1 and noise != "own":
        noise = ""  # the same: workers end at different moments
    return {
        "data": data,
        "length": draw.randint(5, 13),
        "noise": noise,
        "collate": draw.random() < 0.2,
        "loader": loader,
        "sampler": draw.choice(["", "shuffle", *SAMPLERS]),
        "batch sampler": draw.choice(["", "", *BATCHES]) if size else "",
        "size": size,
        "drop_last": size is not None and draw.random() < 0.4,
        "generator": draw.random() < 0.3,
        "workers": workers,
        "prefetch": draw.choice([None, 1, 3]) if workers else None,
        "kept": workers > 0 and draw.random() < 0.5,
        "loop": draw.choice(["for", "for", "to the length", "left", "after"]),
        "second": draw.random() < 0.2 and loader != "raw",
        "limit": draw.randint(1, 4),
        "snapshots": draw.choice([1, 1, 2, 3]),
        "interval": draw.choice([1, 1, 2, 3]),
        "kills": sorted(draw.sample(range(1, STEPS), draw.choice([1, 2, 3]))),
    }


def loader_of(case: dict[str, Any]) -> Any:
    length, size, drop_last = case["length"], case["size"], case["drop_last"]
    kind: Any = DataLoader if case["loader"] == "torch" else StatefulDataLoader
    given: dict[str, Any] = {
        "collate_fn": Jittered() if case["collate"] and size else None, "num_workers": case["workers"],
        "prefetch_factor": case["prefetch"], "persistent_workers": case["kept"],
        "generator": torch.Generator().manual_seed(6) if case["generator"] else None,
    }  # fmt: skip
    if case["loader"] != "torch":
        given["snapshot_every_n_steps"] = case["snapshots"]
    if case["data"] in STREAMS:
        return kind(STREAMS[case["data"]](Rows(length, case["noise"])), size, drop_last=drop_last, **given)
    data = DATA[case["data"]](length, case["noise"])
    if case["sampler"] in ("", "shuffle"):
        return kind(data, size, drop_last=drop_last, shuffle=bool(case["sampler"]), **given)
    sampler = SAMPLERS[case["sampler"]](length)
    if case["batch sampler"]:
        return kind(data, batch_sampler=BATCHES[case["batch sampler"]](sampler, size, drop_last), **given)
    return kind(data, size, drop_last=drop_last, sampler=sampler, **given)


class Raw:
    """The position of a StatefulDataLoader as it is, as a manager stores it."""

    def __init__(self, loader: Any) -> None:
        refuse(*stream_faults(loader.dataset, ()), *unwrapped_faults(loader, ()))
        self._item = DataPosition(loader, lambda: DataRank(0, 1))

    def state_dict(self) -> Any:
        return self._item.value({})

    def load_state_dict(self, state: Any) -> None:
        stored: Any = SimpleNamespace(values={"dataloader": [state]})
        self._item.check(stored)
        self._item.restore(stored, {})


def run(case: dict[str, Any], folder: Path, kill: int | None) -> None:
    """Read batches, write one line for each, and save; resume from the newest save. `kill`: the step to end at."""
    warnings.simplefilter("ignore")
    process = RandomState()
    process.reseed(1)
    loader = loader_of(case)
    second = PositionedLoader(DataLoader(Rows(5, "torch"), 2, shuffle=True)) if case["second"] else None
    seconds = chain.from_iterable(repeat(second)) if second else repeat(None)
    is_raw = case["loader"] == "raw"
    position: Any = Raw(loader) if is_raw else PositionedLoader(loader)
    read_by = loader if is_raw else position
    step = epoch = 0
    if (newest := folder / "newest.json").exists():
        random.random(), torch.rand(3)  # another process has drawn other numbers before
        stored = typed_json.loads(newest.read_bytes())
        step, epoch = stored["step"], stored["epoch"]
        position.load_state_dict(stored["position"])
        if second:
            second.load_state_dict(stored["second"])
        process.load_state_dict(stored["random"])
    records = open(folder / "steps.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends

    def save() -> None:
        if step % case["interval"] == 0:
            state = {"step": step, "epoch": epoch, "position": position.state_dict(), "random": process.state_dict()}
            state["second"] = second.state_dict() if second else None
            (folder / "written.json").write_bytes(typed_json.dumps(state))
            (folder / "written.json").rename(newest)

    ended = 0
    while step < STEPS:
        before = step
        around = getattr(loader, "batch_sampler", None)
        told: Any = getattr(around, "sampler", None) if around is not None else loader.sampler
        if is_raw and hasattr(told, "set_epoch"):
            told.set_epoch(epoch)
        is_whole = hasattr(loader.dataset, "__len__") and not (case["data"] in STREAMS and case["workers"] > 1)
        is_limited = case["loop"] == "to the length" and not is_raw and is_whole  # each worker reads all of a stream
        left = len(loader) - position.num_batches % len(loader) if is_limited else None
        for batch in islice(read_by, left):
            step += 1
            records.write(
                json.dumps([step, [plain(batch), plain(next(seconds)), float(torch.rand(())), random_state()]]) + "\n"
            )
            if case["loop"] == "left" and not is_raw and position.num_batches == case["limit"]:
                position.next_epoch()
            if case["loop"] != "after":
                save()
            if step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STEPS:
                break
        epoch += 1
        if case["loop"] == "after":
            save()
        ended = 0 if step > before else ended + 1
        if ended == 3:
            raise EOFError("an epoch has no batch")
    (folder / "done").touch()


def attempted(case: dict[str, Any], folder: Path, kill: int | None) -> None:
    folder.mkdir(exist_ok=True)
    try:
        run(case, folder, kill)
    except Exception as error:
        (folder / "error").write_text(f"{type(error).__name__}: {error}")


def judge(case: dict[str, Any], folder: Path) -> str:
    """Play a case whole, and killed as often as it says; return "exact", "refused: why" or what differs."""
    plays = [("whole", None), *(("killed", kill) for kill in (*case["kills"], None))]
    for name, kill in plays:
        os.waitpid(fork(partial(attempted, case, folder / name, kill)), 0)
        if (error := folder / name / "error").exists():
            text = error.read_text()
            is_refused = text.startswith(("ConfigError", "LoadMismatchError")) and name == "whole"
            return f"{'refused' if is_refused else 'broken' if name == 'whole' else 'different'}: {text}"
    rows = [
        [json.loads(line) for line in (folder / name / "steps.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    ]
    expected = dict(rows[0])
    wrong = [step for step, values in rows[1] if values != expected[step]]
    if wrong or not (folder / "killed" / "done").exists():
        return f"different: steps {wrong}"
    return "exact"


def main(first: int, last: int) -> None:
    counts: Counter[str] = Counter()
    for number in range(first, last):
        with tempfile.TemporaryDirectory() as folder:
            found = judge(drawn(number), Path(folder))
        counts[found.partition(":")[0]] += 1
        if found.startswith(("different", "broken")):
            print(number, found[:300], drawn(number), flush=True)
    print(dict(counts), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
