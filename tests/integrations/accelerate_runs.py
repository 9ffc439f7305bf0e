"""Runs of a loop over what accelerate has prepared, for the tests, as its documentation writes them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig, skip_first_batches
from accelerate.utils import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    MSAMPRecipeKwargs,
    ProfileKwargs,
    TERecipeKwargs,
    TorchDynamoPlugin,
    set_seed,
)
from datasets import Dataset
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from transformers import DistributedConfig, LlamaConfig, LlamaForCausalLM

from tests.integrations.phases import die_at, forget, leave_behind
from tests.integrations.trainer_runs import fsdp2_on_a_cpu
from titan_ckpt import CheckpointConfig, RunGuard, SaveConfig
from titan_ckpt.errors import ConfigError, LoadMismatchError, SaveError
from titan_ckpt.integrations.accelerate import accelerate_manager
from titan_ckpt.integrations.accelerate.known import WORKS

SAMPLES, STEPS = 20, 9
"""A step takes two batches of two samples each; an epoch has an odd number of batches on two ranks, ten on one."""


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Numbered vectors with noise of the process's random state; it counts what is read."""

    noise = 0.1

    def __init__(self) -> None:
        values = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))
        self.values = torch.cat([torch.arange(SAMPLES)[:, None], values], 1)
        self.num_read = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        noise = torch.zeros(6)
        if self.noise:
            noise[1:] = self.noise * torch.rand(5)
        return self.values[index] + noise


class Still(Noisy):
    """The same without noise, as worker processes may read them."""

    noise = 0


def stream(shards: int = 2, *, data: Callable[[], Noisy] = Noisy, shuffled: bool = False) -> Any:
    """Return them as a stream of datasets."""
    vectors = data()
    rows = Dataset.from_dict({"at": [*range(SAMPLES)]}).to_iterable_dataset(num_shards=shards)
    rows = rows.shuffle(7, buffer_size=4) if shuffled else rows
    return rows.map(lambda row: {"vector": vectors[row["at"]]})


def collated(rows: Any) -> torch.Tensor:
    return torch.stack([row["vector"] if isinstance(row, dict) else row for row in rows])


