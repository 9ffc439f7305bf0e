"""Reading quantized Hugging Face folders, which are dequantized on the way."""
