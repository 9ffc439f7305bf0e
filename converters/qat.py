"""QAT as a model converter: torchao's fake quantisation in the forward, plain weights in every checkpoint.

Owns the schemes and which modules they go to. torchao is imported when a model is converted, not before.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from converters.protocol import ModelConverter, Stage
from converters.qat_export import TorchaoQuantiser
from converters.targets import in_lines, replaceable_linears
from titan_ckpt.config import PositiveInt, validate
from titan_ckpt.errors import ConverterError
from titan_ckpt.model_wrapper import clean_fqn

logger = logging.getLogger(__name__)

Scheme = Literal[
    "int4_weight_only",
    "int8_weight_only",
    "int8_dynamic_act_int4_weight",
    "mxfp8",
    "mxfp4",
    "float8_dynamic_act_float8_weight",
    "float8_dynamic_act_int4_weight",
    "nvfp4",
]
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
_GROUPED = frozenset({"int4_weight_only", "int8_dynamic_act_int4_weight"})
_FIXED_GROUP = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "float8_dynamic_act_int4_weight": 128}
"""Schemes whose group is part of the format, in elements of the input dim."""
_CAPABILITY = {
    "float8_dynamic_act_float8_weight": (8, 9),
    "float8_dynamic_act_int4_weight": (9, 0),
    "nvfp4": (10, 0),
}
"""Schemes whose quantised form only a GPU of this compute capability can compute with."""

QuantisedForward = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""(module, input, weight) -> output: a fake-quantised module's computation with another weight in place of its own."""


@dataclass(frozen=True, slots=True)
class QATConfig:
    """Fake quantisation of linear modules, so that a model trains into what its quantised export will compute."""

    scheme: Scheme
    """What the export will hold: weights alone, or weights and activations, quantised."""
    kind: Literal["qat"] = "qat"
    group_size: PositiveInt | None = None
    """Elements along the input dim that share a scale, for the grouped int4 schemes; absent: 32."""
    exclude_modules: tuple[str, ...] | None = None
    """Linear modules that stay as they are: names as in LoRA's target_modules. Absent: the output head."""
    embeddings: bool = False
    """Quantise embedding tables too; weight-only schemes."""

    def __post_init__(self) -> None:
        validate(self)

    def problems(self) -> Iterator[str]:
        if self.group_size is not None and self.scheme not in _GROUPED:
            yield f"group_size: {self.scheme} has none of its own; leave it out"
        if self.embeddings and not self.scheme.endswith("_weight_only"):
            yield f"embeddings: {self.scheme} quantises activations, which an embedding has not"

    @property
    def group(self) -> int | None:
        """Elements along the input dim that share a scale; None: all of a row."""
        return (self.group_size or 32) if self.scheme in _GROUPED else _FIXED_GROUP.get(self.scheme)


class QATConverter(ModelConverter):
    """Exchanges linear modules for torchao's fake-quantised ones. Adds no keys: weights stay in high precision."""

    stage: ClassVar[Stage] = "replace"
    config: QATConfig

    def __init__(self, config: QATConfig) -> None:
        super().__init__(config)
        self._quantised: set[str] = set()
        """fqns of the weights that are fake-quantised."""

    def convert(self, model: nn.Module) -> None:
        """Exchange the linear modules, and embeddings if asked to, for fake-quantised ones of the same parameters.

        Raises: ConverterError for a scheme this machine cannot run and for modules that do not fit it.
        """
        _require_hardware(self.config.scheme)
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig as TorchaoQAT

        chosen: dict[str, nn.Module] = {**replaceable_linears(model, self.config.exclude_modules)}
        if self.config.embeddings:
            chosen |= {clean_fqn(n): m for n, m in model.named_modules() if type(m) is nn.Embedding}
        if problems := [p for fqn, module in chosen.items() for p in _misfits(fqn, module, self.config.group)]:
            raise ConverterError(f"QAT {self.config.scheme}: {len(problems)} problem(s){in_lines(problems)}")
        trainable = {clean_fqn(name): p.requires_grad for name, p in model.named_parameters()}
        prepare = TorchaoQAT(_torchao_config(self.config), step="prepare")
        quantize_(model, prepare, filter_fn=lambda module, name: clean_fqn(name) in chosen)
        for name, parameter in model.named_parameters():  # torchao makes new parameters on meta
            parameter.requires_grad_(trainable[clean_fqn(name)])
        if self.config.scheme.startswith("float8"):
            _pass_gradients_through(model)
        self._quantised |= {f"{fqn}.weight" for fqn in chosen}
        logger.info("QAT %s: %d modules", self.config.scheme, len(chosen))

    def weight_quantiser(self) -> TorchaoQuantiser:
        """Return what quantises the weights of an export as training pretended."""
        return TorchaoQuantiser(_torchao_config(self.config), self._quantised, self.config.embeddings)


