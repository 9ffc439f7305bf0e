"""A loop of one's own over a PositionedLoader, under DDP or FSDP2, as docs/resume.md writes it."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler

from tests.integrations.accelerate_runs import Late
from tests.integrations.phases import die_at, join
from tests.world import Value, heard, names_in
from titan_ckpt import CheckpointConfig, CheckpointManager, PositionedLoader, RunGuard, SaveConfig
from titan_ckpt.components.items.exchange_order import ExchangeOrder, wrappers_of
from titan_ckpt.errors import CheckpointError, ConfigError, StateEncodingError
from titan_ckpt.integrations.lightning import fabric_manager

STEPS, SAMPLES = 14, 24
"""Six steps are an epoch: each has four samples, on any number of ranks."""


class Numbered(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Vectors with their numbers, and with noise of the process's random state; it counts what is read."""

    def __init__(self) -> None:
        self.values = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        self.num_read = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.num_read += 1
        return index, self.values[index] + 0.1 * torch.rand(4)


def run(folder: str, way: str, interval: int, killed_at: int | None) -> None:
    """Train; write the samples of each step, then the weights."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        join()
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(0)
    model = network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    if ranks > 1:
        network = DistributedDataParallel(model) if way == "ddp" else fully_shard(model)  # type: ignore[assignment]
    torch.manual_seed(rank + 1)
    data = Numbered()
    sampler: Any = DistributedSampler(data, ranks, rank, seed=3)
    loader = PositionedLoader(DataLoader(data, batch_size=2, sampler=sampler))
    batches: Iterator[Any] = chain.from_iterable(repeat(loader))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = CheckpointConfig(save=SaveConfig(interval=interval))
    read: dict[int, list[int]] = {}
    with (
        CheckpointManager(
            config, model_parts=[model], optimizers=[optimizer], dataloader=loader, base_folder=folder
        ) as manager,
        RunGuard(manager) as guard,
    ):
        for step in range(manager.load().step + 1, STEPS + 1):
            die_at(step - 1, killed_at, interval, Path(folder))
            for _ in range(2 // ranks):
                numbers, values = next(batches)
                read.setdefault(step, []).extend(numbers.tolist())
                (network(values).square().mean() / (2 // ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step, last_step=step == STEPS)
            if guard.step_ended(step):
                break
    result = {"read": read, "num_read": data.num_read}
    Path(folder, f"read-{rank}.json").write_text(json.dumps(result))
    local = {name: getattr(value, "_local_tensor", value) for name, value in model.state_dict().items()}
    torch.save(local, Path(folder, f"weights-{rank}.pt"))


def run_summed(folder: str, way: str) -> None:
    """See the first gradients after a resume, summed over three ranks, with the bits that the whole run has."""
    fabric = L.Fabric(accelerator="cpu", devices=3, strategy="ddp")
    fabric.launch()
    config, found = CheckpointConfig(save=SaveConfig(interval=1)), []
    batches = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        torch.manual_seed(0)
        network: Any = Late()
        optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-2)
        if way == "fabric":
            network, optimizer = fabric.setup(network, optimizer)
            manager = fabric_manager(fabric, config, model=network, optimizers=[optimizer], base_folder=folder)
        else:
            network = DistributedDataParallel(inner := network, gradient_as_bucket_view=way == "views")
            if way == "frozen objects":
                gc.freeze()
            parts = [network if way in ("ddp", "views") else inner]
            manager = CheckpointManager(config, model_parts=parts, optimizers=[optimizer], base_folder=folder)
        with manager:
            for step in range(manager.load().step, 2):
                optimizer.zero_grad()
                network(batches[step]).square().mean().backward()
                if step == 0:
                    optimizer.step()
                    manager.save(1)
        found.append([parameter.grad.clone() for parameter in network.parameters()])
    assert all(map(torch.equal, *found))


def run_joined(folder: str, killed_at: int | None) -> None:
    """Train on a batch more on each rank than on the one before, by torch's Join; save where all have some."""
    join()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    network, rank = DistributedDataParallel(model), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank + 1)
    batches = torch.randn(7 + rank, 3, 4, generator=torch.Generator().manual_seed(rank))
    config = CheckpointConfig(save=SaveConfig(interval=5))
    with CheckpointManager(config, model_parts=[network], optimizers=[optimizer], base_folder=folder) as manager:
        step = manager.load().step
        joined: Any = Join([network])
        with joined:
            for batch in batches[step:]:
                die_at(step, killed_at, 5, Path(folder))
                network(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                manager.save(step)
    torch.save(model.state_dict(), Path(folder, f"weights-{rank}.pt"))


def run_apart(folder: str) -> None:
    """See a save stopped on the rank that has a batch more than the other, and the step before in the folder."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, network = dist.get_rank(), DistributedDataParallel(nn.Linear(4, 1))
    config = CheckpointConfig(save=SaveConfig(interval=1, timeout_seconds=3.0))
    error: Any = CheckpointError if rank else RuntimeError
    stopped = pytest.raises(error, match="rank 0 did not answer" if rank else None)
    with stopped, CheckpointManager(config, model_parts=[network], base_folder=folder) as manager:
        manager.load()
        joined: Any = Join([network])
        with joined:
            for step in range(1, 2 + rank):
                network(torch.ones(2, 4)).sum().backward()
                manager.save(step)
            if rank:
                raise AssertionError("the second step is saved")
    assert [name for name in names_in(Path(folder, "checkpoints")) if name.startswith("step")] == ["step-1"]


def run_older(folder: str) -> None:
    """Go on from a step of a version that held no order: the log says that sums may round otherwise."""
    join()
    config = CheckpointConfig(save=SaveConfig(interval=1))
    for is_told in (False, dist.get_rank() == 0):
        network = DistributedDataParallel(Late())
        optimizer = torch.optim.AdamW(network.parameters())
        with (
            heard("titan_ckpt.loading.restore") as lines,
            CheckpointManager(config, model_parts=[network], optimizers=[optimizer], base_folder=folder) as manager,
        ):
            step = manager.load().step
            assert any("does not hold the order in which DDP sums gradients" in line for line in lines) is is_told
            if not step:
                manager._run.items.remove(manager._run.order)
                network(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                manager.save(1)


def run_failing(folder: str, where: str) -> None:
    """Fail on rank 0 in the way to or from a step: the others are told, and wait for no gradient of that rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    config, state = CheckpointConfig(save=SaveConfig(interval=1)), Value()
    for is_resumed in (False, True):
        network = DistributedDataParallel(Late())
        optimizer = torch.optim.AdamW(network.parameters())
        manager = CheckpointManager(
            config, model_parts=[network], optimizers=[optimizer], states={"own": state}, base_folder=folder
        )
        error: Any = ValueError if dist.get_rank() == 0 and where == "load" else CheckpointError
        if is_resumed and where == "load":
            if dist.get_rank() == 0:
                state.load_state_dict = raising  # type: ignore[method-assign]
            with pytest.raises(error, match=r"no state|stopped on all ranks|lost the store"):
                manager.load()
            return
        manager.load()
        network(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if where == "save":
            if dist.get_rank() == 0:
                state.value = ValueError("no state")
            with pytest.raises(error, match=r"no state|stopped on all ranks|lost the store"):
                manager.save(1)
            return
        manager.save(1)
        manager.close()


def raising(state_dict: dict[str, Any]) -> None:
    raise ValueError("no state")


class Made(TorchDispatchMode):
    """Counts the elements that new tensors with memory have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta and not any(result is value for value in args):
            self.num_elements += result.numel()
        return result


def run_order(folder: str) -> None:
    """See the order read without memory for gradients, and what no pass of zeros could give back refused by name."""
    join()
    late, config = Late(), CheckpointConfig(save=SaveConfig(interval=1))
    optimizer = torch.optim.AdamW(late.parameters())
    with CheckpointManager(config, model_parts=[late], optimizers=[optimizer], base_folder=folder) as manager:
        manager.load()
        network = DistributedDataParallel(late)
        network(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(StateEncodingError, match=r"put around .*Late after the CheckpointManager was made"):
            manager.save(1)
    network(torch.ones(2, 4))  # DDP makes buckets of the new order
    order = ExchangeOrder([late])
    with Made() as made:
        names = order.value({})
    assert sorted(names[0]) == sorted(name for name, _ in late.named_parameters())
    assert names[0] != [name for name, _ in late.named_parameters()]
    assert made.num_elements < 100
    again: Any = DistributedDataParallel(late)
    again.itself = [again]
    gc.disable()  # one rank has not collected it yet, and would wait alone for its order
    del again
    if dist.get_rank():
        gc.collect()
    assert len(wrappers_of([late])) == 1
    gc.enable()
    handle = late.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConfigError, match=r"hooks on gradients of module\.first\.weight.*find_unused_parameters=True"):
        CheckpointManager(config, model_parts=[late], base_folder=folder)
    handle.remove()
    with CheckpointManager(config, model_parts=[late], base_folder=f"{folder}/hooks") as manager:
        late.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(StateEncodingError, match=r"hooks on gradients of module\.first\.weight"):
            manager.load()
    parts = [nn.Linear(4, 1) for _ in range(2)]
    wrappers = [DistributedDataParallel(parts[0])]
    gc.freeze()  # hides it
    wrappers.append(DistributedDataParallel(parts[1]))
    assert [wrapper.module for wrapper in wrappers_of(parts)] == parts
    gc.freeze()  # again: it had to look through all objects
    twice = nn.Linear(4, 1)
    wrappers = [DistributedDataParallel(twice) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"several wrappers of DDP around .*Linear: .*delete the one"):
        CheckpointManager(config, model_parts=[twice], base_folder=folder)
    del wrappers
    fixed = nn.Linear(4, 1)
    network = DistributedDataParallel(fixed, static_graph=True)
    with pytest.raises(ConfigError, match=r"DDP's static_graph: three or more ranks .*: leave it out") as refused:
        CheckpointManager(config, model_parts=[fixed], base_folder=folder)
    (allowed,) = re.findall(r'checkpoint\.allow = \["(.*)"\]', str(refused.value))
    CheckpointManager(CheckpointConfig(allow=(allowed,)), model_parts=[fixed], base_folder=folder).close()
    sparse = nn.Sequential(nn.EmbeddingBag(4, 4, sparse=True), nn.Linear(4, 1))
    network = DistributedDataParallel(sparse)
    with pytest.raises(ConfigError, match=r"sparse gradients of module\.0.*find_unused_parameters=True"):
        CheckpointManager(config, model_parts=[sparse], base_folder=folder)


def run_hooked_late(folder: str) -> None:
    """See a hook that keeps errors of its compression refused, which two ranks register after the manager is made."""
    dist.init_process_group("gloo")
    network, config = DistributedDataParallel(inner := Late()), CheckpointConfig(save=SaveConfig(interval=1))
    network.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
    gc.freeze()
    with pytest.raises(ConfigError, match="powerSGD_hook"):
        CheckpointManager(config, model_parts=[inner], base_folder=folder)
    network = DistributedDataParallel(Late())
    optimizer = torch.optim.AdamW(network.parameters())
    with CheckpointManager(config, model_parts=[network], optimizers=[optimizer], base_folder=folder) as manager:
        manager.load()
        network.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
        network(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(StateEncodingError, match=r"(?s)new since the CheckpointManager was made.*powerSGD_hook"):
            manager.save(1)


def run_evaluated(folder: str, way: str) -> None:
    """Go on after evaluations by workers that are kept, which draw a seed once in a process."""
    found = {}
    for part, steps in (("whole", 5), ("resumed", 2), ("resumed", 5)):
        torch.manual_seed(0)
        network: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-2)
        values: Any = [*torch.randn(8, 4)]
        evaluated: Any = DataLoader(values, 4, shuffle=True, num_workers=1, persistent_workers=True)
        config, path = CheckpointConfig(save=SaveConfig(interval=1)), f"{folder}/{part}"
        if way == "fabric":
            fabric = L.Fabric(accelerator="cpu", devices=1)
            network, optimizer = fabric.setup(network, optimizer)
            evaluated = fabric.setup_dataloaders(evaluated)
            manager = fabric_manager(fabric, config, model=network, optimizers=[optimizer], base_folder=path)
        else:
            manager = CheckpointManager(config, model_parts=[network], optimizers=[optimizer], base_folder=path)
        seen = []
        with manager:
            for step in range(manager.load().step + 1, steps + 1):
                seen.append(float(network(torch.ones(4, 4)).square().mean()))
                network(torch.rand(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += [rows.tolist() for rows in evaluated] if step in (1, 4) else []
                manager.save(step, last_step=step == 5)
        found[part] = seen
    assert len(found["resumed"]) == 5
    assert found["resumed"] == found["whole"][-5:]
