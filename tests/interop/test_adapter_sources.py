"""Adapters in this package's own steps and in DCP folders as sources of another run: loaded, resumed and merged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import world
from tests.interop.folders import disturb
from tests.interop.test_lora_fused import fused_qwen3
from tests.interop.test_lora_run import LoraRun, trained
from tests.interop.test_merge_sources import load as merge_into
from titan_ckpt import CheckpointManager, InitialLoadConfig, SaveConfig
from titan_ckpt.converters import from_tables
from titan_ckpt.errors import BaseMismatchError, LoadMismatchError
from titan_ckpt.models.llama3 import Llama3
from titan_ckpt.models.qwen3_moe import FLAVORS, Qwen3Moe
from titan_ckpt.weights.wrapper import ModelWrapper

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp in one process, as meant here
EVERYWHERE = ["wq", "wk", "wv", "wo", "w1", "w2", "w3", "tok_embeddings"]


def write_dcp(run: LoraRun, folder: Path) -> Path:
    """Save the adapter of a run with torch, as another program would."""
    owned = {fqn: value for fqn, value in run.model.state_dict().items() if run.converter.key_filter(fqn)}
    dcp.save(owned, checkpoint_id=folder)
    return folder


def assert_continues(first: LoraRun, base: Path, adapter: Path, folder: Path) -> None:
    """Fail unless a run over base and adapter starts where `first` ended, and resumes what it saves bit for bit."""
    second = LoraRun.build(base, seed=9)
    with second.manager(folder, [base, adapter]) as manager:
        result = manager.load()
        assert result.step == 0 and not result.report.initialized
        assert torch.equal(second.logits(), first.logits())
        for step in (1, 2):
            second.step()
            manager.save(step)
        second.step()
    third = LoraRun.build(base, seed=5)
    with third.manager(folder, [base, adapter]) as manager:
        assert manager.load().step == 2
        third.step()
    assert torch.equal(third.logits(), second.logits())


def test_a4_an_adapter_step_is_a_source_at_the_start_and_at_every_resume(tmp_path: Path, base: Path) -> None:
    """The resume of such a run reads the base and its own step, and leaves the step that it started from alone."""
    first = trained(tmp_path, base)
    assert_continues(first, base, tmp_path / "run/checkpoints/step-4", tmp_path / "second")


def test_an_adapter_in_a_dcp_folder_is_a_source_too(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its names say that it is an adapter; that nothing says its alpha is warned of."""
    first = trained(tmp_path, base)
    assert_continues(first, base, write_dcp(first, tmp_path / "dcp"), tmp_path / "second")
    assert "dcp says no rank, alpha and base of its adapter" in caplog.text


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({"alpha": 16.0}, ["lora.alpha: 8.0 in the checkpoint, 16.0 in this run"]),
        ({"rank": 2}, ["lora.rank: 4 in the checkpoint, 2 in this run"]),
        ({"use_rslora": True}, ["lora.use_rslora: False in the checkpoint, True in this run"]),
        ({"use_dora": True}, ["lora.use_dora: False in the checkpoint, True in this run"]),
        ({"alpha_pattern": {"wq": 4.0}}, ["lora.alpha_pattern: {} in the checkpoint, {'wq': 4.0} in this run"]),
        ({"target_modules": ["wq", "wk"]}, ["lora.target_modules: ['wq', 'wk', 'wv', 'w2'] in the checkpoint"]),
        ({"target_modules": ["wq", "wk", "wv", "wo", "w2"], "rank": 8}, ["lora.rank", "lora.target_modules"]),
    ],
)
def test_other_settings_than_the_steps_are_named(
    changed: dict[str, Any], faults: list[str], tmp_path: Path, base: Path
) -> None:
    """Every setting that would change the adapter's result is listed, once, before anything is loaded."""
    trained(tmp_path, base)
    run = LoraRun.build(base, **changed)
    before = world.whole(run.model.state_dict())
    sources = [base, tmp_path / "run/checkpoints/step-4"]
    with run.manager(tmp_path / "second", sources) as manager, pytest.raises(LoadMismatchError) as raised:
        manager.load()
    assert all(fault in str(raised.value) for fault in faults), raised.value
    assert str(raised.value).count("in this run") == len(faults)
    assert world.same(run.model.state_dict(), before)


def test_settings_that_give_the_same_result_are_accepted(tmp_path: Path, base: Path) -> None:
    """Targets and patterns in other words, the same scale by rsLoRA, and another dropout: the adapter is the same."""
    first = trained(tmp_path, base)
    second = LoraRun.build(
        base,
        target_modules=["layers.*.attention.w[qkv]", "feed_forward.w2"],
        rank=9,
        rank_pattern={"layers.*": 4},
        alpha=4.0,
        use_rslora=True,
        dropout=0.5,
    )
    world.load(second.manager(tmp_path / "second", [base, tmp_path / "run/checkpoints/step-4"]))
    second.model.eval()
    assert torch.equal(second.logits(), first.logits())