class Network(nn.Module):
    """Two blocks, with dropout, so that random numbers count."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.dropout(self.linear(x)).relu()
        return result


class Case(NamedTuple):
    """A case says what is read, and how."""

    accelerator: Callable[[], dict[str, Any]] = dict
    """Arguments of the Accelerator; objects of accelerate are made in the process that uses them."""
    data: Callable[[], Any] = Noisy
    loader: Mapping[str, Any] = MappingProxyType({})
    accumulated: int = 2
    ranks: tuple[int, ...] = (1, 2)
    network: Callable[[Path], Any] = lambda _: Network()
    scales: bool = False
    """Whether gradients are scaled as in fp16, which accelerate does on accelerators alone; one step overflows."""


def fsdp(**settings: Any) -> dict[str, Any]:
    kinds: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **kinds | settings)}


def meshed(**sizes: int) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(**sizes)}


class Divided(nn.Module):
    """The same as Network, by the layers of a Llama, which transformers divides among ranks when it loads them."""

    def __init__(self, llama: Any) -> None:
        super().__init__()
        self.llama, self.config = llama, llama.config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.llama(inputs_embeds=x.repeat(1, 4)[:, None]).logits[:, 0, :1]
        return result


def divided(folder: Path, **sizes: int) -> Divided:
    shape: Any = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 8}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **shape)).save_pretrained(folder / "base")  # rank 0 alone writes
    torch.distributed.barrier()
    layout = DistributedConfig(**cast("Any", sizes))
    return Divided(LlamaForCausalLM.from_pretrained(folder / "base", distributed_config=layout, attention_dropout=0.1))


def loading(**settings: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"dataloader_config": DataLoaderConfiguration(**settings)}


def handled(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"kwargs_handlers": [make()]}


def accumulating(**settings: Any) -> dict[str, Any]:
    return {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, **settings)}


SHUFFLED: dict[str, Any] = {"shuffle": True}
UNDISPATCHED = loading(dispatch_batches=False)
STATEFUL = loading(dispatch_batches=False, use_stateful_dataloader=True)
WORKERS: dict[str, Any] = {"num_workers": 2}
OF_LOADERS: dict[str, Case] = {
    "in order": Case(),
    "shuffled": Case(loader=SHUFFLED),
    "shuffled by a generator": Case(loader={**SHUFFLED, "generator": torch.Generator().manual_seed(3)}),
    "workers": Case(data=Still, loader={**SHUFFLED, **WORKERS}),
    "workers that are kept": Case(data=Still, loader={**SHUFFLED, **WORKERS, "persistent_workers": True}),
    "drop_last": Case(loader={**SHUFFLED, "drop_last": True, "batch_size": 3}),
    "split_batches": Case(loading(split_batches=True), loader={**SHUFFLED, "batch_size": 4}),
    "even_batches=False": Case(loading(even_batches=False), loader=SHUFFLED),
    "use_seedable_sampler": Case(loading(use_seedable_sampler=True), loader=SHUFFLED),
    "data_seed": Case(loading(use_seedable_sampler=True, data_seed=5), loader=SHUFFLED),
    "non_blocking": Case(loading(non_blocking=True), loader=SHUFFLED),
    "use_stateful_dataloader": Case(STATEFUL, loader=SHUFFLED),
    "use_stateful_dataloader, workers": Case(STATEFUL, Still, {**SHUFFLED, **WORKERS}),
    "use_stateful_dataloader, use_seedable_sampler": Case(
        loading(use_stateful_dataloader=True, use_seedable_sampler=True), loader=SHUFFLED
    ),
    **{
        f"{name}, {kind}": Case(settings, partial(stream, shards, **more), loader)
        for name, settings in (("dispatch_batches=False", UNDISPATCHED), ("use_stateful_dataloader", STATEFUL))
        for kind, shards, more, loader in (
            ("a stream", 2, {}, {}),
            ("a stream of one shard", 1, {}, {}),
            ("a shuffled stream", 2, {"shuffled": True}, {}),
            ("a stream, workers", 4, {"data": Still}, WORKERS),
            ("a shuffled stream of one shard, workers", 1, {"data": Still, "shuffled": True}, {"num_workers": 1}),
        )
    },
    "split_batches, a stream": Case(
        loading(split_batches=True, dispatch_batches=False), stream, {"batch_size": 4}, accumulated=1
    ),
    "device_placement=False, a stream": Case(lambda: {"device_placement": False}, stream),
}
OF_PLUGINS: dict[str, Case] = {
    "no accumulation": Case(accumulated=1, loader=SHUFFLED),
    "accumulation over 3": Case(accumulated=3, loader=SHUFFLED),
    "mixed_precision bf16": Case(lambda: {"mixed_precision": "bf16"}, loader=SHUFFLED),
    "step_scheduler_with_optimizer=False": Case(lambda: {"step_scheduler_with_optimizer": False}, loader=SHUFFLED),
    "rng_types": Case(lambda: {"rng_types": ["torch", "generator"]}, loader=SHUFFLED),
    **{
        f"GradientAccumulationPlugin {name}": Case(
            partial(accumulating, **values),
            loader=SHUFFLED,
            accumulated=1,
        )
        for name, values in (
            ("adjust_scheduler=False", {"adjust_scheduler": False}),
            ("sync_with_dataloader=False", {"sync_with_dataloader": False}),
            ("sync_each_batch", {"sync_each_batch": True}),
        )
    },
    "TorchDynamoPlugin": Case(lambda: {"dynamo_plugin": TorchDynamoPlugin(backend="eager")}, loader=SHUFFLED),
    "TorchDynamoPlugin use_regional_compilation": Case(
        lambda: {"dynamo_plugin": TorchDynamoPlugin(backend="eager", use_regional_compilation=True)}, loader=SHUFFLED
    ),
    "AutocastKwargs": Case(handled(partial(AutocastKwargs, enabled=False)), loader=SHUFFLED),
    "DistributedDataParallelKwargs": Case(
        handled(partial(DistributedDataParallelKwargs, find_unused_parameters=True)), loader=SHUFFLED
    ),
    "DistributedDataParallelKwargs comm_hook": Case(
        handled(partial(DistributedDataParallelKwargs, comm_hook=DDPCommunicationHookType.FP16)), loader=SHUFFLED
    ),
    "GradScalerKwargs": Case(handled(GradScalerKwargs), loader=SHUFFLED),
    "GradScaler": Case(loader=SHUFFLED, scales=True),
    "InitProcessGroupKwargs": Case(handled(InitProcessGroupKwargs), loader=SHUFFLED),
    "ProfileKwargs": Case(handled(ProfileKwargs), loader=SHUFFLED),
}
OF_FSDP2: dict[str, Case] = {
    f"FSDP2 {name}": Case(partial(fsdp, **values), loader=SHUFFLED, ranks=(2,))
    for name, values in (
        ("", {}),
        ("reshard_after_forward=False", {"reshard_after_forward": False}),
        ("no_wrap", {"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None}),
        ("size_based_wrap", {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1000}),
        ("cpu_ram_efficient_loading=False", {"cpu_ram_efficient_loading": False}),
        ("activation_checkpointing", {"activation_checkpointing": True}),
        ("mixed_precision_policy", {"mixed_precision_policy": "bf16"}),
    )
}
OF_FSDP2 |= {
    "FSDP2, bf16, a stream": Case(lambda: {**fsdp(), "mixed_precision": "bf16", **UNDISPATCHED()}, stream, ranks=(2,)),
    "FSDP2, use_stateful_dataloader": Case(lambda: {**fsdp(), **STATEFUL()}, loader=SHUFFLED, ranks=(2,)),
    "FSDP2, GradScaler": Case(fsdp, loader=SHUFFLED, ranks=(2,), scales=True),
    "HSDP": Case(lambda: {**meshed(dp_replicate_size=2, dp_shard_size=2), **fsdp()}, loader=SHUFFLED, ranks=(4,)),
    "tensor parallelism": Case(
        partial(meshed, tp_size=2), loader=SHUFFLED, ranks=(2,), network=partial(divided, tp_size=2)
    ),
    "FSDP2 and tensor parallelism": Case(
        partial(meshed, tp_size=2, dp_shard_size=2),
        loader=SHUFFLED,
        ranks=(4,),
        network=partial(divided, tp_size=2, fsdp_size=2),
    ),
}
CASES = OF_LOADERS | OF_PLUGINS | OF_FSDP2


def run(folder: str, interval: int, stopped_at: int | None, name: str, *, kills: bool = False) -> None:
    """Train; write the weights, the rates and the samples of each step."""
    case, path, rank = CASES[name], Path(folder), int(os.environ.get("RANK", 0))
    # accelerate knows meshes on accelerators alone, and does nothing for them that needs one
    with fsdp2_on_a_cpu(), mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        given = {"gradient_accumulation_steps": case.accumulated, **case.accelerator()}
        accelerator = Accelerator(cpu=True, **given)
    if case.scales:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    set_seed(5, device_specific=True)
    data, (network, optimizer, scheduler) = case.data(), built(partial(case.network, path))
    loader: Any = DataLoader(data, **{"batch_size": 2, "collate_fn": collated, **case.loader})
    torch.rand(int(interval))  # another process has drawn other numbers before
    bare = network
    network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    read: dict[int, list[list[float]]] = {}
    rates = {}
    config = CheckpointConfig(save=SaveConfig(interval=interval))
    with accelerate_manager(accelerator, config, base_folder=path) as manager, RunGuard(manager) as guard:
        step = manager.load().step
        while step < STEPS:
            for batch in loader:
                if not kills and step == stopped_at:
                    wait(path / "checkpoints" / f"step-{(step - 1) // interval * interval}")
                    leave_behind(path)
                elif accelerator.sync_gradients:
                    die_at(step, stopped_at if kills else None, interval, path)
                with accelerator.accumulate(network):
                    loss = (network(batch[:, 1:5]) - batch[:, 5:]).square().mean()
                    accelerator.backward(loss * float("inf") if case.scales and step == 3 else loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(network.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                read.setdefault(step + 1, []).append([*batch[:, 0].int().tolist(), float(loss.detach())])
                if accelerator.sync_gradients:
                    step += 1
                    rates[step] = scheduler.get_last_lr()
                    manager.save(step, last_step=step == STEPS)
                    if step == STEPS or guard.step_ended(step):
                        break
    local = {name: v._local_tensor if isinstance(v, DTensor) else v for name, v in bare.state_dict().items()}
    result = {
        "weights": local, "read": read, "rates": rates, "num_read": getattr(data, "num_read", 0),
        "random": (torch.rand(1), random.random()), "scaler": accelerator.scaler and accelerator.scaler.state_dict(),
    }  # fmt: skip
    torch.save(result, path / f"result-{rank}.pt")


def run_killed(folder: str, interval: int, killed_at: int | None, name: str) -> None:
    """Do the same, and die by SIGKILL."""
    run(folder, interval, killed_at, name, kills=True)


def wait(saved: Path) -> None:
    while not saved.is_dir():
        time.sleep(0.01)


def built(make: Callable[[], Any] = Network) -> Any:
    """Return a network, an optimizer and a schedule; all ranks begin with the same weights."""
    torch.manual_seed(0)
    network = make()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    return network, optimizer, OneCycleLR(optimizer, 1e-2, total_steps=2 * STEPS)


def run_refused(folder: str) -> None:
    """See each setting that cannot be continued exactly refused by name, before a step."""
    network, optimizer, scheduler = built()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs()])
    config = CheckpointConfig()

    def refused(said: str, **given: Any) -> None:
        with pytest.raises(ConfigError, match=said):
            accelerate_manager(accelerator, config, base_folder=folder, **given)

    refused(r"no model is prepared: call accelerator\.prepare\(model, optimizer, loader, scheduler\) first")
    accelerator.prepare(network)
    saving = CheckpointConfig(save=SaveConfig(interval=1))
    with pytest.raises(ConfigError, match="no optimizer is prepared, so no step would hold its state"):
        accelerate_manager(accelerator, saving, base_folder=folder)
    accelerator.prepare(optimizer)
    with pytest.raises(ConfigError, match=r"a schedule of torch\.optim\.adamw\.AdamW is not prepared"):
        accelerate_manager(accelerator, saving, base_folder=folder)
    with accelerate_manager(accelerator, saving, states={"rate": scheduler}, base_folder=folder):
        accelerator.prepare(scheduler)
    other = DataLoader(Noisy(), 2)
    refused("dataloader: DataLoader is not what accelerator.prepare returns", dataloader=other)
    dispatched = accelerator.prepare(DataLoader(stream(), 2, collate_fn=collated))
    refused(r"dispatch_batches: rank 0 reads ahead.*set DataLoaderConfiguration\(dispatch_batches=False\)")
    loader = accelerator.prepare(other)
    refused("2 are prepared: name the one that the training reads, dataloader=loader")
    refused("dispatch_batches", dataloader=dispatched)
    refused("not what accelerator.prepare returns", dataloader=skip_first_batches(loader, 1))
    loader.skip_batches = 1  # as it is for a stream
    refused("skip_first_batches", dataloader=loader)
    loader.skip_batches = 0
    refused("states: accelerator: the name of accelerate's own", dataloader=loader, states={"accelerator": Counted()})
    for kind in (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs):
        accelerator.ao_recipe_handler = object.__new__(kind)  # some need packages that are not installed
        refused(f"{kind.__name__}: no step is known to hold the scales")
    accelerator.ao_recipe_handler = None
    accelerator.ddp_handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)
    refused("comm_hook power_sgd: it keeps the errors of its compression")
    accelerator.ddp_handler = None
    hook = accelerator.register_save_state_pre_hook(lambda *_: None)
    refused("register_save_state_pre_hook.*register_for_checkpointing")
    hook.remove()
    state: Any = accelerator.state
    for kind in DistributedType:
        with mock.patch.dict(state._shared_state, distributed_type=kind, fsdp_plugin=SimpleNamespace(fsdp_version=1)):
            if kind.value not in WORKS or kind == DistributedType.FSDP:
                refused("DeepSpeed|FSDP1: .*fsdp_version=2|only DDP, FSDP2 and a single process")
    parallel = SimpleNamespace(cp_enabled=True, sp_enabled=False)
    with mock.patch.dict(state._shared_state, parallelism_config=parallel):
        refused("context and sequence parallelism")


def run_beside_stateful(folder: str) -> None:
    """Do the same with loaders of torchdata, of which accelerate makes an iterator when it prepares them."""
    run_beside(folder, use_stateful_dataloader=True)


def run_beside(folder: str, **settings: Any) -> None:
    """Go on with what is registered, and with the order of a loader that evaluates, from the attribute of the epoch."""
    found = {}
    for part, steps in (("whole", 6), ("resumed", 3), ("resumed", 6)):
        set_seed(5)
        loading = DataLoaderConfiguration(**settings or {"use_seedable_sampler": True})
        accelerator = Accelerator(cpu=True, dataloader_config=loading)
        network, optimizer, scheduler = built()
        loaders = [DataLoader(Still(), 10, shuffle=True) for _ in range(2)]
        prepared: Any = accelerator.prepare(network, optimizer, scheduler, *loaders)
        network, optimizer, scheduler, loader, evaluated = prepared
        counted = Counted()
        accelerator.register_for_checkpointing(counted)
        config = CheckpointConfig(save=SaveConfig(interval=1))
        orders: list[Any] = []
        with accelerate_manager(accelerator, config, dataloader=loader, base_folder=f"{folder}/{part}") as manager:
            step = manager.load().step
            if step:
                with pytest.raises(LoadMismatchError, match=r"set_epoch\(0\) after a load: the run goes on in epoch 1"):
                    loader.set_epoch(0)
            for epoch in range(loader.iteration, 3):
                loader.set_epoch(epoch)
                for batch in loader:
                    accelerator.backward(network(batch[:, 1:5]).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    step, counted.number = step + 1, counted.number + 1
                    orders.append((epoch, counted.number, batch[:, 0].tolist()))
                    orders += [[rows[:, 0].tolist() for rows in evaluated]] if step == 2 or step == 4 else []
                    manager.save(step, last_step=step == 6)
                    if step == steps:
                        break
                if step == steps:
                    break
        found[part] = orders
    accelerator = Accelerator(cpu=True)
    alone: Any = accelerator.prepare(*built(), DataLoader(Still(), 10, shuffle=True))
    accelerator.register_for_checkpointing(Counted())
    other = accelerate_manager(accelerator, CheckpointConfig(), base_folder=f"{folder}/resumed")
    with other, pytest.raises(LoadMismatchError, match="prepare the same, in the same order"):
        other.load()
    del alone
    assert len(found["resumed"]) == 4
    assert found["whole"][-4:] == found["resumed"]


def run_left(folder: str) -> None:
    """Leave the iterator at the last batch of each epoch: the next one begins, whether the loop tells it or not.

    All loops of this process read by one loader, of which accelerate makes another each time.
    """
    given: Any = DataLoader(Noisy(), 10, shuffle=True, num_workers=1, persistent_workers=True)
    for is_told in (False, True):
        found: dict[str, Any] = {}
        for part in ("whole", "resumed"):
            forget()
            set_seed(5)
            accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
            prepared: Any = accelerator.prepare(*built(), given)
            loader = prepared[-1]
            config = CheckpointConfig(save=SaveConfig(interval=2 if part == "whole" else 9))
            with accelerate_manager(accelerator, config, base_folder=f"{folder}/{is_told}") as manager:
                step = manager.load(2 if part == "resumed" else -1).step
                for epoch in range(loader.iteration, 3):
                    if is_told:
                        loader.set_epoch(epoch)
                    for batch in loader:
                        step += 1
                        found.setdefault(part, []).append((epoch, loader.iteration, batch.tolist()))
                        manager.save(step)
                        if loader.end_of_dataloader:
                            break
        assert [row[:2] for row in found["whole"]] == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]
        assert found["resumed"] == found["whole"][2:]


class Drawn(Noisy):
    """Vectors with noise of a generator of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.own.random()


