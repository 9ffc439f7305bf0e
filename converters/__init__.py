"""Model converters: Float8, QAT and LoRA, alone or combined, under one protocol.

Owns the list of kinds that TOML knows. Your own converter needs no entry in it: pass it to ModelConverters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from converters.container import ModelConverters
from converters.float8 import Float8Config, Float8Converter
from converters.lora import LoRAConverter
from converters.lora.config import LoRAConfig
from converters.protocol import ModelConverter
from converters.qat import QATConfig, QATConverter
from titan_ckpt.config import from_dict

__all__ = [
    "ConverterConfig",
    "Float8Config",
    "Float8Converter",
    "LoRAConfig",
    "LoRAConverter",
    "ModelConverter",
    "ModelConverters",
    "QATConfig",
    "QATConverter",
    "build",
    "from_tables",
]

ConverterConfig = Float8Config | QATConfig | LoRAConfig
"""One `[[converters]]` table; `kind` says which."""


@dataclass(frozen=True, slots=True)
class _Tables:
    converters: tuple[ConverterConfig, ...] = ()


def build(configs: Sequence[ConverterConfig]) -> ModelConverters:
    """Return the converters for these settings. Raises: ConverterError for a wrong order or combination."""
    return ModelConverters([_converter(config) for config in configs])


def from_tables(tables: Sequence[Mapping[str, Any]], source: str = "config") -> ModelConverters:
    """Return the converters for TOML's `[[converters]]` tables. Raises: ConfigError with all faults; ConverterError."""
    return build(from_dict(_Tables, {"converters": list(tables)}, source).converters)


def _converter(config: ConverterConfig) -> ModelConverter:
    if isinstance(config, Float8Config):
        return Float8Converter(config)
    if isinstance(config, QATConfig):
        return QATConverter(config)
    if isinstance(config, LoRAConfig):
        return LoRAConverter(config)
    assert_never(config)
