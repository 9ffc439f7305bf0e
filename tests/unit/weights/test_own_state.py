"""State that modules make themselves: saved as they return it, loaded through their own code, or refused by name."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss

from tests import world
from tests.own_state_models import (
    DIM,
    KINDS,
    FusedGate,
    FusedHeads,
    Net,
    Renamed,
    StoredFused,
    add_hooks,
    averaged,
)
from titan_ckpt import CheckpointManager, ExportConfig, InitialLoadConfig
from titan_ckpt.errors import LoadMismatchError, SaveError, StateEncodingError
from titan_ckpt.weights.initialize import construct, materialize
from titan_ckpt.weights.wrapper import ModelWrapper


class Run:
    """A net of one kind, AdamW, a moving average of the weights, and batches that depend on the step alone."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net(kind)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.average = None if "norm by hooks" in kind else averaged(self.net)  # torch cannot copy such a module

    def manager(self, folder: Path, **save: Any) -> CheckpointManager:
        states = {} if self.average is None else {"average": self.average}
        return world.manager(folder, self.net, self.optimizer, **save, states=states)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            mse_loss(self.net(x), x[:, :1]).backward()
            self.optimizer.step()
            if self.average is not None:
                self.average.update_parameters(self.net)

    def result(self) -> dict[str, Any]:
        average = {} if self.average is None else {f"average.{k}": v for k, v in self.average.state_dict().items()}
        return {**self.net.state_dict(), **dict(self.net.named_parameters()), **average}


def assert_equal(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(result) == list(expected)
    for name, value in result.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected[name]), name
        else:
            assert str(value) == str(expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, kind: str) -> None:
    """Three steps, a save, a resume into other weights and three more steps are six steps, bit for bit."""
    whole = Run(kind, 0)
    whole.train(1, 6)
    first = Run(kind, 0)
    with first.manager(tmp_path) as m:
        m.load()
        first.train(1, 3)
        m.save(3)
    second = Run(kind, 1)
    with second.manager(tmp_path) as m:
        assert m.load().step == 3
        second.train(4, 6)
    assert_equal(second.result(), whole.result())


@pytest.mark.parametrize("mode", ["disabled", "thread", "process"])
def test_what_is_stored_is_what_the_model_returns_at_the_save(tmp_path: Path, mode: str) -> None:
    """The step holds the state dict of its moment in every mode, though training goes on at once."""
    run = Run("nested", 0)
    with run.manager(tmp_path, async_mode=mode) as m:
        m.load()
        run.train(1, 1)
        expected = copy.deepcopy(run.net.state_dict())
        m.save(1)
        run.train(2, 2)
    stored = load_file(tmp_path / "checkpoints/step-1/rank-00000.safetensors")
    model = {name.removeprefix("model."): value for name, value in stored.items() if name.startswith("model.")}
    assert model.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.items())


def test_only_the_subtree_with_the_hooks_is_loaded_through_them(tmp_path: Path) -> None:
    """Plain modules around it are filled in place, without a call of their load_state_dict."""
    calls = []
    run = Run("split with collectives", 0)
    world.save(run.manager(tmp_path))
    other = Run("split with collectives", 1)
    for name, module in other.net.named_modules():
        module.register_load_state_dict_post_hook(lambda *_, name=name: calls.append(name)) if "middle." in name else 0
    world.load(other.manager(tmp_path))
    assert set(calls) == {"middle.wqkv", "middle.wo"}
    made = {f"middle.w{name}.{kind}" for name in "qkv" for kind in ("weight", "bias")}
    assert ModelWrapper([run.net]).state().made == made


def test_live_tensors_of_a_module_with_hooks_stay_live() -> None:
    """Only what the hooks make is a copy: the output layer beside the fused one aliases the parameter."""
    fused, plain = FusedHeads(), nn.Linear(DIM, DIM)
    model = nn.Sequential(fused, plain)
    tensors = ModelWrapper([model]).state_dict()
    assert tensors["0.wo.weight"].data_ptr() == fused.wo.weight.data_ptr()
    assert tensors["1.weight"].data_ptr() == plain.weight.data_ptr()
    assert list(tensors) == list(model.state_dict())