def test_f9_another_base_than_the_steps_is_named(tmp_path: Path, base: Path) -> None:
    """An adapter step knows the weights it was trained on, as a source too, loaded or merged."""
    trained(tmp_path, base)
    other, adapter = world.write_llama(tmp_path / "other", seed=1), tmp_path / "run/checkpoints/step-4"
    run = LoraRun.build(base)
    world.load_fails(run.manager(tmp_path / "a", [other, adapter]), BaseMismatchError, "step-4 was")
    with pytest.raises(BaseMismatchError, match="step-4 was trained on another base"):
        merge_into(other, tmp_path / "b", adapter)


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"target_modules": EVERYWHERE, "rank_pattern": {"w2": 2}, "alpha_pattern": {"layers.0.*": 3.0}},
        {"use_dora": True, "use_rslora": True},
        {"modules_to_save": ["norm", "output"]},
    ],
)
def test_a_merged_step_has_the_bits_of_the_merged_export(lora: dict[str, Any], tmp_path: Path, base: Path) -> None:
    """`load = "merge"` of an adapter step gives the weights that its own run exports, in a run without converters."""
    trained(tmp_path, base, **lora)
    ours = merge_into(base, tmp_path / "merged", tmp_path / "run/checkpoints/step-4")
    expected = Llama3(ours.config)
    export = InitialLoadConfig(str(tmp_path / "run/exports/step-4"))
    world.load(world.manager(tmp_path / "expected", expected, initial_load=[export]))
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in ours.state_dict().items())
    unmerged = merge_into(base, tmp_path / "unmerged").state_dict()
    assert not torch.equal(ours.state_dict()["layers.0.attention.wq.weight"], unmerged["layers.0.attention.wq.weight"])


@pytest.mark.parametrize("form", ["fused", "stacks"])
def test_fused_weights_and_stacked_experts_are_merged_too(form: str, tmp_path: Path) -> None:
    """A step keeps them as the model has them; merged they have the bits of the run's own merged weights."""

    def model() -> Any:
        torch.manual_seed(0)
        made = fused_qwen3() if form == "fused" else Qwen3Moe(replace(FLAVORS["debug-1m"], num_layers=2))
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        return made

    targets = ["wqkv"] if form == "fused" else ["wq", "experts.w1", "experts.w2"]
    first, folder = model(), tmp_path / "run"
    converter = from_tables([{"kind": "lora", "rank": 4, "target_modules": targets, "use_dora": form == "fused"}])
    world.save(manager_of(model(), tmp_path / "origin"))
    origin = InitialLoadConfig(str(tmp_path / "origin/checkpoints/step-1"))
    converter.convert(first)
    with manager_of(first, folder, origin, converter=converter) as manager:
        manager.load()
        disturb(first, lambda name, _: converter.key_filter(name))
        manager.save(1)
    merged = model()
    adapter = InitialLoadConfig(str(folder / "checkpoints/step-1"), load="merge")
    world.load(manager_of(merged, tmp_path / "merged", origin, adapter))
    assert world.misplaced(ModelWrapper([first], converter).state_dict("export"), merged.state_dict()) == []


def manager_of(model: Any, folder: Path, *sources: InitialLoadConfig, converter: Any = None) -> CheckpointManager:
    return world.manager(folder, model, initial_load=sources, model_converters=converter)


def test_adapters_of_a_chain_are_merged_in_their_order(tmp_path: Path, base: Path) -> None:
    """The second adapter was trained over the first one's merge, and its record names that base."""
    first = trained(tmp_path, base)
    adapter = tmp_path / "run/checkpoints/step-4"
    second = LoraRun.build(base, seed=3)
    merged: Any = InitialLoadConfig(str(adapter), load="merge")
    with second.manager(tmp_path / "second", [base, merged]) as manager:
        manager.load()
        torch.testing.assert_close(second.logits(), first.logits(), rtol=0, atol=1e-5)
        second.step()
        second.step()
        manager.save(2, last_step=True)
    chain = [adapter, tmp_path / "second/checkpoints/step-2"]
    with torch.no_grad():
        ours = merge_into(base, tmp_path / "merged", *chain)(torch.arange(18).view(2, 9))
        torch.testing.assert_close(ours, second.model(torch.arange(18).view(2, 9)), rtol=0, atol=1e-5)
    with pytest.raises(BaseMismatchError, match="step-2 was trained on another base"):
        merge_into(base, tmp_path / "alone", chain[1])