EVALUATED: dict[str, Callable[[], tuple[DataLoader[torch.Tensor], int]]] = {
    "workers that are kept": lambda: (DataLoader(Still(), 10, num_workers=1, persistent_workers=True), 9),
    "a generator of the data": lambda: (DataLoader(Drawn(), 10), 9),
    "a loop that is broken off": lambda: (DataLoader(Still(), 10), 1),
}
"""The kinds of data that evaluations read, and how many batches they read of it."""


def run_evaluated(folder: str) -> None:
    """Go on with what evaluations leave behind; a step takes two batches of five, or the last one."""
    for name, of_evaluation in EVALUATED.items():
        found = {}
        for part, steps in (("whole", 7), ("resumed", 2), ("resumed", 7)):
            forget()
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            set_seed(5)
            evaluated, limit = of_evaluation()
            prepared: Any = accelerator.prepare(*built(), DataLoader(Noisy(), 4, shuffle=True), evaluated)
            network, optimizer, scheduler, loader, evaluated = prepared
            config = CheckpointConfig(save=SaveConfig(interval=1))
            seen: list[Any] = []
            with accelerate_manager(accelerator, config, dataloader=loader, base_folder=f"{folder}/{name}/{part}") as m:
                step = m.load().step
                while step < steps:
                    for batch in loader:
                        with accelerator.accumulate(network):
                            loss = (network(batch[:, 1:5]) - batch[:, 5:]).square().mean()
                            accelerator.backward(loss)
                            optimizer.step()
                            scheduler.step()
                            optimizer.zero_grad()
                        seen.append((float(loss.detach()), accelerator.sync_gradients))
                        if not accelerator.sync_gradients:
                            continue
                        step += 1
                        seen += [rows.sum().item() for rows in islice(evaluated, limit if step in (2, 4) else 0)]
                        m.save(step, last_step=step == steps)
                        if step == steps:
                            break
            found[part] = seen
        assert len(found["resumed"]) > 8, name
        assert found["resumed"] == found["whole"][-len(found["resumed"]) :], name


