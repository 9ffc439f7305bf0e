"""Weights that other code than optimizer.step() changes while a save reads them. Real copies, real steps on disk."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file
from schedulefree import AdamWScheduleFree, ScheduleFreeWrapper, SGDScheduleFree
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from tests.run_folder import RunFolder
from tests.world import manager as build
from tests.world import same, step_with_ones, whole
from titan_ckpt.components.optimizer_content import PROVED
from titan_ckpt.config import ExportConfig
from titan_ckpt.errors import HalfLoadedError, PeerError, SaveError
from titan_ckpt.formats.native.writer import Segments
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Block, Chunk
from titan_ckpt.testing import distributed
from titan_ckpt.weights.live_memory import Watched

MODES = pytest.mark.parametrize("mode", ["disabled", "thread", "process"])


@contextmanager
def before_each_copy(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in the threads that read the weights for a save, before they do."""
    fill = Segments.fill

    def late(*arguments: Any) -> None:
        act()
        fill(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segments, "fill", late)
        yield


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.weight.copy_(torch.full_like(model.weight, 7.0))


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.weight.mul_(7.0)


@MODES
@pytest.mark.parametrize("change", [in_place, in_inference_mode])
def test_a_weight_that_changes_while_a_save_reads_it_fails_the_save_by_name(
    tmp_path: Path, mode: str, change: Callable[[nn.Module], None]
) -> None:
    """The value of that step is gone, so nothing is committed; the run goes on, and the next save is exact."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    once = iter([lambda: change(model)])
    with build(tmp_path, model, optimizer, async_mode=mode) as manager:
        step_with_ones(optimizer)
        reason = r"step 1 is not saved: model\.weight changed .* maybe_wait_for_staging\(\)"

        def go_on() -> None:
            manager.save(1)
            step_with_ones(optimizer)  # waits for the copy, and does not raise: only this rank would
            manager.wait()

        with before_each_copy(lambda: next(once, lambda: None)()), pytest.raises(SaveError, match=reason):
            go_on()
        assert RunFolder(tmp_path).steps() == []
        manager.save(2)
        wanted = whole(dict(model.state_dict()))
        step_with_ones(optimizer)
        manager.wait()
        manager.load(2)
    assert same(dict(model.state_dict()), wanted)


class TwoSetsOfWeights(torch.optim.SGD):
    """An optimizer whose `train` and `eval` exchange weights, as schedulefree's do; torch sees no version change."""

    def train(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(-1)

    eval = train


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("kind", [TwoSetsOfWeights, AdamWScheduleFree])
def test_the_recipe_of_schedulefree_saves_the_weights_of_evaluation(tmp_path: Path, kind: Any, mode: str) -> None:
    """Eval, save, train: save waits for the copy, as optimizers may change weights elsewhere than in step()."""
    model = nn.Linear(64, 64)
    optimizer = kind(model.parameters(), lr=0.1)
    with build(tmp_path, model, optimizer, async_mode=mode) as manager:
        if kind is AdamWScheduleFree:
            optimizer.train()
        for _ in range(3):
            step_with_ones(optimizer)
        optimizer.eval()
        wanted = whole(dict(model.state_dict()))
        with before_each_copy(lambda: time.sleep(0.2)):
            manager.save(3)
            optimizer.train()
            assert not torch.equal(model.weight, wanted["weight"])
            manager.wait()
        manager.load(3)
    assert same(dict(model.state_dict()), wanted)


def wrapped(parameters: Any, **settings: Any) -> Any:
    return ScheduleFreeWrapper(torch.optim.SGD(parameters, **settings))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", [AdamWScheduleFree, wrapped])
def test_the_last_export_holds_the_weights_of_evaluation_and_the_step_those_of_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    """An export with the training state is one to train on; the log says what exports of the interval hold."""
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.train()
    names = ("weights", "state", "interval")
    exports = (
        ExportConfig("dcp", folder="weights"),
        ExportConfig("torchtitan", folder="state"),
        ExportConfig("dcp", folder="interval", interval=2),
    )[: 3 if kind is AdamWScheduleFree else 1]
    with build(tmp_path, model, optimizer, export=exports) as manager:
        for step in (1, 2, 3):
            step_with_ones(optimizer)
            of_training = model.weight.detach().clone()
            manager.save(step, last_step=step == 3)
        of_evaluation = model.weight.detach().clone()
        manager.load(3)
        assert torch.equal(model.weight, of_training)
        manager.save(3, last_step=True)  # as a run that is started again when it is done
        assert torch.equal(model.weight, of_evaluation)
    assert not torch.equal(of_training, of_evaluation)
    found = []
    for name in names[: len(exports)]:
        read = {"weight": torch.empty(4, 4)}
        torch.distributed.checkpoint.load(read, checkpoint_id=tmp_path / name / "step-3", no_dist=True)
        found.append(read["weight"])
    expected = [of_evaluation, of_training, of_evaluation][: len(exports)]
    assert all(map(torch.equal, found, expected))
    assert ("exports before the last step hold the weights that AdamWScheduleFree" in caplog.text) == (
        len(exports) == 3
    )


def test_a_last_step_of_the_model_alone_holds_the_weights_of_evaluation(tmp_path: Path) -> None:
    """Without the optimizer's state, nobody could compute them from those of training."""
    model = nn.Linear(4, 4)
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    with build(tmp_path, model, optimizer, interval=9, model_only_last=True) as manager:
        for step in (1, 2):
            step_with_ones(optimizer)
            manager.save(step, last_step=step == 2)
        manager.wait()
        optimizer.eval()
        wanted = model.weight.detach().clone()
    (file,) = (tmp_path / "checkpoints" / "step-2").glob("*.safetensors")
    (stored,) = (value for key, value in load_file(file).items() if key.endswith("weight"))
    assert torch.equal(stored, wanted)


def optimizers_of_torch() -> list[type[Optimizer]]:
    kinds = (getattr(torch.optim, name) for name in dir(torch.optim))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer]


