"""Float8 training, and exports as float8 blocks with scales."""

from titan_ckpt.converters.float8.converter import Float8Config, Float8Converter

__all__ = ["Float8Config", "Float8Converter"]
