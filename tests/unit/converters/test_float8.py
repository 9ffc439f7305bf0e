"""Float8: recipes under emulation, hardware, what is exchanged, and parameters that files see without torchao."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests import world
from tests.world import llama
from titan_ckpt.converters import ModelConvertersContainer
from titan_ckpt.errors import ConverterError

TOKENS = torch.arange(20).reshape(2, 10)


def convert(model: nn.Module, **settings: Any) -> ModelConvertersContainer:
    converters: ModelConvertersContainer = world.convert(model, {"kind": "float8", "emulate": True, **settings})
    return converters


def test_recipes_survive_emulation() -> None:
    """Emulating changes where products are computed, not how values are rounded: each recipe gives other logits."""
    outputs = []
    for recipe in ("tensorwise", "rowwise"):
        model = llama()
        convert(model, recipe=recipe)
        outputs.append(model(TOKENS))
    outputs.append(llama()(TOKENS))
    for i, one in enumerate(outputs):
        for other in outputs[i + 1 :]:
            assert not torch.equal(one, other)
            torch.testing.assert_close(one, other, rtol=0, atol=0.3)
    convert(model := llama(), recipe="rowwise", emulate=True)
    config: Any = next(module.config for module in model.modules() if type(module).__name__ == "Float8Linear")
    assert config.emulate and config.cast_config_weight.scaling_granularity.value == "axiswise"


def test_a_machine_without_float8_units_is_told_to_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing falls back in silence: without hardware and without emulation the conversion is refused."""
    model = llama()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConverterError, match=r"capability 8\.9 or more, found no GPU\. Set emulate = true"):
        convert(model, emulate=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConverterError, match=r"found a GPU of compute capability 8\.0"):
        convert(model, emulate=False)
    assert not any("Float8" in type(m).__name__ for m in model.modules())


def test_odd_dims_and_the_head_are_left() -> None:
    """Modules that float8 units cannot take stay as they are; a model of none but those is an error."""
    model = nn.ModuleDict({"a": nn.Linear(32, 48), "b": nn.Linear(32, 50), "lm_head": nn.Linear(32, 32)})
    convert(model)
    assert [type(m).__name__ for m in model.values()] == ["Float8Linear", "Linear", "Linear"]
    with pytest.raises(ConverterError, match="16 divides the dims of none of the 1 linear modules"):
        convert(nn.ModuleDict({"b": nn.Linear(32, 50)}))
    with pytest.raises(ConverterError, match="no linear module to exchange: the model has 1, all excluded"):
        convert(nn.ModuleDict({"lm_head": nn.Linear(32, 32)}))


def test_scales_from_before_a_load_are_forgotten() -> None:
    """A scale computed from weights that a load replaced would round the new ones by the old ones' size."""
    model = llama()
    converters = convert(model, fsdp_all_gather=True)
    live: Any = model.get_parameter("layers.0.attention.wq.weight")
    live._precomputed_scale = torch.tensor(4.0)
    converters.initialize([model], [])
    assert live._precomputed_scale is None