@pytest.mark.parametrize("kind", optimizers_of_torch(), ids=lambda kind: kind.__name__)
def test_no_method_but_step_of_a_proved_optimizer_changes_weights(kind: type[Optimizer]) -> None:
    """Every class of torch.optim is on the list, and each of its public methods leaves every bit of the weights."""
    assert kind in PROVED
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = kind([weight])  # type: ignore[call-arg]

    def loss() -> float:
        dense = torch.ones(4, 4)
        weight.grad = dense.to_sparse() if kind is torch.optim.SparseAdam else dense
        return 1.0

    loss()
    optimizer.step(loss)
    before, version = weight.detach().clone(), weight._version
    arguments: dict[str, tuple[Any, ...]] = {
        "load_state_dict": (optimizer.state_dict(),),
        "add_param_group": ({"params": [nn.Parameter(torch.zeros(2, 2))]},),
        "profile_hook_step": (lambda *_: None,),
    }
    for name in sorted(dir(optimizer), key=lambda name: name == "add_param_group"):
        method = getattr(optimizer, name)
        if not name.startswith("_") and name != "step" and inspect.isroutine(method):
            method(*arguments.get(name, (lambda *_: None,) if name.startswith("register_") else ()))
    optimizer.state_dict(), repr(optimizer)
    assert torch.equal(weight, before) and weight._version == version


