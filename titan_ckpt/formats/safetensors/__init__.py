"""safetensors files: their header, and reads of any region of their tensors."""

__all__ = ["container"]
