"""Model definitions, one architecture per module, each with its key table. Imported by name; nothing is re-exported."""

__all__ = [
    "config",
    "decoder",
    "hf",
    "hf_keys",
    "hf_transforms",
    "language_model",
    "layers",
    "llama3",
    "qwen3_moe",
    "registry",
]
