"""Reading quantized Hugging Face folders, which are dequantized on the way."""

__all__ = ["open"]
