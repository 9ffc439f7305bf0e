"""A run that does everything in a bucket that costs requests, on one or two ranks. `test_requests.py` counts them."""

from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from tests import world
from tests.test_manager import Run
from titan_ckpt.config import ExportConfig, KeepConfig, SaveConfig, StoreConfig
from titan_ckpt.geometry.keymap import KeyMap, KeyRule
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.testing import distributed
from titan_ckpt.weights.transforms import StateDictTransforms

_HF = {"model_type": "x", "architectures": ["X"]}


def work(url: str, store: StoreConfig, folder: Path) -> None:
    """Save, resume and export a tiny model; a request to /mark/NAME comes before each thing that is counted."""
    run, place = Run(), f"{url}/checkpoints"
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        distribute_module(run.model, mesh, lambda _, module, mesh: _shard(module, mesh))
        run.optimizer = torch.optim.AdamW(run.model.parameters())
        run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))
    with run.manager(folder, folder=place, store=store, save=SaveConfig(interval=1)) as manager:
        _mark(store, "start")
        manager.load()
        _mark(store, "first save")
        _save(manager, 1)
        _mark(store, "save")
        _save(manager, 2)
        _mark(store, "close")
    keep = SaveConfig(interval=1, keep=KeepConfig(latest=2))
    with run.manager(folder, folder=place, store=store, save=keep) as manager:
        _mark(store, "resume")
        manager.load()
        _mark(store, "save and remove")
        _save(manager, 3)
        _mark(store, "close")
    for step, kind in enumerate(("hf", "dcp"), 1):
        exports = (ExportConfig(kind, folder=f"{url}/exports"),)  # type: ignore[arg-type]
        table = StateDictTransforms(KeyMap((KeyRule.of("{i}.{name}", "model.{i}.{name}"),)), _HF)
        given = {"save": None, "store": store, "export": exports, "sd_transforms": table}
        with world.manager(folder, run.model, **given) as manager:
            manager.load()
            _mark(store, f"export as {kind}")
            manager.save(step, last_step=True)
            _mark(store, "close")


@distributed(nproc=2)
def two_ranks_work(url: str, store: StoreConfig, folder: Path) -> None:
    """Work as one rank of two."""
    work(url, store, folder)


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, value in [*module.named_parameters(recurse=False)]:
        module.register_parameter(name, nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])))


def _save(manager: CheckpointManager, step: int) -> None:
    manager.save(step)
    manager.wait()


def _mark(store: StoreConfig, name: str) -> None:
    if dist.is_initialized():
        dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        assert store.endpoint is not None
        connection = http.client.HTTPConnection(urlsplit(store.endpoint).netloc)
        connection.request("GET", f"/mark/{name.replace(' ', '-')}")
        connection.getresponse().read()
        connection.close()
    if dist.is_initialized():
        dist.barrier()
