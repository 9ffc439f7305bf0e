"""LoRA in torchtitan's Trainer: the same steps, adapter-only saves, and exports that lose no adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchtitan.runs import (
    FLAVOURS,
    Run,
    config,
    distributed,
    killed,
    logits_of,
    same,
    same_tensors,
    steps_in,
    train,
)
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.torchtitan import TitanConverters

# isort: split
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.llama3 import model_registry

from titan_ckpt.converters import LoRAConfig

FSDP, TP = {"data_parallel_shard": 2}, {"tensor_parallel": 2, "data_parallel_shard": 1}
FLAVOUR = "llama3_debugmodel_float8_emulate_lora"
LAST: dict[str, Any] = {"last_save_model_only": True, "last_save_in_hf": True}
BOTH: dict[str, Any] = {**LAST, "last_save_adapter": "both"}
TOKENS = torch.randint(3, 500, (2, 16), generator=torch.Generator().manual_seed(3))


MODULES = ("wqkv", "wo", "w1", "w2", "w3", "lm_head")


def flavour(name: str, *converters: Any) -> str:
    """Register the debug model with these converters, and return its name."""

    def made() -> Any:
        made = FLAVOURS["llama3_debugmodel"]()
        made.model_spec = model_registry("debugmodel", converters=[*converters])
        return made

    FLAVOURS[name] = made
    return name


THEIRS = flavour("theirs", LoRAConverter.Config(rank=4, alpha=6.0))
"""torchtitan's LoRA on every linear module, fused q, k and v and the head included."""
OURS = flavour("ours", TitanConverters.Config(converters=[LoRAConfig(MODULES, rank=4, alpha=6.0)]))
"""This package's LoRA on the same modules."""


def kind_of(dump_folder: Path, step: int) -> str:
    """Return which part of the model a step holds."""
    kind: str = json.loads((dump_folder / f"checkpoint/step-{step}/MANIFEST.json").read_text())["kind"]
    return kind


