"""QAT as a model converter: torchao's fake quantization in the forward, plain weights in every checkpoint.

Owns the schemes, the choice of modules, and quantized weights in torchao's form on disk: the inner tensors of its
tensor subclasses, as transformers saves them. torchao quantizes each tensor and takes it apart; nothing here repeats
its arithmetic. It is imported only when a model is converted, or exported.
Source of the form: torchao, `prototype/safetensors/safetensors_support.py`; transformers,
`utils/quantization_config.py` TorchAoConfig.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from titan_ckpt.config import PositiveInt
from titan_ckpt.converters.quantized import plain_modules, replaceable_linears, require_gpu, require_torchao
from titan_ckpt.converters.targets import in_lines
from titan_ckpt.encoding.toml import Checked
from titan_ckpt.errors import ConverterError, counted
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.types import ModelConverter, Stage
from titan_ckpt.weights.names import clean_fqn
from titan_ckpt.weights.quantize import QuantizedTensor

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
_NAMES = "tensor_names"
_PLAIN = json.dumps({"_type": "Tensor"})
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
_GROUPED = frozenset({"int4_weight_only", "int8_dynamic_act_int4_weight"})
_FIXED_GROUP = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "float8_dynamic_act_int4_weight": 128}
"""Scheme -> the group size that its format fixes, in elements along the input dim."""
_CAPABILITY = {
    "float8_dynamic_act_float8_weight": (8, 9),
    "float8_dynamic_act_int4_weight": (9, 0),
    "nvfp4": (10, 0),
}
"""Scheme -> the GPU compute capability that it needs to compute with quantized values."""

QuantizedForward = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""(module, input, weight) -> output: a fake-quantized module's computation with `weight` in place of its own weight."""


@dataclass(frozen=True, slots=True)
class QATConfig(Checked):
    """Fake quantization of linear modules, so that training computes what the quantized export will compute."""

    scheme: Scheme
    """Scheme of the export: quantized weights alone, or quantized weights and activations."""
    kind: Literal["qat"] = "qat"
    group_size: PositiveInt | None = None
    """Elements along the input dim that share a scale, for the grouped int4 schemes. Absent: 32."""
    exclude_modules: tuple[str, ...] | None = None
    """Linear modules to leave unchanged, named as in LoRA's target_modules. Absent: the output head."""
    embeddings: bool = False
    """Also quantize embedding tables; only for weight-only schemes."""

    def problems(self) -> Iterator[str]:
        if self.group_size is not None and self.scheme not in _GROUPED:
            yield f"group_size: {self.scheme} has none of its own; leave it out"
        if self.embeddings and not self.scheme.endswith("_weight_only"):
            yield f"embeddings: {self.scheme} quantizes activations, which an embedding has not"

    @property
    def group(self) -> int | None:
        """Return how many elements along the input dim share a scale; None if a whole row does."""
        return (self.group_size or 32) if self.scheme in _GROUPED else _FIXED_GROUP.get(self.scheme)


class QATConverter(ModelConverter):
    """Replaces linear modules by torchao's fake-quantized ones. Adds no keys: weights stay in high precision."""

    stage: ClassVar[Stage] = "replace"
    config_class: ClassVar[type[Any]] = QATConfig
    config: QATConfig

    def __init__(self, config: QATConfig) -> None:
        super().__init__(config)
        self._quantized: set[str] = set()
        """The fqns of the fake-quantized weights."""

    def convert(self, model: nn.Module) -> None:
        """Replace the linear modules, and with `embeddings` the embedding tables, by fake-quantized ones.

        Raises: ConverterError without torchao, for a scheme that this machine cannot run, and for modules that do not
            fit the scheme.
        """
        require_torchao("qat")
        if needed := _CAPABILITY.get(self.config.scheme):
            others = ", ".join(scheme for scheme in get_args(Scheme) if scheme not in _CAPABILITY)
            require_gpu(f"QAT scheme {self.config.scheme!r}", needed, f"These run anywhere: {others}")
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
        for name, parameter in model.named_parameters():  # on meta, torchao makes new parameters
            parameter.requires_grad_(trainable[clean_fqn(name)])
        if self.config.scheme.startswith("float8"):
            _pass_gradients_through(model)
        self._quantized |= {f"{fqn}.weight" for fqn in chosen}
        logger.info("QAT %s: %s", self.config.scheme, counted(len(chosen), "module"))

    def weight_quantizer(self) -> TorchaoQuantizer:
        """Return the quantizer that stores the weights of an export as training fake-quantized them."""
        return TorchaoQuantizer(_torchao_config(self.config), self._quantized, self.config.embeddings)


def quantized_forward(module: nn.Module) -> QuantizedForward | None:
    """Return how a fake-quantized linear module computes with a given weight; None for any other module."""
    if "torchao" not in sys.modules:
        return None
    from torchao.prototype.qat import MXFakeQuantizedLinear
    from torchao.quantization.qat.linear import FakeQuantizedLinear

    if isinstance(module, FakeQuantizedLinear):
        return _fake_quantized
    return _mx_quantized if isinstance(module, MXFakeQuantizedLinear) else None


