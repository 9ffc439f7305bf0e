"""This package's LoRA, QAT and Float8 in torchtitan's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchtitan.runs import FLAVOURS, config, distributed, logits_of, same, train
from tests.torchtitan.test_lora import BOTH, LAST, TOKENS, flavour, kind_of, opened
from titan_ckpt.errors import ConverterError
from titan_ckpt.integrations.torchtitan import TitanConverters

# isort: split
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.llama3 import model_registry

from titan_ckpt.converters import ConverterConfig, Float8Config, LoRAConfig, QATConfig

QAT, FLOAT8 = QATConfig("int8_weight_only"), Float8Config(emulate=True)
LORA = LoRAConfig(("wqkv", "wo", "w2"), rank=4, alpha=6.0)


@distributed(1)
def _resumed(assets: Path, folder: Path, base: dict[str, Any], *converters: ConverterConfig) -> None:
    name = flavour("converted", TitanConverters.Config(converters=[*converters]))
    has_lora = any(isinstance(c, LoRAConfig) for c in converters)
    logits: list[torch.Tensor] = []

    def look(trainer: Any) -> None:
        logits.append(logits_of(trainer, TOKENS))

    def run(folder: Path, **settings: Any) -> Any:
        return config(assets, folder, name, steps=3, interval=1, exact=True, **base | settings)

    whole = train(run(folder / "whole"))
    train(run(folder / "run"), until=2)
    assert kind_of(folder / "run", 2) == ("adapter" if has_lora else "full")
    resumed = train(run(folder / "run", **BOTH if has_lora else LAST), then=look)
    assert len(resumed.losses) == 1
    same(whole, resumed, losses=1)
    exported = opened(folder / "run/exports/step-3")
    torch.testing.assert_close(exported, logits[0], rtol=0.1, atol=0.1)  # training rounds weights to 8 bits
    if has_lora:
        on_base = opened(Path(base["initial_load_path"]), folder / "run/exports/step-3-peft")
        torch.testing.assert_close(on_base, exported, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "converters", [pytest.param((FLOAT8,), marks=pytest.mark.full), (QAT, LORA)], ids=["float8", "qat-lora"]
)
def test_converters_of_ours_train_and_resume(
    assets: Path, tmp_path: Path, base: dict[str, Any], converters: tuple[ConverterConfig, ...]
) -> None:
    """A resumed run has the bits of one that was not stopped; exports hold weights that transformers opens."""
    _resumed(assets, tmp_path, base, *converters)


def test_wrong_orders_and_two_kinds_of_lora_are_refused() -> None:
    """Nothing is built whose adapters one converter would drop, or that has two owners of one name."""
    flavour("wrong", TitanConverters.Config(converters=[LORA, QAT]))
    with pytest.raises(ConverterError, match="Write them in this order: qat, lora"):
        FLAVOURS["wrong"]()
    ours = TitanConverters.Config(converters=[LORA])
    with pytest.raises(ConverterError, match="converters already"):
        model_registry("debugmodel", converters=[ours, ours])
    with pytest.raises(ConverterError, match="leave out fsdp_all_gather"):
        TitanConverters.Config(converters=[Float8Config(emulate=True, fsdp_all_gather=True)]).build()
    both = model_registry("debugmodel", converters=[ours, LoRAConverter.Config(target_modules=["w1"])]).model
    with torch.device("meta"), pytest.raises(ConverterError, match="torchtitan's LoRA already"):
        both.build()
