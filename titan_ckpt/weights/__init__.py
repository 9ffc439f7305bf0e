"""The content of the model: its tensors in the form of files, their initial values and their identity. No I/O."""

__all__ = [
    "digest",
    "identity",
    "initialize",
    "live_memory",
    "lora",
    "low_rank",
    "names",
    "own_state",
    "quantize",
    "transforms",
    "wrapper",
]