def _fake_quantized(module: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002
    if module.activation_fake_quantizer is not None:
        input = module.activation_fake_quantizer(input)  # noqa: A001
    if module.weight_fake_quantizer is not None:
        weight = module.weight_fake_quantizer(weight)
    return F.linear(input, weight, module.bias)


def _mx_quantized(module: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002
    from torchao.prototype.qat.mx import _MXQuantizedForwardFakeQuantizedBackward as Product

    out: torch.Tensor = Product.apply(input, weight, module.bias, module.activation_config, module.weight_config)
    return out


class _StraightThrough(torch.autograd.Function):
    """Forward returns the quantized value, backward passes the gradient through unchanged."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, quantizer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return quantizer(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class StraightThrough(nn.Module):
    """A fake quantizer that passes gradients through: the backward of a cast to float8 would round them to zero."""

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.quantizer = quantizer

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _StraightThrough.apply(value, self.quantizer)  # type: ignore[no-untyped-call]
        return out


def _pass_gradients_through(model: nn.Module) -> None:
    from torchao.quantization.qat.fake_quantizer import Float8FakeQuantizer

    for module in model.modules():
        for name in ("weight_fake_quantizer", "activation_fake_quantizer"):
            quantizer = getattr(module, name, None)
            if isinstance(quantizer, Float8FakeQuantizer):
                setattr(module, name, StraightThrough(quantizer))


def _misfits(fqn: str, module: nn.Module, group: int | None) -> Iterator[str]:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if not weight.is_floating_point():
        yield f"{fqn}: its weight is {weight.dtype}, which cannot be quantized again"
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
            from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
            from torchao.quantization.quantize_.common import KernelPreference

            dtype = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}[config.scheme]
            return MXDynamicActivationMXWeightConfig(
                activation_dtype=dtype, weight_dtype=dtype, kernel_preference=KernelPreference.EMULATED
            )
        case "float8_dynamic_act_float8_weight":
            return ao.Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
        case "float8_dynamic_act_int4_weight":
            return ao.Float8DynamicActivationInt4WeightConfig()
        case "nvfp4":
            from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig

            return NVFP4DynamicActivationNVFP4WeightConfig()


class TorchaoQuantizer:
    """Satisfies titan_ckpt.weights.quantize.WeightQuantizer for one torchao config."""

    def __init__(self, base: Any, weights: Collection[str], embeddings: bool) -> None:
        """`base`: torchao's config. `weights`: fake-quantized fqns. `embeddings`: embedding tables are among them."""
        self._base = base
        self._weights = frozenset(weights)
        self._embeddings = embeddings

    def claims(self, fqn: str) -> bool:
        """Return whether training fake-quantized the weight."""
        return fqn in self._weights

    def quantize(self, key: str, info: TensorInfo) -> QuantizedTensor:
        """Return the parts that torchao makes of a weight of this shape; computed on meta.

        Raises: ConverterError for a weight that torchao cannot quantize.
        """
        try:
            parts, description = self._flat(key, torch.empty(info.shape, dtype=info.dtype, device="meta"))
        except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            raise ConverterError(f"{key}: torchao cannot quantize {info}: {error}") from error
        rows = info.shape[0]
        per_row = all(part.shape[:1] == (rows,) for part in parts.values())
        # tiles of swizzled scales, for example, span several rows: such a tensor is quantized in one piece
        apart = per_row and type(self._base).__name__ in _ROWS_APART
        return QuantizedTensor(
            {name: TensorInfo(tuple(part.shape), part.dtype) for name, part in parts.items()},
            1 if apart else rows,
            lambda values: self._flat(key, values)[0],
            lambda values: _decoded(key, values, description),
            description,
        )

    def header(self, infos: Mapping[str, TensorInfo], quantized: Mapping[str, str]) -> dict[str, str]:
        """Return the descriptions of all tensors: every file holds them, as readers use the first that they open."""
        described = {**quantized, **dict.fromkeys(_plain(infos, quantized), _PLAIN)}
        return {**described, _NAMES: json.dumps(list(described))}

    def config(self, infos: Mapping[str, TensorInfo], quantized: Mapping[str, str]) -> dict[str, Any]:
        """Return the result of TorchAoConfig(base).to_dict() for these modules."""
        from torchao.core.config import config_to_dict

        return {
            "quant_method": "torchao",
            "quant_type": {"default": config_to_dict(self._base)},
            "modules_to_not_convert": plain_modules(_plain(infos, quantized), quantized),
            "include_input_output_embeddings": self._embeddings or "lm_head.weight" in quantized,
            "untie_embedding_weights": False,
        }

    def _flat(self, key: str, values: torch.Tensor) -> tuple[dict[str, torch.Tensor], str]:
        """Return the inner tensors of the quantized rows of a weight, and their description."""
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization import quantize_

        with torch.device("meta"):
            linear = nn.Linear(values.shape[1], values.shape[0], bias=False)
        linear.weight = nn.Parameter(values, requires_grad=False)
        quantize_(linear, self._base, filter_fn=lambda module, name: True)
        parts, metadata = flatten_tensor_state_dict({key: linear.weight.detach()})
        return parts, metadata[key]


_ROWS_APART = frozenset({"IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"})
"""Names of torchao configs in which every scale belongs to one row or a part of a row."""


def _decoded(key: str, parts: Mapping[str, torch.Tensor], description: str) -> torch.Tensor:
    """Return the values that torchao computes from the parts, in float32."""
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    from torchao.quantization import IntxUnpackedToInt8Tensor

    built, _ = unflatten_tensor_state_dict(dict(parts), {key: description, _NAMES: json.dumps([key])})
    weight = built[key]
    if isinstance(weight, IntxUnpackedToInt8Tensor):
        value: torch.Tensor = weight.to(torch.float32).dequantize()
    else:
        value = weight.dequantize(torch.float32)
    return value


def _plain(infos: Mapping[str, TensorInfo], quantized: Mapping[str, str]) -> dict[str, TensorInfo]:
    """Return the file tensors that are no part of a quantized one."""
    parts: set[str] = set()
    for key, description in quantized.items():
        module, _, leaf = key.rpartition(".")
        parts.update(f"{module}._{leaf}_{name}" for name in json.loads(description)["_tensor_data_names"])
    return {key: info for key, info in infos.items() if key not in parts}