def test_the_model_s_own_code_fills_a_model_that_was_loaded_from_an_export(tmp_path: Path) -> None:
    """A DCP export holds the returned names, and starts a new run through the hooks."""
    run = Run("nested", 0)
    world.finish(world.manager(tmp_path / "a", run.net, export=(ExportConfig("dcp"),)))
    other = Run("nested", 1)
    source = InitialLoadConfig(str(tmp_path / "a/exports/step-1"))
    world.load(world.manager(tmp_path / "b", other.net, initial_load=[source]))
    assert_equal(dict(other.net.named_parameters()), dict(run.net.named_parameters()))


def test_weights_from_outside_go_through_the_hooks(tmp_path: Path) -> None:
    """A handler fills the tensors that the model returns; its parameters follow."""
    source, model = StoredFused(), StoredFused()
    fill = lambda event: event.fill(source.state_dict())  # noqa: E731
    world.load(world.manager(tmp_path, model, components=("optimizer",), external_weights=fill))
    assert_equal(dict(model.named_parameters()), dict(source.named_parameters()))


def hooked(save: Any = None, load: Any = None) -> nn.Module:
    """Return a model with two layers; hooks of the first get its state dict, with names such as weight."""

    def on_save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        save(module, state, prefix)

    def on_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        load(module, state, prefix)

    layer = nn.Linear(2, 2)
    add_hooks(layer, None if save is None else on_save, None if load is None else on_load)
    return nn.Sequential(layer, nn.Linear(2, 2))


def drop(name: str) -> Any:
    return lambda m, state, prefix: state.pop(prefix + name)


def put(name: str, value: Any) -> Any:
    return lambda m, state, prefix: state.update({prefix + name: value(m) if callable(value) else value})