def run_unheld(folder: str) -> None:
    """See a save refused that would leave out what was registered late, or the position in a second loader."""
    accelerator = Accelerator(cpu=True)
    prepared: Any = accelerator.prepare(*built(), *(DataLoader(Still(), 4) for _ in range(2)))
    network, optimizer, _, loader, other = prepared
    config = CheckpointConfig(save=SaveConfig(interval=1))
    with accelerate_manager(accelerator, config, dataloader=loader, base_folder=folder) as manager:
        manager.load()
        for step, (batch, _) in enumerate(zip(loader, other, strict=True), 1):
            accelerator.backward(network(batch[:, 1:5]).sum())
            optimizer.step()
            with pytest.raises(SaveError, match="prepared loader 0 beside the training's: it is being read"):
                manager.save(step)
            break
        manager.save(1)
        accelerator.register_for_checkpointing(Counted())
        with pytest.raises(SaveError, match="Counted: prepared or registered after accelerate_manager"):
            manager.save(2)


def run_compressed(folder: str) -> None:
    """See PowerSGD refused also if the loop itself has given it to DDP."""
    accelerator = Accelerator(cpu=True)
    prepared: Any = accelerator.prepare(*built())
    prepared[0].register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    with pytest.raises(ConfigError, match=r"DDP's communication hook .*powerSGD_hook"):
        accelerate_manager(accelerator, CheckpointConfig(), base_folder=folder)