@pytest.mark.parametrize("swap", ["copy_", "data", "moments"])
def test_a_marked_step_whose_weights_were_exchanged_is_not_saved(tmp_path: Path, swap: str) -> None:
    """Averaged weights are in place for an evaluation when the run is stopped: they are not the ones of the step."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with build(tmp_path, model, optimizer) as manager:
        step_with_ones(optimizer)
        manager.completed.complete(1)
        if swap == "copy_":
            in_place(model)
        elif swap == "data":
            model.weight.data = torch.zeros(2, 3)
        else:
            optimizer.state[model.weight]["exp_avg"].zero_()
        with pytest.raises(SaveError, match=r"step 1 can no longer be saved: .*(weight|state) changed after its end"):
            manager.completed.save()
        step_with_ones(optimizer)
        manager.completed.complete(2)
        manager.completed.save()
    assert RunFolder(tmp_path).steps() == [2]


class Queue:
    """A state whose tensor is copied into its dict, replaced, dropped or written to."""

    def __init__(self, numel: int, change: str) -> None:
        self.values, self.change = torch.zeros(numel), change
        self.is_empty = False

    def state_dict(self) -> dict[str, Any]:
        values = self.values.clone() if self.change == "copied" else self.values
        return {} if self.is_empty else {"values": values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict["values"]

    def go_on(self) -> None:
        if self.change == "replaced":
            self.values = self.values + 1
        elif self.change == "dropped":
            self.is_empty = True
        else:
            self.values.add_(1)


@pytest.mark.parametrize("numel", [4, 1 << 19])
@pytest.mark.parametrize("change", ["copied", "replaced", "dropped", "written"])
def test_the_last_completed_step_has_the_states_of_its_end(tmp_path: Path, change: str, numel: int) -> None:
    """A guard saves it in the middle of the next one, whose forward pass has changed a state already."""
    states = [Queue(numel, change) for _ in range(2)]
    for state in states:
        model = nn.Linear(3, 2)
        with build(tmp_path, model, interval=100, states={"queue": state}) as manager:
            manager.load()
            if state is states[0]:
                manager.completed.is_watched = True
                manager.completed.complete(1)
                state.go_on()
                if change == "written" and numel > 4:
                    with pytest.raises(SaveError, match=r"step 1 can no longer be saved: states\.queue\.values"):
                        manager.completed.save()
                    return
                manager.completed.save()
    assert torch.equal(states[1].values, torch.zeros(numel))


def test_the_last_completed_step_has_the_groups_of_its_end(tmp_path: Path) -> None:
    """A hook has set a rate and added a group, as one that unfreezes layers does, before a guard saves."""
    rates = []
    for is_first in (True, False):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.5 if is_first else 0.75)
        with build(tmp_path, model, optimizer, interval=100) as manager:
            manager.load()
            if is_first:
                step_with_ones(optimizer)
                manager.completed.complete(1)
                optimizer.param_groups[0]["lr"] = 0.25
                optimizer.add_param_group({"params": [*model[1].parameters()], "lr": 1.0})
                manager.completed.save()
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [[0.25, 1.0], [0.5]]


@distributed(nproc=2, timeout_seconds=60)
def test_a_copy_that_fails_on_one_rank_ends_the_save_on_all(tmp_path: Path) -> None:
    """optimizer.step() raises nowhere; the next wait raises on both, for an error of the copy and for a shard."""
    rank = dist.get_rank()
    model = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def fail() -> None:
        raise MemoryError("no room")

    def change() -> None:
        with torch.no_grad():
            model.weight.copy_(model.weight * 2)

    with build(tmp_path, model, optimizer) as manager:
        for step, act, own in ((1, fail, MemoryError), (2, change, SaveError)):
            go_on = threading.Event()

            def before(go_on: threading.Event = go_on, act: Any = act) -> None:
                go_on.wait(60)
                if act is fail and rank == 1:
                    act()

            with before_each_copy(before):
                manager.save(step)
                if act is change:
                    manager._coordinator.barrier("both have begun")
                    act()  # both ranks: an operation of DTensor may be collective
                go_on.set()
                step_with_ones(optimizer)
                with pytest.raises(own if act is change or rank == 1 else PeerError, match=r"no room|model\.weight"):
                    manager.wait()
        manager.save(3)
        manager.wait()
    assert RunFolder(tmp_path).steps() == [3]


def test_versions_tell_of_every_change_that_torch_makes() -> None:
    """Views, foreach kernels and detached aliases share a version; inference tensors have none."""
    weight = nn.Parameter(torch.randn(4, 4))
    with torch.inference_mode():
        without = torch.zeros(2)
    named = {"weight": weight.detach(), "without": without}
    changes: list[Callable[[], object]] = [
        lambda: torch._foreach_mul_([weight], 2),
        lambda: weight[1:].zero_(),
        lambda: weight.detach().reshape(-1)[3:].add_(1),
        lambda: nn.init.normal_(weight),
    ]
    with torch.no_grad():
        for change in changes:
            watched = Watched(named)
            assert watched.changed() == []
            change()
            assert watched.changed() == ["weight"]


class Interrupted(SGDScheduleFree):  # type: ignore[misc]  # schedulefree has no types
    """Is interrupted when it has set the first of two weights."""

    is_interrupted = True

    def eval(self) -> None:
        if self.is_interrupted:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)
            raise KeyboardInterrupt
        super().eval()


def test_an_interrupt_while_the_weights_of_evaluation_are_set_leaves_nothing_that_is_exported(tmp_path: Path) -> None:
    """A second call would export a mixture: it is refused until a load has put the step's weights back."""
    model = nn.Linear(2, 2)
    optimizer = Interrupted(model.parameters(), lr=0.1)
    optimizer.train()
    with build(tmp_path, model, optimizer, export=(ExportConfig("dcp"),)) as manager:
        manager.load()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        weights = model.weight.detach().clone()
        with pytest.raises(KeyboardInterrupt):
            manager.save(1, last_step=True)
        with pytest.raises(HalfLoadedError, match=r"the weights of Interrupted\.eval\(\) began to overwrite this run"):
            manager.export(1, last_step=True)
        optimizer.is_interrupted = False
        assert manager.load().step == 1
        assert torch.equal(model.weight, weights)
        assert manager.export(1, last_step=True)


class Swapping(torch.optim.SGD):
    """Its `eval` is called once for all exports of a step: it takes the other weights each time."""

    def eval(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.neg_()


def test_all_exports_of_the_last_step_hold_the_weights_of_one_evaluation(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    exports = tuple(ExportConfig("dcp", folder=str(tmp_path / name)) for name in ("first", "second"))
    with build(tmp_path, model, Swapping(model.parameters(), lr=0.1), export=exports) as manager:
        manager.load()
        trained = model.weight.detach().clone()
        manager.save(1, last_step=True)
        for place in manager.exported.values():
            found = torch.empty(2, 2)
            with open_reader(place) as reader:
                reader.read([Block(Chunk.whole(found.shape), found, "weight")])
            assert torch.equal(found, -trained), place
    assert len(manager.exported) == 2
