"""Really quantised weights for torchao's readers: its tensor subclasses taken apart, as transformers saves them.

Owns the form on disk. torchao quantises, tensor by tensor, and takes apart; nothing of its arithmetic is repeated here.
Source: torchao, `prototype/safetensors/safetensors_support.py`; transformers, `utils/quantization_config.py`
TorchAoConfig.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from converters.quantised_folder import plain_modules
from titan_ckpt.errors import ConverterError
from titan_ckpt.quantising import QuantisedTensor
from titan_ckpt.tensors import TensorInfo

_NAMES = "tensor_names"
_PLAIN = json.dumps({"_type": "Tensor"})
_HEAD = "lm_head.weight"


class TorchaoQuantiser:
    """Satisfies titan_ckpt.quantising.WeightQuantiser for one torchao config."""

    def __init__(self, base: Any, weights: Collection[str], embeddings: bool) -> None:
        """`base`: torchao's own settings. `weights`: fqns that were fake-quantised. `embeddings`: tables among them."""
        self._base = base
        self._weights = frozenset(weights)
        self._embeddings = embeddings

    def claims(self, fqn: str) -> bool:
        """Say whether the weight was fake-quantised in training."""
        return fqn in self._weights

    def quantise(self, key: str, info: TensorInfo) -> QuantisedTensor:
        """Return torchao's parts of a weight of this shape, found out on meta.

        Raises: ConverterError for a dtype that the scheme cannot start from.
        """
        try:
            parts, description = self._flat(key, torch.empty(info.shape, dtype=info.dtype, device="meta"))
        except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            raise ConverterError(f"{key}: torchao cannot quantise {info}: {error}") from error
        rows = info.shape[0]
        per_row = all(part.shape[:1] == (rows,) for part in parts.values())
        # tiles of swizzled scales and the like cross rows: such a tensor is quantised in one piece
        apart = per_row and type(self._base).__name__ in _ROWS_APART
        return QuantisedTensor(
            {name: TensorInfo(tuple(part.shape), part.dtype) for name, part in parts.items()},
            1 if apart else rows,
            lambda values: self._flat(key, values)[0],
            lambda values: _decoded(key, values, description),
            description,
        )

    def header(self, infos: Mapping[str, TensorInfo], quantised: Mapping[str, str]) -> dict[str, str]:
        """Return every tensor's description, for each file: readers take them from whichever file they open first."""
        parts = {f"{_prefix(key)}{name}" for key, text in quantised.items() for name in _part_names(text)}
        described = {**quantised, **{key: _PLAIN for key in infos if key not in parts}}
        return {**described, _NAMES: json.dumps(list(described))}

    def config(self, infos: Mapping[str, TensorInfo], quantised: Mapping[str, str]) -> dict[str, Any]:
        """Return what TorchAoConfig(base).to_dict() gives, for these modules."""
        from torchao.core.config import config_to_dict

        parts = {f"{_prefix(key)}{name}" for key, text in quantised.items() for name in _part_names(text)}
        plain = {key: info for key, info in infos.items() if key not in parts}
        return {
            "quant_method": "torchao",
            "quant_type": {"default": config_to_dict(self._base)},
            "modules_to_not_convert": plain_modules(plain, quantised),
            "include_input_output_embeddings": self._embeddings or _HEAD in quantised,
            "untie_embedding_weights": False,
        }

    def _flat(self, key: str, values: torch.Tensor) -> tuple[dict[str, torch.Tensor], str]:
        """Quantise rows of a weight and take the result apart."""
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization import quantize_

        with torch.device("meta"):
            linear = nn.Linear(values.shape[1], values.shape[0], bias=False)
        linear.weight = nn.Parameter(values, requires_grad=False)
        quantize_(linear, self._base, filter_fn=lambda module, name: True)
        parts, metadata = flatten_tensor_state_dict({key: linear.weight.detach()})
        return parts, metadata[key]


_ROWS_APART = frozenset({"IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"})
"""torchao configs whose scales are of a row or a part of one."""


def _decoded(key: str, parts: Mapping[str, torch.Tensor], description: str) -> torch.Tensor:
    """Return what torchao makes of the parts, with its arithmetic in float32."""
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    from torchao.quantization import IntxUnpackedToInt8Tensor

    built, _ = unflatten_tensor_state_dict(dict(parts), {key: description, _NAMES: json.dumps([key])})
    weight = built[key]
    if isinstance(weight, IntxUnpackedToInt8Tensor):
        value: torch.Tensor = weight.to(torch.float32).dequantize()
    else:
        value = weight.dequantize(torch.float32)
    return value


def _prefix(key: str) -> str:
    module, _, leaf = key.rpartition(".")
    return f"{module}._{leaf}_"


def _part_names(description: str) -> list[str]:
    names: list[str] = json.loads(description)["_tensor_data_names"]
    return names
