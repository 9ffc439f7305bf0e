"""A base that training changes beside its adapter: saves hold it, and an export of the adapter alone is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import world
from tests.faults.shim import intercepted
from tests.interop.test_lora_run import LoraRun
from titan_ckpt import ExportConfig, SaveConfig
from titan_ckpt.directory.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.errors import ConfigError, ExportError, ExportSettingError


def unfrozen(base: Path, seed: int) -> LoraRun:
    """Build a run with adapters that trains a norm of the base, too."""
    run = LoraRun.build(base, seed=seed)
    run.model.get_parameter("norm.weight").requires_grad_(True)
    run.optimizer = torch.optim.AdamW([p for p in run.model.parameters() if p.requires_grad], lr=1e-2)
    return run


def kind(folder: Path, step: int) -> str:
    path = folder / f"checkpoints/step-{step}" / MANIFEST_NAME
    return Manifest.from_bytes(path.read_bytes(), str(path)).kind


def test_a_base_that_is_trained_is_saved_with_its_adapter(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves of the adapter alone would lose the norm; the steps of a run that freezes it later hold it, too."""
    first = unfrozen(base, seed=1)
    with first.manager(tmp_path / "run", [base]) as manager:
        manager.load()
        first.step()
        manager.save(1)
        first.step()
        manager.save(2)
        first.step()
    assert kind(tmp_path / "run", 2) == "full"
    second = unfrozen(base, seed=2)
    with second.manager(tmp_path / "run", [base]) as manager:
        assert manager.load().step == 2
        second.step()
    assert torch.equal(second.logits(), first.logits())

    frozen = unfrozen(base, seed=3)
    frozen.model.get_parameter("norm.weight").requires_grad_(False)
    with frozen.manager(tmp_path / "run", [base]) as manager:
        assert manager.load().step == 2
        frozen.step()
        manager.save(4)
    assert kind(tmp_path / "run", 4) == "full"
    last = unfrozen(base, seed=4)
    assert world.load(last.manager(tmp_path / "run", [base])).step == 4
    assert torch.equal(last.logits(), frozen.logits())


def test_an_export_of_the_adapter_alone_is_refused_before_training(tmp_path: Path, base: Path) -> None:
    export = (ExportConfig("peft"),)
    with pytest.raises(ExportSettingError, match=r"1 parameter of the base is trained too, such as norm\.weight"):
        unfrozen(base, seed=1).manager(tmp_path / "run", [base], export=export)


def test_a_base_that_is_unfrozen_after_the_first_step_is_refused(tmp_path: Path, base: Path) -> None:
    run = LoraRun.build(base, seed=1)
    with run.manager(tmp_path / "run", [base]) as manager:
        manager.load()
        run.step()
        manager.save(1)
        run.model.get_parameter("norm.weight").requires_grad_(True)
        with pytest.raises(
            ConfigError, match=r"save\.include_base: training changes 1 tensor of .*, such as norm\.weight"
        ):
            manager.save(2)


def test_a_run_that_never_loads_records_its_base(tmp_path: Path, base: Path) -> None:
    """A resume can tell its base from one that training has changed: the adapter alone is exported."""
    first = LoraRun.build(base)
    with first.manager(tmp_path / "run", []) as manager:
        first.step()
        manager.save(2)
    second = LoraRun.build(base)
    with second.manager(tmp_path / "run", [], export=(ExportConfig("peft"),)) as manager:
        assert manager.load().step == 2
        assert manager.export(2, last_step=True)


def test_a_base_that_is_written_to_and_is_the_same_stays_what_it_was(tmp_path: Path, base: Path) -> None:
    """As by DDP, which sends rank 0's weights when it is made: the adapter is saved and exported alone."""
    run = LoraRun.build(base)
    with run.manager(tmp_path / "run", [base], export=(ExportConfig("peft"),)) as manager:
        manager.load()
        run.step()
        weight = run.model.get_parameter("norm.weight")
        with torch.no_grad():
            weight.copy_(weight.clone())
        assert manager.save(2, last_step=True)
    assert kind(tmp_path / "run", 2) == "adapter"
    assert (tmp_path / "run/exports/step-2-peft/adapter_config.json").is_file()


