"""safetensors files: their header, and reads of any region of their tensors."""
