"""QAT: schemes, hardware, what is quantized, and that what trains is what a quantized export would compute."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.world import TINY, adamw, convert, learn, llama
from titan_ckpt.converters import QATConfig
from titan_ckpt.converters.qat.converter import Scheme, StraightThrough, _torchao_config
from titan_ckpt.errors import ConverterError
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.models import hf
from titan_ckpt.models.llama3 import Llama3
from titan_ckpt.weights.wrapper import ModelWrapper

TOKENS = torch.arange(20).reshape(2, 10)
ANYWHERE: list[Scheme] = ["int4_weight_only", "int8_weight_only", "int8_dynamic_act_int4_weight", "mxfp8", "mxfp4"]
LORA = {"kind": "lora", "target_modules": ["wq", "wk", "wv", "wo", "w1", "w2", "w3"], "rank": 4}


def train(model: nn.Module, steps: int = 6) -> None:
    """Train a model of ours or of transformers, and leave it for evaluation."""
    optimizer = adamw(model)
    losses = []
    for _ in range(steps):
        out: Any = model(TOKENS)
        predicted = out if isinstance(out, torch.Tensor) else out.logits
        losses.append(learn(optimizer, F.cross_entropy(predicted.float().flatten(0, 1), TOKENS.flatten())))
    assert losses[-1] < losses[0] - 0.2
    model.eval()


def torchao_quantized(state: dict[str, torch.Tensor], scheme: Scheme) -> nn.Module:
    """Quantize a plain model with torchao alone, as a user of the export would."""
    from torchao.quantization import quantize_

    model = Llama3(TINY).to(next(iter(state.values())).dtype)
    model.load_state_dict(state)
    quantize_(
        model,
        _torchao_config(QATConfig(scheme)),
        filter_fn=lambda m, fqn: isinstance(m, nn.Linear) and fqn != "output",
    )
    return model


@pytest.mark.parametrize("scheme", ANYWHERE)
@pytest.mark.parametrize("adapter", [[], [LORA], [{**LORA, "use_dora": True}]], ids=["alone", "lora", "dora"])
def test_what_trains_is_what_quantizing_the_export_gives(scheme: Scheme, adapter: list[dict[str, Any]]) -> None:
    """Train, export plain weights, quantize these with torchao: the logits are those of training, bit for bit."""
    model = llama().to(torch.bfloat16 if scheme.startswith("mx") else torch.float32)  # MX quantizes bfloat16 only
    converters = convert(model, {"kind": "qat", "scheme": scheme}, *adapter)
    train(model)
    exported = ModelWrapper([model], converters).state_dict("export")
    state = {fqn: next(iter(blocks_of(value))).data for fqn, value in exported.items()}
    with torch.no_grad():
        assert torch.equal(torchao_quantized(state, scheme)(TOKENS), model(TOKENS))


def test_head_is_left_and_embeddings_join_on_request() -> None:
    """The output head stays as it is by default, as do embeddings."""
    from torchao.quantization.qat import FakeQuantizedEmbedding, FakeQuantizedLinear

    model = llama()
    convert(model, {"kind": "qat", "scheme": "int4_weight_only"})
    assert type(model.output) is nn.Linear and type(model.tok_embeddings) is nn.Embedding
    assert sum(isinstance(m, FakeQuantizedLinear) for m in model.modules()) == 14
    model = llama()
    convert(model, {"kind": "qat", "scheme": "int4_weight_only", "embeddings": True, "exclude_modules": ["wo"]})
    assert isinstance(model.output, FakeQuantizedLinear) and isinstance(model.tok_embeddings, FakeQuantizedEmbedding)
    assert type(model.get_submodule("layers.0.attention.wo")) is nn.Linear


def test_frozen_parameters_stay_frozen() -> None:
    """Conversion keeps requires_grad, on meta too, where torchao makes new parameters."""
    with torch.device("meta"):
        model = Llama3(TINY)
    model.get_parameter("layers.0.attention.wq.weight").requires_grad_(False)
    convert(model, {"kind": "qat", "scheme": "int8_weight_only"})
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["layers.0.attention.wq.weight"]


@pytest.mark.parametrize("scheme", [s for s in get_args(Scheme) if s not in ANYWHERE])
def test_schemes_for_gpus_say_what_they_need(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme that this machine cannot compute with is refused before the model is touched."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = llama()
    with pytest.raises(ConverterError, match=f"'{scheme}' needs a GPU of compute capability .* found no GPU.*int4_w"):
        convert(model, {"kind": "qat", "scheme": scheme})
    assert not any("Fake" in type(m).__name__ for m in model.modules())


def test_float8_schemes_train_with_exact_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has the units, every fake quantizer to float8 is one that passes gradients through."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    model = llama()
    convert(model, {"kind": "qat", "scheme": "float8_dynamic_act_float8_weight"})
    module: Any = model.get_submodule("layers.0.attention.wq")
    assert isinstance(module.weight_fake_quantizer, StraightThrough)
    assert isinstance(module.activation_fake_quantizer, StraightThrough)


def test_groups_have_the_size_that_was_asked_for() -> None:
    """A smaller group has more scales: other values are rounded to."""
    weights = []
    for group_size in (16, 32):
        model = nn.ModuleDict({"a": nn.Linear(64, 8, bias=False)})
        nn.init.normal_(model.get_parameter("a.weight"), generator=torch.Generator().manual_seed(0))
        convert(model, {"kind": "qat", "scheme": "int4_weight_only", "group_size": group_size})
        module: Any = model.get_submodule("a")
        weights.append(module.weight_fake_quantizer(module.weight))
        assert all(len(row.unique()) <= 16 for row in weights[-1].view(-1, group_size))
    assert any(len(row.unique()) > 16 for row in weights[0].view(-1, 32))


def test_groups_that_do_not_divide_are_listed() -> None:
    """Every module whose inputs do not divide into groups is named at once."""
    model = nn.ModuleDict({"a": nn.Linear(40, 8), "b": nn.Linear(64, 8), "c": nn.Linear(8, 8)})
    with pytest.raises(ConverterError) as caught:
        convert(model, {"kind": "qat", "scheme": "int4_weight_only"})
    assert "a: its 40 inputs do not divide into groups of 32" in str(caught.value)
    assert "c: its 8 inputs" in str(caught.value) and "b: " not in str(caught.value)


def test_integer_weights_are_refused() -> None:
    """A weight of integers holds codes, not values: to fake-quantize or cast it would make noise of it."""
    model = nn.ModuleDict({"a": nn.Linear(32, 8, bias=False)})
    linear = model.get_submodule("a")
    linear.weight = nn.Parameter(torch.zeros(8, 32, dtype=torch.int8), requires_grad=False)
    for table in ({"kind": "qat", "scheme": "int8_weight_only"}, {"kind": "lora", "target_modules": ["a"], "rank": 2}):
        with pytest.raises(ConverterError, match=r"a: its weight is torch\.int8"):
            convert(model, table)


def test_float8_fake_quantization_passes_gradients_through() -> None:
    """Values are torchao's, gradients are exact: torchao's own would pass through float8 and underflow to zero."""
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.qat.fake_quantize_config import Float8FakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import Float8FakeQuantizer

    quantizer = Float8FakeQuantizer(Float8FakeQuantizeConfig(granularity=PerRow()))
    gradients = []
    for form in (quantizer, StraightThrough(quantizer)):
        weight = torch.linspace(-1, 1, 64).reshape(4, 16).requires_grad_()
        out = form(weight)
        assert torch.equal(out, quantizer(weight))
        (out * 1e-6).sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert torch.equal(gradients[1], torch.full((4, 16), 1e-6))
    assert not torch.equal(gradients[0], gradients[1])


def test_a_tied_output_head_is_left_whatever_its_name_is() -> None:
    """BERT's is cls.predictions.decoder: an exchange would part it from the embeddings, so it is refused by name."""
    bert = {
        "model_type": "bert", "is_decoder": True, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 64,
    }  # fmt: skip
    table = {"kind": "qat", "scheme": "int4_weight_only"}
    with torch.device("meta"):
        model, other = hf.build(bert), hf.build(bert)
    convert(model, table)
    assert type(model.get_submodule("cls.predictions.decoder")) is nn.Linear
    assert type(model.get_submodule("cls.predictions.transform.dense")) is not nn.Linear
    with pytest.raises(ConverterError, match=r"cls\.predictions\.decoder: shares its weight with another module"):
        convert(other, {**table, "exclude_modules": []})
