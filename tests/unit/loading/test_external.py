"""Components, and weights that come from outside: what is saved, what is asked for, and what is never made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.run_folder import RunFolder
from tests.world import Value, step_on
from tests.world import manager as build_manager
from titan_ckpt import CheckpointConfig, CheckpointManager, ResumeConfig
from titan_ckpt.config import from_dict
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    HalfLoadedError,
    LoadMismatchError,
    StateEncodingError,
)
from titan_ckpt.loading.external import ExternalLoad
from titan_ckpt.models.registry import build_model
from titan_ckpt.testing import distributed
from titan_ckpt.training.config import RunConfig
from titan_ckpt.weights.initialize import construct, empty_tensors, materialize


class Run:
    """One model with everything a checkpoint may hold, after two steps."""

    def __init__(
        self, folder: RunFolder | Path, components: tuple[Any, ...] | None, handler: Any = None, **config: Any
    ) -> None:
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.counter = Value()
        self.loader: Value | None = None
        self.folder = RunFolder(folder) if isinstance(folder, Path) else folder
        self.config, self.handler = {"components": components, **config}, handler

    def manager(self) -> CheckpointManager:
        return build_manager(
            self.folder,
            self.model,
            self.optimizer,
            lr_schedulers=[self.schedule],
            dataloader=self.loader,
            states={"counter": self.counter},
            external_weights=self.handler,
            **self.config,
        )

    def step(self) -> None:
        step_on(self.model, self.optimizer, torch.randn(8, 4))
        self.schedule.step()
        self.counter.value += 1

    def save(self) -> Manifest:
        self.step()
        self.step()
        with self.manager() as manager:
            manager.save(2)
        return Manifest.from_bytes(self.folder.read(2, "MANIFEST.json"))

    def load(self) -> CheckpointManager:
        with self.manager() as manager:
            self.result = manager.load()
        return manager


def everything(event: ExternalLoad) -> None:
    """Deliver twos, and a number that batch norm counts in."""
    event.fill({name: torch.full(value.shape, 2, dtype=value.dtype) for name, value in event.tensors.items()})


WITHOUT_MODEL = ("optimizer", "lr_scheduler", "rng", "states")


def test_c1_one_setting_selects_what_is_saved_and_loaded(run_folder: RunFolder) -> None:
    """A run of model and states saves these two, and takes these two from a checkpoint that holds everything."""
    few = Run(run_folder / "few", ("model", "states"))
    few.loader = Value()
    assert few.save().components == ("model", "states")
    few_files = run_folder / "few"
    assert {name.split(".")[0] for name in load(few_files.read(2, "rank-00000.safetensors"))} == {"model"}
    assert json.loads(few_files.read(2, "state.json")).keys() == {"step", "states"}
    assert json.loads(few_files.read(2, "rank-00000.json")).keys() == {"layout"}
    Run(run_folder / "one", ("model",)).save()
    assert json.loads((run_folder / "one").read(2, "state.json")).keys() == {"step"}
    whole = Run(run_folder / "all", None)
    whole.loader = Value(7)
    whole.save()
    run = Run(run_folder / "all", ("states", "model"))
    run.loader = Value()
    rate, generators = run.schedule.get_last_lr(), torch.get_rng_state()
    run.load()
    assert run.result.step == 2 and run.counter.value == 2 and run.loader.value == 0
    assert run.schedule.get_last_lr() == rate and run.optimizer.state == {}
    assert torch.equal(torch.get_rng_state(), generators)


def test_c1_the_vocabulary_is_closed_and_what_a_run_lacks_is_ignored(tmp_path: Path) -> None:
    """A typo is answered with the nearest name; a dataloader that this run has not is no error."""
    raw = {"output_folder": "run", "model": {"flavor": "x"}, "checkpoint": {"components": ["model", "optimiser"]}}
    with pytest.raises(ConfigError, match=r"checkpoint\.components\.1: .*did you mean .optimizer"):
        from_dict(RunConfig, raw)
    with pytest.raises(ConfigError, match="components: name one or more"):
        CheckpointConfig(components=())
    manifest = Run(tmp_path, ("model", "dataloader", "optimizer")).save()
    assert manifest.components == ("model", "optimizer")
    Run(tmp_path, ("model", "dataloader", "optimizer")).load()


def test_c1_a_checkpoint_without_a_wanted_component_says_so(run_folder: RunFolder) -> None:
    """A run of everything does not take a checkpoint of the model alone for one of its own."""
    Run(run_folder, ("model",)).save()
    with pytest.raises(LoadMismatchError, match="no state for: optimizer, lr_scheduler, states"):
        Run(run_folder, None).load()


def test_c2_a_checkpoint_without_weights_is_marked_and_holds_none(run_folder: RunFolder) -> None:
    """Its manifest says kind external; a run that wants weights from it is told that there are none."""
    manifest = Run(run_folder, WITHOUT_MODEL, everything).save()
    assert manifest.kind == "external" and "model" not in manifest.components
    run = Run(run_folder, None)
    with pytest.raises(CheckpointNotFoundError, match=r"step-2\S* holds no model weights: its run took them from"):
        run.load()
    run = Run(run_folder, None, resume=ResumeConfig(step=2, exclude=("model",)))
    run.load()
    assert run.counter.value == 2, "asked for, the model starts afresh"


def test_c2_only_a_marked_checkpoint_may_lack_weights(tmp_path: Path) -> None:
    """Neither a manifest that contradicts itself nor one with a part of the weights is valid."""
    manifest = Run(tmp_path, None).save()
    for wrong in ({"kind": "external"}, {"components": ("optimizer",)}):
        with pytest.raises(StateEncodingError, match="with components"):
            replace(manifest, **wrong).to_bytes()
    forged = manifest.to_bytes().replace(b'"kind": "full"', b'"kind": "external"')
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(forged)
    run = Run(tmp_path, None)
    run.model.append(nn.Linear(4, 4))
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    run.schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    with pytest.raises(LoadMismatchError, match=r"2 missing: 2\.weight, 2\.bias"):
        run.load()


def test_c3_the_handler_fills_the_model_at_the_point_of_the_load(run_folder: RunFolder) -> None:
    """At the start and at a resume; training state is attached after it, and exactly."""
    seen: list[tuple[int, int]] = []
    saved = Run(run_folder, WITHOUT_MODEL, everything)
    saved.save()
    for folder, step in ((run_folder / "new", 0), (run_folder, 2)):
        run = Run(folder, WITHOUT_MODEL)

        def handler(event: ExternalLoad, run: Run = run) -> None:
            seen.append((event.step, run.counter.value))
            everything(event)

        run.handler = handler
        run.load()
        assert run.result.step == step and run.result.plan.external
        assert all(torch.all(value == 2) for value in run.model.state_dict().values())
        assert sorted(run.result.report.loaded) == sorted(run.model.state_dict())
    assert seen == [(0, 0), (2, 0)] and run.counter.value == 2
    for mine, theirs in zip(run.optimizer.state.values(), saved.optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_c3_an_excluded_model_without_a_handler_is_an_error(tmp_path: Path) -> None:
    """Before anything is built around it; and so is a handler that nothing would ask, or a second source."""
    with pytest.raises(ConfigError, match=r'"model" is left out.*give the manager external_weights='):
        Run(tmp_path, WITHOUT_MODEL).manager()
    with pytest.raises(ConfigError, match="every weight has one source"):
        Run(tmp_path, None, everything).manager()
    with pytest.raises(ConfigError, match=r'initial_load: components has no "model"'):
        from_dict(CheckpointConfig, {"components": ["rng"], "initial_load": [{"path": "base"}]})


def fills_half(event: ExternalLoad) -> None:
    event.fill({"0.weight": torch.ones(4, 4)})
    event.tensors["0.bias"].data.fill_(1.0)
    event.mark(["0.bias"])


def fills_other_shapes(event: ExternalLoad) -> None:
    event.fill({"0.weight": torch.ones(4, 3), "0.wait": torch.ones(1), "0.bias": torch.ones(4)})


def marks_strangers(event: ExternalLoad) -> None:
    event.mark(["0.bias", "head.weight"])


def fails(event: ExternalLoad) -> None:
    raise ConnectionError("the server is gone")


@pytest.mark.parametrize(
    ("handler", "error", "message"),
    [
        (fills_half, LoadMismatchError, r"5 of 7 tensors were not filled; nothing was initialized[^$]*1\.running_mean"),
        (
            fills_other_shapes,
            LoadMismatchError,
            r"0\.wait: the model has no such[^$]*0\.weight: expected shape \[4, 4\]",
        ),
        (marks_strangers, LoadMismatchError, r"does not have\s+head\.weight"),
        (fails, ConnectionError, "the server is gone"),
    ],
)
def test_c3_a_source_that_does_not_deliver_is_never_masked(
    tmp_path: Path, handler: Callable[[ExternalLoad], None], error: type[Exception], message: str
) -> None:
    """One error, nothing initialized in its place, no training state attached, and what is there is not saved."""
    Run(tmp_path, WITHOUT_MODEL, everything).save()

    class Model(nn.Sequential):
        calls = 0

        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def init_weights(self) -> None:
            Model.calls += 1

    run = Run(tmp_path, WITHOUT_MODEL, handler)
    run.model = construct(Model)
    materialize(run.model, "cpu")
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    run.schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    with run.manager() as manager:
        with pytest.raises(error, match=message):
            manager.load()
        with pytest.raises(HalfLoadedError, match="the load of step 2 began to overwrite this run"):
            manager.save(3)
        with pytest.raises(HalfLoadedError):
            manager.export(3)
    assert Model.calls == 0 and run.counter.value == 0 and run.optimizer.state == {}
    assert len(empty_tensors([run.model])) == 7, "still without values"


def test_c3_non_persistent_tensors_are_initialized_after_the_handler(tmp_path: Path) -> None:
    """The rotary table of a model from meta is no part of what a source delivers."""
    torch.manual_seed(1)
    source = build_model("llama3", flavor="debug-0.5m")
    source.init_weights()
    model = construct(lambda: build_model("llama3", flavor="debug-0.5m"))
    materialize(model, "cpu")
    with build_manager(
        tmp_path, model, save=None, components=("rng",), external_weights=lambda event: event.fill(source.state_dict())
    ) as manager:
        manager.load()
    tokens = torch.arange(9).view(1, 9)
    assert torch.equal(model(tokens), source(tokens)) and empty_tensors([model]) == []


@distributed(nproc=2)
def test_c4_excluding_the_model_is_not_sharding_it(tmp_path: Path) -> None:
    """FSDP2 ranks save all of the weights unless told to leave them out, and take their part of what is delivered."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(5)
    whole = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))

    def build() -> nn.Module:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        fully_shard(model, mesh=mesh)
        return model

    def manager(model: nn.Module, folder: str, handler: Any, *components: Any) -> CheckpointManager:
        optimizer = torch.optim.AdamW(model.parameters())
        return build_manager(tmp_path / folder, model, optimizer, components=components, external_weights=handler)

    with manager(build(), "sharded", None, "model", "optimizer") as m:
        m.save(1)
    found = CheckpointDirectory(tmp_path / "sharded" / "checkpoints", Coordinator.current(20.0)).committed(1)[0]
    assert found.kind == "full" and found.components == ("model", "optimizer")
    one = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    loaded = build()
    for parameter in loaded.parameters():
        assert isinstance(parameter, DTensor)
        parameter.to_local().data.zero_()
    with manager(loaded, "sharded", None, "model", "optimizer") as m:
        m.load()
    one.load_state_dict({name: value.full_tensor() for name, value in loaded.state_dict().items()})
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), whole.parameters(), strict=True))

    outside = build()
    values = {name: torch.randn(value.shape) for name, value in whole.state_dict().items()}
    with manager(outside, "outside", lambda event: event.fill(values), "optimizer") as m:
        m.load()
        m.save(1)
    found = CheckpointDirectory(tmp_path / "outside" / "checkpoints", Coordinator.current(20.0)).committed(1)[0]
    assert found.kind == "external"
    assert all(torch.equal(value.full_tensor(), values[name]) for name, value in outside.state_dict().items())