def quantised_forward(module: nn.Module) -> QuantisedForward | None:
    """Return how a fake-quantised linear computes with another weight; None where the module is no such linear."""
    if "torchao" not in sys.modules:
        return None
    from torchao.prototype.qat import MXFakeQuantizedLinear
    from torchao.quantization.qat.linear import FakeQuantizedLinear

    if isinstance(module, FakeQuantizedLinear):
        return _fake_quantised
    return _mx_quantised if isinstance(module, MXFakeQuantizedLinear) else None


def _fake_quantised(module: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002
    if module.activation_fake_quantizer is not None:
        input = module.activation_fake_quantizer(input)  # noqa: A001
    if module.weight_fake_quantizer is not None:
        weight = module.weight_fake_quantizer(weight)
    return F.linear(input, weight, module.bias)


def _mx_quantised(module: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002
    from torchao.prototype.qat.mx import _MXQuantizedForwardFakeQuantizedBackward as Product

    out: torch.Tensor = Product.apply(input, weight, module.bias, module.activation_config, module.weight_config)
    return out


class _StraightThrough(torch.autograd.Function):
    """The quantised value forward, the gradient as it comes backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, quantiser: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return quantiser(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class StraightThrough(nn.Module):
    """A fake quantiser whose gradient is exact: the backward of a cast to float8 would round gradients to zero."""

    def __init__(self, quantiser: nn.Module) -> None:
        super().__init__()
        self.quantiser = quantiser

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _StraightThrough.apply(value, self.quantiser)  # type: ignore[no-untyped-call]
        return out


def _pass_gradients_through(model: nn.Module) -> None:
    from torchao.quantization.qat.fake_quantizer import Float8FakeQuantizer

    for module in model.modules():
        for name in ("weight_fake_quantizer", "activation_fake_quantizer"):
            quantiser = getattr(module, name, None)
            if isinstance(quantiser, Float8FakeQuantizer):
                setattr(module, name, StraightThrough(quantiser))


def _require_hardware(scheme: Scheme) -> None:
    needed = _CAPABILITY.get(scheme)
    if needed is None:
        return
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found is None or found < needed:
        what = "no GPU" if found is None else f"a GPU of compute capability {found[0]}.{found[1]}"
        raise ConverterError(
            f"QAT scheme {scheme!r} needs a GPU of compute capability {needed[0]}.{needed[1]} or more, found {what}. "
            f"These run anywhere: {', '.join(s for s in Scheme.__args__ if s not in _CAPABILITY)}"  # type: ignore[attr-defined]
        )


def _misfits(fqn: str, module: nn.Module, group: int | None) -> Iterator[str]:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if not weight.is_floating_point():
        yield f"{fqn}: its weight is {weight.dtype}, which cannot be quantised again"
    elif group is not None and weight.shape[-1] % group:
        yield f"{fqn}: its {weight.shape[-1]} inputs do not divide into groups of {group}"


def _torchao_config(config: QATConfig) -> Any:
    """Return torchao's own settings for the scheme."""
    from torchao import quantization as ao
    from torchao.quantization.granularity import PerAxis, PerGroup, PerRow

    match config.scheme:
        case "int4_weight_only":
            assert config.group is not None
            return ao.IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=PerGroup(config.group))
        case "int8_weight_only":
            return ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
        case "int8_dynamic_act_int4_weight":
            assert config.group is not None
            return ao.Int8DynamicActivationIntxWeightConfig(
                weight_dtype=_INT4, weight_granularity=PerGroup(config.group)
            )
        case "mxfp8" | "mxfp4":
            return _mx_config(config.scheme)
        case "float8_dynamic_act_float8_weight":
            return ao.Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
        case "float8_dynamic_act_int4_weight":
            return ao.Float8DynamicActivationInt4WeightConfig()
        case "nvfp4":
            from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig

            return NVFP4DynamicActivationNVFP4WeightConfig()


def _mx_config(scheme: Literal["mxfp8", "mxfp4"]) -> Any:
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    from torchao.quantization.quantize_.common import KernelPreference

    dtype = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}[scheme]
    return MXDynamicActivationMXWeightConfig(
        activation_dtype=dtype, weight_dtype=dtype, kernel_preference=KernelPreference.EMULATED
    )
