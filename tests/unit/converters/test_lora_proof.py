"""LoRA on modules that do more than multiply: exact, or refused by name before anything changes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from titan_ckpt.converters import LoRAConfig, ModelConvertersContainer, build, from_tables
from titan_ckpt.errors import ConverterError
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.weights.wrapper import ModelWrapper

conv1d: Any = Conv1D  # it has no types
IDS = torch.tensor([[1, 5, 3], [9, 0, 7]])


def adapted(module: nn.Module, **settings: Any) -> tuple[Any, ModelConvertersContainer]:
    """The module as `m` of a model, with an adapter that has an effect."""
    model = nn.ModuleDict({"m": module})
    converters = build([LoRAConfig(("m",), **{"rank": 4, **settings})])
    converters.convert(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if converters.key_filter(name):
                parameter.normal_(0, 0.3)
    return model, converters


def merged(model: nn.Module, converters: ModelConvertersContainer) -> torch.Tensor:
    """The weight of `m` that an export writes."""
    (block,) = blocks_of(ModelWrapper([model], converters).state_dict("export")["m.weight"])
    return block.data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Gemma3TextScaledWordEmbedding, BartScaledWordEmbedding])
def test_an_embedding_that_scales_trains_what_is_exported(kind: Any, dtype: torch.dtype) -> None:
    """The low-rank path is scaled like the table's rows, by the module's own factor in the table's precision."""
    model, converters = adapted(kind(16, 8, 0, embed_scale=2560**0.5).to(dtype), alpha=64.0)
    exported = kind(16, 8, 0, embed_scale=2560**0.5).to(dtype)
    exported.load_state_dict({"weight": merged(model, converters)})
    expected = exported(IDS).float()
    assert (model["m"](IDS).float() - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()


def test_a_scale_that_has_no_value_yet_is_followed() -> None:
    """A model on meta knows its factor only after it is materialized; the adapter reads it in each forward."""
    with torch.device("meta"):
        model: Any = nn.ModuleDict({"m": Gemma3TextScaledWordEmbedding(16, 8, 0, embed_scale=9.0)})
    converters = build([LoRAConfig(("m",), rank=4)])
    converters.convert(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for value in model.state_dict().values():
            value.normal_()
        model["m"].embed_scale.fill_(5.0)
    torch.testing.assert_close(model["m"](IDS), 5 * F.embedding(IDS, merged(model, converters)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_dora", [False, True])
def test_gpt2_conv1d_is_a_linear_module(dtype: torch.dtype, use_dora: bool) -> None:
    """Its weight is (in, out), also where it is square: the merged module computes what the adapted one does."""
    for rows, columns in ((8, 8), (12, 8)):
        model, converters = adapted(conv1d(rows, columns).to(dtype), dropout=0.5, use_dora=use_dora)
        exported = conv1d(rows, columns).to(dtype)
        exported.load_state_dict({"weight": merged(model, converters), "bias": model["m"].bias})
        x = torch.randn(2, 3, columns, dtype=dtype)
        expected = exported(x).float()
        difference = (model.eval()["m"](x).float() - expected).abs().max()
        assert difference <= 8 * torch.finfo(dtype).eps * expected.abs().max()


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) * 2


class Clamped(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input).clamp(-1e4, 1e4)


class Normed(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return F.linear(input, F.normalize(self.weight), self.bias)


class DropsOut(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return F.dropout(super().forward(input), 0.5, self.training)


class Router(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:  # noqa: A002
        return super().forward(input).topk(2)


class Offset(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward((input + 2) % self.num_embeddings)


class Unused(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return input @ input.new_ones(self.in_features, self.out_features)


def replaced_forward() -> nn.Module:
    module: Any = nn.Linear(8, 6)
    module.forward = lambda x: x
    return cast("nn.Module", module)


REFUSED = {
    "m: Scaled does more than multiply by its weight: an adapter is off by 50%": lambda: Scaled(8, 6),
    "m: Clamped does more than multiply by its weight": lambda: Clamped(8, 6),
    "m: Normed does more than multiply by its weight": lambda: Normed(8, 6),
    "m: DropsOut does more than multiply by its weight": lambda: DropsOut(8, 6),
    "m: Unused does more than multiply by its weight: an adapter is off by everything": lambda: Unused(8, 6),
    "m: Offset does more than multiply by its weight": lambda: Offset(16, 8),
    r"m: no adapter can be proved right on Router \(": lambda: Router(8, 6),
    "m: max_norm changes the rows of the frozen table": lambda: nn.Embedding(16, 8, max_norm=1.0),
    "m: ParametrizedLinear computes its weight from others": lambda: torch.nn.utils.parametrizations.weight_norm(
        nn.Linear(8, 6)
    ),
    "m: LazyLinear has no shape before its first forward": lambda: nn.LazyLinear(6),
    "m: its forward was replaced on the module itself": replaced_forward,
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_module_that_an_adapter_does_not_fit_is_refused_by_name(fault: str) -> None:
    """An adapter beside any other computation would train one model and export another."""
    with pytest.raises(ConverterError, match=fault):
        adapted(REFUSED[fault](), rank=2)


class Holds(nn.Linear):
    """Multiplies by what it holds somewhere."""

    def __init__(self, kind: str, value: float, size: int) -> None:
        super().__init__(size, size)
        self.kind = kind
        held: Any = torch.tensor(value)
        held = {"tuple": (value,), "dict": {"x": value}, "object": SHARED[value], "child": Held(value)}.get(kind, held)
        if kind == "buffer":
            self.register_buffer("held", held)
        else:
            self.held = held

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        held: Any = self.held
        values = {"tuple": lambda: held[0], "dict": lambda: held["x"], "buffer": lambda: held}
        factor: float = values.get(self.kind, lambda: held.value)()
        return super().forward(input) * factor


class Held(nn.Module):
    """A number that is no attribute of the module that uses it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value


SHARED = {value: SimpleNamespace(value=value) for value in (1.0, 3.0)}
"""Configurations that modules share."""


@pytest.mark.parametrize("kind", ["tuple", "dict", "buffer", "object", "child"])
def test_modules_of_one_class_are_proved_by_what_they_hold(kind: str) -> None:
    """The smallest of them is no proof of one that holds another number, wherever it holds it."""
    model = nn.ModuleDict({"a": Holds(kind, 1.0, 4), "b": Holds(kind, 3.0, 8), "c": Holds(kind, 3.0, 8)})
    with pytest.raises(ConverterError, match=r"problem\(s\)\s+b, c: Holds does more than multiply by its weight"):
        build([LoRAConfig(("a", "b", "c"), rank=2)]).convert(model)


def test_attention_of_torch_is_refused() -> None:
    """MultiheadAttention computes with out_proj.weight itself, so an adapter on it would do nothing."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    with pytest.raises(ConverterError, match=r"attention\.out_proj: MultiheadAttention uses this weight itself"):
        build([LoRAConfig(("out_proj",), rank=2)]).convert(model)


def test_modules_of_one_class_are_one_fault() -> None:
    """Twenty routers are one line, with the first names."""
    model = nn.ModuleDict({f"router{i}": Router(8, 6) for i in range(20)})
    with pytest.raises(
        ConverterError, match=r"LoRA: 1 problem\(s\)\n  router0, router1, router2 and 17 more: no adapter"
    ):
        build([LoRAConfig(("router*",), rank=2)]).convert(model)


class Spy(nn.Linear):
    ran_on: ClassVar[list[str]] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        self.ran_on.append(str(self.weight.device))
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        return super().forward(input)


def test_the_proof_leaves_the_model_and_all_generators_alone() -> None:
    """No live module runs, not even its hooks; each generator gives afterwards what it would have given."""
    model: Any = nn.ModuleDict({"m": Spy(8, 6), "large": nn.Linear(8, 6)})
    called: list[str] = []
    model["m"].register_forward_hook(lambda *_: called.append("hook"))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(1)), random.random(), float(np.random.rand())  # noqa: NPY002

    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    expected = draw()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    Spy.ran_on.clear()
    build([LoRAConfig(("m", "large"), rank=2)]).convert(model)
    assert draw() == expected
    assert Spy.ran_on and not called
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in before)


def test_a_weight_of_any_size_is_proved_on_a_small_copy() -> None:
    """A copy of 400 GB could not be made: the rows are cut, and the bias with them."""
    with torch.device("meta"):
        model = nn.ModuleDict({"m": nn.Linear(300_000, 300_000), "e": Gemma3TextScaledWordEmbedding(10**9, 256, 5)})
        build([LoRAConfig(("m", "e"), rank=2)]).convert(model)
    assert all(value.is_meta for value in model.state_dict().values())


@pytest.mark.parametrize(
    "kind", [{"kind": "float8", "recipe": "rowwise", "emulate": True}, {"kind": "qat", "scheme": "int8_weight_only"}]
)
def test_modules_of_torchao_are_not_refused(kind: dict[str, Any]) -> None:
    """A float8 product is rounded, and an adapter beside it is still right; a fake-quantized weight is merged first."""
    model = nn.ModuleDict({"up": nn.Linear(32, 64)})
    from_tables([kind, {"kind": "lora", "target_modules": ["up"], "rank": 2}]).convert(model)
    assert "up.lora_a.weight" in model.state_dict()


class Functional(nn.Module):
    """A parent that computes with a child's weight itself, as Mamba does with dt_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.first.weight.dtype == x.dtype and self.first.weight.shape == (8, 8)
        return F.linear(self.first(x), self.second.weight)


def test_a_weight_that_is_used_past_its_module_stops_the_first_forward() -> None:
    """An adapter or a trained copy would do nothing there; reading a dtype or a shape is no use of a weight."""
    model = Functional()
    build([LoRAConfig(("first", "second"), rank=2)]).convert(model)
    for _ in range(2):
        with pytest.raises(
            ConverterError, match=r"1 adapted weight.*\n  second\.weight: used by Functional \(linear\)"
        ):
            model(torch.randn(2, 8))
    model = Functional()
    build([LoRAConfig(("first",), rank=2, modules_to_save=("second",))]).convert(model)
    with pytest.raises(ConverterError, match=r"second\.weight: used by Functional"):
        model(torch.randn(2, 8))


def test_only_the_first_forward_is_watched() -> None:
    """Afterwards nothing is left on the model; a copy of the model watches for itself."""
    model = Functional()
    build([LoRAConfig(("first",), rank=2)]).convert(model)
    for _ in range(2):
        model(torch.randn(2, 8))
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_first_forward_that_fails_says_why_and_the_next_one_is_watched() -> None:
    """Beside another hook, as FSDP2's, the model's own error is what the user sees."""
    model = Functional()
    build([LoRAConfig(("first", "second"), rank=2)]).convert(model)
    model.register_forward_hook(lambda *_: None, always_call=True)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.randn(2, 7))
    with pytest.raises(ConverterError, match="1 adapted weight"):
        model(torch.randn(2, 8))