def run_skipped(folder: str) -> None:
    """See what skip_first_batches makes of the training's loader refused when it begins, before a step reads of it."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    for data in (Noisy(), stream()):
        accelerator.free_memory()
        prepared: Any = accelerator.prepare(*built(), *(DataLoader(d, 2, collate_fn=collated) for d in (data, Still())))
        loader, other = prepared[3:]
        with accelerate_manager(accelerator, CheckpointConfig(), dataloader=loader, base_folder=folder):
            twice = skip_first_batches(skip_first_batches(loader, 1), 1)
            for skipped in (skip_first_batches(loader, 1), accelerator.skip_first_batches(loader, 2), twice):
                with pytest.raises(ConfigError, match="skip_first_batches: a resume skips what was read by itself"):
                    next(iter(skipped))
            assert len([*skip_first_batches(other, 1)]) == SAMPLES // 2 - 1
            assert len([*loader]) == SAMPLES // 2
    accelerator.free_memory()
    always: Any = skip_first_batches(DataLoader(Noisy(), 2), 3)  # of every epoch, and so of every run
    prepared = accelerator.prepare(*built(), always)
    with accelerate_manager(accelerator, CheckpointConfig(), base_folder=folder):
        assert len([*prepared[3]]) == SAMPLES // 2 - 3


class Late(nn.Module):
    """Layers whose gradients come in another order than the parameters are listed in."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.first = nn.Linear(64, 1), nn.Linear(4, 64)
        self.second, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.second(self.first(x).relu())).relu())
        return result


def run_summed(folder: str) -> None:
    """See the first gradients after a resume, summed over three ranks, with the bits that the whole run has."""
    found = []
    for _ in range(2):
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        network: Any = Late()
        network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=1e-2))
        batches = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(accelerator.process_index))
        with accelerate_manager(accelerator, CheckpointConfig(save=SaveConfig(interval=1)), base_folder=folder) as m:
            for step in range(m.load().step, 2):
                optimizer.zero_grad()
                accelerator.backward(network(batches[step]).square().mean())
                if step == 0:
                    optimizer.step()
                    m.save(1)
        found.append([parameter.grad.clone() for parameter in network.parameters()])
    assert all(map(torch.equal, *found))


class Counted:
    """An object of the user's own with a state."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.number = state_dict["number"]
