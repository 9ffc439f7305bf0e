"""Quantized weights in torchao's form on disk: the inner tensors of its tensor subclasses, as transformers saves them.

Owns the form on disk. torchao quantizes each tensor and takes it apart; this module repeats none of its arithmetic.
Source: torchao, `prototype/safetensors/safetensors_support.py`; transformers, `utils/quantization_config.py`
TorchAoConfig.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from titan_ckpt.converters.quantized import plain_modules
from titan_ckpt.errors import ConverterError
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.weights.quantize import QuantizedTensor

_NAMES = "tensor_names"
_PLAIN = json.dumps({"_type": "Tensor"})


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
