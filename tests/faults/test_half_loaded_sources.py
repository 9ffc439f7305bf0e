"""A merge or a handler of yours that fails in the middle of a load: nothing is kept until a load succeeds."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.faults.test_half_loaded import ROLLED_BACK_OR_RESUMED, WARM_OR_COLD, Values, refused
from tests.interop.test_merge_sources import LORA, manager_of, write_adapter
from tests.unit.formats.native.test_native import drop_from_page_cache
from tests.world import TINY, convert, same, write_llama
from tests.world import manager as build
from titan_ckpt import CheckpointManager
from titan_ckpt.errors import PeerError
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.loading.external import ExternalLoad
from titan_ckpt.models.llama3 import Llama3
from titan_ckpt.testing import distributed
from titan_ckpt.weights.low_rank import LowRank


class Run:
    """Weights on all ranks of the job, which a load fills from several places."""

    error: type[Exception]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = self.build()
        if dist.is_initialized():
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def build(self) -> nn.Module:
        raise NotImplementedError

    def manager(self) -> CheckpointManager:
        raise NotImplementedError

    def failing(self, patch: pytest.MonkeyPatch) -> None:
        """Let loads of this rank fail in the middle, from here on."""
        raise NotImplementedError

    def values(self) -> Values:
        return {name: local_tensor(value).detach().clone() for name, value in self.model.state_dict().items()}

    def save(self) -> Values:
        """Train and save a step; return the values of a load of it."""
        with self.manager() as manager, torch.no_grad():
            manager.load()
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.5)
            manager.save(1)
            manager.wait()
            manager.load()
        return self.values()


class MergedRun(Run):
    """A base with an adapter merged into it, below another adapter, which alone is saved."""

    error = MemoryError

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = Llama3(TINY)
        model.init_weights()
        self.converter = convert(model, LORA)
        return model

    def manager(self) -> CheckpointManager:
        assert isinstance(self.model, Llama3)
        sources = [self.folder / "base", self.folder / "adapter"]
        return manager_of(self.model, self.folder, sources, 1, self.converter)

    def failing(self, patch: pytest.MonkeyPatch) -> None:
        real, left = LowRank.merged, [2]

        def fails(*arguments: Any) -> torch.Tensor:
            if not left[0]:
                raise MemoryError("no room for the product")
            left[0] -= 1
            return real(*arguments)

        patch.setattr(LowRank, "merged", fails)


class DeliveredRun(Run):
    """Weights that a handler delivers, and moments that lie in the step."""

    error = ConnectionError

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        self.is_failing = False
        return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))

    def manager(self) -> CheckpointManager:
        optimizer = torch.optim.AdamW(self.model.parameters())
        return build(self.folder, self.model, optimizer, components=("optimizer",), external_weights=self.deliver)

    def deliver(self, event: ExternalLoad) -> None:
        for name, value in event.tensors.items():
            if self.is_failing and name == "1.weight":
                raise ConnectionError("the server is gone")
            event.fill({name: torch.full(value.shape, 3.0)})

    def failing(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self, "is_failing", True)


def prepare(root: Path) -> None:
    write_adapter(write_llama(root / "base"), root / "adapter")


def fails_and_recovers(run: Run, expected: Values, *, is_failing: bool, cold: bool) -> None:
    """Let a load of one rank fail after some tensors are changed: nothing is kept, and the next load is whole."""
    if dist.is_initialized():
        dist.barrier()
    for path in (run.folder / "base", run.folder / "adapter", *run.folder.glob("checkpoints/step-*")):
        for file in path.iterdir():
            file.read_bytes()
        if cold:
            drop_from_page_cache(path)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    before = run.values()
    with run.manager() as manager:
        with pytest.MonkeyPatch.context() as patch:
            if is_failing:
                run.failing(patch)
            with pytest.raises(run.error if is_failing else PeerError):
                manager.load()
        assert not same(run.values(), before)
        assert not (is_failing and same(run.values(), expected))
        assert refused(manager)
        step = manager.load().step
        assert same(run.values(), expected)
        assert manager.save(step + 1)


@WARM_OR_COLD
@ROLLED_BACK_OR_RESUMED
@pytest.mark.parametrize("kind", [MergedRun, DeliveredRun], ids=["merge", "handler"])
def test_what_fails_in_the_middle_leaves_nothing_to_keep(
    tmp_path: Path, kind: type[Run], cold: bool, fresh: bool
) -> None:
    """Some matrices have the product added, or come from outside, and others not."""
    prepare(tmp_path)
    run = kind(tmp_path)
    expected = run.save()
    fails_and_recovers(kind(tmp_path) if fresh else run, expected, is_failing=True, cold=cold)


@distributed(nproc=2)
def test_what_fails_in_the_middle_on_one_rank_leaves_nothing_to_keep_on_both(tmp_path: Path) -> None:
    """The other rank has all of its shards right, and refuses too."""
    for kind in (MergedRun, DeliveredRun):
        folder = tmp_path / kind.__name__
        if dist.get_rank() == 0:
            prepare(folder)
        dist.barrier()
        run = kind(folder)
        expected = run.save()
        for cold, is_new in product((False, True), repeat=2):
            is_failing = dist.get_rank() == int(cold)
            fails_and_recovers(kind(folder) if is_new else run, expected, is_failing=is_failing, cold=cold)