def test_a4_a_whole_step_with_an_adapter_inside_is_exact_or_refused(tmp_path: Path, base: Path) -> None:
    """It is the model with the same converters, refused with another alpha or merged, and a base alone if asked."""
    first = LoraRun.build(base)
    save = SaveConfig(interval=1, include_base=True)
    with first.manager(tmp_path / "run", [base], save=save) as manager:
        manager.load()
        first.step()
        manager.save(1)
    step = tmp_path / "run/checkpoints/step-1"
    second = LoraRun.build(base, seed=4)
    with second.manager(tmp_path / "second", [step]) as manager:
        manager.load()
        assert torch.equal(second.logits(), first.logits())
        second.step()
        manager.save(2)  # the adapter alone; the step that it began with is its base
    resumed = LoraRun.build(base, seed=6)
    assert world.load(resumed.manager(tmp_path / "second", [step])).step == 2
    assert torch.equal(resumed.logits(), second.logits())
    third = LoraRun.build(base, alpha=32.0)
    world.load_fails(third.manager(tmp_path / "third", [step]), LoadMismatchError, r"lora\.alpha: 8")
    plain = Llama3(first.model.config)
    world.load_fails(
        world.manager(tmp_path / "plain", plain, initial_load=[step]),
        LoadMismatchError,
        r"step-1 holds 16 tensors of converters \(lora\).*has no converters",
    )
    base_alone = InitialLoadConfig(str(step), ignore=("*.lora_*",))
    world.load(manager_of(plain, tmp_path / "base-alone", base_alone))
    assert all(torch.equal(value, first.model.state_dict()[name]) for name, value in plain.state_dict().items())
    with pytest.raises(LoadMismatchError, match="step-1 is native and holds whole weights, and only an adapter"):
        merge_into(base, tmp_path / "merged", step)


def test_a_dcp_adapter_is_not_merged_by_a_guessed_alpha(tmp_path: Path, base: Path) -> None:
    """The refusal says how the adapter can be merged; without LoRA in the run it is not loaded either."""
    first = trained(tmp_path, base)
    folder = write_dcp(first, tmp_path / "dcp")
    with pytest.raises(LoadMismatchError, match=r"says no rank and no alpha.*merge the export"):
        merge_into(base, tmp_path / "merged", folder)
    converter = from_tables([])
    plain = Llama3(first.model.config)
    sources = (InitialLoadConfig(str(base)), InitialLoadConfig(str(folder)))
    world.load_fails(
        world.manager(tmp_path / "plain", plain, initial_load=sources, model_converters=converter),
        LoadMismatchError,
        "dcp is an adapter, and no converter of this run owns",
    )


class OwnLoRA(torch.nn.Module):
    """A model that has low-rank factors of its own, as torchtune's have, under the names that LoRA here gives."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a = torch.nn.Linear(8, 2, bias=False)
        self.lora_b = torch.nn.Linear(2, 8, bias=False)
        self.base = torch.nn.Linear(8, 8)


def test_names_that_the_model_has_itself_are_no_converters(tmp_path: Path) -> None:
    """Without converters such tensors are weights like others: a step of them loads, and a DCP folder beside a base."""
    first, second = torch.nn.ModuleDict({"x": OwnLoRA()}), torch.nn.ModuleDict({"x": OwnLoRA()})
    values = {name: value.clone() for name, value in first.state_dict().items()}
    world.save(world.manager(tmp_path / "run", first))
    for name in ("base", "lora_"):
        part = {key: value for key, value in values.items() if f"x.{name}" in key}
        dcp.save(part, checkpoint_id=tmp_path / name)
    for sources in ([tmp_path / "run/checkpoints/step-1"], [tmp_path / "base", tmp_path / "lora_"]):
        for parameter in second.parameters():
            torch.nn.init.zeros_(parameter)
        loads = tuple(InitialLoadConfig(str(path)) for path in sources)
        world.load(world.manager(tmp_path / "second", second, initial_load=loads))
        assert all(torch.equal(value, values[name]) for name, value in second.state_dict().items())


def test_an_adapter_of_other_names_is_answered_with_targets_and_names(tmp_path: Path, base: Path) -> None:
    """No converter is missing: its targets differ, or its names are those of another architecture."""
    trained(tmp_path, base, target_modules=["wq"])
    other = LoraRun.build(base, target_modules=["w2"])
    world.load_fails(
        other.manager(tmp_path / "other", [base, tmp_path / "run/checkpoints/step-4"]),
        LoadMismatchError,
        "compare target_modules.*titan-ckpt convert",
    )
