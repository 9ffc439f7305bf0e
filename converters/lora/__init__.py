"""LoRA, rsLoRA and DoRA adapters."""

from converters.lora.config import LoRAConfig
from converters.lora.converter import LoRAConverter

__all__ = ["LoRAConfig", "LoRAConverter"]