def opened(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """Return the logits of transformers' model, with an adapter opened by PEFT on it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    model.train(False)
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


@distributed(1)
def _own(assets: Path, folder: Path, base: dict[str, Any]) -> None:
    theirs = train(config(assets, folder / "theirs", FLAVOUR, titan=False, **base))
    ours = train(config(assets, folder / "ours", FLAVOUR, async_mode="async", **base, **BOTH))
    same(theirs, ours)
    assert [kind_of(folder / "ours", step) for step in steps_in(folder / "ours")] == ["adapter", "adapter"]

    exports = folder / "ours/exports"
    expected = {name: value for name, value in ours.model.items() if ".lora_" not in name}
    for name in expected:
        a, b = (ours.model.get(name.replace("weight", f"lora_{factor}.weight")) for factor in "ab")
        if a is not None and b is not None:
            expected[name] = expected[name] + 2.0 * (b @ a)
    settings: dict[str, Any] = {"initial_load_in_hf": True, "initial_load_path": str(exports / "step-6")}
    merged = train(config(assets, folder / "merged", titan=False, steps=0, layers=2, **settings))
    assert merged.model.keys() == expected.keys()
    for name, value in merged.model.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    on_base = opened(Path(base["initial_load_path"]), exports / "step-6-peft")
    torch.testing.assert_close(on_base, opened(exports / "step-6"), rtol=1e-4, atol=1e-5)

    for adapter in (exports / "step-6-peft", folder / "theirs/checkpoint/step-6"):
        more = {"initial_load_path": str(adapter), "initial_load_in_hf": False}
        if adapter.name.endswith("peft"):
            more = {"additional_load_path": str(adapter)}
        loaded = config(assets, folder / adapter.name / "again", FLAVOUR, steps=0, **base | more)
        same_tensors(train(loaded).model, ours.model)
    upgraded = train(config(assets, folder / "theirs", FLAVOUR, steps=7, layers=2))
    assert (steps_in(folder / "theirs"), kind_of(folder / "theirs", 7)) == ([2, 4, 6, 7], "full")
    resumed = train(config(assets, folder / "theirs", FLAVOUR, steps=7, **base))
    same(upgraded, resumed, losses=0)


def test_torchtitans_float8_and_lora_lose_nothing(assets: Path, tmp_path: Path, base: dict[str, Any]) -> None:
    """6 steps are torchtitan's own; saves hold adapters; exports hold them merged, or as PEFT; both load again."""
    _own(assets, tmp_path, base)


Case = tuple[str, dict[str, int], dict[str, Any]]
"""A flavour, its degrees of parallelism, and the settings that load its base."""


def _config(assets: Path, folder: Path, case: Case, **more: Any) -> Any:
    name, degrees, base = case
    return config(assets, folder, name, async_mode="async", degrees=degrees, exact=True, **base | more)


@distributed(2)
def _killed(assets: Path, folder: Path, case: Case) -> None:
    def keep(run: Run) -> None:
        if torch.distributed.get_rank() == 0:
            torch.save(vars(run), folder / "whole.pt")
        torch.distributed.barrier()

    train(_config(assets, folder, case, steps=7), until=6, before_death=keep)


@distributed(2)
def _resumed(assets: Path, folder: Path, case: Case) -> None:
    logits: list[torch.Tensor] = []

    def look(trainer: Any) -> None:
        logits.append(logits_of(trainer, TOKENS))

    resumed = train(_config(assets, folder, case, **BOTH), then=look)
    assert len(resumed.losses) == 2
    same(Run(**torch.load(folder / "whole.pt")), resumed, losses=2)
    peft = folder / "exports/step-6-peft"
    if torch.distributed.get_rank() == 0:
        merged = opened(folder / "exports/step-6")
        torch.testing.assert_close(merged, logits[0], rtol=2e-4, atol=2e-5)
        on_base = opened(Path(case[2]["initial_load_path"]), peft)
        torch.testing.assert_close(on_base, merged, rtol=2e-4, atol=2e-5)
    again = train(_config(assets, folder / "again", case, steps=0, additional_load_path=str(peft)))
    same_tensors(again.model, resumed.model)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        (THEIRS, TP),
        (OURS, FSDP),
        pytest.param(THEIRS, FSDP, marks=pytest.mark.full),
        pytest.param(OURS, TP, marks=pytest.mark.full),
    ],
    ids=["theirs-tp", "ours-fsdp", "theirs-fsdp", "ours-tp"],
)
def test_a_killed_lora_run_goes_on(
    assets: Path, tmp_path: Path, base: dict[str, Any], name: str, degrees: dict[str, int]
) -> None:
    """Adapters on every linear module, fused ones too, resume bit for bit on 2 ranks; both exports have the logits.

    The run was killed in the middle of its third save.
    """
    killed(_killed, assets, tmp_path, (name, degrees, base))
    assert steps_in(tmp_path) == [2, 4]
    assert [kind_of(tmp_path, step) for step in steps_in(tmp_path)] == ["adapter", "adapter"]
    _resumed(assets, tmp_path, (name, degrees, base))


def test_wrong_combinations_are_one_error(assets: Path, tmp_path: Path) -> None:
    """Each fault is named before step 1, by torchtitan's names, and all together."""
    _refused(assets, tmp_path)


@distributed(1)
def _refused(assets: Path, folder: Path) -> None:
    def faults(flavour: str, **settings: Any) -> list[str]:
        with pytest.raises(ConfigError) as error:
            config(assets, folder, flavour, **settings).build()
        return [problem.partition(":")[0] for problem in error.value.problems]

    plain: dict[str, Any] = {
        "include_base": True,
        "additional_load_path": "hdfs://a",
        "last_save_adapter": "peft",
        **LAST,
    }
    of_paths = ["checkpoint.additional_load_path"] * 3
    expected = ["checkpoint.last_save_adapter", "checkpoint.include_base", *of_paths]
    assert faults("llama3_debugmodel", **plain) == expected
    assert faults(THEIRS, last_save_adapter="peft") == ["checkpoint.last_save_adapter"]
    assert faults(THEIRS, last_save_adapter="adapter") == ["checkpoint.last_save_adapter"]
    trained = config(assets, folder, THEIRS, **BOTH, initial_load_path=str(folder))
    trained.parallelism.spmd_backend = "spmd_types"  # makes frozen parameters trainable
    with pytest.raises(ConfigError, match=r"last_save_adapter, include_base: .* trains 45 parameters, such as tok_emb"):
        trained.build()
    path = {"additional_load_path": str(folder), "initial_load_path": str(folder), "initial_load_model_only": False}
    assert faults(THEIRS, **path) == ["checkpoint.additional_load_path"]