def replace_weight(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    module.weight = nn.Parameter(state[prefix + "weight"].t().contiguous())


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no hook loads it": (put("packed", torch.ones(2)), None, r'0 \(Linear\): .*Unexpected key.*"packed"'),
    "no hook loads the number": (put("version", 3), None, r'Unexpected key.*"version"'),
    "rounded": (put("weight", lambda m: m.weight.bfloat16().float()), None, r"0\.weight has other values after a load"),
    "another value": (put("weight", torch.ones(2, 2)), None, r"0\.weight has other values after a load"),
    "left as it was": (
        lambda m, state, prefix: state.update({prefix + "w": state.pop(prefix + "weight").clone()}),
        lambda m, state, prefix: state.update({prefix + "weight": m.weight.data}) or state.pop(prefix + "w"),
        r"0\.weight was left as it was",
    ),
    "never stored": (drop("weight"), put("weight", torch.zeros(2, 2)), r"leaves out 1 trained .*0\.weight \(0 \(Lin"),
    "replaced": (put("weight", lambda m: m.weight.detach().t().contiguous()), replace_weight, "0.weight was replaced"),
    "not storable": (put("lock", object()), drop("lock"), r"model\.0\.lock: a builtins\.object"),
    "a hook that fails": (drop("kernel"), None, r"0 \(Linear\): its own state_dict\(\) failed with KeyError: '?kernel"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_code_that_would_resume_another_model_is_refused_before_the_first_step(tmp_path: Path, fault: str) -> None:
    """One error names the module and the tensor; the weights are as they were."""
    save, load, message = REFUSED[fault]
    model = hooked(save, load)
    before = [p.detach().clone() for p in model.parameters()]
    world.load_fails(world.manager(tmp_path, model), (LoadMismatchError, StateEncodingError), message)
    if fault != "replaced":
        assert all(map(torch.equal, before, model.parameters()))


def test_a_load_that_reaches_a_parameter_no_more_is_an_error(tmp_path: Path) -> None:
    """A resume whose hook drops the stored value names the parameter, instead of training on other weights."""
    world.save(world.manager(tmp_path, nn.Sequential(Renamed())))

    class Careless(Renamed):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            del state_dict["kernel"]
            return nn.Linear.load_state_dict(self, {"weight": self.weight.data, **state_dict}, strict=False)

    other = nn.Sequential(Careless())
    world.load_fails(world.manager(tmp_path, other), LoadMismatchError, r"0 \(Careless\)")


def test_a_frozen_parameter_may_stay_out_of_the_state_dict(tmp_path: Path) -> None:
    """Its values come from the constructor in every run, as the model's own code wants it."""
    model = hooked(drop("weight"), lambda m, state, prefix: state.update({prefix + "weight": m.weight}))
    next(model.parameters()).requires_grad_(False)
    with world.manager(tmp_path, model) as m:
        m.load()
        m.save(1)
        assert m.load().report.loaded == ("0.bias", "1.weight", "1.bias")


def test_a_marked_step_is_saved_with_the_values_of_its_end(tmp_path: Path) -> None:
    """A buffer that the next forward pass changed is stored as it was, though the model's own code packs it."""

    class Packed(nn.BatchNorm1d):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            names = [f"{prefix}running_{name}" for name in ("mean", "var")]
            destination[f"{prefix}statistics"] = torch.stack([destination.pop(name) for name in names])

        def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
            state[f"{prefix}running_mean"], state[f"{prefix}running_var"] = state.pop(f"{prefix}statistics")
            super()._load_from_state_dict(state, prefix, *args)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 3), Packed(3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build()
    with world.manager(tmp_path, model, optimizer, interval=10) as m:
        m.load()
        model(torch.randn(4, 3))
        m.completed.complete(1)
        expected = copy.deepcopy(model.state_dict())
        model(torch.randn(4, 3))
        now = copy.deepcopy(model.state_dict())
        m.completed.save()
        assert_equal(dict(model.state_dict()), dict(now))
    other, optimizer = build()
    assert world.load(world.manager(tmp_path, other, optimizer, interval=10)).step == 1
    assert_equal(dict(other.state_dict()), dict(expected))


@pytest.mark.parametrize("history", [0, [], {"of": ()}, {"nested": [{"mean": torch.zeros(2)}]}])
def test_a_marked_step_whose_values_are_gone_is_not_saved(tmp_path: Path, history: Any) -> None:
    """A number that the model's own code stores, or what is in a list or a dict, has changed since: it is named."""

    class Remembers(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(self.history, int):
                self.history += 1
            elif isinstance(self.history, list):
                self.history.append(1.0)
            elif "of" in self.history:
                self.history["of"] += (1,)
            else:
                self.history["nested"][0]["mean"] += 1
            return super().forward(x)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}history"] = copy.deepcopy(self.history)

        def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
            self.history = state.pop(f"{prefix}history")
            super()._load_from_state_dict(state, prefix, *args)

    model = nn.Sequential(Remembers(DIM, DIM))
    model[0].history = copy.deepcopy(history)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with world.manager(tmp_path, model, optimizer, interval=10) as m:
        m.load()
        m.completed.complete(1)
        m.completed.save()
        m.completed.complete(2)
        model(torch.randn(2, DIM))
        with pytest.raises(SaveError, match=re.escape("step 2 can no longer be saved: 0.history changed")):
            m.completed.save()


def test_fused_weights_of_a_model_on_meta_are_initialized_and_loaded(tmp_path: Path) -> None:
    """Parameters that the state dict does not name get their values like all others."""

    def build() -> nn.Module:
        return nn.Sequential(FusedGate(), FusedHeads())

    torch.manual_seed(0)
    expected = build()
    for step in (0, 1):
        torch.manual_seed(step)
        model = construct(build)
        materialize(model, "cpu")
        with world.manager(tmp_path, model) as m:
            assert m.load().step == step
            m.save(step + 1)
        assert_equal(dict(model.named_parameters()), dict(expected.named_parameters()))


def test_code_that_runs_after_a_load_sees_the_loaded_values(tmp_path: Path) -> None:
    """Live tensors are filled in place, and a table that the module derives from them is derived again."""

    class Derived(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.table = self.weight.detach() * 2
            register: Any = self.register_load_state_dict_post_hook  # torch has no types for it
            register(self._derive)

        @staticmethod
        def _derive(module: Any, _: Any) -> None:
            module.table = module.weight.detach() * 2

    first, second = Derived(), Derived()
    with world.manager(tmp_path, nn.Sequential(first)) as m:
        m.load()
        m.save(1)
    world.load(world.manager(tmp_path, nn.Sequential(second)))
    assert torch.equal(second.table, first.table)
