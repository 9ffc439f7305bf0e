"""Float8 training as a model converter: torchao's float8 matrix products, plain weights in every checkpoint.

Owns the recipes, the choice of modules, the unwrapping of float8-aware parameters, and exports with one scale per block
in the form of DeepSeek's and Qwen's folders. torchao is imported only when a model is converted; an export needs none.
Source of the form: transformers, `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titan_ckpt.converters.quantized import plain_modules, replaceable_linears, require_gpu, require_torchao
from titan_ckpt.encoding.toml import Checked
from titan_ckpt.errors import ConverterError, counted
from titan_ckpt.geometry.chunks import TensorInfo, local_tensor, sharded_as
from titan_ckpt.types import ModelConverter, Stage, StateDict
from titan_ckpt.weights.names import clean_fqn
from titan_ckpt.weights.quantize import QuantizedTensor

logger = logging.getLogger(__name__)
_MULTIPLE = 16
"""Float8 matrix units need dims divisible by this; a module with other dims is left unchanged."""
BLOCK = 128
"""Rows and columns that share a scale."""
_CODES = torch.float8_e4m3fn
_LARGEST = torch.finfo(_CODES).max


@dataclass(frozen=True, slots=True)
class Float8Config(Checked):
    """Float8 matrix products in training; parameters and optimizer keep their dtype."""

    kind: Literal["float8"] = "float8"
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """One scale per tensor; one per row; or one per row with the weight's gradient computed in high precision."""
    emulate: bool = False
    """Compute in high precision on values rounded to float8, for machines without float8 matrix units."""
    fsdp_all_gather: bool = False
    """Gather FSDP2's weights as float8; tensorwise only."""
    exclude_modules: tuple[str, ...] | None = None
    """Linear modules to leave unchanged, named as in LoRA's target_modules. Absent: the output head."""

    def problems(self) -> Iterator[str]:
        if self.fsdp_all_gather and self.recipe != "tensorwise":
            yield f"fsdp_all_gather: a gathered weight has one scale, and recipe {self.recipe!r} wants one per row"


class Float8Converter(ModelConverter):
    """Replaces linear modules by torchao's Float8Linear. Adds no keys."""

    stage: ClassVar[Stage] = "replace"
    config_class: ClassVar[type[Any]] = Float8Config
    config: Float8Config

    def __init__(self, config: Float8Config) -> None:
        super().__init__(config)
        self._exchanged: set[str] = set()

    def convert(self, model: nn.Module) -> None:
        """Replace the linear modules whose dims float8 matrix units accept.

        Raises: ConverterError without torchao, on a machine without float8 units unless `emulate` is set, and if no
            module can be converted.
        """
        require_torchao("float8")
        if not self.config.emulate:
            require_gpu("float8", (8, 9), "Set emulate = true to compute with the same rounding in high precision")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        modules = replaceable_linears(model, self.config.exclude_modules)
        chosen = {fqn for fqn, m in modules.items() if not any(n % _MULTIPLE for n in m.weight.shape)}
        if not chosen:
            raise ConverterError(f"float8: {_MULTIPLE} divides the dims of none of the {len(modules)} linear modules")
        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(self.config.recipe),
            emulate=self.config.emulate,
            enable_fsdp_float8_all_gather=self.config.fsdp_all_gather,
        )
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: clean_fqn(name) in chosen)
        self._exchanged |= chosen
        if self.config.fsdp_all_gather:
            from titan_ckpt.converters.float8.gather import use_byte_gather

            use_byte_gather(model)
        odd = len(modules) - len(chosen)
        logger.info(
            "float8 %s: %s, %d left for their odd dims", self.config.recipe, counted(len(chosen), "module"), odd
        )

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        """Return the tensors without torchao's wrapper, aliasing the live memory, in every mode."""
        return {fqn: _unwrapped(v) if isinstance(v, torch.Tensor) else v for fqn, v in state_dict.items()}

    def weight_quantizer(self) -> BlockQuantizer:
        """Return the quantizer that stores the replaced modules' weights as float8."""
        return BlockQuantizer({f"{fqn}.weight" for fqn in self._exchanged})

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None:
        """Discard scales that were computed from weights which a load has replaced."""
        for part in model_parts:
            for parameter in part.parameters():
                local = local_tensor(parameter)
                if _is_wrapped(local):
                    local._precomputed_scale = None  # type: ignore[attr-defined]  # noqa: SLF001

    def post_optimizer_hook(self, model_parts: Sequence[nn.Module]) -> None:
        """Compute the scales of all gathered weights in one reduction instead of one per weight."""
        if not self.config.fsdp_all_gather:
            return
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for part in model_parts:
            precompute_float8_dynamic_scale_for_fsdp(part)


def _is_wrapped(value: torch.Tensor) -> bool:
    if "torchao" not in sys.modules:
        return False
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    return isinstance(value, WeightWithDynamicFloat8CastTensor)


def _unwrapped(value: torch.Tensor) -> torch.Tensor:
    """Return the high-precision tensor inside the wrapper, as a DTensor of the same layout if `value` is one.

    A tensor that is not wrapped is returned unchanged.
    """
    local = local_tensor(value)
    if not _is_wrapped(local):
        return value
    inner: torch.Tensor = local._tensor.detach()  # type: ignore[attr-defined]  # noqa: SLF001
    return sharded_as(value, inner) if isinstance(value, DTensor) else inner


class BlockQuantizer:
    """Satisfies titan_ckpt.weights.quantize.WeightQuantizer."""

    def __init__(self, weights: Collection[str]) -> None:
        """`weights`: fqns of the matrices that training multiplied in float8."""
        self._weights = frozenset(weights)

    def claims(self, fqn: str) -> bool:
        """Return whether training multiplied the weight in float8."""
        return fqn in self._weights

    def quantize(self, key: str, info: TensorInfo) -> QuantizedTensor | None:
        """Return the parts with codes and scales; None if blocks do not tile the matrix.

        transformers derives the block size by division, so a shorter last block would shift all other blocks.
        """
        if any(size > BLOCK and size % BLOCK for size in info.shape):
            return None
        grid = tuple(-(-size // BLOCK) for size in info.shape)
        scale = f"{key}_scale_inv"
        parts = {key: TensorInfo(info.shape, _CODES), scale: TensorInfo(grid, torch.float32)}
        return QuantizedTensor(
            parts,
            min(BLOCK, info.shape[0]),
            lambda values: dict(zip(parts, encode(values), strict=True)),
            lambda stored: decode(stored[key], stored[scale]),
        )

    def header(self, infos: Mapping[str, TensorInfo], quantized: Mapping[str, str]) -> dict[str, str]:
        """Return no metadata: names and shapes are enough to read the files."""
        return {}

    def config(self, infos: Mapping[str, TensorInfo], quantized: Mapping[str, str]) -> dict[str, Any]:
        """Return the quantization_config that transformers and vLLM read."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": plain_modules(infos, quantized),
        }


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 codes, and the float32 factor by which each block of codes must be multiplied.

    Shape: (rows, columns) in; (rows, columns) and (ceil(rows / 128), ceil(columns / 128)) out.
    """
    rows, columns = values.shape
    padded = F.pad(values.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    codes = (blocks / scale[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(_CODES)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values of `codes` with their block scales applied, in float32."""
    rows, columns = codes.shape
    each = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * each
