"""Reading quantised Hugging Face folders, which are dequantised on the way."""