class Normed(nn.Module):
    """A model whose running statistics are buffers that every step of training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)))
        return result


class NormedRun:
    """A run of such a model, whole or with adapters over a folder or over initial values."""

    def __init__(
        self, folder: Path, seed: int, source: Path | None = None, *, adapted: bool = True, **settings: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = Normed()
        table = {"kind": "lora", "rank": 2, "target_modules": ["first"]}
        converter = world.convert(self.model, table) if adapted else None
        self.optimizer = world.adamw(self.model)
        given = {"save": SaveConfig(interval=2), "initial_load": [source] if source else [], **settings}
        self.manager = world.manager(folder, self.model, self.optimizer, **given, model_converters=converter)

    def train(self) -> None:
        """Resume or start, make two steps, and save the second."""
        with self.manager as manager:
            resumed = manager.load().step
            for step in (resumed + 1, resumed + 2):
                world.step_on(self.model, self.optimizer, torch.randn(6, 4))
                manager.save(step)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A step of a whole model."""
    NormedRun(tmp_path / "base", seed=0, adapted=False).train()
    return tmp_path / "base/checkpoints/step-2"


INCLUDING = SaveConfig(interval=2, include_base=True)


@pytest.mark.parametrize("kind_of_run", ["base left out", "base included", "base initialized"])
def test_statistics_that_change_beside_an_adapter_are_saved(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture, kind_of_run: str
) -> None:
    """A resumed run has the statistics of training; the log says why steps are full ones that would not have been."""
    base = None if kind_of_run == "base initialized" else source
    settings: dict[str, Any] = {"save": INCLUDING} if kind_of_run == "base included" else {}
    first = NormedRun(tmp_path / "run", 1, base, **settings)
    first.train()
    assert kind(tmp_path / "run", 2) == "full"
    assert ("tensors of the base, such as norm.running_mean" in caplog.text) is (kind_of_run == "base left out")
    second = NormedRun(tmp_path / "run", 2, base, **settings)
    assert world.load(second.manager).step == 2
    assert all(torch.equal(a, b) for a, b in zip(first.model.buffers(), second.model.buffers(), strict=True))


def test_an_adapter_beside_changed_statistics_is_not_exported(tmp_path: Path, source: Path) -> None:
    """PEFT would put it on the base as it was: refused also if an earlier run of the folder has changed the base."""
    peft = (ExportConfig("peft"),)
    refused = "such as norm.running_mean, which an adapter does not hold"
    with pytest.raises(ExportSettingError, match=refused):
        NormedRun(tmp_path / "run", 1, source, save=INCLUDING, export=peft).train()
    with pytest.raises(ExportSettingError, match=refused):
        NormedRun(tmp_path / "initialized", 1, export=peft).train()
    NormedRun(tmp_path / "run", 1, source).train()
    with pytest.raises(ExportSettingError, match="training changes the base, which an adapter does not hold"):
        NormedRun(tmp_path / "run", 1, source, export=peft).train()


def test_statistics_that_rest_leave_saves_to_the_adapter(tmp_path: Path, source: Path) -> None:
    run = NormedRun(tmp_path / "run", 1, source, export=(ExportConfig("peft"),))
    run.model.eval()
    run.train()
    assert kind(tmp_path / "run", 2) == "adapter"


@pytest.mark.parametrize("format_", ["hf", "dcp"])
def test_a_base_that_changes_while_an_export_reads_it_fails_the_export_by_name(
    tmp_path: Path, base: Path, format_: Any
) -> None:
    """An export in the background merges the adapter's copy with the live base; what it read is that of no step."""
    run = LoraRun.build(base, seed=1)
    changed = threading.Event()

    def late(_: str, operation: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if threading.current_thread().name.startswith("titan_ckpt export"):
            assert changed.wait(60)
        return operation(*arguments)

    export = (ExportConfig(format_, interval=1),)
    with run.manager(tmp_path / "run", [base], save=SaveConfig(interval=1), export=export) as manager:
        manager.load()
        run.step()
        with intercepted(late):
            manager.save(1)
            manager.maybe_wait_for_staging()
            with torch.no_grad():
                run.model.get_parameter("norm.weight").add_(1)
            changed.set()
            with pytest.raises(ExportError, match=r"norm\.weight of the frozen base changed .* Call wait\(\) before"):
                manager.wait()
    assert list((tmp_path / "run/exports").iterdir()) == []


def test_a_frozen_base_that_other_code_has_changed_is_saved_with_its_adapter(tmp_path: Path, source: Path) -> None:
    """As ReLoRA does, which merges its adapters into the base: a resume over the source would lose that."""
    first = NormedRun(tmp_path / "run", 1, source)
    first.model.eval()
    with first.manager as manager:
        manager.load()
        with torch.no_grad():
            first.model.last.weight.add_(1)
        manager.save(2)
    second = NormedRun(tmp_path / "run", 2, source)
    assert world.load(second.manager).step == 2
    assert torch.equal(first.model.last.weight, second.model.last.weight)
