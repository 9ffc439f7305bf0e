"""LoRA, rsLoRA and DoRA adapters."""

from titan_ckpt.converters.lora.config import LoRAConfig
from titan_ckpt.converters.lora.converter import LoRAConverter

__all__ = ["LoRAConfig", "LoRAConverter"]
